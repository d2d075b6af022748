"""What `--dry-run` says that a run will take: bytes, memory and seconds of a plan, counted by hand."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner
from support.messages import text_with

import ckptkit
from ckptkit.app.cli import cli
from ckptkit.app.forecast import START, Forecast, disk_rates, forecast, forecast_bytes, lines
from ckptkit.app.plan import Output
from ckptkit.app.run_options import RunOptions
from ckptkit.core.plan import Plan, Step, View, identity
from ckptkit.core.specs import TensorSpec
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.transfer.copy import STREAM

MIB = 1 << 20
READ, WRITE = 200 * MIB, 100 * MIB  # bytes a second
STEP = 225 * MIB  # of the plan below: 100 and 50 read, 75 made
SIZE = "reads 241.17 MB, writes 162.53 MB in 2 files, needs"


def unread(*_):
    raise AssertionError("a dry run opens no file")


class Source:
    """Three tensors of bytes: 100 and 50 MiB that become one, and 80 MiB that passes through."""

    config: ClassVar[dict[str, Any]] = {}
    specs: ClassVar = {
        name: TensorSpec(name, (size * MIB,), "uint8") for name, size in (("a", 100), ("b", 50), ("c", 80))
    }
    groups: ClassVar = [("a",), ("b",), ("c",)]
    byte_ranges = extents = read = unread

    def is_streamable(self, name):
        return True


class TwoFiles:
    """`ab` in a file of its own, and so `c`, each with ten bytes of header."""

    names: ClassVar = {"1": ["ab"], "2": ["c"]}

    def size(self, file):
        return {"1": 75 * MIB + 10, "2": 80 * MIB + 10}[file]


def plan_of(*steps):
    view = View(Source(), Plan(steps, [name for step in steps for name in step.inputs]))
    output = Output(view, TwoFiles())
    return SimpleNamespace(outputs=(output,), files=lambda: dict.fromkeys("12", output))


HALVED = Step(("a", "b"), (TensorSpec("ab", (75 * MIB,), "uint8"),), list, "halve")
PLAN = plan_of(HALVED, identity(Source.specs["c"]))


@pytest.fixture(autouse=True)
def _measured(monkeypatch):
    """A disk of known speed, and a process that holds nothing after planning."""
    monkeypatch.setattr("ckptkit.app.forecast.disk_rates", lambda directory: (READ, WRITE))
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=0))


@pytest.mark.parametrize(
    ("options", "memory"),
    [
        ({"workers": 1}, STREAM + 2 * STEP),  # a thread's buffers; one step that is computed, one that waits
        ({"workers": 3}, 3 * STREAM + 512 * MIB),  # the limit of what is in flight
        ({"workers": 1, "memory": 1}, STREAM + STEP),  # a single step that is larger than the limit
        ({"workers": 3, "ray": "auto"}, STREAM + 2 * STEP),  # of one worker
        ({}, 5 * STREAM + 512 * MIB),  # of as many threads as there are by default
    ],
)
def test_memory_is_buffers_and_steps_in_flight(options, memory, monkeypatch):
    monkeypatch.setattr("ckptkit.app.forecast.threads", lambda memory: 5)
    found = forecast_bytes(RunOptions("convert", "src", "dst", **options), PLAN)
    assert (found.read, found.written, found.files) == (230 * MIB, 155 * MIB + 20, 2)
    assert found.memory == memory


@pytest.mark.parametrize(("streamable", "held"), [(True, STREAM), (False, 80 * MIB)])
def test_a_tensor_is_held_unless_its_bytes_stand_in_files_in_order(monkeypatch, streamable, held):
    monkeypatch.setattr(Source, "groups", [("c",)])
    monkeypatch.setattr(Source, "is_streamable", lambda self, name: streamable)
    found = forecast_bytes(RunOptions("convert", "src", "dst", workers=1), plan_of(identity(Source.specs["c"])))
    assert found.memory == STREAM + 2 * held


def test_seconds_are_those_of_the_disk(tmp_path):
    found = forecast(RunOptions("convert", "src", tmp_path / "made" / "later" / "dst"), PLAN)
    assert found.seconds == pytest.approx(START + 230 / 200 + 155 / 100, abs=0.01)
    assert found.reason is None


def test_seconds_of_a_search_are_those_of_the_cores(monkeypatch, tmp_path):
    monkeypatch.setattr("ckptkit.app.forecast.quantizing_rate", lambda scheme: MIB)
    monkeypatch.setattr("ckptkit.app.forecast.cores", lambda: 2)
    scheme = QuantScheme(32, "minmax", search="mse")
    seconds = [
        forecast(RunOptions("quantize", "src", tmp_path / "dst", scheme=scheme, workers=workers), PLAN).seconds
        for workers in (None, 1, 8)
    ]
    assert seconds == [pytest.approx(START + 230 / cores) for cores in (2, 1, 2)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (RunOptions("convert", "src", "s3://bucket/dst"), "network"),
        (RunOptions("convert", "hf://model", Path("/tmp/dst")), "network"),
        (RunOptions("convert", "src", Path("/tmp/dst"), ray="auto"), "measured"),
        (RunOptions("convert", "src", Path("/proc/dst")), "/proc"),
    ],
)
def test_no_time_where_this_machine_does_not_decide_or_nothing_can_be_written(options, reason, monkeypatch):
    monkeypatch.setattr("ckptkit.app.forecast.disk_rates", disk_rates)
    size, time = lines(forecast(options, PLAN))
    assert size.startswith(SIZE)
    assert time == text_with(reason)


def test_measuring_the_disk_leaves_nothing_there(tmp_path):
    assert all(1e6 < rate < 1e12 for rate in disk_rates(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("seconds", "words"), [(599.4, "599 s"), (660.0, "11 min")])
def test_long_times_are_in_minutes(seconds, words):
    assert lines(Forecast(10**9, 2 * 10**9, 1, 1_240_000_000, seconds)) == [
        "reads 1.00 GB, writes 2.00 GB in 1 file, needs 1.24 GB of memory",
        f"takes about {words}",
    ]


def test_only_a_dry_run_has_a_forecast(small_release, tmp_path):
    done = CliRunner().invoke(cli, ["convert", str(small_release), str(tmp_path / "out"), "--dry-run", "--json"])
    found = json.loads(done.stdout)["forecast"]
    stored = json.loads((small_release / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert found["read"] == stored
    assert found["reason"] is None
    assert found["seconds"] > START
    assert list(tmp_path.iterdir()) == []
    assert ckptkit.convert(small_release, tmp_path / "out").forecast is None
    assert found["written"] == sum(file.stat().st_size for file in (tmp_path / "out" / "release").glob("*.distcp"))
