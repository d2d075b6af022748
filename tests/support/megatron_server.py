"""One process that has imported Megatron and forks the ranks of one verification after the other.

Importing takes about thirty times as long as to load a small model. The fixture `served` puts it in the place of the
processes that the witness starts; what the ranks do, and how they are waited for and ended, is the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.processes import environment
from verify.witnesses.megatron.job import RankJob
from verify.witnesses.process.codec import save
from verify.witnesses.process.interpreter import Interpreter


@dataclass(frozen=True)
class Forked:
    """What `subprocess.Popen` is for the ranks of one verification: a process that the server has forked."""

    folder: Path

    @property
    def pid(self) -> int:
        """Also the number of its process group."""
        return int(_read(self.folder / "server-pid"))

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        ended = self.folder / "server-code"
        return int(ended.read_text()) if ended.exists() else None

    def wait(self) -> int:
        """Waits for its end."""
        return int(_read(self.folder / "server-code"))


def _read(path: Path) -> str:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"the server has not written {path.name}"
        time.sleep(0.01)
    return path.read_text()


Start = Callable[[Sequence[RankJob], Path, bool, Interpreter], Forked]


@contextmanager
def serving() -> Iterator[Start]:
    """A server, and what is to stand in the place of `verify.witnesses.megatron.run._start`."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "support.megatron_server"],
        env=environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    orders = server.stdin
    assert orders is not None

    def start(jobs: Sequence[RankJob], scratch: Path, gpu: bool, interpreter: Interpreter) -> Forked:
        for job in jobs:
            save(job, scratch / f"job-{job.rank}.json")
        orders.write(" ".join([str(scratch), *(str(job.rank) for job in jobs)]) + "\n")
        orders.flush()
        return Forked(scratch)

    try:
        yield start
    finally:
        orders.close()
        server.wait(60)


# What follows runs in the server.


def _write(path: Path, number: int) -> None:
    part = path.with_suffix(".part")
    part.write_text(str(number))
    part.rename(path)


def _become_witness(folder: Path, ranks: Sequence[str]) -> None:
    from verify.witnesses.megatron import process

    os.setsid()
    with (folder / f"stderr-{ranks[0]}").open("wb") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    sys.argv = ["witness", str(folder), *ranks]
    process.main()


def main() -> None:
    """Reads `FOLDER RANK...` from stdin, line by line, and forks the witness of those ranks."""
    from verify.witnesses.megatron import process  # noqa: F401

    for line in sys.stdin:
        folder, *ranks = line.split()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _become_witness(Path(folder), ranks)
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        _write(Path(folder) / "server-pid", pid)
        _, status = os.waitpid(pid, 0)
        _write(Path(folder) / "server-code", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
