"""What a job will take: sums done by hand, and a simulation that shares nothing with them but the sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.app.estimate import PROCESS, START, Machines, Throughput, Volume, estimate, heaviest, measure_throughput
from ckptkit.core.errors import CkptkitError

GB, MIB = 10**9, 1 << 20
FOUR = Volume(8 * GB, [2 * GB] * 4, 100 * MIB)
SLOW_DISK, SLOW_CORES = Throughput(2, 1, 1), Throughput(10, 0.5, 10)


@pytest.mark.parametrize(
    ("rates", "machines", "seconds", "bound"),
    [
        (SLOW_DISK, Machines(), 12, "storage"),  # 8 / 2 read, then 8 / 1 written
        (SLOW_DISK, Machines(workers=4), 12, "storage"),
        (SLOW_DISK, Machines(nodes=2), 6, "storage"),
        (SLOW_DISK, Machines(nodes=3), 6, "storage"),  # one of three has two of the four files
        (SLOW_DISK, Machines(nodes=16), 3, "storage"),  # no more than one file a node
        (SLOW_CORES, Machines(), 16, "processor"),  # 8 / 0.5
        (SLOW_CORES, Machines(workers=4), 4, "processor"),
        (SLOW_CORES, Machines(workers=3), 8, "processor"),
        (SLOW_CORES, Machines(threads=2), 8, "processor"),
        (SLOW_CORES, Machines(nodes=2, workers=2, threads=2), 2, "processor"),
        (SLOW_DISK, Machines(nodes=4, shared=0.5), 32, "shared storage"),  # 16 / 0.5, however many nodes
        (SLOW_DISK, Machines(nodes=4, shared=100), 3, "storage"),
    ],
)
def test_seconds(rates: Throughput, machines: Machines, seconds: float, bound: str) -> None:
    found = estimate(FOUR, rates, machines)
    assert (found.tasks, found.bound) == (4, bound)
    assert found.seconds == pytest.approx(START + seconds)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Volume(8 * GB, [GB, GB], 0), 16),  # quantizing: what is read is worked on
        (Volume(4 * GB, [4 * GB, 4 * GB], 0), 16),  # dequantizing: what is written is
        (Volume(4 * GB, [GB], 0, 3 * GB), 6),
        (Volume(0, [], 0), 0),
    ],
)
def test_what_the_processor_works_on(work: Volume, seconds: float) -> None:
    assert estimate(work, Throughput(1000, 0.5, 1000)).seconds == pytest.approx(START + seconds, abs=0.02)


@pytest.mark.parametrize(
    ("step", "threads", "spare", "held"),
    [
        (100 * MIB, 1, 0, 48 * MIB + 200 * MIB),  # a thread's buffers; one step that is computed, one that waits
        (100 * MIB, 4, 0, 4 * 48 * MIB + 500 * MIB),
        (100 * MIB, 1, 3, 4 * 48 * MIB + 500 * MIB),
        (100 * MIB, 8, 0, 8 * 48 * MIB + 512 * MIB),  # the limit of what is in flight
        (3000 * MIB, 8, 0, 8 * 48 * MIB + 3000 * MIB),  # a single step that is larger than the limit
    ],
)
def test_memory(step: int, threads: int, spare: int, held: int) -> None:
    assert estimate(Volume(GB, [GB], step), SLOW_DISK, Machines(threads=threads, spare=spare)).memory == PROCESS + held


@pytest.mark.parametrize(
    ("sizes", "count", "most"),
    [
        ([5, 4, 3, 3, 3], 2, 10),  # 5 + 3 and 4 + 3 + 3: each goes to whoever has least, which is not the best there is
        ([1, 9, 2, 3], 3, 9),
        ([7, 7], 5, 7),
        ([1, 2, 3], 1, 6),
        ([], 4, 0),
    ],
)
def test_files_dealt_out(sizes: list[int], count: int, most: int) -> None:
    assert heaviest(sizes, count) == most


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_no_throughput(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(CkptkitError, match="cannot be right"):
        Throughput(*numbers)


@pytest.mark.parametrize("machines", [{"nodes": 0}, {"workers": 0}, {"threads": 0}, {"shared": 0.0}])
def test_no_machines(machines: dict[str, int]) -> None:
    with pytest.raises(CkptkitError, match="cannot work"):
        Machines(**machines)


def test_measured(tmp_path: Path) -> None:
    found = measure_throughput(tmp_path)
    assert all(0.001 < rate < 1000 for rate in (found.read, found.transform, found.write))
    assert list(tmp_path.iterdir()) == []


def test_not_measured_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="absent: No such file"):
        measure_throughput(tmp_path / "absent")
