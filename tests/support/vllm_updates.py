"""Updates real vLLM models in place, without a GPU: `python -m support.vllm_updates DIR OUT`; `held` starts that.

DIR is a model with experts in BF16, INT4 or FP8. Each update sends every weight doubled, of INT4 other codes too, by
the calls that trainers make. OUT gets by update which parameters and buffers are not those of a fresh model with the
same weights and, where vLLM keeps tensors as they come, which HF tensors the witness then names. What it raises is
there instead.

vLLM repacks INT4 and FP8 by kernels that need a GPU. `repacked` stands in for them: parameters of another shape, which
a second load cannot fill.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from support.processes import run_logged
from verify.evidence.extremes import as_integers
from verify.witnesses.loading.compare import Loaded
from verify.witnesses.loading.engine import Build
from verify.witnesses.loading.placement import Placement
from verify.witnesses.loading.process import safetensors_of
from verify.witnesses.loading.trace import Trace
from verify.witnesses.process.exit_report import PhaseLog
from verify.witnesses.process.interpreter import python_of

Weights = Iterator[tuple[str, Tensor]]
Update = Callable[[nn.Module, list[tuple[str, Tensor]]], None]
SEVERAL = 40  # tensors in a bucket, which cut layers
MISSING = re.compile(r"model\.layers\.(1\.mlp\.experts\.3\.up_proj|0\.self_attn\.o_proj)\.weight")
CUTLASS = "flashinfer_cutlass"


def held(path: Path, root: Path) -> dict[str, dict[str, list[str]]]:
    """What `main` found."""
    out, log = root / "out.json", root / "log"
    ended = run_logged(log, "support.vllm_updates", path, out, program=python_of("vllm", {}), limit_s=840)
    assert ended, log.read_text(errors="replace")[-5000:]
    found: dict[str, dict[str, list[str]]] = json.loads(out.read_text())
    return found


def doubled(path: Path) -> list[tuple[str, Tensor]]:
    return [(name, _changed(name, tensor)) for name, tensor in safetensors_of(path)]


def _changed(name: str, tensor: Tensor) -> Tensor:
    if name.endswith(".weight_packed"):
        return ~tensor
    if tensor.dtype == torch.float8_e4m3fn:
        return (tensor.view(torch.uint8) ^ 1).view(torch.float8_e4m3fn)
    return tensor * 2 if tensor.is_floating_point() else tensor


def repacked(method: object, layer: nn.Module) -> None:
    """In place of a method's step after loading: turns every matrix of a packed layer, by vLLM's own call."""
    from vllm.model_executor.utils import replace_parameter

    for name, param in list(layer.named_parameters(recurse=False)):
        if param.dim() > 1 and not name.endswith("weight_shape"):
            replace_parameter(layer, name, param.detach().transpose(-1, -2).contiguous())


def packed_methods() -> list[type]:
    """vLLM's methods of INT4 in compressed-tensors' format, and of FP8 in blocks."""
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors_moe as experts

    # 0.26 has a module for Marlin alone besides.
    names = [f"compressed_tensors_moe_wna16{kind}" for kind in ("", "_marlin")]
    modules = [one for one in iter_modules(experts.__path__, f"{experts.__name__}.") if one.name.endswith(tuple(names))]
    for module in modules:
        import_module(module.name)
    int4 = [one for one in experts.CompressedTensorsMoEMethod.__subclasses__() if "WNA16" in one.__name__]
    return [compressed_tensors.CompressedTensorsLinearMethod, *int4, fp8.Fp8LinearMethod, fp8.Fp8MoEMethod]


def process(model: nn.Module) -> None:
    """vLLM's steps after loading."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    process_weights_after_loading(model, get_current_vllm_config().model_config, torch.device("cpu"))


def load_again(model: nn.Module, weights: list[tuple[str, Tensor]]) -> None:
    model.load_weights(iter(weights))  # type: ignore[operator]


def load_and_process(model: nn.Module, weights: list[tuple[str, Tensor]]) -> None:
    load_again(model, weights)
    process(model)


def initialize(model: nn.Module) -> None:
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)


def finalize(model: nn.Module) -> None:
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, get_current_vllm_config().model_config)


def layerwise(model: nn.Module, weights: list[tuple[str, Tensor]]) -> None:
    """`initialize_layerwise_reload`, bucket after bucket, `finalize_layerwise_reload`."""
    initialize(model)
    for begin in range(0, len(weights), SEVERAL):
        load_again(model, weights[begin : begin + SEVERAL])
    finalize(model)


def around_each_bucket(model: nn.Module, weights: list[tuple[str, Tensor]]) -> None:
    for begin in range(0, len(weights), SEVERAL):
        initialize(model)
        load_again(model, weights[begin : begin + SEVERAL])
        finalize(model)


def one_buffer(model: nn.Module, weights: list[tuple[str, Tensor]]) -> None:
    """A receiver that has one buffer for all tensors, one after the other."""
    buffer = torch.empty(max(tensor.nbytes for _, tensor in weights), dtype=torch.uint8)

    def received() -> Weights:
        for name, tensor in weights:
            view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor)
            yield name, view

    initialize(model)
    model.load_weights(received())  # type: ignore[operator]
    finalize(model)


def with_names_missing(model: nn.Module, weights: list[tuple[str, Tensor]]) -> None:
    layerwise(model, [(name, tensor) for name, tensor in weights if not MISSING.fullmatch(name)])


@dataclass(frozen=True)
class Case:
    """An update, and the kernels of experts that vLLM was told to use; None: its choice, Triton."""

    update: Update
    experts: str | None = None


CASES = {
    "a second load": Case(load_again),
    "layer by layer": Case(layerwise),
    "a second load, processed, with FlashInfer's CUTLASS": Case(load_and_process, CUTLASS),
    "layer by layer with FlashInfer's CUTLASS": Case(layerwise, CUTLASS),
    "a second load with FlashInfer's CUTLASS": Case(load_again, CUTLASS),
    "one buffer": Case(one_buffer),
    "initialized and finalized around each bucket": Case(around_each_bucket),
    "names missing": Case(with_names_missing),
}
PACKED = {"a second load": Case(load_again), "layer by layer": Case(layerwise)}


def digests(model: nn.Module) -> dict[str, str]:
    """Of every parameter and buffer."""
    held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        name: hashlib.sha256(as_integers(tensor.detach().contiguous()).numpy().tobytes()).hexdigest()
        for name, tensor in held
        if tensor.numel() and not tensor.is_meta
    }


def built(path: Path, experts: str | None, loading: Callable[[nn.Module], None]) -> None:
    """Builds the model by the adapter; `loading` has vLLM's config around it."""
    from vllm.engine import arg_utils

    from verify.witnesses.vllm import adapter

    told = partial(arg_utils.EngineArgs, moe_backend=experts)
    scratch = Path(tempfile.mkdtemp())
    with patch.object(arg_utils, "EngineArgs", told) if experts else nullcontext(), torch.no_grad():
        adapter.build(Build(path, scratch), lambda model, *_: loading(model), PhaseLog(scratch / "report"))


def outcome(path: Path, case: Case) -> dict[str, list[str]]:
    from verify.witnesses.vllm import adapter

    fresh: dict[str, str] = {}
    found: dict[str, list[str]] = {}

    def load_fresh(model: nn.Module) -> None:
        load_and_process(model, doubled(path))
        fresh.update(digests(model))

    def load_and_update(model: nn.Module) -> None:
        before = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
        with Trace(before.values()) as trace:
            model.load_weights(trace.feed(safetensors_of(path)))  # type: ignore[operator]
        placement = Placement.of(trace, before)
        process(model)
        with torch.device("cpu"):
            try:
                case.update(model, doubled(path))
            except (AssertionError, IndexError, RuntimeError, ValueError) as error:
                found["raised"] = [f"{type(error).__name__}: {error}"]
                return
        now = digests(model)
        found["not as fresh"] = sorted(name for name in fresh.keys() | now.keys() if fresh.get(name) != now.get(name))
        tensors = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
        sizes = {name: block.numel for name, block in trace.given.items()}
        config: Any = json.loads((path / "config.json").read_text())
        loaded = Loaded(adapter, config, tensors, placement, sizes)
        as_given = not case.experts and "quantization_config" not in config
        found["named"] = sorted(one.tensor for one in loaded.compare(doubled(path)).differing) if as_given else []

    built(path, case.experts, load_fresh)
    built(path, case.experts, load_and_update)
    return found


def main() -> None:
    from verify.witnesses.vllm import platform

    platform.choose(Path(tempfile.mkdtemp()))
    path = Path(sys.argv[1])
    packed = "quantization_config" in json.loads((path / "config.json").read_text())
    with ExitStack() as stack:
        for method in packed_methods() if packed else []:
            stack.enter_context(patch.object(method, "process_weights_after_loading", repacked))
        found = {name: outcome(path, case) for name, case in (PACKED if packed else CASES).items()}
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    import os

    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
