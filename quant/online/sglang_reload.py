"""Opens and closes a weight update inside SGLang 0.5.16, which cannot load packed experts a second time by itself.

After loading, SGLang repacks routed experts for Marlin's kernels. Its class for them can restore their loading shapes,
but 0.5.16 never calls that and has no request for it. (Later versions have `begin_weight_update` and
`end_weight_update`; use those there.) Start the engine with

    --custom-weight-loader ckptkit.quant.online.sglang_reload.begin ckptkit.quant.online.sglang_reload.end

Call `update_weights_from_tensor` without tensors before and after the buckets, with the first and the second name as
`load_format`. SGLang calls the function in every rank as `loader(model, named_tensors)`. It catches no exception there:
an error ends the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import summarize
from ckptkit.quant.formats.part_names import WEIGHT_PACKED

_RELOADABLE = "CompressedTensorsWNA16MoE"


def begin(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Restores the loading shapes of packed experts. Their weights are lost and must all be loaded again.

    Raises CkptkitError, before changing anything, if a packed layer is not a group of routed experts for Marlin.
    """
    found = _packed(model)
    if other := {name: scheme for name, (_, scheme) in found.items() if scheme != _RELOADABLE}:
        hint = "quantize only routed experts to INT4, "
        hint += "and let SGLang choose Marlin (--moe-runner-backend auto or marlin)"
        schemes = ", ".join(sorted(set(other.values())))
        raise CkptkitError(f"SGLang cannot load {summarize(other)} again ({schemes})", hint)
    for module, _ in found.values():
        module.scheme.restore_weights_before_loading(module)  # type: ignore[union-attr, operator]


def end(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Repacks the experts, if any, for Marlin. Raises CkptkitError without `begin`: repacking twice loses them."""
    packed = [module for module, _ in _packed(model).values()]
    opened = [module for module in packed if not getattr(module, "is_marlin_converted", False)]
    if packed and not opened:
        message = "sglang_reload.end found no experts to be repacked"
        raise CkptkitError(message, "send ckptkit.quant.online.sglang_reload.begin before the weights of every update")
    for module in opened:
        workspace = module.workspace
        module.scheme.process_weights_after_loading(module)  # type: ignore[union-attr, operator]
        module.workspace = workspace  # CUDA graphs hold the address of the workspace they were captured with


def _packed(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Returns name -> (module, class name of its SGLang scheme) for every module with its own packed weights."""
    return {
        name: (module, type(getattr(module, "scheme", None)).__name__)
        for name, module in model.named_modules()
        if any(parameter.endswith(WEIGHT_PACKED) for parameter, _ in module.named_parameters(recurse=False))
    }
