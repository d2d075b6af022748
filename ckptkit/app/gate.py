"""`ckptkit gate`: runs any launcher, and lets `preflight` check the trainer's command before the trainer starts.

The launcher is not parsed: a folder with replacements for `python`, `python3`, `torchrun` and `ray` is first in PATH,
and they pass the words, directory and environment of the trainer to `preflight`.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ckptkit.app import stand_in
from ckptkit.core.errors import CkptkitError

NAMES = ("python", "python3", "torchrun", "ray")
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def gate(command: Sequence[str], options: Sequence[str] = ()) -> tuple[int, str | None]:
    """Runs a command, and forwards signals to it; `options` are those of `preflight`.

    Returns the exit code (1 if the launch was stopped) and a remark. Raises CkptkitError if the command cannot start.
    """
    with TemporaryDirectory(prefix="ckptkit-gate-") as home:
        folder = Path(home)
        (folder / "options").write_text("".join(f"{one}\0" for one in options))
        (folder / "bin").mkdir()
        words = [sys.executable, "-I", str(Path(stand_in.__file__).resolve()), str(folder)]
        for name in NAMES:
            program = folder / "bin" / name
            program.write_text(f'#!/bin/sh\nexec {shlex.join([*words, name])} "$@"\n')
            program.chmod(0o755)
        path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)])
        code = _run(command, {**os.environ, "PATH": path})
        if (folder / "stopped").exists():
            return 1, "the launch was stopped before the trainer started"
        seen = (folder / "judged").exists()
        return code, None if seen else f"no trainer was started by {', '.join(NAMES)}, so nothing was checked"


def _run(command: Sequence[str], variables: dict[str, str]) -> int:
    """Runs a command. Returns its exit code like a shell: 128 + N if signal N ended it."""
    try:
        process = subprocess.Popen(command, env=variables)
    except OSError as error:
        raise CkptkitError(f"{command[0]}: {error.strerror}", "pass the command as you would run it") from error

    before = {one: signal.signal(one, lambda number, _: process.send_signal(number)) for one in _PASSED_ON}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
