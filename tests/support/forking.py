"""A process that has imported SGLang, Megatron or transformers and forks what would be processes that import it.

Importing takes five to ten seconds of a processor, and to load a small model less than one. `start_python`, `started`,
`ran` and `run_module` replace `ckptkit.core.isolation.start_python`, `start_confined` of the witnesses' sandbox,
`processes.run_logged` and `processes.run_module`. The same modules run; `served_transformers` in conftest.py names the
tests that start them for real.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from ckptkit.core import isolation
from ckptkit.core.isolation import PACKAGES_HOME, isolated
from ckptkit.verify.witnesses.process.interpreter import python_of
from support.processes import environment, run_logged

_NUMBERS = count()
_PATH = isolated(os.environ, PACKAGES_HOME)["PYTHONPATH"]
SANDBOX = "ckptkit.verify.witnesses.process.sandbox"
# Modules that import transformers and no engine.
_WITH_TRANSFORMERS = ("ckptkit.converters.class_in_transformers", "ckptkit.verify.evidence.side.texts")
_REFERENCE = "ckptkit.verify.witnesses.reference."


@dataclass(frozen=True)
class Forked:
    """What `subprocess.Popen` is for the tests, of a process that the server has forked."""

    ending: Path

    @property
    def pid(self):
        """Also the number of its process group."""
        return int(self._read("pid", 120))

    def poll(self):
        """Its exit code, None while it runs."""
        code = self.ending.with_suffix(".code")
        return int(code.read_text()) if code.exists() else None

    returncode = property(poll)

    def wait(self, limit_s=600):
        return int(self._read("code", limit_s))

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _read(self, what, limit_s):
        path, deadline = self.ending.with_suffix(f".{what}"), time.monotonic() + limit_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"the server has not written {path.name}", limit_s)
            time.sleep(0.01)
        return path.read_text()


def start_python(words, folder, variables, python=sys.executable, **streams):
    """Forks what needs transformers, if it would import the same packages; starts every other process."""
    flag, module, *rest = words
    if flag == "-m" and module == SANDBOX:
        _, module, *rest = rest  # without the number of the parent
    is_served = flag == "-m" and (module in _WITH_TRANSFORMERS or module.startswith(_REFERENCE))
    path = isolated(os.environ, PACKAGES_HOME)["PYTHONPATH"]
    if not is_served or python != sys.executable or (path, variables["PYTHONPATH"]) != (_PATH, _PATH):
        return isolation.start_python(words, folder, variables, python, **streams)
    return started("transformers", module, rest, Path(streams["stdout"].name), variables, folder=folder)


def started(package, module, words, log, variables, *, stdout=True, python=sys.executable, folder=None):
    """Runs `python -m MODULE WORDS...` with these variables alone, without a GPU. A module may be the path of a script.

    It prints into `log`, without `stdout` its errors alone.
    """
    assert python == sys.executable
    process, folder = _server(package)
    forked = Forked(folder / str(next(_NUMBERS)))
    order = {
        "module": str(module),
        "words": [*map(str, words)],
        "log": str(log.absolute()),
        "stdout": stdout,
        "folder": str(folder or Path.cwd()),
        "variables": {**variables, "CUDA_VISIBLE_DEVICES": ""},
        "ending": str(forked.ending),
    }
    assert process.stdin is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    return forked


def ran(package, log, module, *words, limit_s=540):
    """Runs `python -m MODULE WORDS...` offline, which prints into `log`. Returns whether it ended well in `limit_s`."""
    forked = started(package, module, words, log, environment(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1"))
    try:
        return forked.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(forked.pid, signal.SIGKILL)
        forked.wait()


def run_module(package, module, *words):
    """What `python -m MODULE WORDS...` prints, errors too. Raises RuntimeError with it when it fails."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        ended_well = ran(package, log, module, *words)
        printed = log.read_text(errors="replace")
    if not ended_well:
        raise RuntimeError(printed[-5000:])
    return printed


def run_script(package, code, *words):
    with TemporaryDirectory() as folder:
        file = Path(folder) / "script.py"
        file.write_text(code)
        return run_module(package, file, *words)


def run_in_engine(engine, log, module, *words):
    """As `ran`, with an engine by its name: SGLang, or vLLM in the Python that has it."""
    if engine == "sglang":
        return ran("sglang", log, module, *words)
    return run_logged(log, module, *words, program=python_of(engine, {}))


@cache
def _server(package):
    """The server of this process, which ends with it, and where the ends of what it forks are told."""
    from ckptkit.verify.witnesses.sglang.adapter import WITHOUT_GPU  # what SGLang reads while it is imported

    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "support.forking", package],
        env=environment(OMP_NUM_THREADS="1", **WITHOUT_GPU),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def close():
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)

    atexit.register(close)
    return process, Path(mkdtemp(prefix=f"ckptkit-{package}-server-"))


# What follows runs in the server.


def _write(path, number):
    part = path.with_name(f"{path.name}.part")
    part.write_text(str(number))
    part.rename(path)


def _become(order):
    import faulthandler
    import runpy

    from ckptkit.verify.witnesses.process.sandbox import DUMP

    os.setsid()
    with Path(str(order["log"])).open("wb") as output:
        for stream in (sys.stdout, sys.stderr) if order["stdout"] else (sys.stderr,):
            os.dup2(output.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(order["variables"])
    os.chdir(order["folder"])
    faulthandler.register(DUMP, file=2, all_threads=True)
    module = str(order["module"])
    sys.argv = [module, *order["words"]]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _fork(order):
    """Forks a process that forks it, waits for it and tells its end, so that the server need not."""
    if os.fork():
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ending = Path(str(order["ending"]))
    if (pid := os.fork()) == 0:
        code = 1
        try:
            _become(order)
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a process
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _write(ending.with_suffix(".pid"), pid)
    _, status = os.waitpid(pid, 0)
    _write(ending.with_suffix(".code"), os.waitstatus_to_exitcode(status))
    os._exit(0)


def _reap():
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _import_sglang():
    from unittest import mock

    import torch

    import ckptkit.verify.witnesses.loading.process  # noqa: F401

    # Once torch has looked for a GPU, it refuses to do so again in what is forked, with another message than it has.
    with (
        mock.patch.object(torch._C, "_cuda_getDeviceCount", return_value=0),
        mock.patch.object(torch._C, "_cuda_init", side_effect=RuntimeError("Found no NVIDIA driver")),
    ):
        import sglang.srt.models.registry  # noqa: F401 - which imports the class of every model


def _import_megatron():
    import ckptkit.verify.witnesses.megatron.process  # noqa: F401


def _import_transformers():
    isolation.end_with_parent = lambda parent: None  # the parent is this server
    import ckptkit.converters.class_in_transformers
    import ckptkit.verify.evidence.side.texts
    import ckptkit.verify.witnesses.reference.names
    import ckptkit.verify.witnesses.reference.process  # noqa: F401


def main():
    import gc

    {"sglang": _import_sglang, "megatron": _import_megatron, "transformers": _import_transformers}[sys.argv[1]]()
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    gc.freeze()
    for line in sys.stdin:
        _fork(json.loads(line))


if __name__ == "__main__":
    main()
