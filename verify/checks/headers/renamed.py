"""Finds what wrappers do to names: a prefix added or lost, a part repeated, a wrapper's name inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise

from ckptkit.verify.core.check import Subject, once
from ckptkit.verify.evidence.expected import expected_of, spelling_of
from ckptkit.verify.evidence.folding import by_key

_SAVED = "save it again, from"
# What wrappers put into names, and what to save instead.
_WRAPPERS: Mapping[str, str] = {
    "module": f"{_SAVED} inside DataParallel, DistributedDataParallel or DeepSpeed (`model.module`)",
    "_orig_mod": f"{_SAVED} the model that torch.compile was given (`model._orig_mod`)",
    "_fsdp_wrapped_module": f"{_SAVED} FSDP's full state dict (torch.distributed.checkpoint.state_dict)",
    "_checkpoint_wrapped_module": f"{_SAVED} the model without its activation checkpointing",
    "base_model": f"{_SAVED} what merge_and_unload() of peft returns",
}
_ANYWHERE = _WRAPPERS.keys() - {"base_model"}


@dataclass(frozen=True)
class Renamed:
    """How the names of a checkpoint were changed."""

    change: str  # for people
    hint: str
    stored: tuple[str, ...]  # the changed names
    promised: frozenset[str]  # what they should be


@once
def renamed_of(subject: Subject) -> Renamed | None:
    """Finds how the names of a checkpoint, those of an index alone included, were changed.

    None without a usable config, and for the names of another class (`spelling_of`).
    """
    expected = None if spelling_of(subject) else expected_of(subject)
    if expected is None:
        return None
    return renamed([*subject.specs, *subject.unread_names], expected.shapes.keys() | expected.optional)


def renamed(names: Collection[str], promised: Collection[str]) -> Renamed | None:
    """The one change that gives `names` the names that the config promises; None without one.

    Names of wrappers count anywhere, a prefix where it is that of at least half of the names. All names with the change
    are `stored`, those of parts too (multi-token prediction) that are only promised where they have their own names.
    """
    odd = [name for name in names if name not in promised]
    if not odd:
        return None
    wanted = {_module(name) for name in promised}
    prefixes = ((found, len(names) / 2) for find in (_further, _lacking, _repeated) for found in find(odd, wanted))
    for found, least in (*((found, 1) for found in _wrapped(odd, wanted)), *prefixes):
        if len(found.right) >= least:
            right = (name for parts in map(_promised, found.right, found.right.values()) for name in parts)
            # Those without the number of a layer first: they are few, and tell more.
            changed = sorted(filter(found.has_it, odd), key=lambda name: any(map(str.isdecimal, name.split("."))))
            return Renamed(found.change, found.hint, tuple(changed), frozenset(right))
    return None


@dataclass(frozen=True)
class _Found:
    """A change that explains some names."""

    change: str
    hint: str
    right: Mapping[str, str]  # the right module of each name
    has_it: Callable[[str], bool]  # whether a name has the change


def _module(name: str) -> str:
    """All but the last part, which is not the same where a weight is quantized."""
    return name.rpartition(".")[0]


def _promised(name: str, module: str) -> tuple[str, str]:
    """The name of a stored tensor in the right module, and that of the weight of which it may be a packed part."""
    leaf = name.rpartition(".")[2]
    return f"{module}.{leaf}", f"{module}.weight" if leaf.startswith("weight") else f"{module}.{leaf}"


def _fit(odd: Iterable[str], wanted: set[str], fix: Callable[[str], str]) -> dict[str, str]:
    """The names whose module is a right one once it is fixed, with that."""
    fixed = {name: fix(_module(name)) for name in odd}
    return {name: module for name, module in fixed.items() if module in wanted and module != _module(name)}


def _wrapped(odd: Collection[str], wanted: set[str]) -> Iterator[_Found]:
    """Names of wrappers anywhere in the names."""
    for wrapper in _ANYWHERE:
        inside = {name for name in odd if wrapper in name.split(".")}
        right = _fit(inside, wanted, lambda module, own=wrapper: ".".join(p for p in module.split(".") if p != own))  # type: ignore[misc]
        yield _Found(f"`{wrapper}.` is part of their names", _WRAPPERS[wrapper], right, inside.__contains__)


def _further(odd: Collection[str], wanted: set[str]) -> Iterator[_Found]:
    """A prefix too many."""
    splits = ([_split(_module(name), at) for at in range(1, name.count("."))] for name in odd)
    if usual := _usual(next((head for head, tail in split if tail in wanted), "") for split in splits):
        hint = _WRAPPERS.get(usual.partition(".")[0], "save it again from the model itself, or remove the prefix")
        right = _fit(odd, wanted, lambda module: module.removeprefix(usual))
        yield _Found(f"an extra prefix `{usual}`", hint, right, lambda name: name.startswith(usual))


def _lacking(odd: Collection[str], wanted: set[str]) -> Iterator[_Found]:
    """A prefix too few."""
    heads = by_key((tail, head) for head, _, tail in (module.partition(".") for module in wanted))
    if usual := _usual(heads[_module(name)][0] for name in odd if len(heads.get(_module(name), ())) == 1):
        right = _fit(odd, wanted, lambda module: f"{usual}.{module}")
        hint = "the inner model was saved: save the whole one (...ForCausalLM), with its output layer"
        firsts = {name.partition(".")[0] for name in right}
        yield _Found(f"the prefix `{usual}.` is missing", hint, right, lambda name: name.partition(".")[0] in firsts)


def _repeated(odd: Collection[str], wanted: set[str]) -> Iterator[_Found]:
    """A part that stands more than once in a row."""
    if right := _fit(odd, wanted, lambda module: ".".join(part for part, _ in groupby(module.split(".")))):
        part = next(one for one, other in pairwise(min(right, key=len).split(".")) if one == other)
        hint, repeated = "save it again from the model itself, or remove the repeated parts", f".{part}.{part}."
        yield _Found(f"`{part}.` is repeated inside their names", hint, right, lambda name: repeated in f".{name}")


def _split(module: str, at: int) -> tuple[str, str]:
    """The first parts of a module's name, with the dot behind them, and the others."""
    parts = module.split(".")
    return f"{'.'.join(parts[:at])}.", ".".join(parts[at:])


def _usual(heads: Iterable[str]) -> str:
    """The most common one; empty where there is none."""
    return next((head for head, _ in Counter(filter(None, heads)).most_common(1)), "")
