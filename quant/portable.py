"""Whether an `ignore` list means the same to every reader, and the spelling that does."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptkit.errors import CkptkitError
from ckptkit.specs import summarize
from quant.readers import compressed_tensors, sglang, sglang_layers, sglang_suffix, slime

_SHARD = re.compile(r"(?:\((?P<several>\w+(?:\|\w+)*)\)|\b(?P<one>q|k|v|gate|up))_proj")
_SHARDS = (("q", "k", "v", "qkv"), ("gate", "up", "gate_up"))
# What ties a regular expression to module names only, or to parameter names only.
_ENDING = re.compile(r"(?:\$|\(\\\.weight\)\?|\\?\.weight|\\?\.\.\*|\\\.\*|\\\.)+$")
_MAX_ADVICE = 3  # each try looks at every tensor again
_TOGETHER = "SGLang packs the routed experts of a layer together or not at all, and so q, k, v and gate, up"


@dataclass(frozen=True)
class Matrix:
    """A `….weight` with two or more axes, and who might pack it: its class (`linear`), and whether INT4 is possible at all (`packable`).

    `layer` is the module's name in SGLang where SGLang may pack it, else None; `entry` the portable entry that leaves it out.
    """

    tensor: str
    linear: bool
    packable: bool
    layer: str | None
    entry: str

    @property
    def module(self) -> str:
        """The tensor's module."""
        return self.tensor.removesuffix(".weight")

    def packed(self, ignore: Collection[str]) -> bool:
        """Whether it is quantized: one that may be, unless compressed-tensors finds its module in `ignore`."""
        return self.packable and not any(compressed_tensors(self.module, pattern) for pattern in ignore)


@dataclass(frozen=True)
class Divergence:
    """A tensor that one reader treats differently, and the entries of `ignore` that this reader reads differently."""

    tensor: str
    reader: str
    packs: bool
    patterns: tuple[str, ...]


def divergences(matrices: Iterable[Matrix], ignore: Sequence[str], expands: bool) -> Iterator[Divergence]:
    """Every disagreement between what is packed and what transformers, SGLang (two generations) and slime would pack."""
    for matrix in matrices:
        packed = matrix.packed(ignore)
        names = {pattern: compressed_tensors(matrix.module, pattern) for pattern in ignore}
        if matrix.linear and not packed and not any(names.values()):
            yield Divergence(matrix.tensor, "transformers", True, ())
        covers = {pattern: slime(matrix.tensor, pattern) for pattern in ignore}
        if any(covers.values()) == packed:
            yield Divergence(matrix.tensor, "slime", not packed, tuple(pattern for pattern in ignore if covers[pattern] != names[pattern]))
        for reader, rule in (("SGLang 0.5.16", sglang), ("SGLang 0.5.23", sglang_suffix)):
            for layer in sglang_layers(matrix.layer, ignore, expands) if matrix.layer else ():
                covers = {pattern: rule(layer, pattern) for pattern in ignore}
                if any(covers.values()) == packed:
                    yield Divergence(matrix.tensor, reader, not packed, tuple(pattern for pattern in ignore if covers[pattern] != names[pattern]))
                    break


def check_portable(matrices: Sequence[Matrix], ignore: Sequence[str], expands: bool) -> None:
    """Raises CkptkitError naming tensors, readers and entries when a reader takes `ignore` differently; the hint spells it portably."""
    found = list(divergences(matrices, ignore, expands))
    if found:
        raise CkptkitError("the ignore list is not read alike by every reader:\n  " + "\n  ".join(_lines(found)), _advice(found, matrices, ignore, expands))


def _lines(found: Iterable[Divergence]) -> Iterator[str]:
    tensors: dict[tuple[str, bool, tuple[str, ...]], list[str]] = defaultdict(list)
    for one in found:
        tensors[one.reader, one.packs, one.patterns].append(one.tensor)
    readers: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (reader, packs, patterns), names in tensors.items():
        verb = "pack" if packs else "leave unpacked"
        why = "because of how it reads " + _quoted(patterns) if patterns else "because no entry covers it"
        readers[verb, summarize(names), why].append(reader)
    for (verb, names_folded, why), who in readers.items():
        yield f"{' and '.join(who)} would {verb} {names_folded} {why}"


def _advice(found: Sequence[Divergence], matrices: Sequence[Matrix], ignore: Sequence[str], expands: bool) -> str:
    advice = []
    suspects = list(dict.fromkeys(pattern for one in found for pattern in one.patterns))
    for pattern in suspects[:_MAX_ADVICE]:
        better = respell(pattern, matrices, ignore, expands)
        advice.append(f"instead of '{pattern}' pass '{better}'" if better else f"remove '{pattern}' and name whole layers: {_TOGETHER}")
    if rest := suspects[_MAX_ADVICE:]:
        advice.append(f"treat {len(rest)} more entries alike")
    bare = {one.tensor for one in found if not one.patterns}
    if missing := dict.fromkeys(matrix.entry for matrix in matrices if matrix.tensor in bare):
        advice.append("add " + _quoted(missing))
    return "; ".join(advice)


def _quoted(patterns: Iterable[str]) -> str:
    return ", ".join(f"'{pattern}'" for pattern in patterns)


def spell(module: str) -> str:
    """An entry for this module, in every layer, that all readers take alike: a regular expression for module and parameter names.

    Shards that SGLang fuses and routed experts come together; a module outside the layers is its plain name.
    """
    container, experts, _ = module.partition(".experts.")
    tail = re.sub(r".*\.\d+\.", "", container)
    if tail == container:
        return module
    return rf"re:.*\.{re.escape(tail)}\.experts\..*" if experts else rf"re:.*\.{_SHARD.sub(_all_shards, re.escape(tail))}(\.weight)?$"


def respell(pattern: str, matrices: Sequence[Matrix], ignore: Sequence[str], expands: bool) -> str | None:
    """The first rewriting of one entry that removes every disagreement over it, makes no other and covers something; else None."""
    basis = [matrix.entry for matrix in matrices if not matrix.packable]
    others = {(one.tensor, one.reader) for one in divergences(matrices, _unique(ignore, basis), expands) if pattern not in one.patterns}
    for candidate in filter(_compiles, dict.fromkeys(_candidates(pattern))):
        replaced = _unique([candidate if entry == pattern else entry for entry in ignore], basis)
        covers = any(compressed_tensors(matrix.module, candidate) for matrix in matrices)
        if covers and {(one.tensor, one.reader) for one in divergences(matrices, replaced, expands)} <= others:
            return candidate
    return None


def _unique(*entries: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(entry for several in entries for entry in several))


def _candidates(pattern: str) -> Iterator[str]:
    if pattern.startswith("re:"):
        cores, ending = [_ENDING.sub("", pattern.removeprefix("re:"))], r"(\.weight)?$"
    else:
        plain = re.escape(pattern.removesuffix(".weight"))
        cores, ending = [plain, r".*\." + plain], r"(\..*)?$"
    for core in cores:
        end = "" if core.endswith(".*") else ending
        yield f"re:{core}{end}"
        yield f"re:{_SHARD.sub(_all_shards, core)}{end}"
        before, experts, _ = core.partition("experts")
        if experts:
            yield rf"re:{before}experts\..*"


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern.removeprefix("re:"))
    except re.error:
        return False
    return True


def _all_shards(match: re.Match[str]) -> str:
    names = match["several"].split("|") if match["several"] else [match["one"]]
    for family in _SHARDS:
        if set(family) & set(names):
            names += [name for name in family if name not in names]
    return f"({'|'.join(names)})_proj"
