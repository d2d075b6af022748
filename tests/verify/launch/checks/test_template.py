"""CK724: a chat template and stop ids that a launch asks for, by hand-written files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.fixture_types import PathOf
from support.messages import text_with

from ckptkit.verify.core.report import Finding
from ckptkit.verify.launch.preflight import preflight

STOPS = "--rollout-stop-token-ids"


@pytest.fixture
def engine(releases: PathOf, tmp_path: Path) -> Path:
    """A directory of 320 tokens, with a tokenizer and a chat template."""
    root = shutil.copytree(releases("qwen2-tied"), tmp_path / "engine")
    words = {f"w{number}": number for number in range(300)}
    (root / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": words, "merges": []}}))
    (root / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w3"}))
    (root / "chat_template.jinja").write_text("{{ messages }}")
    return root


def judged(root: Path, *words: str) -> tuple[str | None, list[Finding]]:
    """Status of CK724, None where it does not apply, and its findings."""
    report = preflight(root, arguments=words)
    status = next((check.status for check in report.checks if check.code == "CK724"), None)
    return status, [finding for finding in report.findings if finding.code == "CK724"]


def test_a_template_and_stop_ids_that_are_there_pass(engine: Path) -> None:
    more = ["--rollout-max-response-len", "8192"]
    assert judged(engine, "--apply-chat-template", STOPS, "3", "5", *more) == ("passed", [])
    assert judged(engine, *more) == (None, [])  # asks for neither
    (engine / "chat_template.jinja").unlink()
    (engine / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w3", "chat_template": "{{ messages }}"}))
    assert judged(engine, "--apply-chat-template") == ("passed", [])


def test_a_template_that_is_nowhere_and_a_stop_id_beyond_the_vocabulary_are_found(engine: Path) -> None:
    vocabulary = json.loads((engine / "config.json").read_text())["vocab_size"]
    status, (finding,) = judged(engine, STOPS, "3", str(vocabulary))
    assert (status, finding.actual) == ("failed", f"{STOPS} {vocabulary}, at the command line")
    (engine / "chat_template.jinja").unlink()
    status, (finding,) = judged(engine, "--apply-chat-template")
    assert (status, finding.severity) == ("failed", "error")
    assert finding.expected == text_with("--apply-chat-template")
