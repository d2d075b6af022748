"""CK111 to CK113: checks of the files of a Megatron torch_dist directory. No weight is read."""

from __future__ import annotations

import re
import sys
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import summarize
from ckptkit.formats.detect import TRACKER, is_legacy
from ckptkit.formats.hf.reader import read_json
from ckptkit.formats.torch_dist.foreign_names import foreign_name
from ckptkit.formats.torch_dist.reader import OF_FSDP, tiling_problem
from ckptkit.formats.torch_dist.training_state import describe_state, training_state
from ckptkit.verify.checks.headers.files import names_of, require_metadata
from ckptkit.verify.core.check import CannotCheck, Issue, Subject, Tally, check, only_if, warning_if
from ckptkit.verify.evidence.folding import group_by_pattern

# Libraries with functions that run what a pickle gives them; Python 2's names stand for those of Python 3.
_RUN = {*sys.stdlib_module_names, *IMPORT_MAPPING, "torch", "numpy"}
# What metadata.json says; what it says of common.pt is left out from megatron-core 0.19 on.
_BACKEND: Mapping[str, str | int] = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


TRAINING_STATE = "training state"


only_megatron = only_if(lambda subject: subject.is_megatron, "an HF directory has no torch_dist files")


@check("CK111", gate=True, applies_to=only_megatron)
def directory_complete(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The tracker names a directory, in which `.metadata`, `metadata.json` and the common state can be read.

    Their pickles name nothing that Megatron and torch do not write, since Megatron runs what they name.
    """
    files = subject.megatron_files
    try:
        weights = files.weights
    except CkptkitError as error:
        yield Issue("a tracker that names a directory", error.message, error.hint or "", file=TRACKER)
        return
    tally.compared()
    if is_legacy(weights):
        actual = "Megatron's legacy format (mp_rank_*)"
        hint = "Megatron loads it at the same parallel sizes only, and no more is checked: export, and convert that"
        yield Issue("a torch_dist checkpoint", actual, hint, file=weights, severity="warning")
        return
    files.readable  # noqa: B018 - raises for a format that is not torch_dist
    layout, damage = None, None
    try:
        layout = files.metadata.layout
        files.args  # noqa: B018 - a cached property that raises
    except CkptkitError as error:
        damage = error
    if layout not in OF_FSDP:
        yield from _backend(weights)
    if damage is not None:
        yield Issue("readable .metadata and common state", damage.message, damage.hint or "", file=weights)
        return
    if (foreign := foreign_name(weights, files.metadata)) is not None:
        name, refusal = foreign
        severity = warning_if(name.partition(".")[0] not in _RUN)  # which may be a trainer's class
        expected = "pickles that name what Megatron and torch write"
        yield Issue(expected, refusal.message, refusal.hint or "", file=weights, severity=severity)
    if not files.opened.specs:
        inside = summarize(files.metadata.keys)
        hint, actual = "give the directory that holds the model, or save it again", f"none, only {inside}"
        yield Issue("the weights of a model", actual if inside else "none", hint, file=weights / ".metadata")
    common = files.opened.common
    if state := describe_state(training_state(files.metadata, common)):
        tally.facts[TRAINING_STATE] = [state]
    match, stated = re.fullmatch(r"iter_(\d+)", weights.name), common.get("iteration")
    if match and type(stated) is int and stated != int(match[1]):
        hint = "Megatron finds it under one number and resumes at the other: give the directory its own name again"
        expected, actual = f"iteration {int(match[1])}, as in the directory's name", f"{stated} in the common state"
        yield Issue(expected, f"iteration {actual}", hint, file=weights, severity="warning")


def _backend(weights: Path) -> Iterator[Issue]:
    """metadata.json is there and names formats and versions that Megatron has.

    Source: megatron-core `dist_checkpointing/core.py`.
    """
    where = weights / "metadata.json"
    try:
        content = read_json(weights / "metadata.json")
    except CkptkitError as error:
        hint = "Megatron tells by this file that the directory is a torch_dist checkpoint: copy it from the save"
        yield Issue("a readable metadata.json", error.message, hint, file=where)
        return
    for key, known in _BACKEND.items():
        stated = content.get(key)
        if stated != known and (key == "sharded_backend" or stated is not None):
            yield Issue(f"{key} {known}", f"{stated!r}", "save it with --ckpt-format torch_dist", file=where)


@check("CK112", gate=True, applies_to=only_megatron)
def entries_inside(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """File, offset and length of every entry against the files that are there; entries share bytes only as aliases."""
    require_metadata(subject)
    files = subject.megatron_files
    if not files.blobs:
        raise CannotCheck("not run because .metadata names no bytes", "CK111")
    gone: dict[Path, list[str]] = {}
    for path, stored in files.blobs.items():
        tally.compared(len(stored))
        if path.exists():
            yield from _outside(path, stored)
        else:
            gone[path] = [key for keys in stored.values() for key in keys]
    if gone:
        keys = [key for found in gone.values() for key in found]
        first, more = next(iter(gone)), len(gone) - 1
        which = f"{_short(first)} and {more} more are missing" if more else f"{_short(first)} is missing"
        actual, where = f"{which}, with {len(keys)} entries", files.weights if more else first
        yield Issue("every file that .metadata names", actual, names=keys, as_one=True, file=where)
    for path in sorted(files.weights.glob("*.distcp")):
        if path not in files.blobs and path.stat().st_size:
            hint = "another save left it, or one that has not written its .metadata yet: move it elsewhere"
            actual = ".metadata names none of its bytes"
            yield Issue("only files that .metadata names", actual, hint, file=path, severity="warning")


def _short(path: Path) -> str:
    """A file of the checkpoint with the directory of its iteration."""
    return f"{path.parent.name}/{path.name}"


def _outside(path: Path, stored: Mapping[tuple[int, int], Sequence[str]]) -> Iterator[Issue]:
    """One issue if the file is too short for its entries, and one if entries share bytes."""
    held, need = path.stat().st_size, max(offset + length for offset, length in stored)
    if held < need:
        beyond = [key for (offset, length), found in stored.items() if offset + length > held for key in found]
        actual = f"{_short(path)} is cut off: {held} of {need} bytes; {len(beyond)} entries are beyond its end"
        hint = "copy it again, with the .metadata of the same save"
        yield Issue(f"at least {need} bytes", actual, hint, names=beyond, as_one=True, file=path)
    end, before, shared = 0, "", {}
    for (offset, length), found in stored.items():
        if offset < end:
            shared[found[0]] = f"{found[0]} starts at byte {offset}, inside {before}, which ends at {end}"
        end, before = max(end, offset + length), found[0]
    if shared:
        more = f"; and {len(shared) - 1} more in the same way" if len(shared) > 1 else ""
        actual, expected = next(iter(shared.values())) + more, "a byte range of its own for each entry"
        yield Issue(expected, actual, names=shared, as_one=True, file=path)


@check("CK113", gate=True, applies_to=only_megatron)
def chunks_tile(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """No hole, no overlap, nothing outside, for every tensor of `.metadata`."""
    names_of(subject)
    problems: dict[str, str] = {}
    for key, stored in subject.megatron_files.metadata.tensors.items():
        tally.compared()
        if problem := tiling_problem(stored.shape, [(chunk.offsets, chunk.sizes) for chunk in stored.chunks]):
            problems[key] = problem
    where = subject.megatron_files.weights / ".metadata"
    for keys in group_by_pattern(problems):
        yield Issue("chunks that cover the tensor exactly once", problems[keys[0]], names=keys, file=where)
