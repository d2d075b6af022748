"""The table of readers of lists of unquantized modules: engines, trainers, transformers and compressed-tensors.

The lists are `modules_to_not_convert`, `ignored_layers`, `ignore`, `exclude_modules` and `exclude`. A row of `LISTS`
has the `quant_method`s of its readers, the keys that they read, the names that they look up, and the rules of
`ckptkit.quant.ignore.matching` by which an entry covers a name. `ckptkit.quant.ignore.reading` predicts from a row
which modules are quantized. Trainers choose weights by name, and except for slime's INT4, miles' NVFP4 and verl's
SGLang path read no list; `tests/interop/test_online_selection.py` compares these choices with each tool's own function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from ckptkit.converters.hf_names import name_in_layer
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.ignore.matching import (
    PLAIN,
    Rule,
    any_part,
    class_name,
    dotted_ending,
    either,
    exact,
    glob,
    holds_expert,
    named_by_modelopt,
    never,
    parameter_prefix,
    parts_only,
    prefix,
    quark_experts,
    regex_from_start,
    regex_or_exact,
    regex_to_a_dot,
    substring,
    verl_path,
    whole_parts,
)

VLLM = ("vLLM 0.26", "vLLM 0.33")
SGLANG = ("SGLang 0.5.16", "SGLang 0.5.23")
BY_CLASS = ("compressed-tensors", "transformers")
TRANSFORMERS = ("transformers 5.12", "transformers 5.24")
TRAINERS = ("slime", "miles", "verl", "NeMo-RL")
# The values of `--reader`: the readers of compressed-tensors' lists, and of all lists.
ALL_READERS = ("sglang", "vllm", "transformers", "slime", "miles")
LIST_READERS = (*ALL_READERS, "verl", "nemo-rl")

_MLP = r"(?:gate|up|down|gate_up)_proj"
_EXPERTS = rf"(?:mlp|block_sparse_moe)\.(?:experts\.#|shared_experts?)\.(?:{_MLP}|w[123])"
_ATTENTION = r"self_attn\.(?:[qkvo]_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj)"
_INDEXER_KEY = "self_attn.indexer.wk"
# The released names of the Megatron names by which slime and miles choose.
_BLOCK = re.compile(rf"{_EXPERTS}|mlp\.{_MLP}|{_ATTENTION}|self_attn\.indexer\.(?:wq_b|wk)")
_LINEAR_ATTENTION = re.compile(r"linear_attn\.(?:in_proj_qkv|in_proj_z|out_proj)")
_EXPERTS_ONLY = re.compile(_EXPERTS)
# verl's lists of parts of names.
_VERL_LEAVES = ("embed_tokens", "lm_head", "layernorm", "norm", "ln_", "embeddings", "mlp.gate.weight")
_VERL_TAKES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc1", "fc2", "mlp")


def slime_fp8(parameter: str, config: Mapping[str, Any]) -> bool:
    """slime's and vime's block FP8: a list of Megatron names, with the indexer's `wk` but without `weights_proj`.

    `in_proj_qkvz` of Qwen3-Next is not in it. Source: slime `quantizer_fp8.py`, `quantize_params_fp8`.
    """
    return bool(_BLOCK.fullmatch(_module(parameter)) or _LINEAR_ATTENTION.fullmatch(_module(parameter)))


def miles_fp8(parameter: str, config: Mapping[str, Any]) -> bool:
    """miles' block FP8: slime's list without `wk` if the indexer's rotary embedding is interleaved."""
    return slime_fp8(parameter, config) and not _skipped_by_miles(parameter, config)


def miles_mxfp8(parameter: str, config: Mapping[str, Any]) -> bool:
    """miles' MXFP8: its FP8 list without linear attention. Source: miles `quantizer_mxfp8.py`."""
    return bool(_BLOCK.fullmatch(_module(parameter))) and not _skipped_by_miles(parameter, config)


def miles_nvfp4(parameter: str, config: Mapping[str, Any]) -> bool:
    """miles' NVFP4: routed and shared experts that the list does not name. Source: miles `quantizer_nvfp4.py`."""
    return bool(_EXPERTS_ONLY.fullmatch(_module(parameter)))


def verl_fp8(parameter: str, config: Mapping[str, Any]) -> bool:
    """verl's block FP8 for SGLang and TensorRT-LLM: parts of names.

    `mlp` includes `shared_expert_gate`; `q_a_proj`, `q_b_proj`, `kv_a_proj_with_mqa`, `kv_b_proj` contain none of them.
    Source: verl `fp8_utils.py`, `FP8QuantizerHelper.should_quantize_param`.
    """
    name = parameter.lower()
    is_skipped = not parameter.endswith(".weight") or any(part in name for part in _VERL_LEAVES)
    return not is_skipped and any(part in name for part in _VERL_TAKES)


def _skipped_by_miles(parameter: str, config: Mapping[str, Any]) -> bool:
    return _module(parameter) == _INDEXER_KEY and bool(config.get("indexer_rope_interleave"))


def _module(parameter: str) -> str:
    return name_in_layer(parameter.removesuffix(".weight"))


Method = Literal[
    "compressed-tensors", "fp8", "mxfp8", "modelopt fp4", "modelopt fp8", "modelopt mxfp8", "mxfp4", "quark"
]
COMPRESSED: Method = "compressed-tensors"
MODELOPT: tuple[Method, ...] = ("modelopt fp4", "modelopt fp8", "modelopt mxfp8")
_FP8: tuple[Method, ...] = ("fp8", "mxfp8")
NAMES = "by name"  # the reading in which an entry covers the names in it; other readings are compared with it
_IGNORED, _NOT_CONVERTED = "ignored_layers", "modules_to_not_convert"


@dataclass(frozen=True)
class ListReader:
    """How readers read the lists of some methods."""

    readers: tuple[str, ...]
    # The names that they look up: of modules by their class, of the layers of an engine, of modules in transformers, of
    # parameters, or ("entry") all names that an entry may have.
    namespace: Literal["class", "sglang", "vllm", "transformers", "parameter", "entry"]
    methods: tuple[Method, ...]
    keys: tuple[str, ...]  # the first non-empty one counts
    part: Rule  # an entry and a layer, or one part of a fused layer
    experts: Rule = never  # an entry and the container of a layer's routed experts
    fused: Rule | None = None  # an entry and a fused layer's own name, which is looked up first
    last: Rule | None = None  # an entry and any layer's own name, which is looked up last
    head: bool = False  # the output layer is an ordinary layer
    linears: bool = True  # False: only routed experts are ever quantized
    packs: Callable[[str, Mapping[str, Any]], bool] | None = None  # a trainer's own choice, by parameter and config
    declared: bool = False  # SGLang splits only the fused layers that the model's class declares
    joins: bool = False  # all `keys` count, not only the first
    parts_first: bool = False  # a target for the parts of a fused layer counts before one for its class
    options: tuple[str, ...] = ()  # further values of `--reader` that select it

    def entries(self, content: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the entries that this reader finds in a quantization_config."""
        lists = [list(map(str, value)) for key in self.keys if isinstance(value := content.get(key), list) and value]
        return tuple(dict.fromkeys(entry for one in (lists if self.joins else lists[:1]) for entry in one))

    def refuses(self, entry: str) -> bool:
        """Whether the reader raises for an entry, as transformers does for an invalid regular expression."""
        if PLAIN.fullmatch(entry):
            return False
        try:
            self.part(entry)("")
            self.experts(entry)("")
        except CkptkitError:
            return True
        return False


_R = ListReader
_SGLANG_16, _SGLANG_23 = (("SGLang 0.5.16",), ("SGLang 0.5.23",))
_VLLM_26, _VLLM_33 = (("vLLM 0.26",), ("vLLM 0.33",))
_FP8_KEYS, _MODELOPT_KEYS = (_IGNORED, _NOT_CONVERTED), ("ignore", "exclude_modules")
_INT4: Any = {"methods": (COMPRESSED,), "keys": ("ignore",)}
_QUARK: Any = {"methods": ("quark",), "keys": ("exclude",), "part": regex_or_exact}
_vllm_modelopt = partial(
    _R, VLLM, "vllm", part=exact, experts=either(holds_expert, substring), fused=exact, last=substring
)
_sglang_modelopt = partial(_R, namespace="sglang", part=parts_only, experts=glob, last=glob, head=True)
_transformers_12 = partial(_R, ("transformers 5.12",), "transformers", experts=regex_from_start)
_transformers_24 = partial(_R, ("transformers 5.24",), "transformers", experts=regex_to_a_dot)
_chooses = partial(_R, namespace="parameter", keys=(), part=never)  # a trainer that reads no list
LISTS: tuple[ListReader, ...] = (
    _R(BY_CLASS, "class", **_INT4, part=regex_or_exact, last=class_name),
    _R(_VLLM_26, "vllm", **_INT4, part=regex_or_exact, fused=exact),
    _R(_VLLM_33, "vllm", **_INT4, part=regex_or_exact, fused=regex_or_exact, parts_first=True),
    _R(_SGLANG_16, "sglang", **_INT4, part=any_part, fused=exact, declared=True),
    _R(_SGLANG_23, "sglang", **_INT4, part=dotted_ending, fused=exact, declared=True),
    # It packs everything with a weight, and miles too: only miles' bridge uses the names of the checkpoint.
    _R(("slime",), "parameter", **_INT4, part=prefix, options=("miles",)),
    _R(VLLM, "vllm", ("fp8",), _FP8_KEYS, exact, holds_expert, fused=exact),
    _vllm_modelopt(methods=("mxfp8",), keys=(_IGNORED,), head=True),
    _vllm_modelopt(methods=MODELOPT, keys=_MODELOPT_KEYS, head=True),
    _R(SGLANG, "sglang", _FP8, _FP8_KEYS, whole_parts, either(whole_parts, holds_expert)),
    _sglang_modelopt(_SGLANG_16, methods=("modelopt fp4", "modelopt fp8"), keys=("ignore",)),
    _sglang_modelopt(_SGLANG_23, methods=("modelopt fp4",), keys=("ignore", _NOT_CONVERTED, "exclude_modules")),
    _sglang_modelopt(_SGLANG_23, methods=("modelopt fp8",), keys=("ignore",)),
    _sglang_modelopt(_SGLANG_23, methods=("modelopt mxfp8",), keys=("exclude_modules", "ignore")),
    _R(VLLM, "vllm", ("mxfp4",), (), never, linears=False),
    _R(SGLANG, "sglang", ("mxfp4",), (), never, linears=False),
    _transformers_12(methods=("mxfp4",), keys=(_NOT_CONVERTED,), part=never, linears=False),
    _transformers_24(methods=("mxfp4",), keys=(_NOT_CONVERTED,), part=never, linears=False),
    _R(_SGLANG_16, "sglang", **_QUARK, experts=regex_or_exact, declared=True),
    _R(_SGLANG_23, "sglang", **_QUARK, experts=quark_experts, declared=True),
    _R(_VLLM_26, "vllm", **_QUARK, experts=quark_experts),
    _R(_VLLM_33, "vllm", **_QUARK, experts=quark_experts, fused=regex_or_exact),
    _transformers_12(methods=_FP8, keys=(_NOT_CONVERTED, _IGNORED), part=regex_from_start, head=True),
    _transformers_24(methods=_FP8, keys=(_NOT_CONVERTED, _IGNORED), part=regex_to_a_dot, head=True),
    _chooses(("slime",), methods=("fp8",), packs=slime_fp8),
    _chooses(("miles",), methods=("fp8",), packs=miles_fp8),
    _chooses(("miles",), methods=("mxfp8",), packs=miles_mxfp8),
    _R(("miles",), "parameter", ("modelopt fp4",), _MODELOPT_KEYS, parameter_prefix, packs=miles_nvfp4, joins=True),
    _R(("verl",), "parameter", ("fp8",), _FP8_KEYS, verl_path, packs=verl_fp8, joins=True),
    # It gives vLLM another quantization_config without the list, and packs the layers that vLLM then builds packed.
    _R(("NeMo-RL",), "vllm", _FP8, (), exact, holds_expert, fused=exact),
)
_named = partial(_R, (NAMES,), "entry", (), ())
_PLAIN = _named(part=whole_parts, fused=whole_parts)
# The names in an entry, by the first word of the method.
NAMED: Mapping[str, ListReader] = MappingProxyType(
    {
        **dict.fromkeys(("fp8", "mxfp8", "mxfp4"), _PLAIN),
        "quark": _named(part=regex_or_exact, fused=regex_or_exact),
        "modelopt": _named(part=named_by_modelopt, fused=named_by_modelopt, head=True),
    }
)
# The keys that a list may have, by the method.
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


INT4_READERS = tuple(readers_of_method(COMPRESSED))


def named_in_lists(content: Mapping[str, Any], names: Iterable[str]) -> frozenset[str]:
    """The modules of these weights that the lists of a quantization_config name, in other formats than INT4."""
    method = str(content.get("quant_method")).partition(" ")[0]
    if method not in NAMED:
        return frozenset()
    lists = [content.get(key) for keys in KEYS.values() for key in keys]
    entries = dict.fromkeys(str(entry) for one in lists if isinstance(one, list) for entry in one)
    rules = [NAMED[method].part(entry) for entry in entries if not entry.startswith("re:") or method == "quark"]
    modules = (name.removesuffix(".weight") for name in names if name.endswith(".weight"))
    return frozenset(module for module in modules if any(covers(module) for covers in rules))


def readers_of(names: Iterable[str], method: str = COMPRESSED) -> tuple[str, ...]:
    """The readers of a method's lists for values of `--reader`. Raises CkptkitError for unknown values or no reader."""
    chosen, rows = list(names), readers_of_method(method)
    options = {reader: {_option(reader), *row.options} for reader, row in rows.items()}
    able = [name for name in LIST_READERS if any(name in values for values in options.values())]
    known = able if method == COMPRESSED else LIST_READERS
    if unknown := sorted(set(chosen).difference(known)):
        raise CkptkitError(f"unknown reader {unknown[0]!r}", f"choose from {', '.join(known)}")
    if not chosen:
        raise CkptkitError("no reader is selected", f"choose from {', '.join(known)}")
    if selected := tuple(reader for reader, values in options.items() if not values.isdisjoint(chosen)):
        return selected
    message = f"--reader {' '.join(chosen)}: these readers read no `ignore` list of {method} checkpoints"
    raise CkptkitError(message, f"choose from {', '.join(able)}")


def _option(reader: str) -> str:
    return "transformers" if reader in BY_CLASS else reader.partition(" ")[0].lower()


Severity = Literal["error", "warning"]


def deciding_readers(asked: Iterable[str] | None, engine: str = "sglang") -> tuple[str, ...]:
    """The readers of `--reader` (`asked`), or else the engine, if known, and trainers. Raises as `readers_of`."""
    return readers_of(asked if asked is not None else (*({engine} & {*ALL_READERS}), "slime", "miles"))


def severity_of(
    reader: str, asked: Iterable[str] | None, engine: str = "sglang", *, published: bool = False, updated: bool = False
) -> Severity:
    """The severity of an `ignore` list that contradicts the packed weights for `reader` (of `INT4_READERS`).

    `asked` and `engine` are as in `deciding_readers`. `published`: the list is that of a release, which is made for
    engines; a contradiction for a trainer only is then a warning, unless `updated`: a launch quantizes by this list.
    Raises CkptkitError as `readers_of`.
    """
    is_excused = asked is None and published and not updated and reader == "slime"
    return "error" if reader in deciding_readers(asked, engine) and not is_excused else "warning"


def worst(severities: Iterable[Severity]) -> Severity:
    """The worst of some severities."""
    return "error" if "error" in set(severities) else "warning"


def severity_of_all(readers: Collection[str], asked: Iterable[str] | None, engine: str = "sglang") -> Severity:
    """The worst severity of a setting that all of `readers` refuse or misread, or "error" by `refuses_own_format`."""
    if refuses_own_format(readers, asked):
        return "error"
    return worst(severity_of(reader, asked, engine) for reader in readers)


def refuses_own_format(readers: Iterable[str], asked: Iterable[str] | None) -> bool:
    """Whether compressed-tensors is among `readers`, and no reader was given.

    It defines the format, and trainers load checkpoints with it through transformers. A config that it refuses, or that
    contradicts the stored weights for it, is then an error for every engine.
    """
    return asked is None and "compressed-tensors" in readers
