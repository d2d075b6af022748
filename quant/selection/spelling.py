"""Spells entries of `ignore` that mean the same to every reader."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from ckptkit.core.errors import CkptkitError
from converters.hf_names import FUSED, IN_LAYER, LATENT_DOWN
from quant.patterns import matcher

_SHARD = re.compile(r"(?:\((?P<several>\w+(?:\|\w+)*)\)|\b(?P<one>q|k|v|gate|up))_proj")
# The shards of the layers that releases may also spell as one, and the fused name, without `_proj`.
_SHARDS = tuple(
    tuple(name.removesuffix("_proj") for name in (*FUSED[fused], fused)) for fused in ("qkv_proj", "gate_up_proj")
)
_LATENT = re.compile(rf"\b({'|'.join(LATENT_DOWN)})\b")
_LATENT_ALL = f"({'|'.join((*LATENT_DOWN, 'fused_qkv_a_proj_with_mqa'))})"
# Parts of a layer that stay as a whole.
_WHOLE = re.compile(r"(.+\.)?(indexer|linear_attn|experts)\..*")
# What ties a regular expression to module names only, or to parameter names only.
_ENDING = re.compile(r"(?:\$|\(\\\.weight\)\?|\\?\.weight|\\?\.\.\*|\\\.\*|\\\.)+$")


def spell(module: str) -> str:
    """Returns an entry for this module in every layer: a regular expression for module and parameter names.

    Shards that engines fuse, routed experts, and parts that stay as a whole come together; a module outside the layers
    is its plain name.
    """
    match = IN_LAYER.fullmatch(module)
    return rf"re:.*\.{_spell_tail(match[3])}" if match else module


def _spell_tail(tail: str) -> str:
    if whole := _WHOLE.fullmatch(tail):
        return rf"{re.escape(whole[1] or '')}{whole[2]}\..*"
    return rf"{with_fused(re.escape(tail))}(\.weight)?$"


def ignore_options(names: Iterable[str]) -> str:
    """The options that leave these weights out, for a message."""
    entries = dict.fromkeys(spell(name.removesuffix(".weight")) for name in names)
    return " ".join(f"--ignore '{entry}'" for entry in entries)


def with_fused(pattern: str) -> str:
    """A regular expression with each shard of a fused layer joined by the others and by the fused name."""
    return _LATENT.sub(_LATENT_ALL, _SHARD.sub(_all_shards, pattern))


def _all_shards(match: re.Match[str]) -> str:
    if match["one"]:
        return f"({'|'.join(next(family for family in _SHARDS if match['one'] in family))})_proj"
    names = match["several"].split("|")
    for family in _SHARDS:
        if set(family) & set(names):
            names += [name for name in family if name not in names]
    return f"({'|'.join(names)})_proj"


def entries_for(excluded: Mapping[str, str], packed: Collection[str]) -> list[str]:
    """Entries that leave out every module of `excluded`, given with its own entry, and no module of `packed`.

    Where a module's entry for all layers would cover a packed one, the entries are for single layers.
    """
    groups: dict[str, list[str]] = {}
    for module, entry in excluded.items():
        groups.setdefault(entry, []).append(module)
    found: list[str] = []
    for entry, modules in groups.items():
        found += _by_layer(modules) if _spares(entry, packed) else [entry]
    return list(dict.fromkeys(found))


def _spares(entry: str, packed: Collection[str]) -> bool:
    if not entry.startswith("re:"):
        return entry in packed
    match = matcher(entry)
    return any(match(module) for module in packed)


def _by_layer(modules: Iterable[str]) -> list[str]:
    layers: dict[str, set[int]] = {}
    for match in filter(None, map(IN_LAYER.fullmatch, modules)):
        layers.setdefault(_spell_tail(match[3]), set()).add(int(match[2]))
    return [rf"re:(.*\.)?layers\.({'|'.join(map(str, sorted(numbers)))})\.{tail}" for tail, numbers in layers.items()]


def candidates(pattern: str) -> Iterator[str]:
    """Spellings that may mean to every reader what an entry means to one."""
    if pattern.startswith("re:"):
        cores, ending = [_ENDING.sub("", pattern.removeprefix("re:"))], r"(\.weight)?$"
    else:
        plain = re.escape(pattern.removesuffix(".weight"))
        cores, ending = [plain, r".*\." + plain], r"(\..*)?$"
    for core in cores:
        end = "" if core.endswith(".*") else ending
        yield from filter(_compiles, (f"re:{core}{end}", f"re:{with_fused(core)}{end}"))
        before, experts, _ = core.partition("experts")
        if experts:
            yield from filter(_compiles, (rf"re:{before}experts\..*",))


def _compiles(pattern: str) -> bool:
    try:
        matcher(pattern)
    except CkptkitError:
        return False
    return True
