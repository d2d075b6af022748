"""How long models of 30B to 1T parameters take on 1, 4 and 16 nodes: the closed form of `ckptkit.app.estimate`, held against a simulation.

`python benchmarks/simulate.py` prints the tables of docs/scale.md; with `--read`, `--write`, `--workers` and `--shared` one for other machines.
The simulation moves every piece of every file through storage, a core and storage again, each of which serves one piece at a time in
the order of arrival, with files that take longer than others by chance. It shares nothing with the closed form but the sizes.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from ckptkit.app.estimate import GB, START, Estimate, Machines, Throughput, Volume, estimate

PIECE = 256e6  # bytes of output that are read, computed and written together
DEPTH = 3  # pieces of a file in flight: one being read, one being computed, one being written
NOISE = 0.2  # standard deviation of the logarithm of how much longer than planned a file takes
SEEDS = range(3)


@dataclass
class _Server:
    """Serves one piece after the other: storage of a node, the shared file system, or the cores of a worker."""

    free: float = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """When a piece that arrives now, and takes so long, is done."""
        self.free = max(self.free, now) + seconds
        return self.free


@dataclass
class _Worker:
    """A process and the file that it works on: its pieces in all, those whose reading has begun, and those written; `slow` is the file's luck."""

    storage: _Server
    cores: _Server = field(default_factory=_Server)
    share: float = 0.0
    slow: float = 1.0
    pieces: int = 0
    begun: int = 0
    written: int = 0


def simulate(work: Volume, rates: Throughput, machines: Machines, seed: int) -> float:
    """Seconds until the last file is written."""
    noise, order = random.Random(seed), count()
    files, whole = deque(sorted(work.files, reverse=True)), sum(work.files)
    storages, shared = [_Server() for _ in range(machines.nodes)], _Server()
    workers = [_Worker(storages[index % machines.nodes]) for index in range(machines.nodes * machines.workers)]
    events = [(START, next(order), "free", worker) for worker in workers]

    def move(worker: _Worker, now: float, nbytes: float, rate: float, event: str) -> None:
        """Through the node's own storage, and at the same time through the shared file system."""
        done = worker.storage.serve(now, nbytes / rate / GB * worker.slow)
        if machines.shared is not None:
            done = max(done, shared.serve(now, nbytes / machines.shared / GB))
        heappush(events, (done, next(order), event, worker))

    def begin(worker: _Worker, now: float) -> None:
        """Reads on, as far as pieces may be in flight."""
        if worker.begun < worker.pieces and worker.begun - worker.written < DEPTH:
            worker.begun += 1
            move(worker, now, worker.share * work.read, rates.read, "read")

    now = START
    while events:
        now, _, event, worker = heappop(events)
        if event == "read":
            seconds = worker.share * work.transformed / rates.transform / machines.threads / GB * worker.slow
            heappush(events, (worker.cores.serve(now, seconds), next(order), "computed", worker))
            begin(worker, now)
        elif event == "computed":
            move(worker, now, worker.share * whole, rates.write, "written")
        else:
            worker.written += event == "written"
            if worker.written == worker.pieces and files:
                size = files.popleft()
                pieces = max(1, round(size / PIECE))
                worker.share, worker.slow, worker.pieces = size / whole / pieces, noise.lognormvariate(0, NOISE), pieces
                worker.begun = worker.written = 0
            begin(worker, now)
    return now


# GB of plain weights a second and core, by way and by the form of the HF release that is read. Measured: docs/scale.md says how.
TRANSFORM = {"plain": 3.5, "from FP8": 0.7, "to INT4": 2.2}
NODES = (1, 4, 16)


@dataclass(frozen=True)
class Site:
    """Machines of one kind: what a node's storage moves in GB/s, its worker processes, and the bandwidth of the file system that nodes share, if they do."""

    words: str
    read: float
    write: float
    workers: int
    shared: float | None = None


SITES = (
    Site("nodes like the one measured: 2 cores, storage of 1.6 GB/s read and 1.7 GB/s written for each", 1.6, 1.7, 2),
    Site("GPU nodes: 32 workers, 10 GB/s of network, a shared file system of 40 GB/s", 10.0, 10.0, 32, 40.0),
)


Jobs = Mapping[str, tuple[float, Volume]]  # what a core transforms in GB/s, and the bytes, by the words of the job


def jobs_of(models: Mapping[str, tuple[Any, Any]], works: Callable[[Any, Any], Mapping[str, Volume]]) -> Jobs:
    """Every way to convert these models (`huge.MODELS`, `huge.works`)."""
    return {
        f"{model}, {way}": (TRANSFORM[_kind(way, form)], work)
        for model, (config, form) in models.items()
        for way, work in works(config, form).items()
    }


def _kind(way: str, form: str) -> str:
    """What of `TRANSFORM` a way is."""
    return "to INT4" if way.endswith("INT4") else "from FP8" if way.startswith("HF") and form == "fp8" else "plain"


Cells = Mapping[
    str, Sequence[tuple[Estimate, float]]
]  # of each job, at each of NODES: the closed form, and the simulation in seconds


def cells_of(site: Site, jobs: Jobs) -> Cells:
    """What both say of these jobs at a site."""
    return {
        what: [
            _cell(work, Throughput(site.read, transform, site.write), Machines(nodes, site.workers, shared=site.shared))
            for nodes in NODES
        ]
        for what, (transform, work) in jobs.items()
    }


def _cell(work: Volume, rates: Throughput, machines: Machines) -> tuple[Estimate, float]:
    return estimate(work, rates, machines), statistics.median(simulate(work, rates, machines, seed) for seed in SEEDS)


def table(site: Site, cells: Cells) -> Iterator[str]:
    """Lines of Markdown: at each number of nodes the closed form, the simulation, and what bounds it."""
    yield f"| {site.words} | files | " + " | ".join(f"{nodes} node{'s' * (nodes > 1)}" for nodes in NODES) + " |"
    yield "| --- | --- |" + " --- |" * len(NODES)
    for what, several in cells.items():
        words = [f"{_words(found.seconds)} ({_words(simulated)}), {found.bound}" for found, simulated in several]
        yield f"| {what} | {several[0][0].tasks} | " + " | ".join(words) + " |"


def _words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def main() -> None:
    """Prints the tables."""
    # Found beside this file when it is run as a command; whoever imports the simulation has no need of it.
    from huge import MODELS, works

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--read", type=float, help="GB/s that a node reads; with it, give --write and --workers too")
    parser.add_argument("--write", type=float, help="GB/s that a node writes")
    parser.add_argument("--workers", type=int, help="worker processes of a node")
    parser.add_argument("--shared", type=float, help="GB/s of a file system that all nodes share")
    given = parser.parse_args()
    own = [Site("your machines", given.read, given.write, given.workers, given.shared)] if given.read else SITES
    jobs = jobs_of(MODELS, works)
    print("\n\n".join("\n".join(table(site, cells_of(site, jobs))) for site in own))


if __name__ == "__main__":
    main()
