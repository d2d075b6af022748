"""Job and report files of witnesses, which rank is to blame, and the engines that are registered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.messages import text_with

from ckptkit.core.errors import UsageError
from ckptkit.verify.core.check import NEEDS, STAGE_LABELS, WITNESS_OPTIONS, all_checks
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses.process.codec import load_record, save
from ckptkit.verify.witnesses.process.exit_report import ExitReport, Phase
from ckptkit.verify.witnesses.registry import ENGINES, live_engine, programs_not_used, with_implied
from ckptkit.verify.witnesses.runner import Answer, read_answer, tail_of_log

LOADING = Phase("loading")


@dataclass(frozen=True)
class Found:
    number: int


def read(root, failed, ranks=2):
    reports = {rank: root / f"report-{rank}.json" for rank in range(ranks)}
    return read_answer(Found, reports, {rank: root / f"log-{rank}" for rank in range(ranks)}, failed)


def test_all_ranks_that_end_well_report(tmp_path):
    for rank in range(2):
        save(Found(rank), tmp_path / f"report-{rank}.json")
    answer = read(tmp_path, {})
    assert answer == Answer({0: Found(0), 1: Found(1)}, {})
    assert (answer.report, answer.failure, answer.require("nothing was done")) == (Found(0), None, Found(0))


def test_a_rank_that_ends_well_without_a_report_has_failed(tmp_path):
    save(Found(0), tmp_path / "report-0.json")
    answer = read(tmp_path, {})
    assert [*answer.failures] == [1]
    assert str(answer.failure) == text_with("importing no report; nothing")


def test_an_exception_is_told_without_how_the_process_ended(tmp_path):
    ExitReport(tmp_path / "report-0.json", LOADING, message="ValueError: no", verdict=True).save()
    (tmp_path / "log-1").write_text("almost done\n")
    answer = read(tmp_path, {0: "exit code 1", 1: "killed by SIGKILL"})
    assert {rank: one.message for rank, one in answer.failures.items()} == {
        0: "ValueError: no",
        1: "killed by SIGKILL; it last printed: almost done",
    }


# As gloo, NCCL and torch's store put it.
LOST = [
    "RuntimeError: Connection closed by peer",
    "RuntimeError: [.../gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:7569: Connection reset by peer",
    "torch.distributed.DistBackendError: NCCL error ... remote process exited or there was a network error",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
]


@pytest.mark.parametrize("lost", LOST)
def test_a_rank_that_only_lost_another_is_left_out(lost, tmp_path):
    for rank, message in enumerate((lost, "KeyError: 'key'")):
        ExitReport(tmp_path / f"report-{rank}.json", LOADING, message=message).save()
    assert [*read(tmp_path, {0: "exit code 1", 1: "exit code 1"}).failures] == [1]
    assert [*read(tmp_path, {0: "exit code 1"}).failures] == [0]


@pytest.mark.parametrize(
    ("verdicts", "failing_rank"), [((False, False), 0), ((False, True), 1), ((True, True), 0), ((True, False), 0)]
)
def test_the_first_verdict_is_to_blame_else_the_first_failure(verdicts, failing_rank):
    failures = {rank: ExitReport(Path(str(rank)), LOADING, verdict=verdict) for rank, verdict in enumerate(verdicts)}
    answer = Answer[Found]({}, failures)
    assert (answer.failing_rank, answer.failure) == (failing_rank, failures[failing_rank])


def test_a_report_that_is_required_and_missing_is_inconclusive():
    answer = Answer[Found]({}, {0: ExitReport(Path(), LOADING, message="KeyError: 'key'")})
    said = "^nothing was computed, .*: while loading: KeyError: 'key'$"
    with pytest.raises(CannotCheck, match=said):
        answer.require("nothing was computed")


IN_FRAMES = '  File "a.py", line 1\n    f()\n  File "b.py", line 7\n    g()\n'
LOGS = {
    "": "it printed nothing",
    "\n".join(map(str, range(20))): "it last printed: " + " | ".join(map(str, range(12, 20))),
    f"noise\nTraceback (most recent call last):\n{IN_FRAMES}ValueError: no\nmore\n": (
        'ValueError: no | more | at File "b.py", line 7'
    ),
    # An engine's log goes on.
    f"[12:00] Traceback (most recent call last):\n{IN_FRAMES}ValueError: no\n\n[12:01] SIGQUIT.\nLoading 2/22\n": (
        'ValueError: no | at File "b.py", line 7'
    ),
}


@pytest.mark.parametrize(("log", "words"), LOGS.items())
def test_the_last_exception_of_a_log_or_else_its_last_lines_are_quoted(log, words, tmp_path):
    (tmp_path / "log").write_text(log)
    assert tail_of_log(tmp_path / "log") == words


class Place(NamedTuple):
    at: tuple[int, ...]
    main: bool


@dataclass(frozen=True)
class Inner:
    name: str
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outer:
    several: tuple[Inner, ...] | None
    named: Mapping[str, Sequence[Inner]]
    places: Mapping[str, tuple[Place, ...]]
    mixed: Sequence[tuple[int, Sequence[int]]]
    free: str | Sequence[Mapping[str, Any]]
    path: Path
    other: Path | None = None
    maybe: Inner | None = None


def test_a_file_is_read_as_it_was_written(tmp_path):
    inner, places = Inner("a", (1.0, 2.5)), (Place((1, 2), True), Place((), False))
    value = Outer((inner,), {"n": [inner]}, {"p": places}, [(1, [2, 3])], [{"role": "user"}], Path("/a"))
    save(value, tmp_path / "file")
    assert load_record(Outer, tmp_path / "file") == value
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_every_engine_has_its_stage_option_and_checks():
    for engine in ENGINES:
        checks = [one for one in all_checks() if one.stage == engine.name]
        assert [one.code for one in checks] == [f"{engine.codes}{number}" for number in range(1, 9)]
        assert {one.needs for one in checks} == {(engine.name,)}
        assert (STAGE_LABELS[engine.name], WITNESS_OPTIONS[engine.name]) == (engine.label, f"--against-{engine.name}")
        assert engine.name in NEEDS


@pytest.mark.parametrize(
    ("asked", "implied", "unasked"),
    [
        ({"update"}, {"update", "engine"}, ["Megatron", "vLLM"]),
        ({"release-resume"}, {"release-resume", "engine"}, ["Megatron", "vLLM"]),
        ({"logits"}, {"logits"}, ["Megatron", "SGLang", "vLLM"]),
        ({"logits", "megatron"}, {"logits", "megatron"}, ["SGLang", "vLLM"]),
        ({"vllm", "engine"}, {"vllm", "engine"}, ["Megatron", "SGLang"]),
    ],
)
def test_updates_imply_a_live_engine_and_logits_do_not(asked, implied, unasked):
    found = with_implied(frozenset(asked))
    assert (found, programs_not_used(found)) == (implied, unasked)


def test_the_engine_is_vllm_where_that_alone_is_asked():
    assert [live_engine(frozenset(one)).name for one in ({"engine"}, {"engine", "vllm"})] == ["sglang", "vllm"]
    with pytest.raises(UsageError, match="--engine"):
        VerifyOptions(against=frozenset({"update", "sglang", "vllm"}))
