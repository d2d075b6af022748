"""Groups move through several threads: all of them, never too many bytes at once, and the first error ends it."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ckptkit.app.plan import make_plan
from ckptkit.app.run_options import RunOptions
from ckptkit.core.errors import CkptkitError, FinalError
from ckptkit.core.plan import Plan, Step, View, identity, read_and_held
from ckptkit.core.specs import TensorSpec
from ckptkit.transfer.copy import IN_FLIGHT, copy, threads

NAMES = [f"w{index}" for index in range(40)]


class Numbers:
    """40 tensors of 1000 bytes, each filled with its number; counts the bytes that were read and not yet written."""

    def __init__(self):
        self.config: Mapping[str, Any] = {}
        self.specs = {name: TensorSpec(name, (1000,), "uint8") for name in NAMES}
        self.groups = [(name,) for name in NAMES]
        self.lock = threading.Lock()
        self.order: list[str] = []
        self.held, self.most = 0, 0
        self.threads: set[int] = set()
        self.seconds = 0.002  # of a read

    def read(self, names):
        with self.lock:
            self.order += names
            self.threads.add(threading.get_ident())
            self.held += 1000 * len(names)
            self.most = max(self.most, self.held)
        time.sleep(self.seconds)
        return {name: torch.full((1000,), int(name[1:]), dtype=torch.uint8) for name in names}


class Sink:
    def __init__(self, source):
        self.source, self.values, self.end = source, dict[str, int](), ""

    def write(self, name, tensor):
        with self.source.lock:
            self.source.held -= tensor.nbytes
            self.values[name] = int(tensor[0])

    def finish(self):
        self.end = "finished"

    def discard(self):
        self.end = "discarded"


@pytest.mark.parametrize("workers", [1, 4])
def test_every_group_is_copied_once_by_so_many_threads(workers):
    source = Numbers()
    sink = Sink(source)
    copy(source, sink, "test", workers)
    assert sink.values == {name: int(name[1:]) for name in NAMES}
    assert sink.end == "finished"
    assert sorted(source.order) == sorted(NAMES)
    assert len(source.threads) == workers
    if workers == 1:
        assert source.order == NAMES


def test_bytes_in_flight_are_bounded_and_a_larger_group_goes_alone():
    for memory, most in ((3000, 3000), (10, 1000)):
        source = Numbers()
        sink = Sink(source)
        copy(source, sink, "test", 8, memory=memory)
        assert source.most == most
        assert len(sink.values) == 40
    assert source.order == NAMES


@pytest.mark.parametrize(
    ("cores", "memory", "expected"), [(2, IN_FLIGHT, 5), (64, IN_FLIGHT, 10), (64, 10 * IN_FLIGHT, 67), (8, 1, 1)]
)
def test_threads_have_buffers_of_no_more_than_the_bound(monkeypatch, cores, memory, expected):
    monkeypatch.setattr("ckptkit.transfer.copy.cores", lambda: cores)
    assert threads(memory) == expected
    source = Numbers()
    copy(source, Sink(source), "test", memory=memory)
    assert len(source.threads) <= expected


def test_memory_counts_what_is_read_through_every_view():
    source = Numbers()
    half = Step(("w0", "w1"), (TensorSpec("half", (500,), "uint8"),), lambda tensors: [tensors[0][:500]], "half")
    first = View(source, Plan((half, *(identity(source.specs[name]) for name in NAMES[2:])), source.specs))
    second = View(first, Plan(tuple(identity(spec) for spec in first.specs.values()), first.specs))
    assert read_and_held(source, ["w0", "w1"]) == (2000, 2000)
    assert read_and_held(first, ["half"]) == (2000, 500 + 2000)
    # A copy lies where it was read.
    assert read_and_held(second, ["half", "w2"]) == (3000, 500 + 3000)


def test_tensors_that_are_joined_count_twice_in_memory():
    """Even where bytes are only copied, as those of gate and up; on the way back they are parts of one memory."""
    source = Numbers()
    both = Step(
        ("w0", "w1"),
        (TensorSpec("both", (2000,), "uint8"),),
        lambda tensors: [torch.cat(list(tensors))],
        "merge",
        is_byte_copy=True,
    )
    parts = Step(
        ("both",),
        (source.specs["w0"], source.specs["w1"]),
        lambda tensors: list(tensors[0].chunk(2)),
        "split",
        is_byte_copy=True,
    )
    merged = View(source, Plan((both,), ["w0", "w1"]))
    assert read_and_held(merged, ["both"]) == (2000, 4000)
    assert read_and_held(View(merged, Plan((parts,), ["both"])), ["w0", "w1"]) == (2000, 4000)


@pytest.mark.parametrize(("name", "megatron"), [("qwen3_moe", False), ("glm4_moe", True)])
def test_tensors_that_share_memory_lie_in_that_of_their_source(releases, converted, name, megatron):
    view = make_plan(RunOptions("convert", str((converted if megatron else releases)(name)), "out")).outputs[0].view
    shared = [tensor for tensor in view.specs if view.shares_memory(tensor)]
    assert 10 < len(shared) < len(view.specs)
    for tensor in shared:
        step = view.step(tensor)
        (read,) = view.source.read(step.inputs).values()
        (made,) = [one for spec, one in zip(step.outputs, step.run([read]), strict=True) if spec.name == tensor]
        assert made.contiguous().untyped_storage().data_ptr() == read.untyped_storage().data_ptr(), tensor


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("read", CkptkitError("w7 is broken")),
        ("write", ZeroDivisionError("w7 is broken")),
        ("write", KeyboardInterrupt("w7 is broken")),
        ("finish", CkptkitError("w7 is broken")),
    ],
)
def test_an_error_of_a_stage_ends_the_job(monkeypatch, stage, error):
    source = Numbers()
    source.seconds = 0.05  # a busy machine may keep the thread that fails waiting, while the other reads on
    sink = Sink(source)
    target = source if stage == "read" else sink
    original = getattr(target, stage)

    def fail(*arguments):
        if stage == "finish" or "w7" in (*arguments[0], arguments[0]):
            raise error
        return original(*arguments)

    monkeypatch.setattr(target, stage, fail)
    with pytest.raises(type(error), match="w7 is broken") as raised:
        copy(source, sink, "test", 2)
    assert isinstance(raised.value, FinalError) == (stage == "read")
    assert sink.end == "discarded"
    # What was running ends, nothing new begins.
    assert len(source.order) == 40 if stage == "finish" else len(source.order) < 15
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ckptkit-copy")]
