"""On a Ray cluster the same bytes are written, whatever the number of workers and whatever is lost on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import models
from support.fixture_types import PathOf
from support.models import content
from support.nightly import daily
from support.processes import environment

from ckptkit.app.api import convert, quantize
from ckptkit.app.cli import main
from ckptkit.app.plan import make_plan
from ckptkit.app.run_options import RunOptions
from ckptkit.app.write import TaskInput, _check_written, batches_of, digest_of, write_batch
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.storage.fingerprint import fingerprint
from ckptkit.transfer import ray as ray_tasks
from ckptkit.transfer.files import FilesWriter
from ckptkit.transfer.journal import JOURNAL, Journal
from ckptkit.verify.evidence import reading
from ckptkit.verify.run import verify

ray = pytest.importorskip("ray")

FILE_BYTES = 300_000
TASK = "ray::ckptkit write_batch"  # what a worker is called while it works
WORKER = (TASK, "ray::IDLE")  # and not its agents, which end by themselves
PATIENCE_S = 300
Write = Callable[..., None]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes with four CPUs. This process is connected to the first, so all tests have the same workers."""
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **store})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, **store)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(params=daily(["to Megatron", "to HF", "to INT4"], ["to Megatron"]))
def write(request: pytest.FixtureRequest, releases: PathOf, converted: PathOf) -> Write:
    """One of the three ways, of a model that takes many files."""
    return ways(releases, converted)[request.param]


@pytest.fixture
def to_megatron(releases: PathOf, converted: PathOf) -> Write:
    return ways(releases, converted)["to Megatron"]


def ways(releases: PathOf, converted: PathOf) -> dict[str, Write]:
    return {
        "to Megatron": lambda out, **how: (
            convert(releases("qwen3_moe"), out, max_shard_size=FILE_BYTES, **how) and None
        ),
        "to HF": lambda out, **how: convert(converted("qwen3_moe"), out, **how) and None,
        "to INT4": lambda out, **how: quantize(releases("qwen3_moe"), out, int4_scheme(group_size=32), **how) and None,
    }


def test_the_bytes_are_the_same_at_any_number_of_workers(cluster: Any, write: Write, tmp_path: Path) -> None:
    write(tmp_path / "plain")
    expected = content(tmp_path / "plain")
    assert len(expected) > 20
    for workers in (1, 4):
        write(tmp_path / f"{workers}", ray=cluster.address, workers=workers)
        assert content(tmp_path / f"{workers}") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4", "plain"]


def test_a_worker_that_is_killed_costs_only_its_tasks(cluster: Any, to_megatron: Write, tmp_path: Path) -> None:
    to_megatron(tmp_path / "plain")
    with midway(cluster, to_megatron, tmp_path) as (out, running, busy):
        os.kill(busy[0], signal.SIGKILL)
    running.result(PATIENCE_S)
    assert content(out) == content(tmp_path / "plain")
    assert not out.with_name(f"{out.name}.partial").exists()


def test_a_coordinator_that_is_killed_is_resumed(
    cluster: Any, releases: PathOf, to_megatron: Write, tmp_path: Path
) -> None:
    to_megatron(tmp_path / "plain")
    for attempt in count():
        out = tmp_path / f"out{attempt}"
        command = f"convert {releases('qwen3_moe')} {out} --max-shard-size {FILE_BYTES} --workers 1"
        words = [sys.executable, "-m", "ckptkit", *command.split(), "--ray", cluster.address]
        with subprocess.Popen(words, env=environment()) as coordinator:
            until_begun(out, lambda: coordinator.poll() is not None)
            coordinator.kill()
        assert coordinator.returncode in (0, -signal.SIGKILL)
        if not out.exists():
            break
    before = {path: path.stat().st_ino for path in recorded(out)}
    assert 0 < len(before) < len(list((tmp_path / "plain/release").glob("*.distcp")))
    to_megatron(out, ray=cluster.address, resume=True)
    assert content(out) == content(tmp_path / "plain")
    assert {path: (out / "release" / path.name).stat().st_ino for path in before} == before
    assert not out.with_name(f"{out.name}.partial").exists()


def test_an_error_in_a_task_ends_the_run_as_it_does_without_ray(
    cluster: Any,
    converted: PathOf,
    copy_of: Callable[[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = copy_of(converted("qwen3_moe"))
    file = next((source / "release").glob("*.distcp"))
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)

    # What the command does to a process of its own.
    monkeypatch.setattr("gc.set_threshold", lambda *numbers: None)

    def failing(*options: str) -> str:
        monkeypatch.setattr(
            sys, "argv", ["ckptkit", "convert", str(source), str(tmp_path / "out"), "--overwrite", *options]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err.partition("\n")[0]

    message = failing()
    assert str(file) in message
    assert failing("--ray", cluster.address) == message
    assert until(lambda: not any(title_of(pid) == TASK for pid in workers_of(cluster)))


@pytest.mark.nightly
def test_a_task_that_ends_while_another_fails_does_not_take_the_process_with_it(cluster: Any) -> None:
    # In a process of its own: Ray aborted it within 10 to 30 rounds where tasks were cancelled.
    words = [sys.executable, str(Path(__file__).parents[2] / "support/failing_tasks.py"), cluster.address, "40"]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True)
    # Ray prints before it what it has to say of nodes that other tests took away.
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["40 failed, 40 stopped"]), ended.stderr


@pytest.mark.parametrize("kind", daily(["HF", "Megatron"], ["Megatron"]))
def test_a_report_of_a_broken_checkpoint_is_the_same(
    cluster: Any, releases: PathOf, converted: PathOf, copy_of: Callable[[Path], Path], kind: str
) -> None:
    broken = copy_of(releases("qwen3_moe"))
    gate, up = (f"model.layers.1.mlp.experts.3.{name}_proj.weight" for name in ("gate", "up"))
    found = models.tensors(broken)
    models.edit(broken, gate, found[up])
    models.edit(broken, up, found[gate])
    models.edit(broken, "model.norm.weight", found["model.norm.weight"] * float("nan"))
    source = releases if kind == "HF" else converted
    report = same_report(cluster, broken, source("qwen3_moe"))
    assert {finding["code"] for finding in report["findings"]} == {"CK202", "CK204"}
    assert "gate_proj and up_proj are exchanged" in {finding["actual"] for finding in report["findings"]}


def same_report(cluster: Any, checkpoint: Path, source: Path) -> dict[str, Any]:
    """The report of a checkpoint, which is the same with Ray and without, but for the seconds and the date."""
    reports = [verify(checkpoint, source=source, ray=address).to_json() for address in (None, cluster.address)]
    for report in reports:
        del report["date"]
        for check in report["checks"]:
            del check["seconds"]
    assert reports[0] == reports[1]
    return reports[0]


def test_a_task_that_is_lost_again_and_again_ends_the_run(
    cluster: Any, to_megatron: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying() -> Callable[..., None]:
        def die(*arguments: object) -> None:
            import os

            os.kill(os.getpid(), 9)

        return die

    monkeypatch.setattr(ray_tasks, "_task", dying)
    monkeypatch.setattr(ray_tasks, "RETRIES", 1)
    with pytest.raises(CkptkitError, match=r"release/__0_0.distcp.*2.*[\s\S]*enough"):
        to_megatron(tmp_path / "out", ray=cluster.address, workers=1)
    assert list(tmp_path.iterdir()) == []


def test_a_node_with_another_version_is_named(
    cluster: Any, to_megatron: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ray_tasks.program_version()
    monkeypatch.setattr(ray_tasks, "program_version", lambda: "9.9")
    with pytest.raises(
        CkptkitError, match=rf"node \S+ has ckptkit {here}, and the coordinator 9.9\n.*install the same version"
    ):
        to_megatron(tmp_path / "out", ray=cluster.address)


def test_without_a_gpu_in_the_cluster_there_is_no_waiting_for_one(cluster: Any) -> None:
    with pytest.raises(CkptkitError, match="the Ray cluster has no GPUs"):
        ray_tasks.check_gpus(ray)


def test_without_a_cpu_in_the_cluster_there_is_no_waiting_for_one() -> None:
    empty = SimpleNamespace(cluster_resources=lambda: {"memory": 1e9})
    with pytest.raises(CkptkitError, match="the Ray cluster has no CPUs"):
        ray_tasks.cpus(empty)


@pytest.fixture
def task(releases: PathOf, tmp_path: Path) -> TaskInput:
    """What every task of a run gets."""
    options = RunOptions(
        "convert", str(releases("qwen3_moe")), tmp_path / "out", max_shard_size=FILE_BYTES, memory=1 << 20
    )
    (tmp_path / "out.partial" / JOURNAL).mkdir(parents=True)
    (tmp_path / "out.partial" / JOURNAL / "run-1").touch()
    source = fingerprint(options.local_sources().values())
    return TaskInput(options, tmp_path / "out.partial", "run-1", source, digest_of(make_plan(options)))


def test_a_task_writes_and_records_its_files_and_no_others(task: TaskInput) -> None:
    write_batch(task, ["release/__0_1.distcp", "release/__0_3.distcp"])
    written = sorted(path.name for path in (task.partial / "release").iterdir())
    assert written == ["__0_1.distcp", "__0_3.distcp"]
    assert sorted(path.name for path in recorded(task.partial.with_name("out"))) == written


def test_a_node_that_does_not_see_the_destination_is_named(task: TaskInput) -> None:
    elsewhere = task.partial.with_name("elsewhere.partial")
    with pytest.raises(CkptkitError, match=r"\S+.*\S+elsewhere.partial.*coordinator\n.*nodes"):
        write_batch(replace(task, partial=elsewhere), ["release/__0_1.distcp"])
    assert not elsewhere.exists()


def test_a_worker_that_was_thought_dead_does_not_bring_the_destination_back(
    task: TaskInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Journal.record

    def last(self: Journal, *arguments: Any) -> None:
        record(self, *arguments)
        task.partial.rename(task.partial.with_name("out"))

    monkeypatch.setattr(Journal, "record", last)
    with pytest.raises(FileNotFoundError):
        write_batch(task, ["release/__0_1.distcp", "release/__0_2.distcp"])
    assert not task.partial.exists()


def test_a_task_of_a_run_that_was_killed_writes_nothing_into_the_output_of_the_next(
    task: TaskInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray's workers may outlive a coordinator that is killed, and its lock does not: another run may have begun.
    opened = FilesWriter._opened

    def while_the_next_run_begins(self: FilesWriter, file: str) -> Any:
        found = opened(self, file)
        Journal(task.partial).end_dead_runs()
        return found

    monkeypatch.setattr(FilesWriter, "_opened", while_the_next_run_begins)
    with pytest.raises(CkptkitError, match="task"):
        write_batch(task, ["release/__0_1.distcp"])
    assert list((task.partial / "release").iterdir()) == []
    assert recorded(task.partial.with_name("out")) == []


def test_a_task_that_has_begun_when_its_run_fails_is_kept_for_the_next(
    task: TaskInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = FilesWriter._opened

    def while_the_run_fails(self: FilesWriter, file: str) -> Any:
        Journal(task.partial).stop_run(task.token)
        return opened(self, file)

    monkeypatch.setattr(FilesWriter, "_opened", while_the_run_fails)
    write_batch(task, ["release/__0_1.distcp"])
    assert [path.name for path in recorded(task.partial.with_name("out"))] == ["__0_1.distcp"]
    with pytest.raises(CkptkitError, match="does not see"):
        write_batch(task, ["release/__0_2.distcp"])


@pytest.mark.parametrize("different", ["source", "plan"])
def test_a_node_that_sees_another_source_is_named(task: TaskInput, different: str) -> None:
    with pytest.raises(CkptkitError, match=r"\S+.*\S+qwen3_moe"):
        write_batch(replace(task, **{different: "0" * 64}), ["release/__0_1.distcp"])
    assert not (task.partial / "release").exists()


def test_a_node_that_sees_another_checkpoint_is_named(releases: PathOf) -> None:
    task = reading.TaskInput(releases("qwen3_moe"), releases("qwen2-tied"), None, stored=False, files="0" * 64)
    with pytest.raises(CkptkitError, match=r"\S+.*\S+qwen3_moe.*\S+qwen2-tied"):
        reading.look_at(task, ["model.norm.weight"])


def test_a_file_that_arrived_in_part_is_missed(task: TaskInput) -> None:
    plan = make_plan(task.options)
    write_batch(task, list(plan.files()))
    _check_written(plan, task.partial, Journal(task.partial))
    file = task.partial / "release/__0_2.distcp"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(CkptkitError, match=rf"__0_2.distcp has {size - 1} bytes instead of {size}"):
        _check_written(plan, task.partial, Journal(task.partial))


def test_small_files_are_cut_into_several_tasks_a_worker(task: TaskInput) -> None:
    plan = make_plan(task.options)
    for workers in (1, 2, 4):
        batches = batches_of(plan, workers)
        assert min(len(plan.files()), 16 * workers) <= len(batches) <= 32 * workers
        assert [file for files in batches for file in files] == list(plan.files())
        assert sum(batches.values()) == sum(plan.outputs[0].files.size(file) for file in plan.files())


def recorded(out: Path) -> list[Path]:
    """The files of a run in progress that are finished, by the records of its journal."""
    partial = out.with_name(f"{out.name}.partial")
    records = [path.name for path in (partial / JOURNAL).glob("release%*.json")]
    return [partial / record.removesuffix(".json").replace("%", "/") for record in records]


@contextmanager
def midway(cluster: Any, write: Write, folder: Path) -> Iterator[tuple[Path, Future[None], list[int]]]:
    """Catches a run when some of its files are finished and some are not, and stops all workers while the block runs.

    Yields the destination, the run, and the workers that are at a task.
    A run that ended before it was caught is followed by another.
    """
    with ThreadPoolExecutor(1) as pool:
        for attempt in count():
            out = folder / f"out{attempt}"
            running = pool.submit(write, out, ray=cluster.address)
            until_begun(out, running.done)
            workers = workers_of(cluster)
            for pid in workers:
                os.kill(pid, signal.SIGSTOP)
            try:
                busy = [pid for pid in workers if title_of(pid) == TASK]
                if caught := busy and recorded(out) and not running.done():
                    yield out, running, busy
            finally:
                for pid in workers:
                    if title_of(pid).startswith(WORKER):
                        os.kill(pid, signal.SIGCONT)
            if caught:
                return
            running.result(PATIENCE_S)


def until_begun(out: Path, ended: Callable[[], bool]) -> None:
    """Waits until a file is finished, or the run has ended."""
    until(lambda: recorded(out) or ended())


def until(reached: Callable[[], Any]) -> bool:
    """Waits for a condition."""
    end = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)
    return True


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def workers_of(cluster: Any) -> list[int]:
    """Processes of Ray's workers, idle ones too, on all nodes."""
    raylets = {raylet_of(node) for node in [cluster.head_node, *cluster.worker_nodes]}
    running = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in running if parent_of(pid) in raylets and title_of(pid).startswith(WORKER)]


def parent_of(pid: int) -> int:
    """The parent of a process; 0 where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def title_of(pid: int) -> str:
    """What a process calls itself; nothing where there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0].strip()
    except OSError:
        return ""
