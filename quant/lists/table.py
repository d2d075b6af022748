"""Who reads which list of unquantized modules, and what each makes of it, in formats other than INT4.

`LISTS` is the table: a reader, the `quant_method`s that it knows, the keys that it reads, and the rules by which an
entry covers a layer. compressed-tensors' own lists are read in `quant.selection.reading`, whatever their format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from quant.lists import rules, trainers
from quant.lists.rules import Rule
from quant.selection.readers import SGLANG, VLLM

Method = Literal["fp8", "mxfp8", "modelopt fp4", "modelopt fp8", "modelopt mxfp8", "mxfp4", "quark"]
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


_FP8: tuple[Method, ...] = ("fp8", "mxfp8")
_R = ListReader
LISTS: tuple[ListReader, ...] = (
    _R(VLLM, ("fp8",), (_IGNORED, _NOT_CONVERTED), rules.exact, rules.holds_expert, fused=rules.exact),
    _R(
        VLLM,
        ("mxfp8",),
        (_IGNORED,),
        rules.exact,
        rules.vllm_modelopt_experts,
        fused=rules.exact,
        last=rules.substring,
        head=True,
    ),
    _R(
        VLLM,
        MODELOPT,
        ("ignore", "exclude_modules"),
        rules.exact,
        rules.vllm_modelopt_experts,
        fused=rules.exact,
        last=rules.substring,
        head=True,
    ),
    _R(SGLANG, _FP8, (_IGNORED, _NOT_CONVERTED), rules.whole_parts, rules.sglang_experts),
    _R(
        ("SGLang 0.5.16",),
        ("modelopt fp4", "modelopt fp8"),
        ("ignore",),
        rules.parts_only,
        rules.glob,
        last=rules.glob,
        head=True,
    ),
    _R(
        ("SGLang 0.5.23",),
        ("modelopt fp4",),
        ("ignore", _NOT_CONVERTED, "exclude_modules"),
        rules.parts_only,
        rules.glob,
        last=rules.glob,
        head=True,
    ),
    _R(("SGLang 0.5.23",), ("modelopt fp8",), ("ignore",), rules.parts_only, rules.glob, last=rules.glob, head=True),
    _R(
        ("SGLang 0.5.23",),
        ("modelopt mxfp8",),
        ("exclude_modules", "ignore"),
        rules.parts_only,
        rules.glob,
        last=rules.glob,
        head=True,
    ),
    _R(ENGINES, ("mxfp4",), (), rules.never, rules.never, linears=False),
    _R(("transformers 5.12",), ("mxfp4",), (_NOT_CONVERTED,), rules.never, rules.regex_from_start, linears=False),
    _R(("transformers 5.24",), ("mxfp4",), (_NOT_CONVERTED,), rules.never, rules.regex_to_a_dot, linears=False),
    _R(("SGLang 0.5.16",), ("quark",), ("exclude",), rules.regex_or_exact, rules.regex_or_exact, declared=True),
    _R(("SGLang 0.5.23",), ("quark",), ("exclude",), rules.regex_or_exact, rules.quark_experts, declared=True),
    _R(("vLLM 0.26",), ("quark",), ("exclude",), rules.regex_or_exact, rules.quark_experts),
    _R(("vLLM 0.33",), ("quark",), ("exclude",), rules.regex_or_exact, rules.quark_experts, fused=rules.regex_or_exact),
    _R(
        ("transformers 5.12",),
        _FP8,
        (_NOT_CONVERTED, _IGNORED),
        rules.regex_from_start,
        rules.regex_from_start,
        head=True,
    ),
    _R(("transformers 5.24",), _FP8, (_NOT_CONVERTED, _IGNORED), rules.regex_to_a_dot, rules.regex_to_a_dot, head=True),
    _R(("slime",), ("fp8",), (), rules.never, rules.never, packs=trainers.slime_fp8),
    _R(("miles",), ("fp8",), (), rules.never, rules.never, packs=trainers.miles_fp8),
    _R(("miles",), ("mxfp8",), (), rules.never, rules.never, packs=trainers.miles_mxfp8),
    _R(
        ("miles",),
        ("modelopt fp4",),
        ("ignore", "exclude_modules"),
        rules.parameter_prefix,
        rules.never,
        packs=trainers.miles_nvfp4,
        joins=True,
    ),
    _R(
        ("verl",),
        ("fp8",),
        (_IGNORED, _NOT_CONVERTED),
        rules.verl_path,
        rules.never,
        packs=trainers.verl_fp8,
        joins=True,
    ),
    # It gives vLLM a quantization_config of its own, without the list, and packs what vLLM then builds packed.
    _R(("NeMo-RL",), _FP8, (), rules.exact, rules.holds_expert, fused=rules.exact),
)
_PLAIN = _R((NAMES,), (), (), rules.whole_parts, rules.never, fused=rules.whole_parts)
# What an entry names, by the first word of the method.
NAMED: Mapping[str, ListReader] = MappingProxyType(
    {
        **dict.fromkeys(("fp8", "mxfp8", "mxfp4"), _PLAIN),
        "quark": _R((NAMES,), (), (), rules.regex_or_exact, rules.never, fused=rules.regex_or_exact),
        "modelopt": _R(
            (NAMES,), (), (), rules.named_by_modelopt, rules.never, fused=rules.named_by_modelopt, head=True
        ),
    }
)
# The keys that a list may stand under, by the method.
KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp8": (_IGNORED, _NOT_CONVERTED),
        "mxfp8": (_IGNORED, _NOT_CONVERTED),
        **dict.fromkeys(MODELOPT, ("ignore", "exclude_modules", _NOT_CONVERTED)),
        "mxfp4": (_NOT_CONVERTED,),
        "quark": ("exclude",),
    }
)


def readers_of_method(method: str) -> dict[str, ListReader]:
    """Returns the readers that know a method, by name."""
    return {reader: row for row in LISTS if method in row.methods for reader in row.readers}
