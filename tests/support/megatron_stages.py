"""Real Megatron with faults planted into its weights, stage by stage against transformers, in a process of its own."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.forking import run_module
from verify.witnesses.reference.residuals import Stage

SOUND, PLANTED, ROPE = "sound", "planted faults", "rope base wrong"
PROMPTS = [[(7 * position) % 349 + 3 for position in range(40)]]  # token ids


def stages_of(names: Sequence[str], dtype: str = "float32") -> dict[str, dict[str, list[Stage]]]:
    """By test model and by what is wrong with it, every stage. Names are those of `families.CASES`."""
    with tempfile.TemporaryDirectory() as folder:
        run_module("megatron", "support.megatron_stages", folder, dtype, *names)
        found = json.loads((Path(folder) / "out.json").read_text())
    return {
        name: {fault: [Stage(**stage) for stage in stages] for fault, stages in faults.items()}
        for name, faults in found.items()
    }


# What follows runs in that process.

Held = Mapping[str, Tensor]  # parameters of Megatron by local name, sharing memory with the model


def _within(layer: int, held: Held) -> dict[str, Tensor]:
    """A layer's parameters by their name within it."""
    start = f"decoder.layers.{layer}."
    return {name.removeprefix(start): tensor for name, tensor in held.items() if name.startswith(start)}


def _layers_exchanged(held: Held) -> None:
    one, other = _within(3, held), _within(8, held)
    for name in one.keys() & other.keys():
        if one[name].shape == other[name].shape:
            _exchange(one[name], other[name])


def _exchange(one: Tensor, other: Tensor) -> None:
    before = one.clone()
    one.copy_(other)
    other.copy_(before)


def _qkv_mixed(held: Held) -> None:
    for name, tensor in _within(5, held).items():
        if name.endswith(("linear_qkv.weight", "linear_q_up_proj.weight", "linear_q_proj.weight")):
            tensor.copy_(tensor.roll(32, dims=0))


def _gate_and_up_swapped(held: Held) -> None:
    for name, tensor in _within(4, held).items():
        if name.endswith("linear_fc1.weight"):
            tensor.copy_(tensor.roll(tensor.shape[0] // 2, dims=0))


def _experts_exchanged(held: Held) -> None:
    layer = _within(6, held)
    for name, tensor in layer.items():
        if ".local_experts.2." in name:
            _exchange(tensor, layer[name.replace(".2.", ".7.")])


def _norm_of_another_layer(held: Held) -> None:
    name = "input_layernorm.weight"
    _within(2, held)[name].copy_(_within(9, held)[name])


def _norm_before_mlp_of_another_layer(held: Held) -> None:
    name = "pre_mlp_layernorm.weight"
    _within(7, held)[name].copy_(_within(9, held)[name])


def _final_norm_wrong(held: Held) -> None:
    held["decoder.final_layernorm.weight"].mul_(1.01)


def _head_wrong(held: Held) -> None:
    tensor = held["output_layer.weight"]
    tensor.copy_(tensor.roll(1, dims=0))


# Each in a part of its own: what differs in one part does not count in another.
_FAULTS: Sequence[Callable[[Held], None]] = (
    _layers_exchanged,
    _qkv_mixed,
    _gate_and_up_swapped,
    _experts_exchanged,
    _norm_of_another_layer,
    _norm_before_mlp_of_another_layer,
    _final_norm_wrong,
    _head_wrong,
)


def _models(dims: Any, checkpoint: str, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Megatron's model, sound and then with faults."""
    from converters.megatron.parallel import ParallelSizes
    from verify.witnesses.megatron.model import Build, build_chunks
    from verify.witnesses.megatron.process import held_by, load

    def loaded(dims: Any) -> Any:
        (model,) = build_chunks(dims, Build(ParallelSizes(), dtype))
        load([model], checkpoint)
        return model

    model = loaded(dims)
    yield SOUND, model
    for plant in _FAULTS:
        plant(held_by(model))
    yield PLANTED, model
    yield ROPE, loaded(replace(dims, rope_theta=dims.rope_theta * 2))


def _stages(name: str, root: Path, dtype: torch.dtype) -> dict[str, Any]:
    from families import CASES
    from families.case import save

    from ckptkit.app.api import convert
    from ckptkit.formats.detect import locate
    from converters.megatron.parallel import ParallelSizes
    from converters.planner import dims_of
    from verify.witnesses.megatron.forward import forward, recorded
    from verify.witnesses.reference.float64 import in_float64
    from verify.witnesses.reference.process import as_hf, model_of
    from verify.witnesses.reference.residuals import OUTPUT
    from verify.witnesses.reference.teacher_forced import compare, decoder_of, guided

    save(name, CASES[name], root / "hf", torch.bfloat16)
    convert(root / "hf", root / "megatron")
    checkpoint, home = as_hf(root / "hf")
    dims = dims_of(checkpoint.config)
    given = {}
    for label, megatron in _models(dims, str(locate(root / "megatron").path), dtype):
        runs = [recorded([megatron], partial(forward, [megatron], ParallelSizes(), prompt))[1] for prompt in PROMPTS]
        given[label] = [run | {OUTPUT: run[OUTPUT][:, : dims.vocab]} for run in runs]
    model = model_of(checkpoint, home, torch.float32)
    decoder = decoder_of(model)

    def all_guided() -> dict[str, Any]:
        return {
            label: [guided(model, decoder, prompt, values) for prompt, values in zip(PROMPTS, runs, strict=True)]
            for label, runs in given.items()
        }

    if dtype == torch.float32:
        with in_float64(model, decoder.layers):
            exact = all_guided()
    else:
        exact = all_guided()
        model = model_of(checkpoint, home, dtype)
        decoder = decoder_of(model)
    rounded = all_guided()
    return {
        label: [asdict(stage) for stage in compare(runs, exact[label], rounded[label], dtype)]
        for label, runs in given.items()
    }


def main() -> None:
    """The folder for the answer, Megatron's dtype, and the names of test models."""

    from converters.megatron.parallel import ParallelSizes
    from verify.witnesses.megatron.model import connect

    root, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
    connect(ParallelSizes(), 0, str(root / "store"))
    found = {name: _stages(name, root / name, dtype) for name in sys.argv[3:]}
    (root / "out.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
