"""Runs sections of `make bench` on their smallest models, with every Python process that they start forked from one.

A fork costs milliseconds, where a new interpreter imports torch, and Megatron, for seconds. What a process runs, its
words, its directory and its streams are the same. `python -m support.forked_benchmarks SECTION...`.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import run

HERE = Path(run.__file__).parent
_PARENT = os.getpid()


class ForkedPopen(subprocess.Popen[Any]):
    """A process that is forked where what starts it is a benchmark, and it runs this Python."""

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        command = [args] if isinstance(args, str) else [os.fspath(word) for word in args]
        if command[0] != sys.executable or os.getpid() != _PARENT:
            super()._execute_child(args, executable, *rest)  # type: ignore[misc]
            return
        cwd, env, pipes = rest[3], rest[4], rest[8:14]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(command[1:], cwd, env, (pipes[0], pipes[3], pipes[5]))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _become(words: Sequence[str], cwd: Any, env: Any, streams: Sequence[int]) -> None:
    """Runs `python WORDS...` in this process, which ends."""
    code = 1
    try:
        for number, stream in enumerate(streams):
            if stream != -1:
                os.dup2(stream, number)
        if cwd is not None:
            os.chdir(cwd)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        _run(list(words))
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a process
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(words: list[str]) -> None:
    """What the interpreter does with `-P`, `-W X`, `-m MODULE`, `-c CODE` or a file, and the words after it."""
    safe = False
    while words[0] in ("-P", "-W"):
        safe |= words[0] == "-P"
        del words[: 1 if words[0] == "-P" else 2]
    how, *rest = words
    if how == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
    else:
        sys.argv = words
        if safe:
            sys.path.remove(str(HERE))
        runpy.run_path(how, run_name="__main__")


def main() -> None:
    """Imports what the processes of the sections import, and runs the sections."""
    sections = sys.argv[1:]
    # Where `python benchmarks/run.py` finds the modules beside it.
    sys.path.insert(0, str(HERE))
    modules = ["torch", "ckptkit.app.api", "verify.run"]
    modules += ["verify.witnesses.sglang.process"] * ("witness" in sections)
    modules += ["verify.witnesses.megatron.process"] * ("megatron" in sections)
    for module in modules:
        import_module(module)
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    run.main(sections)


if __name__ == "__main__":
    main()
