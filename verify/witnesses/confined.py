"""Starts a witness so that it cannot outlive its parent, take all memory, see secrets or hang without a word.

As a program, `python -m verify.witnesses.confined PARENT MODULE WORDS...`, it prepares its own process and then runs
MODULE as `python -m` would. Linux only, as the witnesses are.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ckptkit.core.printable import one_line

DUMP = signal.SIGUSR1  # asks a witness for the Python stacks of its threads
_DUMP_S = 1.0
_PART = 0.95  # of the memory that is free at the start, for all processes of a witness together
_FRAMES = 3
# Variables that a witness, which runs code of others, has no use for. A list of what it may see would lack what some
# driver or cluster needs.
_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|APIKEY|API_KEY|ACCESS_KEY|PRIVATE_KEY|AUTH)(_|$)"
    r"|^(AWS|AZURE|GOOGLE|GCP|OPENAI|ANTHROPIC|WANDB|GITHUB|GITLAB|SSH|KUBERNETES|FSSPEC)_|_URL$|_PROXY$|_DSN$",
    re.IGNORECASE,
)


def environment(**more: str) -> dict[str, str]:
    """This process's variables without secrets, with `more`: offline, on the loopback interface, and without TF32."""
    kept = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    # A token may also lie in the user's home directory.
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    # Some containers turn on TF32, which rounds the factors of float32 to 10 bits of mantissa.
    exact = {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
    return kept | loopback | offline | exact | {"PYTHONPATH": path} | more


def start(
    module: str, words: Sequence[object], log: Path, variables: Mapping[str, str], *, stdout: bool = True
) -> subprocess.Popen[bytes]:
    """Starts `python -m MODULE WORDS...` in a session of its own, with stderr and, if asked, stdout in `log`."""
    quiet = [] if stdout else ["-W", "ignore"]
    command = [sys.executable, *quiet, "-m", __name__, str(os.getpid()), module, *map(str, words)]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output if stdout else subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills what still runs of a process and of those that it started, which may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def memory_limit(free: int) -> int:
    """Bytes that the processes of a witness may take together, of `free` ones; 0: no limit is known."""
    return int(_PART * free)


def takes_more_than(limit: int, processes: Iterable[subprocess.Popen[bytes]]) -> bool:
    """Whether these processes and all in their sessions have more bytes of memory than `limit` together.

    Memory that holds a file counts not: the kernel takes it back. What several share counts once (PSS), which the
    kernel adds up page by page, so it is asked only where the sum of what each has is above the limit.
    """
    members = _members(processes)
    return _sum(members, "status", "RssAnon", "RssShmem") > limit and (
        _sum(members, "smaps_rollup", "Pss_Anon", "Pss_Shmem") > limit
    )


def ask_for_stacks(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Has every Python process in these sessions write the stacks of its threads into its log."""
    for pid in _members(processes):
        with suppress(OSError):
            caught = re.search(r"^SigCgt:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            if caught and int(caught[1], 16) >> (DUMP - 1) & 1:  # it would kill a compiler
                os.kill(pid, DUMP)
    time.sleep(_DUMP_S)


def stuck_at(log: Path) -> str:
    """Where the thread that answered `ask_for_stacks` was, innermost first; empty where none did."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    starts = [index for index, line in enumerate(lines) if line.startswith("Current thread ")]
    if not starts:
        return ""
    frames = [line.strip() for line in lines[starts[-1] + 1 :][:_FRAMES] if line.startswith("  File ")]
    return f"; it was at {one_line(' | '.join(frames))}"


def _members(processes: Iterable[subprocess.Popen[bytes]]) -> list[int]:
    """The processes of the sessions that these lead."""
    sessions = {process.pid for process in processes}
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) in sessions:
                found.append(int(path.parent.name))
    return found


def _sum(pids: Iterable[int], file: str, *names: str) -> int:
    """The bytes that files of /proc say under these names, of all these processes."""
    found = 0
    for pid in pids:
        with suppress(OSError):
            text = Path(f"/proc/{pid}/{file}").read_text()
            found += sum(
                int(size) << 10 for size in re.findall(rf"^(?:{'|'.join(names)}):\s+(\d+) kB$", text, re.MULTILINE)
            )
    return found


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent, the process `parent`, ends (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(1)


def main() -> None:
    """Runs the module that the command line names."""
    end_with_parent(int(sys.argv[1]))
    faulthandler.register(DUMP, file=2, all_threads=True)
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
