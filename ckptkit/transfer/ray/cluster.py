"""Connects to a Ray cluster: the one at hand, the one at an address, or a new one on this machine."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckptkit.core.errors import CkptkitError, MissingDependencyError, words_of
from ckptkit.core.isolation import isolated_in
from ckptkit.transfer.copy import cores

_REACH_S = 10.0
_STORE = 100_000_000  # bytes of the object store of a cluster that is started here: no tensor goes through it


@contextmanager
def connected(address: str, workers: int | None = None) -> Iterator[Any]:
    """The module `ray`, connected to a cluster while the block runs.

    A process that is connected already stays so. Else `address` is host:port of a cluster, or "auto": what RAY_ADDRESS
    says, or a cluster that runs on this machine, or a new one of `workers` CPUs (None: one a core) that ends with the
    block.
    Raises CkptkitError where Ray is missing, nothing answers, or the cluster has another version of Ray or Python.
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
    try:
        _connect(ray, given, workers or cores())
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _not_reached(given, error) from error


def _connect(ray: Any, address: str, cpus: int) -> None:
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    if address != "local":
        try:
            ray.init(address=address, **quiet)
            return
        except ConnectionError:  # there is none on this machine
            if address != "auto":
                raise
    ray.init(address="local", num_cpus=cpus, object_store_memory=_STORE, include_dashboard=False, **quiet)


def _is_left_behind() -> bool:
    """Whether the cluster that Ray last recorded on this machine is gone.

    One that crashed leaves its file, and Ray tries to reach it for minutes.
    """
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
