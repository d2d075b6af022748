"""Runs pieces of work as tasks on a Ray cluster: one core each, retried where lost, all ended when one fails."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ckptkit.core.errors import CkptkitError, words_of
from ckptkit.core.installation import program_version
from ckptkit.core.specs import summarize

PIECE = 1_000_000_000  # bytes up to which neighbours are one task
_EACH = (
    16  # tasks that every worker should get, so that none waits long for the last one: a task itself costs milliseconds
)
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
    return _neighbours(sizes, min(PIECE, sum(sizes.values()) // (_EACH * workers)))


def _neighbours(sizes: Mapping[Part, int], limit: int) -> list[list[Part]]:
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
