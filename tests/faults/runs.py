"""Runs of `ckptkit` with a fault, through `faults.server`."""

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.processes import environment

SHIM = Path(__file__).with_name("shim.c")


@dataclass(frozen=True)
class Injection:
    """What happens at a system call of one kind on files that match a pattern, as `shim.c` says."""

    call: str
    pattern: str
    action: str = "error"
    value: int = 0
    first: int = 1
    times: int = 1 << 30


@dataclass(frozen=True)
class Surroundings:
    """What a run finds: its standard output, variables, whether it is nobody's, most files open, jumps of the clock."""

    stdout: str = ""
    env: Mapping[str, str] | None = None
    nobody: bool = False
    files: int = 0
    clock_s: int = 0


@dataclass(frozen=True)
class Done:
    """How a run ended; `met`: how often it met its fault."""

    code: int
    met: int
    stdout: str
    stderr: str


class Server:
    def __init__(self, process, logs):
        self._process, self._logs = process, logs

    def run(self, words, cwd, fault=None, given=None):
        given = given or Surroundings()
        out, err = self._logs / "stdout", self._logs / "stderr"
        for file in (out, err):
            file.write_bytes(b"")
        request = {
            "words": list(map(str, words)),
            "cwd": str(cwd),
            "stdout": given.stdout or str(out),
            "stderr": str(err),
            "env": dict(given.env or {}),
            "nobody": given.nobody,
            "files": given.files,
            "clock_s": given.clock_s,
            "fault": fault
            and [fault.call, fault.pattern, fault.action, int(fault.value), fault.first, min(fault.times, 1 << 30)],
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code, met = json.loads(self._process.stdout.readline())
        return Done(code, met, out.read_text(errors="replace"), err.read_text(errors="replace"))


@contextmanager
def server(folder):
    shim = folder / "shim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", shim, SHIM, "-ldl"], check=True)
    found = environment(LD_PRELOAD=str(shim), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    command = [sys.executable, "-W", "ignore", "-m", "faults.server", str(shim)]
    with subprocess.Popen(command, env=found, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Server(process, folder)
        process.stdin.close()
