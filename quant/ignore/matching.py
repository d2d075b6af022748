"""How entries of lists of unquantized modules cover names: one rule for each way in which a reader matches.

A rule takes an entry and returns a function that decides whether the entry covers a name. The rules are compared with
the readers' own functions in `tests/quant/ignore/test_lists.py`, except those with the note "read, not run".
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from ckptkit.quant.patterns import MAX_NAME, REGEX, check_lookups, matcher

Covers = Callable[[str], bool]
Rule = Callable[[str], Covers]


@dataclass(frozen=True)
class Run:
    """Whether a name has this run of complete dotted parts; `lower`: without regard to case."""

    parts: str
    lower: bool = False

    def __call__(self, name: str) -> bool:
        return f".{self.parts}." in f".{name.lower() if self.lower else name}."


_NESTED = "language_model."
# Of ModelOpt's fused attention: an entry with this ending excludes the projection of every layer in SGLang.
_LATENT_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
PLAIN = re.compile(r"[\w.\-]*")  # text without a wildcard


def never(entry: str) -> Covers:
    """A reader that looks up nothing."""
    return lambda name: False


def exact(entry: str) -> Covers:
    """vLLM's fp8: the full name. Source: vLLM `quant_utils.py`, `is_layer_skipped`."""
    return lambda name: name == entry


def whole_parts(entry: str) -> Covers:
    """SGLang's fp8: any run of dotted parts. Source: `Fp8Config.from_config`; `utils.py`, `_module_path_match`."""
    return Run(entry.removeprefix("model.").rstrip("."))


def parts_only(entry: str) -> Covers:
    """SGLang's ModelOpt: any run of dotted parts. Source: `ModelOptQuantConfig.apply_weight_name_mapper`."""
    return Run(entry.removeprefix(_NESTED).rstrip("."))


def substring(entry: str) -> Covers:
    """vLLM's ModelOpt: any part of the name, or a glob for all of it. Source: `ModelOptQuantConfigBase`."""
    is_plain = PLAIN.fullmatch(entry) is not None
    return lambda name: entry in name or (not is_plain and fnmatchcase(name, entry))


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
    """SGLang's and vLLM's fp8, for a layer's routed experts: an entry for one of them excludes all."""
    return (lambda container: container in entry) if "experts" in entry else never(entry)


def either(one: Rule, other: Rule) -> Rule:
    """Two rules, one of which has to cover a name."""
    return lambda entry: _either(one(entry), other(entry))


def named_by_modelopt(entry: str) -> Covers:
    """The names in an entry of ModelOpt: a module, or all below it; a glob for either."""
    parts, below = parts_only(entry), f"{entry}.*"
    if PLAIN.fullmatch(entry):
        return parts
    return lambda name: parts(name) or fnmatchcase(name, entry) or fnmatchcase(name, below)


def regex_or_exact(entry: str) -> Covers:
    """compressed-tensors, vLLM for its lists, and Quark: `re:` from the start of the name, or the full name.

    Source: compressed-tensors `utils/match.py`, `match_name`; vLLM `compressed_tensors/utils.py`,
    `should_ignore_layer`; `quark/utils.py` of SGLang and vLLM.
    """
    return _matcher(entry) if entry.startswith("re:") else exact(entry)


def class_name(entry: str) -> Covers:
    """compressed-tensors: the class of a module, or `Module`. Source: `utils/match.py`, `_match_class`."""
    return (lambda name: True) if entry == "Module" else exact(entry)


def any_part(entry: str) -> Covers:
    """SGLang up to 0.5.16 for INT4: `re:` from the start, else any part in any case (`check_equal_or_regex_match`)."""
    lower = entry.lower()
    return _matcher(entry) if entry.startswith("re:") else lambda name: lower in name.lower()


def dotted_ending(entry: str) -> Covers:
    """SGLang 0.5.23 for compressed-tensors: `re:` from the start, else the full name or a dotted ending of it."""
    return _matcher(entry) if entry.startswith("re:") else lambda name: f".{name}".endswith(f".{entry}")


def prefix(entry: str) -> Covers:
    """slime, miles, Relax INT4: `re:` or a prefix. Source: `quantize_params_compressed_tensors`; read, not run."""
    return _matcher(entry) if entry.startswith("re:") else lambda name: name.startswith(entry)


def quark_experts(entry: str) -> Covers:
    """Quark, for a layer's routed experts: also an entry for one of them excludes all."""
    return _either(regex_or_exact(entry), lambda container: entry.startswith(f"{container}."))


def regex_from_start(entry: str) -> Covers:
    """transformers 5.12: a regular expression from the start of the name, or its ending; neither ends at a dot.

    Source: transformers `quantizers_utils.py`, `should_convert_module`. Raises CkptkitError for an entry that is not a
    regular expression, as transformers does.
    """
    start = _start(entry) if PLAIN.fullmatch(entry) else _matcher(f"re:{entry}")
    return _either(start, lambda name: name.endswith(entry))


def _start(entry: str) -> Covers:
    """The regular expression `entry` of words and dots, without compiling one for each of many entries."""
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
    """miles' NVFP4: `re:` from the start of a parameter, or its name up to a dot. Source: `quantizer_nvfp4.py`."""
    if entry.startswith("re:"):
        return _matcher(entry)
    return lambda parameter: parameter == entry or parameter.startswith(f"{entry}.")


def verl_path(entry: str) -> Covers:
    """verl's list for SGLang: `re:` from the start, or dotted parts in any case. Source: `sglang_fp8_utils.py`."""
    if entry.startswith("re:"):
        match = _matcher(entry)
        return lambda parameter: match(parameter) or match(parameter.removesuffix(".weight"))
    return Run(entry.lower().strip("."), lower=True)


def _either(one: Covers, other: Covers) -> Covers:
    return lambda name: one(name) or other(name)


def _matcher(text: str) -> Covers:
    """Returns a function that matches a regular expression with the prefix `re:` from the start of a name."""
    short, long = matcher(text, MAX_NAME), matcher(text)
    return lambda name: bool(short(name) if len(name) <= MAX_NAME else long(name))


# Rules with an index, which do not test every name, and rules with an index for all but regular expressions.
_INDEXED = (never, exact, class_name, whole_parts, parts_only, named_by_modelopt)
_INDEXED_PLAIN = (regex_or_exact, prefix)
_LAST = "\U0010ffff"
_SLOW = 5  # the cost of a rule that tests each name, in lookups


@dataclass(frozen=True)
class Names:
    """Names that entries are looked up in, indexed: long lists of large models would take minutes."""

    names: frozenset[str]

    @cached_property
    def by_part(self) -> Mapping[str, Sequence[str]]:
        """The names that have each dotted part, in lower case."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in self.names:
            for part in set(name.lower().split(".")):
                found[part].append(name)
        return found

    @cached_property
    def _ordered(self) -> Sequence[str]:
        return sorted(self.names)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.names), default=0)

    def check(self, entries: Sequence[str], rule: Rule) -> None:
        """Raises CkptkitError if a rule has to test too many pairs of an entry and a name."""
        if rule in _INDEXED_PLAIN:
            check_lookups([entry for entry in entries if entry.startswith(REGEX)], len(self.names))
        elif rule not in _INDEXED:
            check_lookups(entries, len(self.names) * _SLOW)

    @cached_property
    def _found(self) -> dict[tuple[Rule, str], frozenset[str]]:
        return {}

    def covered(self, rule: Rule, entry: str) -> frozenset[str]:
        """The names that an entry covers by a rule."""
        if (rule, entry) not in self._found:
            self._found[rule, entry] = self._covered(rule, entry)
        return self._found[rule, entry]

    def _covered(self, rule: Rule, entry: str) -> frozenset[str]:
        # A run of parts is looked for where its rarest part is.
        if rule in _INDEXED_PLAIN and entry.startswith(REGEX):
            return frozenset(filter(matcher(entry, self._longest), self.names))
        if rule in (exact, regex_or_exact):
            return self.names & {entry}
        if rule is prefix:
            first, last = (bisect_left(self._ordered, text) for text in (entry, entry + _LAST))
            return frozenset(self._ordered[first:last])
        covers = rule(entry)
        where: Collection[str] = self.names
        if isinstance(covers, Run):
            where = min((self.by_part.get(part.lower(), ()) for part in covers.parts.split(".")), key=len)
        return frozenset(filter(covers, where))


def ignored(modules: Iterable[str], ignore: Sequence[str]) -> frozenset[str]:
    """The Linear modules that entries cover for compressed-tensors. Raises CkptkitError as `covering`."""
    covers = covering(ignore, modules)
    return frozenset[str]().union(*map(covers, dict.fromkeys(ignore)))


def covering(entries: Sequence[str], modules: Iterable[str]) -> Callable[[str], frozenset[str]]:
    """Returns a function that finds the modules that an entry covers for compressed-tensors. Raises if too many."""
    names = Names(frozenset(modules))
    names.check(entries, regex_or_exact)
    return lambda entry: names.names if class_name(entry)("Linear") else names.covered(regex_or_exact, entry)
