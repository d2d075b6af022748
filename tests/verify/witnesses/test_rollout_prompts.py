"""CK603: recorded prompts against the checkpoint's tokenizer and chat template, tokens worked out by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import rollout_files
from support.check_examples import hold_example
from support.installed import release
from support.rollout_files import Sample, ids_of, write

from verify.check import Tally
from verify.checks.witnesses import prompts as prompt_checks
from verify.evidence.subject import Subject
from verify.options import VerifyOptions
from verify.report import CheckResult, Finding
from verify.skip import Unable
from verify.witnesses.rollouts.job import Rendering
from verify.witnesses.rollouts.run import run_sglang_templates

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
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    recorded: Any,
) -> Judge:
    """`judge(samples)`: status, reason and findings of CK603; `sglang` is what SGLang renders."""

    def one(given: Sequence[Sample], sglang: Sequence[Rendering] = (), **how: Any) -> tuple[str, str, list[Finding]]:
        monkeypatch.setattr(prompt_checks, "run_sglang_templates", lambda subject: sglang)
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
    assert finding.actual == f"'l' ({letters['l']}) at token 4; 1 of 2 prompts differ"
    hold_example("CK603", finding)
    assert finding.expected.endswith(f"recorded for sample 1: 'p' ({letters['p']}) behind '<bos>hel'")


@pytest.mark.parametrize(
    ("text", "tokens", "actual"), [("hello", "hell", "'o' (%d) at token 4"), ("hell", "hello", "the end at token 4")]
)
def test_prompts_of_other_lengths_fail(judge: Judge, text: str, tokens: str, actual: str) -> None:
    _, _, (finding,) = judge([prompted(text, tokens)])
    said = actual % rollout_files.BYTES["o"] if "%" in actual else actual
    assert finding.actual == f"{said}; 1 of 1 prompts differ"


def test_options_that_no_file_records_are_tried_and_named(judge: Judge) -> None:
    answered = [*ASKED, {"role": "assistant", "content": "he"}]
    found = judge([prompted(ASKED, f"{RENDERED}T"), prompted(answered, "<bos>hello<eos><bos>he")])
    assert found == ("passed", "", [])


def test_prompt_that_ends_before_the_models_turn_is_a_warning(judge: Judge) -> None:
    status, _, (finding,) = judge([prompted(ASKED, RENDERED), prompted(ASKED, "<bos>hello<eos>")])
    assert (status, finding.severity) == ("passed", "warning")
    assert finding.actual == "1 of 2, first sample 1, are equal with add_generation_prompt=False only"


def test_text_with_the_tokenizers_own_special_tokens_is_a_warning(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, recorded: Any, tmp_path: Path
) -> None:
    path = tmp_path / "special"
    shutil.copytree(recorded.path, path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    status, _, (finding,) = judge([prompted("hello", "<bos>hello")], path=path)
    assert (status, finding.severity) == ("passed", "warning")
    assert finding.actual == "1 of 1, first sample 0, are equal with add_special_tokens=True only"


def test_messages_that_the_template_refuses_fail(judge: Judge) -> None:
    _, _, (finding,) = judge([prompted([{"role": "critic", "content": "no"}], RENDERED)])
    assert finding.actual == "it refuses those of sample 0: no critics"


def test_text_with_another_tokenization_fails(judge: Judge) -> None:
    _, _, (finding,) = judge([prompted("hello", "<bos>hello")])
    assert finding.actual == f"'h' ({rollout_files.BYTES['h']}) at token 0; 1 of 1 prompts differ"


def test_what_sglang_alone_renders_otherwise_is_a_warning(judge: Judge) -> None:
    other = Rendering(0, 7, "'B' (1)", "'A' (2)", "hello")
    status, _, (finding,) = judge([prompted(ASKED, RENDERED)], sglang=[other])
    assert (status, finding.severity) == ("passed", "warning")
    assert finding.actual == "'B' (1) at token 7 in SGLang's chat endpoint"


def test_messages_that_sglang_alone_refuses_are_a_warning(judge: Judge) -> None:
    status, _, (finding,) = judge([prompted(ASKED, RENDERED)], sglang=[Rendering(0, refused="no such role")])
    assert (status, finding.severity) == ("passed", "warning")
    assert finding.actual == "it refuses those of sample 0: no such role"


def test_options_that_sglang_was_not_told_are_no_warning(judge: Judge) -> None:
    other = Rendering(0, 8, "the end", "'T' (1)", "hello")
    assert judge([prompted(ASKED, f"{RENDERED}T")], sglang=[other]) == ("passed", "", [])


def test_prompt_that_sglang_renders_and_transformers_does_not_passes(judge: Judge) -> None:
    assert judge([prompted(ASKED, "<bos>hello<eos>B")], sglang=[Rendering(0)]) == ("passed", "", [])


def test_without_a_template_or_a_tokenizer_it_is_inconclusive(judge: Judge, recorded: Any, tmp_path: Path) -> None:
    path = tmp_path / "bare"
    shutil.copytree(recorded.path, path)
    (path / "chat_template.jinja").unlink()
    assert judge([prompted("hello", "hello")], path=path) == ("passed", "", [])
    status, reason, _ = judge([prompted(ASKED, RENDERED)], path=path)
    assert status == "skipped"
    assert "has no chat template" in reason
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


@pytest.mark.sglang
@pytest.mark.usefixtures("served_sglang")
def test_sglangs_own_chat_handler_renders_the_template(recorded: Any, tmp_path: Path) -> None:
    given = [
        prompted(ASKED, RENDERED),
        prompted(ASKED, f"{RENDERED}T", apply_chat_template_kwargs={"enable_thinking": False}),
        prompted(ASKED, "<bos>helpo<eos>A"),
        prompted("hello", "hello"),
    ]
    subject = Subject(recorded.path, options=VerifyOptions(rollout_data=write(tmp_path / "rollout.pt", given)))
    if release("sglang") >= (0, 5, 23):  # its handler wants a server's context
        with pytest.raises(Unable, match="while starting SGLang's chat handler"):
            run_sglang_templates(subject)
        return
    found = run_sglang_templates(subject)
    assert [(one.index, one.at, one.refused) for one in found] == [(0, None, ""), (1, None, ""), (2, 4, "")]


def test_without_sglang_its_rendering_is_said_to_be_missing(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, recorded: Any, tmp_path: Path
) -> None:
    def missing(subject: Subject) -> Sequence[Rendering]:
        raise Unable("SGLang is not installed here")

    file = write(tmp_path / "rollout.pt", [prompted(ASKED, RENDERED)])
    monkeypatch.setattr(prompt_checks, "run_sglang_templates", missing)
    tally = Tally()
    assert (
        list(prompt_checks.same_prompts(Subject(recorded.path, options=VerifyOptions(rollout_data=file)), tally)) == []
    )
    assert tally.facts["notes"] == [
        "recorded prompts were compared with transformers' rendering alone, not with SGLang's: "
        "SGLang is not installed here"
    ]
