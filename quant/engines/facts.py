"""What there is to know of an inference engine's class of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.converters.family import respelled

QKV_GATE_UP = ("qkv_proj", "gate_up_proj")


@dataclass(frozen=True)
class Dense:
    """Linear layers that an engine's class can hold dense only: a pattern of their names, and why."""

    pattern: str
    reason: str

    @property
    def entry(self) -> str:
        """The entry of `ignore` that leaves them out."""
        return f"re:{self.pattern}"


@dataclass(frozen=True)
class EngineClass:
    """An inference engine's class of a model; the defaults are those of a plain one."""

    # Fused layers that the class declares in `packed_modules_mapping`, and so takes apart before it looks at `ignore`.
    # Any other fused layer is looked up by its own name.
    fused: tuple[str, ...] = ()
    # How a released module's name begins, and what the engine has instead.
    root: tuple[str, str] = ("", "")
    # Parts of names in a layer that it spells otherwise.
    inside: tuple[tuple[str, str], ...] = ()
    # Prefixes that it rewrites in plain entries of `ignore` (`hf_to_sglang_mapper`); the first that fits counts.
    entries: tuple[tuple[str, str], ...] = ()
    # Parts of names that it spells otherwise in layers outside the language model; None: it never asks about those.
    outside: tuple[tuple[str, str], ...] | None = None
    # Layers that it cannot hold quantized.
    dense: tuple[Dense, ...] = ()
    # On CUDA it makes the shared expert one of the routed ones, unless started with an option against it.
    joins_shared_expert: bool = False
    # Whether it loads `weight_scale_inv` of FP8 in blocks. Classes of releases in FP8 by tensor take it for one scale.
    fp8_blocks: bool = True
    # It loads the model in BF16, and with `quant_method` fp8 in FP8 blocks alone.
    fp8_only: bool = False
    # Further keys of config.json that it needs beside a `quant_method` of fp8.
    fp8_keys: Mapping[str, Any] = field(default_factory=dict)
    # It joins queries, keys and values also where a layer lacks some of them.
    partly_fused: bool = False
    # Its routers are quantized where `ignore` does not name them.
    packs_routers: bool = False
    # It refuses a checkpoint without the tensors that no reader uses (`ModelFamily.with_unused`).
    requires_unused: bool = False
    # Whether a class with a vision tower finds the layers of an adapter that was trained on the language model alone
    # (`model.layers.`, without the wrapper's prefix). Otherwise it answers with the base, silently.
    adapters_of_text: bool = True
    # The dtype of its key-value cache, where it does not build the model with another.
    cache_dtype: str = "auto"
    # What it reads of the language model's config and transformers 5 does not write, with the values of the model that
    # transformers runs. Without them it stops, or builds another model.
    keys: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda text: {}

    def layer(self, module: str) -> str:
        """The engine's name of a module that it does not fuse."""
        old, new = self.root
        layer = new + module.removeprefix(old) if module.startswith(old) else module
        return respelled(layer, self.inside)

    def layer_outside(self, layer: str) -> str | None:
        """The engine's name of a layer outside the language model; None where it never asks about it."""
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
