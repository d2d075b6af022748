"""What `--dry-run` says that a job will take: bytes and tasks of a plan counted by hand, and words."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from click.testing import CliRunner

import ckptkit
from ckptkit.app.cli import cli
from ckptkit.app.estimate import Throughput
from ckptkit.app.execute import How
from ckptkit.app.forecast import Forecast, Row, forecast, lines, volume_of
from ckptkit.app.jobs import Job, Output, Work
from ckptkit.core.plan import Plan, Step, View, identity
from ckptkit.core.specs import TensorSpec
from ckptkit.transfer.copy import IN_FLIGHT, STREAM

MIB = 1 << 20
RATES = Throughput(2.0, 0.5, 1.0)


class Source:
    """Three tensors of bytes: 100 and 50 MiB that become one, and 80 MiB that passes through."""

    config: ClassVar[dict[str, Any]] = {}
    specs: ClassVar = {
        name: TensorSpec(name, (size * MIB,), "uint8") for name, size in (("a", 100), ("b", 50), ("c", 80))
    }
    groups: ClassVar = [("a",), ("b",), ("c",)]

    def byte_ranges(self, names: object) -> None:
        raise AssertionError("a dry run reads no weights")

    def is_streamable(self, name: str) -> bool:
        return True

    def extents(self, name: str) -> None:
        raise AssertionError("a dry run opens no file")

    def read(self, names: object) -> dict[str, torch.Tensor]:
        raise AssertionError("a dry run reads no weights")


class TwoFiles:
    """`ab` in a file of its own, and so `c`, each with ten bytes of header."""

    names: ClassVar = {"1": ["ab"], "2": ["c"]}

    def size(self, file: str) -> int:
        return {"1": 75 * MIB + 10, "2": 80 * MIB + 10}[file]


def planned() -> Work:
    halved = Step(("a", "b"), (TensorSpec("ab", (75 * MIB,), "uint8"),), list, "halve")
    view = View(Source(), Plan((halved, identity(Source.specs["c"])), Source.specs))
    return SimpleNamespace(
        outputs=(Output(view, TwoFiles()),),
        files=lambda: dict.fromkeys("12", Output(view, TwoFiles())),
        dequantized=None,
    )  # type: ignore[arg-type,return-value]


def test_bytes_of_a_plan() -> None:
    volume = volume_of(planned(), IN_FLIGHT)
    assert (volume.read, list(volume.files), volume.plain) == (230 * MIB, [75 * MIB + 10, 80 * MIB + 10], 230 * MIB)
    assert volume.step == 225 * MIB  # 100 and 50 read, 75 made
    assert volume.process > 50 * MIB


@pytest.mark.parametrize(("streamable", "held"), [(True, STREAM), (False, 80 * MIB)])
def test_a_tensor_is_held_unless_its_bytes_stand_in_files_in_order(
    monkeypatch: pytest.MonkeyPatch, streamable: bool, held: int
) -> None:
    monkeypatch.setattr(Source, "groups", [("c",)])
    monkeypatch.setattr(Source, "is_streamable", lambda self, name: streamable)
    view = View(Source(), Plan((identity(Source.specs["c"]),), ["c"]))
    work = SimpleNamespace(outputs=(Output(view, TwoFiles()),), files=lambda: {"2": Output(view, TwoFiles())})  # type: ignore[arg-type]
    assert volume_of(work, IN_FLIGHT).step == held  # type: ignore[arg-type]


def test_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ckptkit.app.forecast.measure_throughput", lambda directory, steps: RATES)
    found = forecast(Job("convert", "src"), planned(), How(tmp_path / "made" / "later" / "dst", workers=3))
    assert (found.read, found.written, found.files, found.directory, found.reason) == (
        230 * MIB,
        155 * MIB + 20,
        2,
        str(tmp_path),
        None,
    )
    assert [(row.ray, row.nodes, row.workers, row.tasks) for row in found.rows] == [
        (False, 1, 1, 2),
        (False, 1, 2, 2),
        (False, 1, 3, 2),
        (True, 4, 3, 2),
        (True, 16, 3, 2),
    ]
    # A thread more than one takes a step more, up to the limit of what is in flight.
    assert found.rows[1].memory - found.rows[0].memory == STREAM + IN_FLIGHT - 2 * 225 * MIB


def test_threads_beside_those_that_compute_have_buffers_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ckptkit.app.forecast.measure_throughput", lambda directory, steps: RATES)
    monkeypatch.setattr("ckptkit.app.forecast.cores", lambda: 2)
    monkeypatch.setattr("ckptkit.app.forecast.threads", lambda memory: 5)
    unasked, asked = (
        forecast(Job("convert", "src"), planned(), How(tmp_path / "dst", workers=workers)).rows for workers in (None, 2)
    )
    assert [(one.workers, one.memory - other.memory) for one, other in zip(unasked, asked, strict=True)][:2] == [
        (1, 0),
        (2, 3 * STREAM),
    ]


@pytest.mark.parametrize(("src", "dst"), [("src", "s3://bucket/dst"), ("hf://model", Path("/tmp/dst"))])
def test_no_estimate_over_the_network(src: str, dst: str | Path) -> None:
    found = forecast(Job("convert", src), planned(), How(dst))
    assert lines(found) == [
        "reads 0.241 GB, writes 0.163 GB in 2 files",
        "no estimate of time and memory: the network is not measured",
    ]


def test_no_estimate_where_nothing_can_be_written() -> None:
    assert lines(forecast(Job("convert", "src"), planned(), How(Path("/proc/dst"))))[1].startswith(
        "no estimate of time and memory: /proc: "
    )


def test_words() -> None:
    rows = (Row(False, 1, 1, 1, 1_240_000_000, 599.4, "storage"), Row(True, 4, 2, 9, 900_000_000, 660.0, "processor"))
    assert lines(Forecast(10**9, 2 * 10**9, 1, "/data", RATES, rows)) == [
        "reads 1.000 GB, writes 2.000 GB in 1 file",
        "estimate from a quick measurement in /data (read 2.00, write 1.00, a core 0.50 GB/s):",
        "  1 worker here: 599 s, bound by storage, 1.2 GB of memory",
        "  Ray, 4 such nodes of 2 workers, 9 tasks: 11 min, bound by processor, 0.9 GB of memory a worker",
    ]


def test_only_a_dry_run_has_one(small_release: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["convert", str(small_release), str(tmp_path / "out"), "--dry-run", "--json"])
    found = json.loads(done.stdout)["forecast"]
    stored = json.loads((small_release / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert found["read"] == stored
    assert found["reason"] is None
    assert found["rows"][-1]["nodes"] == 16
    assert list(tmp_path.iterdir()) == []
    assert ckptkit.convert(small_release, tmp_path / "out").forecast is None
    assert found["written"] == sum(file.stat().st_size for file in (tmp_path / "out" / "release").glob("*.distcp"))
