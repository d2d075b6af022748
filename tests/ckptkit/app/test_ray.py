"""On a Ray cluster the same bytes are written, whatever the number of workers and whatever is lost on the way."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support import models
from support.messages import refusal
from support.models import content
from support.nightly import daily
from support.processes import environment
from support.whole_files import flip

from ckptkit.app.api import convert, quantize
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
PATIENCE_S = 300


@pytest.fixture(scope="module")
def cluster():
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


@pytest.fixture
def ways(releases, converted):
    return {
        "to Megatron": partial(convert, releases("qwen3_moe"), max_shard_size=FILE_BYTES),
        "to HF": partial(convert, converted("qwen3_moe")),
        "to INT4": partial(quantize, releases("qwen3_moe"), scheme=int4_scheme(group_size=32)),
    }


@pytest.fixture
def to_megatron(ways):
    return ways["to Megatron"]


@pytest.mark.parametrize("way", daily(["to Megatron", "to HF", "to INT4"], ["to Megatron"]))
def test_the_bytes_are_the_same_at_any_number_of_workers(cluster, ways, way, tmp_path):
    ways[way](tmp_path / "plain")
    expected = content(tmp_path / "plain")
    assert len(expected) > 20
    for workers in (1, 4):
        ways[way](tmp_path / f"{workers}", ray=cluster.address, workers=workers)
        assert content(tmp_path / f"{workers}") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4", "plain"]


def test_a_worker_that_is_killed_costs_only_its_tasks(cluster, to_megatron, tmp_path):
    to_megatron(tmp_path / "plain")
    with ThreadPoolExecutor(1) as pool:
        out, killed = tmp_path / "out", list[int]()
        while not killed:  # a run may end before it is caught
            running = pool.submit(to_megatron, out, ray=cluster.address, overwrite=True)
            wait_until_begun(out, running.done)
            killed = [] if running.done() else busy_workers(cluster)[:1]
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            running.result(PATIENCE_S)
    assert content(out) == content(tmp_path / "plain")
    assert not (tmp_path / "out.partial").exists()


def test_a_coordinator_that_is_killed_is_resumed(cluster, releases, to_megatron, tmp_path):
    to_megatron(tmp_path / "plain")
    for attempt in count():  # a run may end before it is caught
        out = tmp_path / f"out{attempt}"
        command = f"convert {releases('qwen3_moe')} {out} --max-shard-size {FILE_BYTES} --workers 1"
        words = [sys.executable, "-m", "ckptkit", *command.split(), "--ray", cluster.address]
        with subprocess.Popen(words, env=environment()) as coordinator:
            wait_until_begun(out, coordinator.poll)
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


def test_an_error_in_a_task_ends_the_run_as_it_does_without_ray(cluster, converted, copy_of, tmp_path):
    source = copy_of(converted("qwen3_moe"))
    file = next((source / "release").glob("*.distcp"))
    flip(file)
    messages = []
    for address in (None, cluster.address):
        messages.append(refusal("", convert, source, tmp_path / "out", ray=address).message)
        assert list(tmp_path.iterdir()) == [source]
    assert str(file) in messages[0]
    assert messages[0] == messages[1]
    while busy_workers(cluster):  # as long as a test may take
        time.sleep(0.01)


@pytest.mark.nightly
def test_a_task_that_ends_while_another_fails_does_not_take_the_process_with_it(cluster):
    # In a process of its own: Ray aborted it within 10 to 30 rounds where tasks were cancelled.
    words = [sys.executable, str(Path(__file__).parents[2] / "support/failing_tasks.py"), cluster.address, "40"]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True)
    # Ray prints before it what it has to say of nodes that other tests took away.
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["40 failed, 40 stopped"]), ended.stderr


def test_a_report_of_a_broken_checkpoint_is_the_same(cluster, releases, converted, copy_of):
    broken = copy_of(releases("qwen3_moe"))
    gate, up = (f"model.layers.1.mlp.experts.3.{name}_proj.weight" for name in ("gate", "up"))
    found = models.tensors(broken)
    models.edit(broken, gate, found[up])
    models.edit(broken, up, found[gate])
    models.edit(broken, "model.norm.weight", found["model.norm.weight"] * float("nan"))
    source = converted("qwen3_moe")
    plain, on_ray = (verify(broken, source=source, ray=address).to_json() for address in (None, cluster.address))
    for report in (plain, on_ray):
        del report["date"]
        for check in report["checks"]:
            del check["seconds"]
    assert plain == on_ray
    assert {finding["code"] for finding in plain["findings"]} == {"CK202", "CK204"}


def test_a_task_that_is_lost_again_and_again_ends_the_run(cluster, to_megatron, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_tasks, "_task", lambda: lambda *_: os.kill(os.getpid(), 9))
    monkeypatch.setattr(ray_tasks, "RETRIES", 1)
    refusal(r"release/__0_0.distcp.*2.*[\s\S]*enough", to_megatron, tmp_path / "out", ray=cluster.address, workers=1)
    assert list(tmp_path.iterdir()) == []


def test_a_node_with_another_version_is_named(cluster, to_megatron, tmp_path, monkeypatch):
    here = ray_tasks.program_version()
    monkeypatch.setattr(ray_tasks, "program_version", lambda: "9.9")
    refusal(rf"node \S+ has ckptkit {here}, .* 9.9\n.*install", to_megatron, tmp_path / "out", ray=cluster.address)


def test_without_cpus_or_gpus_in_the_cluster_there_is_no_waiting_for_one():
    empty = SimpleNamespace(cluster_resources=lambda: {"memory": 1e9})
    refusal("the Ray cluster has no GPUs", ray_tasks.check_gpus, empty)
    refusal("the Ray cluster has no CPUs", ray_tasks.cpus, empty)


@pytest.fixture
def task(releases, tmp_path):
    options = RunOptions(
        "convert", str(releases("qwen3_moe")), tmp_path / "out", max_shard_size=FILE_BYTES, memory=1 << 20
    )
    (tmp_path / "out.partial" / JOURNAL).mkdir(parents=True)
    (tmp_path / "out.partial" / JOURNAL / "run-1").touch()
    source = fingerprint(options.local_sources().values())
    return TaskInput(options, tmp_path / "out.partial", "run-1", source, digest_of(make_plan(options)))


def test_a_task_writes_and_records_its_files_and_no_others(task):
    write_batch(task, ["release/__0_1.distcp", "release/__0_3.distcp"])
    written = sorted(path.name for path in (task.partial / "release").iterdir())
    assert written == ["__0_1.distcp", "__0_3.distcp"]
    assert sorted(path.name for path in recorded(task.partial.with_name("out"))) == written


def act_when_opened(monkeypatch, act):
    opened = FilesWriter._opened

    def watched(self, file):
        found = opened(self, file)
        act()
        return found

    monkeypatch.setattr(FilesWriter, "_opened", watched)


def test_a_worker_that_was_thought_dead_does_not_bring_the_destination_back(task, monkeypatch):
    record = Journal.record

    def last(self, *arguments):
        record(self, *arguments)
        task.partial.rename(task.partial.with_name("out"))

    monkeypatch.setattr(Journal, "record", last)
    with pytest.raises(FileNotFoundError):
        write_batch(task, ["release/__0_1.distcp", "release/__0_2.distcp"])
    assert not task.partial.exists()


def test_a_task_of_a_run_that_was_killed_writes_nothing_into_the_output_of_the_next(task, monkeypatch):
    # Ray's workers may outlive a coordinator that is killed, and its lock does not: another run may have begun.
    act_when_opened(monkeypatch, Journal(task.partial).end_dead_runs)
    refusal("task", write_batch, task, ["release/__0_1.distcp"])
    assert list((task.partial / "release").iterdir()) == []
    assert recorded(task.partial.with_name("out")) == []


def test_a_task_that_has_begun_when_its_run_fails_is_kept_for_the_next(task, monkeypatch):
    act_when_opened(monkeypatch, lambda: Journal(task.partial).stop_run(task.token))
    write_batch(task, ["release/__0_1.distcp"])
    assert [path.name for path in recorded(task.partial.with_name("out"))] == ["__0_1.distcp"]
    refusal("does not see", write_batch, task, ["release/__0_2.distcp"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"source": "0" * 64}, "qwen3_moe"),
        ({"plan": "0" * 64}, "qwen3_moe"),
        ({"partial": Path("/nowhere/out.partial")}, "/nowhere/out.partial"),
    ],
    ids=["source", "plan", "destination"],
)
def test_a_node_that_sees_another_source_or_destination_is_named(task, change, named):
    refusal(rf"{socket.gethostname()}.*{named}", write_batch, replace(task, **change), ["release/__0_1.distcp"])
    assert not (task.partial / "release").exists()


def test_a_node_that_sees_another_checkpoint_is_named(releases):
    task = reading.TaskInput(releases("qwen3_moe"), releases("qwen2-tied"), None, stored=False, files="0" * 64)
    refusal(r"\S+.*\S+qwen3_moe.*\S+qwen2-tied", reading.look_at, task, ["model.norm.weight"])


def test_a_file_that_arrived_in_part_is_missed(task):
    plan, file = make_plan(task.options), task.partial / "release/__0_2.distcp"
    write_batch(task, list(plan.files()))
    _check_written(plan, task.partial, Journal(task.partial))
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(CkptkitError, match=rf"__0_2.distcp has {size - 1} bytes instead of {size}"):
        _check_written(plan, task.partial, Journal(task.partial))


def test_small_files_are_cut_into_several_tasks_a_worker(task):
    plan = make_plan(task.options)
    for workers in (1, 2, 4):
        batches = batches_of(plan, workers)
        assert min(len(plan.files()), 16 * workers) <= len(batches) <= 32 * workers
        assert [file for files in batches for file in files] == list(plan.files())
        assert sum(batches.values()) == sum(plan.outputs[0].files.size(file) for file in plan.files())


def recorded(out):
    partial = out.with_name(f"{out.name}.partial")
    records = [path.name for path in (partial / JOURNAL).glob("release%*.json")]
    return [partial / record.removesuffix(".json").replace("%", "/") for record in records]


def wait_until_begun(out, has_ended):
    while not recorded(out) and has_ended() in (None, False):
        time.sleep(0.001)


def busy_workers(cluster):
    """The processes on all nodes that are at a task of ours, which Ray gives a title."""
    busy = list[int]()
    for node in [cluster.head_node, *cluster.worker_nodes]:
        for child in psutil.Process(node.all_processes["raylet"][0].process.pid).children():
            with contextlib.suppress(psutil.Error):
                busy += [child.pid] * child.cmdline()[0].startswith(TASK)
    return busy
