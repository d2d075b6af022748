"""A stand-in for Transformer Engine on a machine without CUDA: the parameters of its layers, and no computation.

megatron-core wraps these classes in its own (`megatron/core/extensions/transformer_engine.py`), and those name, cut,
save and load the parameters. Bridges build models of them, so that what they do with weights can be run on the CPU.
Names and shapes of the parameters follow Transformer Engine 2.3; without FP8 a layer's extra state is empty.
"""

import contextlib
import sys
from types import ModuleType, SimpleNamespace

__version__ = "2.3.0"


def _computes(*arguments, **keywords):
    raise NotImplementedError("this stand-in for Transformer Engine computes nothing")


class CudaRNGStatesTracker:
    """Random states, of which a model that only holds weights has none."""

    def reset(self, *_): ...

    set_states = add = reset


def _autocast(*arguments, **keywords):
    return contextlib.nullcontext()


# The modules that megatron-core imports names of, beside the layers.
_MODULES = {
    "common": {},
    "common.recipe": {name: type(name, (), {}) for name in ("Recipe", "DelayedScaling")},
    "pytorch.distributed": {"CudaRNGStatesTracker": CudaRNGStatesTracker}
    | dict.fromkeys(("checkpoint", "activation_recompute_forward"), _computes),
    "pytorch.fp8": {"FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False)}
    | dict.fromkeys(("fp8_autocast", "fp8_model_init"), _autocast),
    "pytorch.ops": {name: type(name, (), {}) for name in ("FusibleOperation", "Sequential")},
    "pytorch.permutation": dict.fromkeys(
        ("moe_permute", "moe_permute_with_probs", "moe_sort_chunks_by_index", "moe_unpermute"), _computes
    )
    | {"moe_sort_chunks_by_index_with_probs": _computes},
    "pytorch.tensor": {"QuantizedTensor": type("QuantizedTensor", (), {})},
}
for _name, _content in _MODULES.items():
    sys.modules[f"{__name__}.{_name}"] = _module = ModuleType(f"{__name__}.{_name}")
    vars(_module).update(_content)
common = sys.modules[f"{__name__}.common"]
common.recipe = sys.modules[f"{__name__}.common.recipe"]

from transformer_engine import pytorch  # noqa: E402, F401 - as the package itself does
