"""CK603: recorded prompts against the checkpoint's tokenizer and chat template, tokens worked out by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import rollout_files
from support.messages import text_with
from support.rollout_files import Sample, ids_of, write

from ckptkit.verify.core.report import CheckResult, Finding

ASKED = [{"role": "user", "content": "hello"}]
RENDERED = "<bos>hello<eos>A"


def prompted(prompt: Any, tokens: str, **fields: Any) -> Sample:
    ids = [*ids_of(tokens), 9, 10]
    return Sample(prompt=prompt, tokens=ids, response_length=2, rollout_log_probs=[-1.0, -1.0], **fields)


Judge = Callable[..., tuple[str, str, list[Finding]]]


@pytest.fixture
def judge(
    alone: Callable[..., tuple[CheckResult | None, list[Finding]]],
    in_process: None,
    tmp_path: Path,
    recorded: Any,
) -> Judge:
    """`judge(samples)`: status, reason and findings of CK603."""

    def one(given: Sequence[Sample], **how: Any) -> tuple[str, str, list[Finding]]:
        file = write(tmp_path / "rollout.pt", given)
        result, findings = alone("CK603", how.pop("path", recorded.path), rollout_data=file)
        assert result is not None
        return result.status, result.reason or "", findings

    return one


def test_text_and_messages_with_their_tokens_pass(judge: Judge) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    given = [
        prompted("hello", "hello"),
        prompted(ASKED, RENDERED),
        prompted(ASKED, f"add{RENDERED}", metadata={"tools": tools}),
        prompted(ASKED, f"{RENDERED}T", apply_chat_template_kwargs={"enable_thinking": False}),
    ]
    assert judge(given) == ("passed", "", [])


def test_another_template_is_named_by_its_first_token(judge: Judge) -> None:
    status, _, (finding,) = judge([prompted(ASKED, RENDERED), prompted(ASKED, "<bos>helpo<eos>A")])
    assert (status, finding.severity) == ("failed", "error")
    letters = rollout_files.BYTES
    different = f"'l' ({letters['l']}) at token 4, recorded 'p' ({letters['p']}) after '<bos>hel'"
    assert finding.actual == f"{different}; 1 of 2 prompts differ"


@pytest.mark.parametrize(
    ("text", "tokens", "actual"),
    [("hello", "hell", "'o' (%d) at token 4, recorded the end"), ("hell", "hello", "the end at token 4, recorded 'o'")],
)
def test_prompts_of_other_lengths_fail(judge: Judge, text: str, tokens: str, actual: str) -> None:
    _, _, (finding,) = judge([prompted(text, tokens)])
    said = actual % rollout_files.BYTES["o"] if "%" in actual else actual
    assert finding.actual.startswith(said)


def test_options_that_no_file_records_are_tried_and_named(judge: Judge) -> None:
    answered = [*ASKED, {"role": "assistant", "content": "he"}]
    unfinished = prompted(ASKED, "<bos>hello<eos>")
    found = judge([prompted(ASKED, f"{RENDERED}T"), prompted(answered, "<bos>hello<eos><bos>he"), unfinished])
    assert found == ("passed", "", [])


def test_messages_that_the_template_refuses_fail(judge: Judge) -> None:
    _, _, (finding,) = judge([prompted([{"role": "critic", "content": "no"}], RENDERED)])
    assert finding.actual == text_with("0 critics")


def test_text_with_another_tokenization_fails(judge: Judge) -> None:
    _, _, (finding,) = judge([prompted("hello", "<bos>hello")])
    assert finding.actual.startswith(f"'h' ({rollout_files.BYTES['h']}) at token 0, recorded '<bos>'")


def test_without_a_template_or_a_tokenizer_it_is_inconclusive(judge: Judge, recorded: Any, tmp_path: Path) -> None:
    path = tmp_path / "bare"
    shutil.copytree(recorded.path, path)
    (path / "chat_template.jinja").unlink()
    assert judge([prompted("hello", "hello")], path=path) == ("passed", "", [])
    status, reason, _ = judge([prompted(ASKED, RENDERED)], path=path)
    assert status == "skipped"
    assert "chat" in reason
    for name in ("tokenizer.json", "tokenizer.model"):
        (path / name).unlink()
    status, reason, _ = judge([prompted("hello", "hello")], path=path)
    assert status == "skipped"
    assert "has no tokenizer" in reason


def test_a_file_without_prompts_is_not_judged(
    alone: Callable[..., tuple[CheckResult | None, list[Finding]]], recorded: Any, tmp_path: Path
) -> None:
    file = write(tmp_path / "rollout.pt", [prompted("", "hello")])
    assert alone("CK603", recorded.path, rollout_data=file) == (None, [])
