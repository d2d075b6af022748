"""Remembers what a run has finished, for --resume: in `.ckptkit/`, what was asked for and a record a whole file."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import MANIFEST, TRACKER
from ckptkit.formats.files import Digests, Files
from ckptkit.formats.hf.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ckptkit.formats.hf.reader import INDEX, read_json
from ckptkit.storage.digest import TensorDigest

JOURNAL = ".ckptkit"
_ASKED = "asked.json"
_FILES = "files"
_RUN = "run-"
_STOPPED = ".stopped"
_MEASURED = ".measured"

_NAME = re.compile(
    rf"{re.escape(JOURNAL)}/({re.escape(_ASKED)}|{_FILES}|{_RUN}[0-9a-f]{{16}}({re.escape(_STOPPED)})?"
    rf"|[^/]+\.(safetensors|distcp)({re.escape(_MEASURED)}|\.json))?(\.[0-9a-f]{{8}}\.tmp)?"
)
_TEMPORARY = re.compile(r"(.*/)?\.([^/]+)\.[0-9a-f]{16}\.tmp")  # as `ckptkit.storage.write.new_file` names files
# What every run may write: a manifest, configs, and what makes a checkpoint of weights.
_ALWAYS = frozenset(
    {
        *(MANIFEST, "config.json", "hf/config.json", "carried/config.json", ADAPTER_CONFIG, ADAPTER_WEIGHTS),
        *(INDEX, f"carried/{INDEX}", TRACKER),
        *("release/.metadata", "release/common.pt", "release/metadata.json"),
    }
)

# Numbers that were measured while tensors were written, by name.
Measured = Mapping[str, Sequence[float]]


class Journal:
    """The journal of the output that is growing at `root`, shared by the processes and machines that write it.

    A record appears whole, after its file has its name. `mark`: the run that is worked for (`begin_run`).
    """

    def __init__(self, root: Path, mark: str | None = None) -> None:
        self._root, self._folder, self._mark = root, root / JOURNAL, mark

    def begin(self, asked: Mapping[str, Any]) -> None:
        """Notes what the run was asked for, as JSON can hold it."""
        self._folder.mkdir()
        _write(self._folder / _ASKED, dict(asked))

    def list_files(self, files: Iterable[str]) -> None:
        """Notes the files of weights and next to them that the run writes, relative to the root."""
        _write(self._folder / _FILES, {"files": sorted(files)})

    def not_written(self, names: Collection[str]) -> list[str]:
        """Which of these files, and of folders with a `/` behind them, no run has written here, sorted."""
        try:
            found = read_json(self._folder / _FILES).get("files")
        except CkptkitError:  # the run had not come so far
            found = []
        listed = _ALWAYS.union(one for one in (found if isinstance(found, list) else []) if isinstance(one, str))
        folders = {f"{parent}/" for one in listed for parent in PurePosixPath(one).parents}
        own = [_TEMPORARY.sub(r"\1\2", name) for name in names]
        return sorted(
            name
            for name, one in zip(names, own, strict=True)
            if not (one in listed or one in folders or is_of_journal(one))
        )

    def check(self, asked: Mapping[str, Any]) -> None:
        """Raises CkptkitError when the run that died was asked for something else, naming what differs."""
        before = read_json(self._folder / _ASKED)
        if differ := [key for key in {**before, **asked} if before.get(key) != asked.get(key)]:
            key = differ[0]
            what = f"its {key} was {_short(before.get(key))}, and is {_short(asked.get(key))} now"
            if key == "source":  # a digest tells nothing
                what = "files of its source were written, moved or copied since (their paths, sizes or times differ)"
            hint = "give the same command and source, or start again with --overwrite"
            raise CkptkitError(f"{self._root} cannot be resumed: {what}", hint)

    def begin_run(self) -> str:
        """Marks a run as going on. Returns the mark, for `Journal(root, mark)` in what works for it elsewhere."""
        mark = f"{_RUN}{secrets.token_hex(8)}"
        (self._folder / mark).touch()
        return mark

    def stop_run(self, mark: str) -> None:
        """Lets nothing more begin for that run. What has begun may still be finished, for --resume."""
        with suppress(FileNotFoundError):  # nothing begins where there is no journal any more
            (self._folder / f"{mark}{_STOPPED}").touch()

    def end_dead_runs(self) -> None:
        """Lets nothing more be written for runs that were here before."""
        for path in self._folder.glob(f"{_RUN}*"):
            path.unlink()

    @property
    def may_begin(self) -> bool:
        """Whether the run that this works for is here and was not stopped."""
        return self._goes_on and not (self._folder / f"{self._mark}{_STOPPED}").exists()

    def check_goes_on(self) -> None:
        """Raises CkptkitError when another run has begun here after the one that this works for."""
        if not self._goes_on:
            raise CkptkitError(
                f"{self._root}: the run that this task was part of has ended",
                "the task's output is not used; see how that run ended",
            )

    @property
    def _goes_on(self) -> bool:
        return self._mark is None or (self._folder / self._mark).exists()

    @property
    def exists(self) -> bool:
        """Whether a run has begun here."""
        return (self._folder / _ASKED).exists()

    def record(self, file: str, digests: Digests, measured: Measured | None = None) -> None:
        """Notes that a file is whole, and what was measured of its tensors. Raises as `check_goes_on`."""
        self.check_goes_on()
        if measured:
            _write(self._record(file).with_suffix(_MEASURED), measured)
        _write(self._record(file), {name: digest.to_json() for name, digest in digests.items()})

    def recorded(self, file: str) -> dict[str, TensorDigest] | None:
        """The digests of a file's tensors; None when it has not been finished."""
        if not self._record(file).exists():
            return None
        found = {name: TensorDigest.parse(entry) for name, entry in read_json(self._record(file)).items()}
        digests = {name: digest for name, digest in found.items() if digest is not None}
        return digests if len(digests) == len(found) else None

    def measured(self, file: str) -> Measured:
        """What was measured of a finished file's tensors."""
        path = self._record(file).with_suffix(_MEASURED)
        return read_json(path) if path.exists() else {}

    def intact(self, file: str, files: Files) -> bool:
        """Whether a file is finished and its bytes are the recorded ones; a crash may lose the last of them."""
        try:
            digests = self.recorded(file)
            if digests is None:
                return False
            return {name: TensorDigest.of(tensor) for name, tensor in files.read(file, self._root)} == digests
        except CkptkitError:  # it is written anew
            return False

    def count(self) -> int:
        """How many files are finished."""
        return sum(path.name != _ASKED for path in self._folder.glob("*.json"))

    def end(self) -> None:
        """Removes the journal, and what killed processes have left of files."""
        for leftover in self._root.rglob(".*.tmp"):
            if _TEMPORARY.fullmatch(leftover.name):
                leftover.unlink()
        shutil.rmtree(self._folder)

    def _record(self, file: str) -> Path:
        return self._folder / (file.replace("/", "%") + ".json")


def is_of_journal(name: str) -> bool:
    """Whether a file, or an empty folder with a `/` behind it, is of a journal, by its name relative to the root."""
    return _NAME.fullmatch(name) is not None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    # A node that was thought lost may come back and write the same record.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.write_text(json.dumps(content))
    temporary.rename(path)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
