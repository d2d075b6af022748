"""Python processes that tests start: they find the packages and the test modules."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def environment(*, gpu=False, **variables):
    """This process's own, with these variables, and CUDA hidden unless `gpu`."""
    path = os.pathsep.join(filter(None, [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""}) | variables


def python(*words, given="", **variables):
    """Runs `python WORDS...` with `given` on stdin, and returns its exit code and what it printed."""
    command = [sys.executable, *map(str, words)]
    found = environment(**variables)
    return subprocess.run(command, env=found, input=given, capture_output=True, text=True, timeout=540, check=False)


def ckptkit(*arguments, **variables):
    return python("-m", "ckptkit", *arguments, **variables)


def run_module(module, *words, **variables):
    """Runs `python -m MODULE WORDS...`. Raises RuntimeError with what it said when it fails."""
    done = python("-W", "ignore", "-m", module, *words, **variables)
    if done.returncode:
        raise RuntimeError(done.stderr[-5000:])


def run_logged(log, module, *words, gpu=False, limit_s=540, program=sys.executable):
    """Runs `python -m MODULE WORDS...` offline and prints into `log`. Returns whether it ended well within `limit_s`.

    What it started itself is killed at the end.
    """
    command = [program, "-W", "ignore", "-m", module, *map(str, words)]
    found = environment(gpu=gpu, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=found, stdout=output, stderr=output, start_new_session=True)
        try:
            return process.wait(limit_s) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end_now():
    """Ends this process without waiting for threads that an engine has started."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def fork_ranks(world, run):
    """Whether `run(rank)` ended well on all of them, each in a process of its own; the first that fails ends all."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(rank,)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    running = {rank.sentinel: rank for rank in ranks}
    failed = False
    while running and not failed:
        for sentinel in multiprocessing.connection.wait(list(running)):
            rank = running.pop(sentinel)
            rank.join()
            failed |= bool(rank.exitcode)
    for rank in running.values():
        rank.kill()
    return not failed
