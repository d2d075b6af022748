"""For CK104: safetensors files that belong to another save than the index, and which reader takes which."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.core.progress import size
from ckptkit.formats.hf.reader import INDEX, SINGLE
from verify.evidence.extremes import same_bytes
from verify.evidence.hf_files import HfFiles
from verify.issue import Issue

# What Mistral publishes beside the shards with HF's names: all weights in a format of its own.
_CONSOLIDATED = re.compile(r"consolidated(-\d+-of-\d+)?\.safetensors")
_READ = 1 << 28  # bytes up to which two copies are compared
_ASIDE = "delete neither before `ckptkit diff` has compared them: one may be the only copy of what was trained"


def leftovers(files: HfFiles) -> Iterator[Issue]:
    """Tensors that stand in two shards, and weight files that the index does not name."""
    by_homes: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, found in files.twice.items():
        by_homes[tuple(found)].append(name)
    for homes, names in by_homes.items():
        yield _twice(files, homes, names)
    stray: list[str] = []
    for file in files.orphans:
        if _CONSOLIDATED.fullmatch(file) and not files.scan(file).specs.keys() & files.specs.keys():
            actual = "a second copy of the weights, under Mistral's own names"
            hint = "readers of HF names ignore it, and it is not checked here; readers of Mistral's own format load it"
            yield Issue(_ONLY, actual, hint, file=files.root / file, severity="warning")
        elif files.index is None or file == SINGLE:
            yield _orphan(files, file)
        else:
            stray.append(file)
    if stray:
        whose = f"{stray[0]} and {len(stray) - 1} more: the index names none of their" if stray[1:] else ""
        actual = f"{whose or 'the index names none of its'} tensors, and loaders follow it"
        hint = f"restore the index if it belongs to this save, or move it elsewhere; {_ASIDE}"
        where = files.root if stray[1:] else files.root / stray[0]
        actual = f"{actual}; {_newest(files.root, [*files.shards, *stray])}"
        yield Issue(_ONLY, actual, hint, file=where, count=len(stray))


_ONLY = "only files that the index names"


def _twice(files: HfFiles, homes: tuple[str, ...], names: Sequence[str]) -> Issue:
    """Tensors that the same files hold: which copies the index names, whether they are equal, and what to rewrite."""
    index = files.index or {}
    named = {index[name] for name in names if name in index}
    (home,) = named if len(named) == 1 and named <= {*homes} else (None,)
    listed = f"the index names {home or ' and '.join(sorted(named)) or 'neither'}"
    actual = f"stored in {' and '.join(homes)}, {_difference(files, homes, names)}; {listed}"
    extra = {file: len(files.shards[file].specs.keys() - files.twice.keys()) for file in homes if file != home}
    if home is None:
        hint = f"let the index name one of them for all of these tensors, and write the other without them; {_ASIDE}"
    elif any(extra.values()):
        (file, kept) = max(extra.items(), key=lambda item: item[1])
        hint = f"write {file} again without these tensors: {kept} others are only there; {_ASIDE}"
    else:
        other = " and ".join(extra)
        hint = f"move {other} elsewhere, and let the index name {home} for what it lists there; {_ASIDE}"
    actual = f"{actual}; {_newest(files.root, [*homes])}"
    return Issue("each tensor in one shard", actual, hint, names, files.root, together=True)


def _difference(files: HfFiles, homes: Sequence[str], names: Sequence[str]) -> str:
    """Whether the copies of tensors are alike, by their headers and by as many of their bytes as are soon read."""
    first, *others = (files.shards[file] for file in homes)
    pairs = [(first.specs[name], other.specs[name], other) for name in names for other in others]
    if shaped := {spec.name for spec, copy, _ in pairs if spec != copy}:
        return f"with another shape or dtype ({len(shaped)} of {len(names)})"
    read, different = 0, set()
    for spec, _, other in pairs:
        read += spec.nbytes
        if read > _READ:
            break
        try:
            alike = same_bytes(first.read(spec.name), other.read(spec.name))
        except (CkptkitError, OSError):  # CK102 says why
            return "of which one cannot be read"
        different |= set() if alike else {spec.name}
    if different:
        return f"with other values ({len(different)} of {len(names)})"
    return "with the same bytes" if read <= _READ else f"with the same bytes in the first {size(_READ)}"


def _orphan(files: HfFiles, file: str) -> Issue:
    """A file that the index does not name, or beside model.safetensors, and that some reader takes all the same.

    Source: transformers `modeling_utils.py` (`_get_resolved_checkpoint_files`) and SGLang `weight_utils.py`
    (`filter_duplicate_safetensors_files`).
    """
    where, newest = files.root / file, _newest(files.root, [*files.shards, file])
    if files.index is None:
        # SGLang leaves out a consolidated.safetensors that is alone beside it.
        reader = "vLLM" if file == "consolidated.safetensors" and len(files.orphans) == 1 else "SGLang"
        actual = f"{reader} reads {file} too, transformers {SINGLE} alone; {newest}"
        return Issue(
            f"{SINGLE} alone, since there is no index", actual, f"move one of them elsewhere; {_ASIDE}", file=where
        )
    actual = f"transformers reads {SINGLE}, SGLang the shards of {INDEX}; {newest}"
    hint = f"move the one that is not meant elsewhere ({SINGLE}, or the shards with their index); {_ASIDE}"
    return Issue("one set of weights", actual, hint, file=where)


def _newest(root: Path, files: list[str]) -> str:
    """Which of these files was changed last, and when."""
    times = {file: (root / file).stat().st_mtime for file in files if (root / file).exists()}
    last = max(times, key=lambda file: times[file])
    when = datetime.fromtimestamp(times[last], UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    return f"last modified: {last} ({when} UTC)"
