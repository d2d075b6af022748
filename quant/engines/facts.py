"""The facts about an inference engine's class of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.converters.family import respelled

QKV_GATE_UP = ("qkv_proj", "gate_up_proj")


@dataclass(frozen=True)
class Dense:
    """Linear layers that an engine's class can only hold dense: a pattern of their names, and the reason."""

    pattern: str
    reason: str

    @property
    def entry(self) -> str:
        """The entry of `ignore` that leaves them out."""
        return f"re:{self.pattern}"


@dataclass(frozen=True)
class EngineClass:
    """An inference engine's class of a model; the defaults are those of a plain one."""

    # Fused layers that the class declares in `packed_modules_mapping`, and so splits before it looks at `ignore`.
    # Any other fused layer is looked up by its own name.
    fused: tuple[str, ...] = ()
    root: tuple[str, str] = ("", "")  # the prefix of a released module's name, and that in the engine
    inside: tuple[tuple[str, str], ...] = ()  # parts of names in a layer, and their names in the engine
    # Prefixes that it rewrites in plain entries of `ignore` (`hf_to_sglang_mapper`); the first that fits counts.
    entries: tuple[tuple[str, str], ...] = ()
    # The same as `inside` for layers outside the language model, or None if it never looks these up.
    outside: tuple[tuple[str, str], ...] | None = None
    dense: tuple[Dense, ...] = ()  # layers that it cannot hold quantized
    # On CUDA it makes the shared expert one of the routed ones, unless started with an option against it.
    joins_shared_expert: bool = False
    # It loads `weight_scale_inv` of FP8 in blocks. Classes of releases in FP8 by tensor treat it as one scale.
    fp8_blocks: bool = True
    fp8_only: bool = False  # it loads the model only in BF16, and in FP8 blocks with `quant_method` fp8
    # Further keys of config.json that it needs in addition to a `quant_method` of fp8.
    fp8_keys: Mapping[str, Any] = field(default_factory=dict)
    partly_fused: bool = False  # it joins queries, keys and values even if a layer lacks some of them
    packs_routers: bool = False  # its routers are quantized unless `ignore` names them
    # It refuses a checkpoint without the tensors that no reader uses (`ModelFamily.with_unused`).
    requires_unused: bool = False
    # A class with a vision tower finds the layers of an adapter that was trained on the language model only
    # (`model.layers.`, without the wrapper's prefix). Otherwise it answers with the base, silently.
    adapters_of_text: bool = True
    cache_dtype: str = "auto"  # of its key-value cache, if it does not build the model with another
    # Keys of the language model's config that it reads and transformers 5 does not write, with the values of the model
    # that transformers runs. Without them it stops, or builds another model.
    keys: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda text: {}

    def layer(self, module: str) -> str:
        """The engine's name of a module that it does not fuse."""
        old, new = self.root
        return respelled(new + module.removeprefix(old) if module.startswith(old) else module, self.inside)

    def layer_outside(self, layer: str) -> str | None:
        """The engine's name of a layer outside the language model, or None if it never looks it up."""
        if self.outside is None:
            return None
        for old, new in self.outside:
            layer = layer.replace(old, new)
        return layer

    def entry(self, pattern: str) -> str:
        """An entry of `ignore` as the engine compares it with its layers' names."""
        for old, new in self.entries:
            if pattern.startswith(old):
                return new + pattern.removeprefix(old)
        return pattern
