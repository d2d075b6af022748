"""Connects to a Ray cluster (running, at an address, or a new one on this machine), and runs tasks there.

Each task uses one core. Lost tasks are retried; if one fails, all are stopped.
"""

from __future__ import annotations

import os
import pickle
import re
import socket
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from ckptkit.core.errors import CkptkitError, MissingDependencyError, words_of
from ckptkit.core.installation import program_version
from ckptkit.core.isolation import isolated_in
from ckptkit.core.specs import summarize
from ckptkit.transfer.copy import cores

_REACH_S = 10.0
_STORE = 100_000_000  # bytes of the object store of a new cluster, which contains no tensors


@contextmanager
def ray_cluster(address: str, workers: int | None = None) -> Iterator[Any]:
    """The module `ray`, connected to a cluster during the block; an existing connection is kept.

    `address`: host:port of a cluster, or "auto" for RAY_ADDRESS, a cluster running on this machine, or a new one with
    `workers` CPUs (default: one per core) that ends with the block. Raises CkptkitError if Ray is missing, nothing
    answers, or the cluster has another version of Ray or Python.
    """
    with TemporaryDirectory(prefix="ckptkit-ray-") as folder:
        # Ray adds its current directory to the import path of every worker, and under `uv run` sends it to them.
        with isolated_in(Path(folder), RAY_ENABLE_UV_RUN_RUNTIME_ENV="0"):
            try:
                import ray
            except ImportError as error:
                raise MissingDependencyError("Ray is not installed", "pip install ray") from error
            joined = ray.is_initialized()
            if not joined:
                _start(ray, address, workers)
        try:
            yield ray
        finally:
            if not joined:
                ray.shutdown()
                # For a new cluster Ray 2.60 sets RAY_AUTH_MODE, which `isolated_in` removes, and keeps copies of it,
                # with which the next cluster of this process would reject its own nodes. Older releases have neither.
                if loader := getattr(ray._raylet, "AuthenticationTokenLoader", None):
                    ray._raylet.Config.initialize("")
                    loader.instance().reset_cache()


def _start(ray: Any, address: str, workers: int | None) -> None:
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "auto" and _is_stale():
        address = "local"
    _check_reachable(address)
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    new = {"num_cpus": workers or cores(), "object_store_memory": _STORE, "include_dashboard": False}
    try:
        if address != "local":
            try:
                ray.init(address=address, **quiet)
                return
            except ConnectionError:  # no cluster on this machine
                if address != "auto":
                    raise
        ray.init(address="local", **new, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _not_reached(address, error) from error


def _is_stale() -> bool:
    """Whether the cluster that Ray last recorded on this machine has ended: Ray would retry for minutes."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - Ray's default
    file = Path(folder, "ray", "ray_current_cluster")
    if not file.exists():
        return False
    try:
        _check_reachable(file.read_text().strip())
    except CkptkitError:
        return True
    return False


def _check_reachable(address: str) -> None:
    """Raises CkptkitError if nothing answers: Ray would retry for minutes."""
    if address.startswith("ray://"):
        hint = "run this on a node of the cluster, with --ray host:port or only --ray"
        raise CkptkitError(f"{address} is an address for Ray's client, which ckptkit does not use", hint)
    match = re.fullmatch(r"(.+):(\d+)", address)
    if match is None:  # "auto", "local", or an error of Ray
        return
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), _REACH_S).close()
    except OSError as error:
        raise _not_reached(address, error) from error


def _not_reached(address: str, error: Exception) -> CkptkitError:
    message = f"no connection to the Ray cluster at {address}: {words_of(error)}"
    return CkptkitError(message, "pass the address that `ray start --head` printed, or only --ray")


PIECE = 1_000_000_000  # most bytes of neighbours in one task
_EACH = 16  # tasks per worker, so that none waits long for the last one; a task costs milliseconds
RETRIES = 5  # retries of a task if its worker or node was lost
_STOP_S = 60.0  # time for running tasks to end after a run has failed
TaskInput = TypeVar("TaskInput")
Part = TypeVar("Part", bound=Hashable)
Outcome = TypeVar("Outcome")


def cpus(ray: Any) -> int:
    """CPUs of the cluster. Raises CkptkitError if there are none: tasks would wait forever."""
    if not (count := int(ray.cluster_resources().get("CPU", 0))):
        raise CkptkitError("the Ray cluster has no CPUs", "start its nodes with --num-cpus, or wait until they start")
    return count


def check_gpus(ray: Any) -> None:
    """Raises CkptkitError if the cluster has no GPU."""
    if ray.cluster_resources().get("GPU", 0) < 1:
        raise CkptkitError("the Ray cluster has no GPUs", "remove --device cuda: the bytes are the same")


def pieces_of(sizes: Mapping[Part, int], workers: int) -> list[list[Part]]:
    """Groups parts of `sizes` bytes into tasks; neighbours share one if there are enough tasks for all workers."""
    limit = min(PIECE, sum(sizes.values()) // (_EACH * workers))
    pieces: list[list[Part]] = []
    room = 0
    for part, size in sizes.items():
        if size > room or not pieces:
            pieces.append([])
            room = limit
        pieces[-1].append(part)
        room -= size
    return pieces


def outcomes(
    ray: Any,
    call: Callable[[TaskInput, Sequence[str]], Outcome],
    data: TaskInput,
    pieces: Sequence[Sequence[str]],
    workers: int | None = None,
    gpus: int = 0,
    stop: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Outcome]]:
    """Yields the index of each piece and the result of `call(data, piece)` on some node, in order of completion.

    `call` is a function of a module; `data` is plain; a piece is a list of names. `workers`: concurrent tasks
    (default: one per core of the cluster). After an error, and if the caller stops, calls `stop`, which lets tasks that
    have not begun end at once, and waits for running ones for up to a minute. Raises the exception of a task, and
    CkptkitError if a node has another version of this package or a task is lost repeatedly.
    """
    options = {"num_cpus": 1, "num_gpus": gpus, "max_retries": RETRIES, "scheduling_strategy": "SPREAD"}
    task = ray.remote(**options, name=f"ckptkit {call.__name__}")(_task())
    content = ray.put(pickle.dumps((call, data)))
    waiting, running = deque(range(len(pieces))), dict[Any, int]()
    try:
        while waiting or running:
            # By default twice as many as can run, so that no worker waits, and an autoscaling cluster grows.
            while waiting and len(running) < (workers or 2 * cpus(ray)):
                index = waiting.popleft()
                running[task.remote(program_version(), content, pieces[index])] = index
            for reference in ray.wait(list(running))[0]:
                outcome = _outcome(ray, reference, pieces[running[reference]])
                yield running.pop(reference), outcome
    finally:
        if running:
            # Not ray.cancel, which aborts this process if the task ends at that moment ("Tried to complete task that
            # was not pending", Ray 2.60).
            stop()
            ray.wait(list(running), num_returns=len(running), timeout=_STOP_S)


def _outcome(ray: Any, reference: Any, piece: Sequence[str]) -> Any:
    """The result of a task. Raises its exception, and CkptkitError if Ray lost it too often."""
    try:
        refused, outcome = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (CkptkitError, OSError)):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        message = f"Ray lost the task of {summarize(piece)} {RETRIES + 1} times: {words_of(error)}"
        raise CkptkitError(message, "check that every node has enough memory") from error
    if refused is not None:
        raise CkptkitError(refused, "install the same version on every node of the cluster")
    return outcome


def _task() -> Callable[[str, bytes, Sequence[str]], tuple[str | None, Any]]:
    """The remote function. It is sent as code, so that it can report a node without ckptkit or with another version."""

    def run(expected: str, content: bytes, piece: Sequence[str]) -> tuple[str | None, Any]:
        import pickle
        import platform

        try:
            from ckptkit.core.installation import program_version as node_version

            actual = node_version()
        except ImportError:
            actual = "none"
        if actual != expected:
            return f"node {platform.node()} has ckptkit {actual}, but the coordinator {expected}", None
        call, data = pickle.loads(content)
        return None, call(data, piece)

    return run
