"""How the weight exporters of trainers number layers and experts, each by its own formula, beside Megatron's.

A trainer that sends weights to an engine names each parameter of a rank by global layer and expert. Where its formula
disagrees with Megatron's, the engine gets another layer's values under a right name. Sources, read at these commits:

- slime: THUDM/slime 624b824a, `slime/backends/megatron_utils/update_weight/common.py`
  (`_named_params_and_buffers_global`). Layers by megatron-core's own `get_transformer_layer_offset`.
- miles: radixark/miles 31f1ca96, `miles/backends/megatron_utils/update_weight/common.py` (the same function).
- verl: volcengine/verl b178a3cd, `verl/utils/megatron_utils.py` (`get_transformer_layer_offset`,
  `per_tensor_generator`) and `verl/utils/model.py` (`normalize_model_name`), which export without a bridge.

All three number the experts of `TEGroupedMLP` alone (`weight3`), not those of `local_experts.3`, and slime and miles
find those of a multi-token prediction layer by the module's name up to megatron-core 0.16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from converters.megatron.pipeline import Pipeline


@dataclass(frozen=True)
class Exporter:
    """One exporter.

    `first_layer(pipeline, stage, chunk)` is the number that it gives to a chunk's first layer, and `expert(experts, ep,
    rank, local)` that of a rank's expert. `mtp_shifted`: it adds the number of the chunk's first layer to multi-token
    prediction layers too. `mtp_modules`: the names of the module inside such a layer whose experts it numbers.
    `biases`: whether it numbers the biases of experts.
    """

    name: str
    first_layer: Callable[[Pipeline, int, int], int]
    expert: Callable[[int, int, int, int], int]
    mtp_shifted: bool = False
    mtp_modules: tuple[str, ...] = ("transformer_layer",)
    biases: bool = True


def _of_megatron(pipeline: Pipeline, stage: int, chunk: int) -> int:
    """As megatron-core numbers it: the layers of all chunks before it, chunk by chunk through the stages."""
    before = [pipeline.stages[one][round_] for round_ in range(chunk + 1) for one in range(pipeline.pp)]
    return sum(map(len, before[: chunk * pipeline.pp + stage]))


def _of_verl(pipeline: Pipeline, stage: int, chunk: int) -> int:
    """verl's copy of the formula, which takes one off the stage of an interleaved pipeline whose first is not given."""
    if pipeline.pp == 1:
        return 0
    if pipeline.layout is not None:
        return _of_megatron(pipeline, stage, chunk)
    if pipeline.first is None and pipeline.last is None:
        return _even(pipeline, stage, chunk)
    first, last = pipeline.first or 0, pipeline.last or 0
    given = (pipeline.first is not None) + (pipeline.last is not None)
    middle, stages = pipeline.layers - first - last, pipeline.pp - given
    if pipeline.vpp == 1:
        each = middle // stages if stages else 0
        return 0 if stage == 0 else (stage - (pipeline.first is not None)) * each + first
    total = first // pipeline.vpp + middle // pipeline.vpp + last // pipeline.vpp
    if stage == 0:
        return chunk * total
    return chunk * total + first // pipeline.vpp + (stage - 1) * (middle // pipeline.vpp // stages)


def _even(pipeline: Pipeline, stage: int, chunk: int) -> int:
    layers = pipeline.layers + pipeline.embedding + pipeline.loss
    each = layers // pipeline.pp
    start = chunk * (layers // pipeline.vpp) + stage * (each // pipeline.vpp)
    return start - (pipeline.embedding and (stage, chunk) != (0, 0))


def _floor_of_product(experts: int, ep: int, rank: int, local: int) -> int:
    return local + rank * experts // ep


def _product_of_floor(experts: int, ep: int, rank: int, local: int) -> int:
    return experts // ep * rank + local


EXPORTERS = (
    Exporter("slime", _of_megatron, _floor_of_product),
    Exporter("miles", _of_megatron, _floor_of_product, biases=False),
    Exporter(
        "verl without a bridge",
        _of_verl,
        _product_of_floor,
        mtp_shifted=True,
        mtp_modules=("transformer_layer", "mtp_model_layer"),
    ),
)
