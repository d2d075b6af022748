"""Conditions and values of Megatron-LM arguments that are more than a field of ModelDims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptkit.converters.blocks.latent_attention import refuse_scaling
from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.config.values import integer, number
from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened


def inside_layer(dims: ModelDims) -> bool:
    """Every model, for rare features inside a layer; two runs are not compared by it."""
    return True


def not_latent(dims: ModelDims) -> bool:
    """Models without latent attention, which ignores query groups and head size."""
    return dims.mla is None


def latent_scaled(dims: ModelDims) -> bool:
    """Models with latent attention and rope scaling (always YaRN)."""
    return dims.mla is not None and dims.rope_scaling is not None


def yarn(dims: ModelDims) -> bool:
    """Models with other attention and a YaRN that Megatron-LM has arguments for, from 0.19 on.

    Source: Megatron-LM 0.19 `_apply_yarn_config_from_args`. Before, only Megatron-Bridge's model provider supports it.
    """
    return dims.mla is None and _scaling(dims) == "yarn" and _plain_yarn(dims)


def llama3(dims: ModelDims) -> bool:
    """Models with the rope scaling of Llama 3."""
    return dims.mla is None and _scaling(dims) == "llama3"


def linear_rope(dims: ModelDims) -> bool:
    """Models with linear rope scaling in all layers; only Megatron-Bridge's model provider has it in some layers."""
    return dims.mla is None and _scaling(dims) == "linear" and dims.local_rope_theta is None


def refuse_inexpressible(dims: ModelDims) -> None:
    """Raises CkptkitError for a rope scaling that has no arguments.

    Source: megatron-core `rotary_pos_embedding.py`, which fixes three of Llama 3's four numbers.
    """
    if dims.rope_scaling is None:
        return
    if dims.mla is not None:
        refuse_scaling(dims.rope_scaling)
        return
    rope, kind = dims.rope_scaling, _scaling(dims)
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if (
        (kind == "llama3" and all(rope.get(key) == value for key, value in fixed.items()))
        or (kind == "yarn" and _plain_yarn(dims))
        or (kind == "linear" and (dims.local_rope_theta is not None or number(rope, "factor").is_integer()))
    ):
        return
    hint = "remove the scaling if you only train with shorter contexts"
    message = f"config.json: Megatron has no arguments for rope scaling {shortened(kind)} with these values"
    raise CkptkitError(message, f"{hint}; else Megatron would train a different model", code="unsupported")


def _scaling(dims: ModelDims) -> Any:
    return dims.rope_scaling["rope_type"] if dims.rope_scaling is not None else None


def _plain_yarn(dims: ModelDims) -> bool:
    """Whether Megatron computes this YaRN: over complete heads, from a given length, with the usual attention factor.

    Engines use different lengths if it is absent.
    """
    rope = _rope(dims)
    return (
        dims.rotary_fraction == 1
        and rope.get("original_max_position_embeddings") is not None
        and rope.get("attention_factor") is None
    )


def _rope(dims: ModelDims) -> Mapping[str, Any]:
    return dims.rope_scaling or {}


def fixed(value: Any) -> Callable[[ModelDims], Any]:
    """The same value for every model."""
    return lambda dims: value


def rope_number(key: str, default: float | None = None) -> Callable[[ModelDims], float]:
    """A number of the config's rope scaling."""
    return lambda dims: number(_rope(dims), key) if default is None else number(_rope(dims), key, default)


def positions(dims: ModelDims) -> str:
    """The value of `--position-embedding-type`."""
    return ("yarn" if yarn(dims) else "rope") if dims.rotary else "none"


def squared_relu(dims: ModelDims) -> bool:
    """Whether the MLPs use a squared ReLU without a gate."""
    return dims.activation == "relu2"


def rotary_base(dims: ModelDims) -> float | int:
    """The base, as an integer if possible, like Megatron's option."""
    return int(dims.rope_theta) if float(dims.rope_theta).is_integer() else dims.rope_theta


def scaling_factor(dims: ModelDims) -> float:
    """The factor, or 1 without scaling."""
    return number(_rope(dims), "factor") if dims.rope_scaling is not None else 1.0


def original_positions(dims: ModelDims) -> int:
    """The context from which YaRN scales."""
    return integer(_rope(dims), "original_max_position_embeddings")


def mscales(dims: ModelDims) -> tuple[float, float]:
    """YaRN's `mscale` and `mscale_all_dim`, or 1 and 0; transformers ignores one without the other."""
    scales = number(_rope(dims), "mscale", 0.0), number(_rope(dims), "mscale_all_dim", 0.0)
    return scales if all(scales) else (1.0, 0.0)


def window_size(dims: ModelDims) -> tuple[int, int]:
    """The tokens before and after the query's; an HF config also counts the query's token."""
    return (dims.window or 0) - 1, 0


def window_layers(dims: ModelDims) -> list[int] | None:
    """1 for each layer with a window, or None if every layer has one."""
    pattern = ones(dims, dims.window_layers)
    return None if all(pattern) else pattern


def ones(dims: ModelDims, layers: Sequence[int]) -> list[int]:
    """1 for each of these layers, 0 for the others."""
    return [int(layer in layers) for layer in range(dims.layers)]
