"""Detects names that a wrapper changed: an extra or missing prefix, a repeated part, the wrapper's name inside."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise

from ckptkit.verify.core.check import Subject, once
from ckptkit.verify.evidence.expected import expected_of, spelling_of
from ckptkit.verify.evidence.folding import by_key

_SAVED = "save again from"
# Parts that wrappers add to names, and the hint for each.
_WRAPPERS: Mapping[str, str] = {
    "module": f"{_SAVED} inside DataParallel, DistributedDataParallel or DeepSpeed (`model.module`)",
    "_orig_mod": f"{_SAVED} the model inside torch.compile (`model._orig_mod`)",
    "_fsdp_wrapped_module": f"{_SAVED} FSDP's full state dict (torch.distributed.checkpoint.state_dict)",
    "_checkpoint_wrapped_module": f"{_SAVED} the model without its activation checkpointing",
    "base_model": f"{_SAVED} the result of merge_and_unload() of peft",
}
_ANYWHERE = _WRAPPERS.keys() - {"base_model"}


@dataclass(frozen=True)
class Renamed:
    """A change of the names of a checkpoint."""

    change: str  # for people
    hint: str
    stored: tuple[str, ...]  # the changed names
    promised: frozenset[str]  # the right names


@once
def renamed_of(subject: Subject) -> Renamed | None:
    """The change of the names in headers and index, or None, also for names of another class (`spelling_of`)."""
    expected = None if spelling_of(subject) else expected_of(subject)
    if expected is None:
        return None
    return renamed([*subject.specs, *subject.unread_names], expected.shapes.keys() | expected.optional)


def renamed(names: Collection[str], promised: Collection[str]) -> Renamed | None:
    """The one change that explains `names`, or None.

    A wrapper's name may be anywhere in one name; a prefix must be that of at least half of the names. `stored` are all
    names with the change, also those of parts (multi-token prediction) that are promised only under their own names.
    """
    odd = [name for name in names if name not in promised]
    if not odd:
        return None
    modules = {_module(name) for name in promised}
    prefixes = ((found, len(names) / 2) for find in (_extra, _missing, _repeated) for found in find(odd, modules))
    for found, least in (*((found, 1) for found in _wrapped(odd, modules)), *prefixes):
        if len(found.fixed) >= least:
            right = [f"{module}.{name.rpartition('.')[2]}" for name, module in found.fixed.items()]
            right += [re.sub(r"\.weight[^.]*$", ".weight", name) for name in right]  # packed parts belong to a weight
            # Names without the number of a layer come first: they are few, and tell more.
            changed = sorted(filter(found.has_it, odd), key=lambda name: any(map(str.isdecimal, name.split("."))))
            return Renamed(found.change, found.hint, tuple(changed), frozenset(right))
    return None


@dataclass(frozen=True)
class _Found:
    """A change that explains some names."""

    change: str
    hint: str
    fixed: Mapping[str, str]  # the right module of each name
    has_it: Callable[[str], bool]  # whether a name has the change


def _module(name: str) -> str:
    """The name without its last part, which depends on the quantization."""
    return name.rpartition(".")[0]


def _fix(odd: Iterable[str], modules: set[str], fix: Callable[[str], str]) -> dict[str, str]:
    """The right module of each name that `fix` gives one."""
    fixed = {name: fix(_module(name)) for name in odd}
    return {name: module for name, module in fixed.items() if module in modules and module != _module(name)}


def _wrapped(odd: Collection[str], modules: set[str]) -> Iterator[_Found]:
    """A wrapper's name anywhere in the names."""
    for wrapper in _ANYWHERE:
        inside = {name for name in odd if wrapper in name.split(".")}
        right = _fix(inside, modules, lambda module, own=wrapper: ".".join(p for p in module.split(".") if p != own))  # type: ignore[misc]
        yield _Found(f"the names contain `{wrapper}.`", _WRAPPERS[wrapper], right, inside.__contains__)


def _extra(odd: Collection[str], modules: set[str]) -> Iterator[_Found]:
    """An extra prefix."""
    paths = (_module(name).split(".") for name in odd)
    splits = ([(".".join(path[:at]), ".".join(path[at:])) for at in range(1, len(path))] for path in paths)
    if head := _most_common(next((head for head, tail in split if tail in modules), "") for split in splits):
        prefix = f"{head}."
        hint = _WRAPPERS.get(head.partition(".")[0], "save the model itself again, or remove the prefix")
        right = _fix(odd, modules, lambda module: module.removeprefix(prefix))
        yield _Found(f"the names have an extra prefix `{prefix}`", hint, right, lambda name: name.startswith(prefix))


def _missing(odd: Collection[str], modules: set[str]) -> Iterator[_Found]:
    """A missing prefix."""
    heads = by_key((tail, head) for head, _, tail in (module.partition(".") for module in modules))
    if prefix := _most_common(heads[_module(name)][0] for name in odd if len(heads.get(_module(name), ())) == 1):
        right = _fix(odd, modules, lambda module: f"{prefix}.{module}")
        hint = "save the complete model (...ForCausalLM) with its output layer: only the inner model was saved"
        firsts = {name.partition(".")[0] for name in right}
        yield _Found(f"the names lack `{prefix}.`", hint, right, lambda name: name.partition(".")[0] in firsts)


def _repeated(odd: Collection[str], modules: set[str]) -> Iterator[_Found]:
    """A part that is repeated."""
    if right := _fix(odd, modules, lambda module: ".".join(part for part, _ in groupby(module.split(".")))):
        part = next(one for one, other in pairwise(min(right, key=len).split(".")) if one == other)
        hint, repeated = "save the model itself again, or remove the repeated parts", f".{part}.{part}."
        yield _Found(f"the names repeat the part `{part}.`", hint, right, lambda name: repeated in f".{name}")


def _most_common(heads: Iterable[str]) -> str:
    """The most common head that is not empty, or ""."""
    return next((head for head, _ in Counter(filter(None, heads)).most_common(1)), "")
