"""Remembers what a run has finished, for --resume: in `.ckptkit/`, what was asked for and a record a whole file."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.files import Digests, Files
from ckptkit.formats.hf.reader import read_json
from ckptkit.storage.digest import TensorDigest

JOURNAL = ".ckptkit"
_ASKED = "asked.json"
_RUN = "run-"
_STOPPED = ".stopped"
_MEASURED = ".measured"

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

    def check(self, asked: Mapping[str, Any]) -> None:
        """Raises CkptkitError when the run that died was asked for something else, naming what differs."""
        before = read_json(self._folder / _ASKED)
        if differ := [key for key in {**before, **asked} if before.get(key) != asked.get(key)]:
            key = differ[0]
            raise CkptkitError(
                f"{self._root} cannot be resumed: its {key} was {_short(before.get(key))}, "
                f"and is {_short(asked.get(key))} now",
                "give the same command and source, or start again with --overwrite",
            )

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
                "what the task wrote is not used; see how that run ended",
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
        """Whether a file was finished and its bytes are what they were.

        A machine that went down may have lost the last of them, or of the record.
        """
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
            leftover.unlink()
        shutil.rmtree(self._folder)

    def _record(self, file: str) -> Path:
        return self._folder / (file.replace("/", "%") + ".json")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    # A node that was thought lost may come back and write the same record.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.write_text(json.dumps(content))
    temporary.rename(path)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
