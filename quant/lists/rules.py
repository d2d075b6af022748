"""How readers hold one entry of a list of unquantized modules against names, in formats other than INT4.

The lists are `modules_to_not_convert`, `ignored_layers`, `ignore`, `exclude_modules` and `exclude`. Each rule takes an
entry and returns what says of a name whether the entry covers it, so that an entry is read once for many names. Each
was run beside the reader's own function in `tests/quant/lists/test_lists.py`, except where it says "read".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from quant.patterns import MAX_NAME, matcher

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


def sglang_experts(entry: str) -> Covers:
    """SGLang's fp8, of a layer's routed experts."""
    return _either(whole_parts(entry), holds_expert(entry))


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
    """Quark: `re:` from the start of the name, or the whole name. Source: `quark/utils.py` of SGLang and vLLM."""
    return _matcher(entry) if entry.startswith("re:") else exact(entry)


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


# Rules that need not be asked about every name: exact names, and runs of parts.
INDEXED = (never, exact, whole_parts, parts_only, named_by_modelopt)
