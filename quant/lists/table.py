"""Who reads which list of unquantized modules, and what each makes of it.

The lists are `modules_to_not_convert`, `ignored_layers`, `ignore`, `exclude_modules` and `exclude`. Each rule takes an
entry and returns what says of a name whether the entry covers it, so that an entry is read once for many names. Each
was run beside the reader's own function in `tests/quant/lists/test_lists.py`, except where it says "read". Trainers
choose what they pack by name, and but for slime's INT4, miles' NVFP4 and verl's SGLang path read no list; these choices
are compared with each tool's own function in `tests/interop/test_online_selection.py`. `LISTS` is the table of readers:
the `quant_method`s that each knows, the keys that it reads, and the rules by which an entry covers a layer. Which names
a reader looks up is in `quant.selection.reading`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from converters.hf_names import tail
from quant.patterns import MAX_NAME, matcher
from quant.selection.readers import BY_CLASS, SGLANG, VLLM

Covers = Callable[[str], bool]
Rule = Callable[[str], Covers]


@dataclass(frozen=True)
class Run:
    """Says whether a name has this run of whole dotted parts; `lower`: which is in lower case, as the name is taken."""

    parts: str
    lower: bool = False

    def __call__(self, name: str) -> bool:
        return f".{self.parts}." in f".{name.lower() if self.lower else name}."


_NESTED = "language_model."
# Of ModelOpt's fused attention: an entry that ends so leaves the projection out of every layer in SGLang.
_LATENT_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
PLAIN = re.compile(r"[\w.\-]*")  # text without a wildcard


def never(entry: str) -> Covers:
    """A reader that looks up nothing."""
    return lambda name: False


def exact(entry: str) -> Covers:
    """vLLM's fp8: the whole name. Source: vLLM `quant_utils.py`, `is_layer_skipped`."""
    return lambda name: name == entry


def whole_parts(entry: str) -> Covers:
    """SGLang's fp8: any run of whole dotted parts, with or without `model.` before them.

    Source: SGLang `quantization/utils.py`, `_module_path_match`, and `Fp8Config.from_config`.
    """
    return Run(entry.removeprefix("model.").rstrip("."))


def parts_only(entry: str) -> Covers:
    """SGLang's ModelOpt: any run of whole dotted parts, with `language_model.` before them or not.

    Source: SGLang `ModelOptQuantConfig.apply_weight_name_mapper`.
    """
    return Run(entry.removeprefix(_NESTED).rstrip("."))


def substring(entry: str) -> Covers:
    """vLLM's ModelOpt: any part of the name, or a glob for all of it. Source: `ModelOptQuantConfigBase`."""
    if PLAIN.fullmatch(entry):
        return lambda name: entry in name
    return lambda name: entry in name or fnmatchcase(name, entry)


def glob(entry: str) -> Covers:
    """SGLang's ModelOpt: a glob for the name or for one dotted part of it.

    An entry that ends with a projection of latent attention covers it in all layers. Source: SGLang
    `modelopt_quant.py`, `is_layer_excluded`.
    """
    bare, ending = entry.removeprefix(_NESTED), entry.rpartition(".")[2]
    latent = ending if ending in _LATENT_PARTS else None
    if PLAIN.fullmatch(entry):
        dotted = "." in bare
        found: Covers = lambda name: name == bare or (not dotted and bare in name.split("."))  # noqa: E731
    else:
        match = _matcher("re:" + bare.replace(".", r"\.").replace("*", ".*") + r"\Z")
        found = lambda name: match(name) or any(match(part) for part in name.split("."))  # noqa: E731
    return lambda name: found(name.removeprefix(_NESTED)) or (latent is not None and latent in name.rpartition(".")[2])


def holds_expert(entry: str) -> Covers:
    """SGLang's and vLLM's fp8, of a layer's routed experts: an entry for one of them leaves out all."""
    return (lambda container: container in entry) if "experts" in entry else never(entry)


def vllm_modelopt_experts(entry: str) -> Covers:
    """vLLM's ModelOpt, of a layer's routed experts."""
    return _either(holds_expert(entry), substring(entry))


def named_by_modelopt(entry: str) -> Covers:
    """What an entry of ModelOpt names: a module, or all below it; a glob for either."""
    parts, below = parts_only(entry), f"{entry}.*"
    if PLAIN.fullmatch(entry):
        return parts
    return lambda name: parts(name) or fnmatchcase(name, entry) or fnmatchcase(name, below)


def regex_or_exact(entry: str) -> Covers:
    """compressed-tensors, vLLM for its lists, and Quark: `re:` from the start of the name, or the whole name.

    Source: compressed-tensors `utils/match.py`, `match_name`; vLLM `compressed_tensors/utils.py`,
    `should_ignore_layer`; `quark/utils.py` of SGLang and vLLM.
    """
    return _matcher(entry) if entry.startswith("re:") else exact(entry)


def class_name(entry: str) -> Covers:
    """compressed-tensors: the class of a module, or `Module`. Source: `utils/match.py`, `_match_class`."""
    return (lambda name: True) if entry == "Module" else exact(entry)


def any_part(entry: str) -> Covers:
    """SGLang up to 0.5.16 for compressed-tensors: `re:` from the start, else any part of the name, in any case.

    Source: SGLang `layers/quantization/compressed_tensors/utils.py`, `check_equal_or_regex_match`.
    """
    lower = entry.lower()
    return _matcher(entry) if entry.startswith("re:") else lambda name: lower in name.lower()


def dotted_ending(entry: str) -> Covers:
    """SGLang 0.5.23 for compressed-tensors: `re:` from the start, else the whole name or a dotted ending of it."""
    return _matcher(entry) if entry.startswith("re:") else lambda name: f".{name}".endswith(f".{entry}")


def prefix(entry: str) -> Covers:
    """slime's, miles' and Relax's INT4: `re:` from the start of a parameter's name, or a prefix of it.

    Source: slime `quantizer_compressed_tensors.py`, `quantize_params_compressed_tensors`; read, not run.
    """
    return _matcher(entry) if entry.startswith("re:") else lambda name: name.startswith(entry)


def quark_experts(entry: str) -> Covers:
    """Quark, of a layer's routed experts: also an entry for one of them leaves out all."""
    return _either(regex_or_exact(entry), lambda container: entry.startswith(f"{container}."))


def regex_from_start(entry: str) -> Covers:
    """transformers 5.12: a regular expression from the start of the name, or its ending; neither ends at a dot.

    Source: transformers `quantizers_utils.py`, `should_convert_module`. Raises CkptkitError for an entry that is not a
    regular expression, where transformers raises too.
    """
    start = _start(entry) if PLAIN.fullmatch(entry) else _matcher(f"re:{entry}")
    return _either(start, lambda name: name.endswith(entry))


def _start(entry: str) -> Covers:
    """As the regular expression `entry` of words and dots, without compiling one for each of many entries."""
    parts, begins = entry.split("."), [0]
    for part in parts:
        begins.append(begins[-1] + len(part) + 1)
    pairs, length = list(zip(parts, begins, strict=False)), len(entry)
    return lambda name: len(name) >= length and all(name.startswith(part, begin) for part, begin in pairs)


def regex_to_a_dot(entry: str) -> Covers:
    """transformers 5.24: as `regex_from_start`, but the expression ends at a dot or at the end. Read, not run."""
    bare = entry.rstrip(".")
    if not PLAIN.fullmatch(entry):
        return _either(_matcher(rf"re:(?:{bare})(?:\.|$)"), lambda name: name.endswith(entry))
    start, length = _start(bare), len(bare)
    return lambda name: name.endswith(entry) or (name[length : length + 1] in ("", ".") and start(name))


def parameter_prefix(entry: str) -> Covers:
    """miles' NVFP4: `re:` from the start, the whole name, or the name up to a dot; of a parameter, not a module.

    Source: miles `quantizer_nvfp4.py`, `_is_ignored`.
    """
    if entry.startswith("re:"):
        return _matcher(entry)
    return lambda parameter: parameter == entry or parameter.startswith(f"{entry}.")


def verl_path(entry: str) -> Covers:
    """verl's list for SGLang: `re:` from the start, or whole dotted parts in any case.

    Source: verl `sglang_fp8_utils.py`, `_matches_ignored_layer`.
    """
    if entry.startswith("re:"):
        match = _matcher(entry)
        return lambda parameter: match(parameter) or match(parameter.removesuffix(".weight"))
    return Run(entry.lower().strip("."), lower=True)


def _either(one: Covers, other: Covers) -> Covers:
    return lambda name: one(name) or other(name)


def _matcher(text: str) -> Covers:
    """Says whether a regular expression with `re:` before it matches from the start of a name."""
    short, long = matcher(text, MAX_NAME), matcher(text)
    return lambda name: bool(short(name) if len(name) <= MAX_NAME else long(name))


# Rules that need not be asked about every name: exact names, and runs of parts; and of these but for expressions.
INDEXED = (never, exact, class_name, whole_parts, parts_only, named_by_modelopt)
INDEXED_PLAIN = (regex_or_exact, prefix)


_MLP = r"(?:gate|up|down|gate_up)_proj"
_EXPERTS = rf"(?:mlp|block_sparse_moe)\.(?:experts\.#|shared_experts?)\.(?:{_MLP}|w[123])"
_ATTENTION = r"self_attn\.(?:[qkvo]_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj)"
_INDEXER_KEY = "self_attn.indexer.wk"
# What the Megatron names that slime and miles choose by become in a release.
_BLOCK = re.compile(rf"{_EXPERTS}|mlp\.{_MLP}|{_ATTENTION}|self_attn\.indexer\.(?:wq_b|wk)")
_LINEAR_ATTENTION = re.compile(r"linear_attn\.(?:in_proj_qkv|in_proj_z|out_proj)")
_EXPERTS_ONLY = re.compile(_EXPERTS)
# verl's lists of parts of names.
_VERL_LEAVES = ("embed_tokens", "lm_head", "layernorm", "norm", "ln_", "embeddings", "mlp.gate.weight")
_VERL_TAKES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc1", "fc2", "mlp")


def slime_fp8(parameter: str, config: Mapping[str, Any]) -> bool:
    """slime's and vime's block FP8: a list of Megatron names, which has the indexer's `wk` but no `weights_proj`.

    `in_proj_qkvz` of Qwen3-Next is not in it. Source: slime `quantizer_fp8.py`, `quantize_params_fp8`.
    """
    return bool(_BLOCK.fullmatch(_module(parameter)) or _LINEAR_ATTENTION.fullmatch(_module(parameter)))


def miles_fp8(parameter: str, config: Mapping[str, Any]) -> bool:
    """miles' block FP8: slime's list without `wk` where the indexer's rotary embedding is interleaved."""
    return slime_fp8(parameter, config) and not _left_out_by_miles(parameter, config)


def miles_mxfp8(parameter: str, config: Mapping[str, Any]) -> bool:
    """miles' MXFP8: its FP8 list without linear attention. Source: miles `quantizer_mxfp8.py`."""
    return bool(_BLOCK.fullmatch(_module(parameter))) and not _left_out_by_miles(parameter, config)


def miles_nvfp4(parameter: str, config: Mapping[str, Any]) -> bool:
    """miles' NVFP4: routed and shared experts, less what the list names. Source: miles `quantizer_nvfp4.py`."""
    return bool(_EXPERTS_ONLY.fullmatch(_module(parameter)))


def verl_fp8(parameter: str, config: Mapping[str, Any]) -> bool:
    """verl's block FP8 for SGLang and TensorRT-LLM: parts of names.

    `mlp` takes in `shared_expert_gate`; `q_a_proj`, `q_b_proj`, `kv_a_proj_with_mqa`, `kv_b_proj` hold none of them.
    Source: verl `fp8_utils.py`, `FP8QuantizerHelper.should_quantize_param`.
    """
    name = parameter.lower()
    if not parameter.endswith(".weight") or any(part in name for part in _VERL_LEAVES):
        return False
    return any(part in name for part in _VERL_TAKES)


def slime_int4(parameter: str, config: Mapping[str, Any]) -> bool:
    """slime's, miles' and Relax's INT4: whatever its class, less what the list names. `targets` are not read."""
    return True


def _left_out_by_miles(parameter: str, config: Mapping[str, Any]) -> bool:
    return _module(parameter) == _INDEXER_KEY and bool(config.get("indexer_rope_interleave"))


def _module(parameter: str) -> str:
    return tail(parameter.removesuffix(".weight"))


Method = Literal[
    "compressed-tensors", "fp8", "mxfp8", "modelopt fp4", "modelopt fp8", "modelopt mxfp8", "mxfp4", "quark"
]
ENGINES = (*VLLM, *SGLANG)
MODELOPT: tuple[Method, ...] = ("modelopt fp4", "modelopt fp8", "modelopt mxfp8")
NAMES = "by name"  # the reading that takes an entry for what it names; the others are held against it
_IGNORED, _NOT_CONVERTED = "ignored_layers", "modules_to_not_convert"


@dataclass(frozen=True)
class ListReader:
    """How a reader takes the lists of some methods."""

    readers: tuple[str, ...]
    methods: tuple[Method, ...]
    keys: tuple[str, ...]  # the first that is there and not empty counts
    part: Rule  # an entry and a layer, or one part of a fused layer
    experts: Rule  # an entry and the container of a layer's routed experts
    fused: Rule | None = None  # an entry and a fused layer's own name, which is asked first
    last: Rule | None = None  # an entry and any layer's own name, which is asked last
    head: bool = False  # the output layer is a layer like others
    linears: bool = True  # False: routed experts alone are ever quantized
    packs: Callable[[str, Mapping[str, Any]], bool] | None = None  # a trainer's own choice, by parameter and config
    declared: bool = False  # SGLang takes apart only the fused layers that the model's class declares
    joins: bool = False  # all `keys` count, not the first alone

    def entries(self, content: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the entries that this reader takes from a quantization_config."""
        found = [list(map(str, value)) for key in self.keys if isinstance(value := content.get(key), list) and value]
        return tuple(dict.fromkeys(entry for several in (found if self.joins else found[:1]) for entry in several))


_R = ListReader
COMPRESSED: Method = "compressed-tensors"
_SGLANG_16, _SGLANG_23 = (("SGLang 0.5.16",), ("SGLang 0.5.23",))
_VLLM_26, _VLLM_33 = (("vLLM 0.26",), ("vLLM 0.33",))
_FP8: tuple[Method, ...] = ("fp8", "mxfp8")
_FP8_KEYS, _MODELOPT_KEYS = (_IGNORED, _NOT_CONVERTED), ("ignore", "exclude_modules")
_vllm_modelopt = partial(_R, VLLM, part=exact, experts=vllm_modelopt_experts, fused=exact, last=substring, head=True)
_sglang_modelopt = partial(_R, part=parts_only, experts=glob, last=glob, head=True)
_trainer = partial(_R, part=never, experts=never)
_transformers_12 = partial(_R, ("transformers 5.12",), experts=regex_from_start)
_transformers_24 = partial(_R, ("transformers 5.24",), experts=regex_to_a_dot)
_compressed = partial(_R, methods=(COMPRESSED,), keys=("ignore",), experts=never)
LISTS: tuple[ListReader, ...] = (
    _compressed(BY_CLASS, part=regex_or_exact, last=class_name),
    _compressed(_VLLM_26, part=regex_or_exact, fused=exact),
    _compressed(_VLLM_33, part=regex_or_exact, fused=regex_or_exact),
    _compressed(_SGLANG_16, part=any_part, fused=exact, declared=True),
    _compressed(_SGLANG_23, part=dotted_ending, fused=exact, declared=True),
    _compressed(("slime",), part=prefix, packs=slime_int4),
    _R(VLLM, ("fp8",), _FP8_KEYS, exact, holds_expert, fused=exact),
    _vllm_modelopt(("mxfp8",), (_IGNORED,)),
    _vllm_modelopt(MODELOPT, _MODELOPT_KEYS),
    _R(SGLANG, _FP8, _FP8_KEYS, whole_parts, lambda entry: _either(whole_parts(entry), holds_expert(entry))),
    _sglang_modelopt(_SGLANG_16, ("modelopt fp4", "modelopt fp8"), ("ignore",)),
    _sglang_modelopt(_SGLANG_23, ("modelopt fp4",), ("ignore", _NOT_CONVERTED, "exclude_modules")),
    _sglang_modelopt(_SGLANG_23, ("modelopt fp8",), ("ignore",)),
    _sglang_modelopt(_SGLANG_23, ("modelopt mxfp8",), ("exclude_modules", "ignore")),
    _R(ENGINES, ("mxfp4",), (), never, never, linears=False),
    _transformers_12(("mxfp4",), (_NOT_CONVERTED,), never, linears=False),
    _transformers_24(("mxfp4",), (_NOT_CONVERTED,), never, linears=False),
    _R(_SGLANG_16, ("quark",), ("exclude",), regex_or_exact, regex_or_exact, declared=True),
    _R(_SGLANG_23, ("quark",), ("exclude",), regex_or_exact, quark_experts, declared=True),
    _R(_VLLM_26, ("quark",), ("exclude",), regex_or_exact, quark_experts),
    _R(_VLLM_33, ("quark",), ("exclude",), regex_or_exact, quark_experts, fused=regex_or_exact),
    _transformers_12(_FP8, (_NOT_CONVERTED, _IGNORED), regex_from_start, head=True),
    _transformers_24(_FP8, (_NOT_CONVERTED, _IGNORED), regex_to_a_dot, head=True),
    _trainer(("slime",), ("fp8",), (), packs=slime_fp8),
    _trainer(("miles",), ("fp8",), (), packs=miles_fp8),
    _trainer(("miles",), ("mxfp8",), (), packs=miles_mxfp8),
    _R(("miles",), ("modelopt fp4",), _MODELOPT_KEYS, parameter_prefix, never, packs=miles_nvfp4, joins=True),
    _R(("verl",), ("fp8",), _FP8_KEYS, verl_path, never, packs=verl_fp8, joins=True),
    # It gives vLLM a quantization_config of its own, without the list, and packs what vLLM then builds packed.
    _R(("NeMo-RL",), _FP8, (), exact, holds_expert, fused=exact),
)
_PLAIN = _R((NAMES,), (), (), whole_parts, never, fused=whole_parts)
# What an entry names, by the first word of the method.
NAMED: Mapping[str, ListReader] = MappingProxyType(
    {
        **dict.fromkeys(("fp8", "mxfp8", "mxfp4"), _PLAIN),
        "quark": _R((NAMES,), (), (), regex_or_exact, never, fused=regex_or_exact),
        "modelopt": _R((NAMES,), (), (), named_by_modelopt, never, fused=named_by_modelopt, head=True),
    }
)
# The keys that a list may stand under, by the method.
KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(_FP8, _FP8_KEYS),
        **dict.fromkeys(MODELOPT, (*_MODELOPT_KEYS, _NOT_CONVERTED)),
        "mxfp4": (_NOT_CONVERTED,),
        "quark": ("exclude",),
        COMPRESSED: ("ignore",),
    }
)


def readers_of_method(method: str) -> dict[str, ListReader]:
    """Returns the readers that know a method, by name."""
    return {reader: row for row in LISTS if method in row.methods for reader in row.readers}


def named_in_lists(content: Mapping[str, Any], names: Iterable[str]) -> frozenset[str]:
    """The modules of these weights that the lists of a quantization_config name, in other formats than INT4."""
    method = str(content.get("quant_method")).partition(" ")[0]
    if method not in NAMED:
        return frozenset()
    lists = [content.get(key) for several in KEYS.values() for key in several]
    entries = dict.fromkeys(str(entry) for one in lists if isinstance(one, list) for entry in one)
    covers = [NAMED[method].part(entry) for entry in entries if not entry.startswith("re:") or method == "quark"]
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    return frozenset(module for module in modules if any(one(module) for one in covers))
