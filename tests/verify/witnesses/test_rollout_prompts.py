"""CK603: recorded prompts against the checkpoint's tokenizer and chat template, tokens worked out by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fixture_types import RunAlone
from support.messages import text_with
from support.rollout_files import BYTES, Sample, ids_of, write

from ckptkit.verify.core.report import Finding

ASKED = [{"role": "user", "content": "hello"}]
RENDERED = "<bos>hello<eos>A"


def prompted(prompt: Any, tokens: str, **fields: Any) -> Sample:
    ids = [*ids_of(tokens), 9, 10]
    return Sample(prompt=prompt, tokens=ids, response_length=2, rollout_log_probs=[-1.0, -1.0], **fields)


Judge = Callable[..., tuple[str, str, list[Finding]]]


@pytest.fixture
def judge(alone: RunAlone, in_process: None, tmp_path: Path, recorded: Any) -> Judge:
    """`judge(sample, ...)`: status, reason and findings of CK603."""

    def one(*given: Sample, path: Path = recorded.path) -> tuple[str, str, list[Finding]]:
        result, findings = alone("CK603", path, rollout_data=write(tmp_path / "rollout.pt", given))
        assert result is not None
        return result.status, result.reason or "", findings

    return one


def test_text_and_messages_with_their_tokens_pass(judge: Judge) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    found = judge(
        prompted("hello", "hello"),
        prompted(ASKED, RENDERED),
        prompted(ASKED, f"add{RENDERED}", metadata={"tools": tools}),
        prompted(ASKED, f"{RENDERED}T", apply_chat_template_kwargs={"enable_thinking": False}),
    )
    assert found == ("passed", "", [])


def test_options_that_no_file_records_are_tried_and_named(judge: Judge) -> None:
    answered = [*ASKED, {"role": "assistant", "content": "he"}]
    unfinished = prompted(ASKED, "<bos>hello<eos>")
    found = judge(prompted(ASKED, f"{RENDERED}T"), prompted(answered, "<bos>hello<eos><bos>he"), unfinished)
    assert found == ("passed", "", [])


@pytest.mark.parametrize(
    ("prompt", "tokens", "actual"),
    [
        (ASKED, "<bos>helpo<eos>A", f"'l' ({BYTES['l']}) 4 'p' ({BYTES['p']}) '<bos>hel' 1 2"),  # another template
        ("hello", "hell", f"'o' ({BYTES['o']}) 4 end 1 2"),
        ("hell", "hello", "end 4 'o' 1 2"),
        ("hello", "<bos>hello", f"'h' ({BYTES['h']}) 0 '<bos>' 1 2"),  # another tokenization
        ([{"role": "critic", "content": "no"}], RENDERED, "critics"),  # which the template refuses
    ],
)
def test_a_prompt_with_other_tokens_is_named_by_the_first(judge: Judge, prompt: Any, tokens: str, actual: str) -> None:
    status, _, (finding,) = judge(prompted("hello", "hello"), prompted(prompt, tokens))
    assert (status, finding.severity, finding.actual) == ("failed", "error", text_with(actual))


def test_without_a_template_or_a_tokenizer_it_is_inconclusive(judge: Judge, recorded: Any, tmp_path: Path) -> None:
    path = Path(shutil.copytree(recorded.path, tmp_path / "bare"))
    (path / "chat_template.jinja").unlink()
    assert judge(prompted("hello", "hello"), path=path) == ("passed", "", [])
    status, reason, _ = judge(prompted(ASKED, RENDERED), path=path)
    assert (status, reason) == ("skipped", text_with("chat"))
    for name in ("tokenizer.json", "tokenizer.model"):
        (path / name).unlink()
    status, reason, _ = judge(prompted("hello", "hello"), path=path)
    assert (status, reason) == ("skipped", text_with("tokenizer"))


def test_a_file_without_prompts_is_not_judged(alone: RunAlone, recorded: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "rollout.pt", [prompted("", "hello")])
    assert alone("CK603", recorded.path, rollout_data=file) == (None, [])
