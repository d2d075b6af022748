"""How each reader decides by name whether an `ignore` entry covers a tensor. They agree on less than one would think.

compressed-tensors (and transformers, which calls it) and SGLang look at module names, slime at parameter names; a plain entry is
the whole name, any part of it, a dotted ending or a prefix; SGLang asks about fused layers and about the first expert only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

# Whether SGLang's model class declares `packed_modules_mapping`, and so takes a fused layer's name apart before it looks at
# `ignore`. Source: `sglang/srt/models/<name>.py` of SGLang 0.5.16.
EXPANDS_FUSED: Mapping[str, bool] = MappingProxyType({"glm4_moe": False, "llama": False, "qwen2": False, "qwen3": False, "qwen3_moe": True})

FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType({"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")})
_FUSED_OF = {shard: fused for fused, shards in FUSED.items() for shard in shards}
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.\w+")
_LINEAR_CLASSES = ("Linear", "Module")


def compressed_tensors(module: str, pattern: str) -> bool:
    """A Linear module, as compressed-tensors and transformers read it: `re:` from the start, else the whole name or a class name.

    Source: compressed-tensors `utils/match.py`, `is_match`.
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern == module or pattern in _LINEAR_CLASSES


def sglang(layer: str, pattern: str) -> bool:
    """A layer, as SGLang up to at least 0.5.16 reads it: `re:` from the start, else any part of the name, in any case.

    Source: SGLang `layers/quantization/compressed_tensors/utils.py`, `check_equal_or_regex_match`.
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), layer) is not None
    return pattern.lower() in layer.lower()


def sglang_suffix(layer: str, pattern: str) -> bool:
    """A layer, as SGLang 0.5.23 reads it: `re:` from the start, else the whole name or a dotted ending of it."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), layer) is not None
    return pattern == layer or layer.endswith("." + pattern)


def slime(parameter: str, pattern: str) -> bool:
    """A parameter (`….weight`), as slime reads it: `re:` from the start, or any prefix.

    What is not covered is quantized when it ends in `.weight` and has two or more axes, whatever its class: `targets` is not read.
    Source: slime `quantizer_compressed_tensors.py`, `quantize_params_compressed_tensors`.
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), parameter) is not None
    return parameter.startswith(pattern)


def sglang_layers(module: str, ignore: Collection[str], expands: bool) -> tuple[str, ...]:
    """The names that SGLang looks up in `ignore` to decide about the layer that holds this module; it wants one answer for all.

    Routed experts: the three projections of expert 0. q, k, v and gate, up: their fused layer, or all of its shards when the
    model class `expands` and the fused name is not itself an entry. Source: SGLang `get_moe_scheme`, `should_ignore_layer`.
    """
    if match := _EXPERT.fullmatch(module):
        return tuple(f"{match[1]}.0.{projection}" for projection in ("gate_proj", "up_proj", "down_proj"))
    parent, _, name = module.rpartition(".")
    if name not in _FUSED_OF:
        return (module,)
    fused = f"{parent}.{_FUSED_OF[name]}"
    if expands and fused not in ignore:
        return tuple(f"{parent}.{shard}" for shard in FUSED[_FUSED_OF[name]])
    return (fused,)
