"""The journal for --resume in `.ckptkit/`: the identity of a run, and a record of each complete file."""

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
# Files that every run may write: manifest, configs, index, metadata and tracker.
_ALWAYS = frozenset(
    {
        *(MANIFEST, "config.json", "hf/config.json", "carried/config.json", ADAPTER_CONFIG, ADAPTER_WEIGHTS),
        *(INDEX, f"carried/{INDEX}", TRACKER),
        *("release/.metadata", "release/common.pt", "release/metadata.json"),
    }
)

# Numbers measured while tensors were written, by name.
Measured = Mapping[str, Sequence[float]]


class Journal:
    """The journal of unfinished output at `root`, shared by the processes and machines that write it.

    A record is written atomically after its file is renamed. `mark`: the current run (see `begin_run`).
    """

    def __init__(self, root: Path, mark: str | None = None) -> None:
        self._root, self._folder, self._mark = root, root / JOURNAL, mark

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Records the identity of the run, as JSON."""
        self._folder.mkdir()
        _write(self._folder / _ASKED, dict(identity))

    def list_files(self, files: Iterable[str]) -> None:
        """Records the weights and side files that the run writes, relative to the root."""
        _write(self._folder / _FILES, {"files": sorted(files)})

    def not_written(self, names: Collection[str]) -> list[str]:
        """The files among these, and the folders (with a trailing `/`), that no run has written here, sorted."""
        try:
            found = read_json(self._folder / _FILES).get("files")
        except CkptkitError:  # interrupted before `list_files`
            found = []
        listed = _ALWAYS.union(one for one in (found if isinstance(found, list) else []) if isinstance(one, str))
        known = listed.union(f"{parent}/" for one in listed for parent in PurePosixPath(one).parents)
        final = {name: _TEMPORARY.sub(r"\1\2", name) for name in names}
        return sorted(name for name in names if final[name] not in known and not is_of_journal(final[name]))

    def check(self, identity: Mapping[str, Any]) -> None:
        """Raises CkptkitError if the identity of the interrupted run differs, naming the difference."""
        before = read_json(self._folder / _ASKED)
        if differ := [key for key in {**before, **identity} if before.get(key) != identity.get(key)]:
            key = differ[0]
            why = f"its {key} was {_short(before.get(key))}, but is {_short(identity.get(key))} now"
            if key == "source":  # only a digest
                why = "files of its source were written, moved or copied since (their paths, sizes or times differ)"
            hint = "run the same command with the same source, or pass --overwrite to start again"
            raise CkptkitError(f"{self._root} cannot be resumed: {why}", hint)

    def begin_run(self) -> str:
        """Marks a run as active. Returns the mark, for `Journal(root, mark)` in other processes."""
        mark = f"{_RUN}{secrets.token_hex(8)}"
        (self._folder / mark).touch()
        return mark

    def stop_run(self, mark: str) -> None:
        """Lets no new task begin for that run. Running tasks may finish, for --resume."""
        with suppress(FileNotFoundError):  # no task begins without a journal
            (self._folder / f"{mark}{_STOPPED}").touch()

    def end_dead_runs(self) -> None:
        """Invalidates earlier runs, so that none of their tasks writes any more."""
        for path in self._folder.glob(f"{_RUN}*"):
            path.unlink()

    @property
    def may_begin(self) -> bool:
        """Whether the run of this process exists here and was not stopped."""
        return self._is_active and not (self._folder / f"{self._mark}{_STOPPED}").exists()

    def check_goes_on(self) -> None:
        """Raises CkptkitError if another run has begun here after that of this process."""
        if not self._is_active:
            hint = "check the result of that run: this task's output is not used"
            raise CkptkitError(f"{self._root}: the run of this task has ended", hint)

    @property
    def _is_active(self) -> bool:
        return self._mark is None or (self._folder / self._mark).exists()

    @property
    def exists(self) -> bool:
        """Whether a run has begun here."""
        return (self._folder / _ASKED).exists()

    def record(self, file: str, digests: Digests, measured: Measured | None = None) -> None:
        """Records that a file is complete, and the measurements of its tensors. Raises like `check_goes_on`."""
        self.check_goes_on()
        if measured:
            _write(self._record(file).with_suffix(_MEASURED), measured)
        _write(self._record(file), {name: digest.to_json() for name, digest in digests.items()})

    def recorded(self, file: str) -> dict[str, TensorDigest] | None:
        """The digests of a file's tensors, or None if it is not finished."""
        if not self._record(file).exists():
            return None
        found = {name: TensorDigest.parse(entry) for name, entry in read_json(self._record(file)).items()}
        digests = {name: digest for name, digest in found.items() if digest is not None}
        return digests if len(digests) == len(found) else None

    def measured(self, file: str) -> Measured:
        """The measurements of a finished file's tensors."""
        path = self._record(file).with_suffix(_MEASURED)
        return read_json(path) if path.exists() else {}

    def intact(self, file: str, files: Files) -> bool:
        """Whether a file is finished and has the recorded bytes, some of which a crash may have lost."""
        try:
            digests = self.recorded(file)
            if digests is None:
                return False
            return {name: TensorDigest.of(tensor) for name, tensor in files.read(file, self._root)} == digests
        except CkptkitError:  # it will be written again
            return False

    def count(self) -> int:
        """The number of finished files."""
        return sum(path.name != _ASKED for path in self._folder.glob("*.json"))

    def end(self) -> None:
        """Removes the journal, and temporary files of killed processes."""
        for leftover in self._root.rglob(".*.tmp"):
            if _TEMPORARY.fullmatch(leftover.name):
                leftover.unlink()
        shutil.rmtree(self._folder)

    def _record(self, file: str) -> Path:
        return self._folder / (file.replace("/", "%") + ".json")


def is_of_journal(name: str) -> bool:
    """Whether a file, or an empty folder with a trailing `/`, belongs to a journal, by its relative name."""
    return _NAME.fullmatch(name) is not None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    # A node that was assumed lost may write the same record.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.write_text(json.dumps(content))
    temporary.rename(path)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
