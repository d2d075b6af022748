"""For CK104: safetensors files that belong to another save than the index, and which reader takes which."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from ckptkit.formats.hf.reader import INDEX, SINGLE
from verify.evidence.folding import group_by_pattern
from verify.evidence.hf_files import HfFiles
from verify.issue import Issue

# What Mistral publishes beside the shards with HF's names: all weights in a format of its own.
_CONSOLIDATED = re.compile(r"consolidated(-\d+-of-\d+)?\.safetensors")
_ASIDE = "delete neither before `ckptkit diff` has compared them: one may be the only copy of what was trained"


def leftovers(files: HfFiles) -> Iterator[Issue]:
    """Tensors that stand in two shards, and weight files that the index does not name."""
    twice = files.twice
    for names in group_by_pattern(twice):
        homes = twice[names[0]]
        actual = f"it is stored in {' and '.join(homes)}; {_newest(files.root, homes)}"
        hint = f"two saves are mixed: move the shards of one of them, with its index, elsewhere; {_ASIDE}"
        yield Issue("each tensor in one shard", actual, hint, names=names, file=files.root)
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
