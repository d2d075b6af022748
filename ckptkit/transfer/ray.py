"""Connects to a Ray cluster (at hand, at an address, or a new one on this machine), and runs pieces of work there.

Pieces are tasks of one core each, retried where lost, all ended when one fails.
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
_STORE = 100_000_000  # bytes of the object store of a cluster that is started here: no tensor goes through it


@contextmanager
def ray_cluster(address: str, workers: int | None = None) -> Iterator[Any]:
    """The module `ray`, connected to a cluster while the block runs; a process that is connected already stays so.

    `address` is host:port of a cluster, or "auto": RAY_ADDRESS, or a cluster that runs on this machine, or a new one of
    `workers` CPUs (None: one a core) that ends with the block. Raises CkptkitError where Ray is missing, nothing
    answers, or the cluster has another version of Ray or Python.
    """
    with TemporaryDirectory(prefix="ckptkit-ray-") as folder:
        # Ray puts the directory that it is started in on the path of every worker, and under `uv run` sends it to them.
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


def _start(ray: Any, address: str, workers: int | None) -> None:
    given = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    if given == "auto" and _is_left_behind():
        given = "local"
    _check_reachable(given)
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    new = {"num_cpus": workers or cores(), "object_store_memory": _STORE, "include_dashboard": False}
    try:
        if given != "local":
            try:
                ray.init(address=given, **quiet)
                return
            except ConnectionError:  # there is none on this machine
                if given != "auto":
                    raise
        ray.init(address="local", **new, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _not_reached(given, error) from error


def _is_left_behind() -> bool:
    """Whether the cluster that Ray last recorded on this machine is gone: Ray would try for minutes."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - where Ray has it
    file = Path(folder, "ray", "ray_current_cluster")
    if not file.exists():
        return False
    try:
        _check_reachable(file.read_text().strip())
    except CkptkitError:
        return True
    return False


def _check_reachable(address: str) -> None:
    """Raises CkptkitError where nothing answers: Ray itself would go on trying for minutes."""
    if address.startswith("ray://"):
        raise CkptkitError(
            f"{address} is an address for Ray's client",
            "run this on a node of the cluster, with --ray host:port or --ray alone",
        )
    found = re.fullmatch(r"(.+):(\d+)", address)
    if found is None:  # "auto", "local", or for Ray to refuse
        return
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), _REACH_S).close()
    except OSError as error:
        raise _not_reached(address, error) from error


def _not_reached(address: str, error: Exception) -> CkptkitError:
    return CkptkitError(
        f"no connection to the Ray cluster at {address}: {words_of(error)}",
        "give the address that `ray start --head` printed, or --ray alone",
    )


PIECE = 1_000_000_000  # bytes up to which neighbours are one task
# Tasks that every worker should get, so that none waits long for the last one: a task itself costs milliseconds.
_EACH = 16
RETRIES = 5  # times that Ray starts a task again whose worker or node was lost
_STOP_S = 60.0  # what the tasks that have begun when a run fails may take to end
TaskInput = TypeVar("TaskInput")
Part = TypeVar("Part", bound=Hashable)
Outcome = TypeVar("Outcome")


def cpus(ray: Any) -> int:
    """CPUs of the cluster. Raises CkptkitError where there are none: tasks would wait for ever."""
    if not (found := int(ray.cluster_resources().get("CPU", 0))):
        raise CkptkitError(
            "the Ray cluster has no CPUs", "start its nodes with --num-cpus, or wait until they are there"
        )
    return found


def check_gpus(ray: Any) -> None:
    """Raises CkptkitError where the cluster has none."""
    if ray.cluster_resources().get("GPU", 0) < 1:
        raise CkptkitError("the Ray cluster has no GPUs", "leave out --device cuda: the bytes are the same")


def pieces_of(sizes: Mapping[Part, int], workers: int) -> list[list[Part]]:
    """Cuts parts, of `sizes` bytes, into tasks: neighbours share one, unless workers would get too few."""
    limit = min(PIECE, sum(sizes.values()) // (_EACH * workers))
    found: list[list[Part]] = []
    room = 0
    for part, size in sizes.items():
        if size > room or not found:
            found.append([])
            room = limit
        found[-1].append(part)
        room -= size
    return found


def outcomes(
    ray: Any,
    call: Callable[[TaskInput, Sequence[str]], Outcome],
    given: TaskInput,
    pieces: Sequence[Sequence[str]],
    workers: int | None = None,
    gpus: int = 0,
    stop: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Outcome]]:
    """Yields the index of each piece and what `call(given, piece)` returned on some node, as they end.

    `call` is a function of a module; `given` is plain data; a piece is a list of names. `workers`: tasks at one time
    (None: as many as the cluster has cores). On any error, and when the caller stops, `stop` is called, which tells
    tasks that have not begun to end at once; those that have begun are waited for, up to a minute. Raises what a task
    raised; CkptkitError where a node has another version of this package, or a task is lost again and again.
    """
    how = {
        "num_cpus": 1,
        "num_gpus": gpus,
        "max_retries": RETRIES,
        "scheduling_strategy": "SPREAD",
        "name": f"ckptkit {call.__name__}",
    }
    task = ray.remote(**how)(_task())
    content = ray.put(pickle.dumps((call, given)))
    waiting, running = deque(range(len(pieces))), dict[Any, int]()
    try:
        while waiting or running:
            # By default twice as many as can run: no worker waits, and a cluster that can grow sees why.
            while waiting and len(running) < (workers or 2 * cpus(ray)):
                index = waiting.popleft()
                running[task.remote(program_version(), content, pieces[index])] = index
            for reference in ray.wait(list(running))[0]:
                outcome = _outcome(ray, reference, pieces[running[reference]])
                yield running.pop(reference), outcome
    finally:
        if running:
            # ray.cancel of a task that ends at that moment aborts this process ("Tried to complete task that was not
            # pending", Ray 2.60).
            stop()
            ray.wait(list(running), num_returns=len(running), timeout=_STOP_S)


def _outcome(ray: Any, reference: Any, piece: Sequence[str]) -> Any:
    """What a task returned. Raises what it raised there, and CkptkitError when Ray lost it too often."""
    try:
        refused, outcome = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (CkptkitError, OSError)):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise CkptkitError(
            f"Ray lost the task of {summarize(piece)} {RETRIES + 1} times: {words_of(error)}",
            "has every node enough memory?",
        ) from error
    if refused is not None:
        raise CkptkitError(refused, "install the same version on every node of the cluster")
    return outcome


def _task() -> Callable[[str, bytes, Sequence[str]], tuple[str | None, Any]]:
    """The remote function. It is sent as code, so that it can report a node with no or another version of ckptkit."""

    def run(wanted: str, content: bytes, piece: Sequence[str]) -> tuple[str | None, Any]:
        import pickle
        import platform

        try:
            from ckptkit.core.installation import program_version as version_here

            found = version_here()
        except ImportError:
            found = "none"
        if found != wanted:
            return f"node {platform.node()} has ckptkit {found}, and the coordinator {wanted}", None
        call, given = pickle.loads(content)
        return None, call(given, piece)

    return run
