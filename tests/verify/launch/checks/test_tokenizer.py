"""CK716: the tokenizer of --hf-checkpoint against that of the weights; CK724: what a launch asks of it."""

import json
import shutil

import pytest
from support.messages import text_with

from ckptkit.verify.launch.preflight import preflight

WORDS = {f"w{number}": number for number in range(300)}
ADDED = [{"id": 300, "content": "<end>", "special": True}, {"id": 301, "content": "<turn>", "special": True}]
CONFIG = {"eos_token": "w3", "chat_template": "{{ messages }}"}
MERGES = ["w 1", "w 2"]


def write(root, file, content):
    (root / file).write_text(content if isinstance(content, str) else json.dumps(content))


def model(vocab, merges):
    return {"type": "BPE", "vocab": vocab, "merges": merges}


def tokenizer(**changes):
    return {"model": model(WORDS, MERGES), "added_tokens": ADDED} | changes


@pytest.fixture
def sides(releases, converted, tmp_path):
    """--hf-checkpoint of qwen2-tied, and the `hf/` beside what it was converted to, both with the same tokenizer."""
    engine = shutil.copytree(releases("qwen2-tied"), tmp_path / "engine")
    root = shutil.copytree(converted("qwen2-tied"), tmp_path / "megatron")
    for side in (engine, root / "hf"):
        (side / "tokenizer.model").unlink()
        write(side, "tokenizer.json", tokenizer())
        write(side, "tokenizer_config.json", CONFIG)
    return engine, root / "hf"


def report_of(sides):
    return preflight(hf_checkpoint=sides[0], ref_load=sides[1].parent)


def found(sides):
    return [finding for finding in report_of(sides).findings if finding.code == "CK716"]


def test_one_tokenizer_on_both_sides_is_silent(sides):
    report = report_of(sides)
    assert (report.status, report.findings) == ("passed", [])
    assert next(check.status for check in report.checks if check.code == "CK716") == "passed"


MOVED = "another model's tokenizer: 300 of the 302 tokens in --hf-checkpoint have other ids ('w0' 1, not 0)"
SHIFTED = {f"w{number}": number + 1 for number in range(299)} | {"w299": 0}


@pytest.mark.parametrize(
    ("changes", "actual"),
    [
        ({"model": model(SHIFTED, MERGES)}, MOVED),
        ({"added_tokens": ADDED[:1]}, "1 302 --hf-checkpoint"),
        ({"added_tokens": [*ADDED, {"id": 302, "content": "<new>"}]}, "1 added"),
        ({"model": model(WORDS, MERGES[::-1])}, "model.merges[0] is 'w 2' but 'w 1' in --hf-checkpoint"),
    ],
)
def test_another_vocabulary_beside_the_weights_is_an_error(changes, actual, sides):
    write(sides[1], "tokenizer.json", tokenizer(**changes))
    (finding,) = found(sides)
    assert (finding.severity, finding.actual.partition("; no text")[0]) == ("error", text_with(actual))
    assert finding.file == str(sides[1] / "tokenizer.json")


@pytest.mark.parametrize(
    ("file", "content", "severity", "actual"),
    [
        ("tokenizer_config.json", {"eos_token": "w3"}, "warning", "missing"),
        ("chat_template.jinja", "{{ other }}", "warning", "chat template 'default' has 11 characters but 14"),
        ("tokenizer_config.json", CONFIG | {"eos_token": "<turn>"}, "warning", "eos_token is '<turn>' but 'w3'"),
        (
            "tokenizer.json",
            tokenizer(added_tokens=[ADDED[0], ADDED[1] | {"special": False, "normalized": False}]),
            "error",
            "added_tokens[1].special is False but True",
        ),
    ],
)
def test_another_template_or_special_token_is_a_warning(file, content, severity, actual, sides, monkeypatch):
    """As a base model beside its instruct sibling has it; ids of a text that differ are an error."""
    monkeypatch.setattr("ckptkit.verify.evidence.side.tokenizers.ask_libraries", lambda *_: ([], "not asked"))
    write(sides[1], file, content)
    (finding,) = found(sides)
    assert finding.severity == severity
    assert finding.actual.startswith(actual)


def test_the_same_tokenizer_in_other_files_is_silent_and_a_broken_one_is_an_error(sides):
    engine, _ = sides
    (engine / "tokenizer.json").unlink()
    write(engine, "vocab.json", WORDS)
    write(engine, "merges.txt", "#version: 0.2\nw 1\nw 2\n")
    write(engine, "tokenizer_config.json", CONFIG | {"added_tokens_decoder": {str(one["id"]): one for one in ADDED}})
    assert found(sides) == []
    write(sides[1], "tokenizer.json", "{")
    assert [("tokenizer.json" in one.actual, one.severity) for one in found(sides)] == [(True, "error")]


def test_two_formats_cannot_be_compared(sides):
    (sides[0] / "tokenizer.json").unlink()
    (sides[0] / "tokenizer.model").write_bytes(b"one")
    report = report_of(sides)
    assert (report.status, report.findings) == ("inconclusive", [])
    assert "formats" in report.reasons[0]


@pytest.mark.parametrize("option", ["", "--sglang-skip-tokenizer-init", "--skip-tokenizer-init"])
def test_an_engine_without_a_tokenizer_is_an_error_unless_it_is_started_so(option, releases, tmp_path):
    """slime's rollout loads it, where the user has not put another in its place."""
    engine = shutil.copytree(releases("qwen2-tied"), tmp_path / "engine")
    (engine / "tokenizer.model").unlink()
    (finding,) = preflight(arguments=["--hf-checkpoint", str(engine), *option.split()]).findings
    assert (finding.code, finding.severity) == ("CK716", "warning" if option else "error")
    assert finding.actual == text_with(f"tokenizer {option}")


@pytest.mark.parametrize(
    ("words", "option", "readers"),
    [
        (["data.train_files=x", "trainer.resume_mode=disable"], "model.path", "the trainer"),  # verl, supervised
        (["policy.generation.backend=vllm"], "policy.model_name", "engine and trainer"),
        (["actor_infer.strategy_args.strategy_name=vllm"], "pretrain", "engine and trainer"),
    ],
)
def test_finding_names_the_stacks_own_setting_of_the_model(words, option, readers, sides):
    (sides[0] / "tokenizer.json").unlink()
    report = preflight(arguments=[*words, f"{option}={sides[0]}"])
    (finding,) = [one for one in report.findings if one.code == "CK716"]
    assert finding.expected == text_with(f"tokenizer {readers} {option}")
    assert "--hf-checkpoint" not in str(report.findings)


STOPS = "--rollout-stop-token-ids"


@pytest.fixture
def engine(releases, tmp_path):
    root = shutil.copytree(releases("qwen2-tied"), tmp_path / "engine")
    write(root, "tokenizer.json", {"model": model(WORDS, [])})
    write(root, "tokenizer_config.json", {"eos_token": "w3"})
    write(root, "chat_template.jinja", "{{ messages }}")
    return root


def judged(root, *words):
    report = preflight(hf_checkpoint=root, arguments=words)
    status = next((check.status for check in report.checks if check.code == "CK724"), None)
    return status, [finding for finding in report.findings if finding.code == "CK724"]


def test_a_template_and_stop_ids_that_are_there_pass(engine):
    more = ["--rollout-max-response-len", "8192"]
    assert judged(engine, "--apply-chat-template", STOPS, "3", "5", *more) == ("passed", [])
    assert judged(engine, *more) == (None, [])  # asks for neither
    (engine / "chat_template.jinja").unlink()
    (engine / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w3", "chat_template": "{{ messages }}"}))
    assert judged(engine, "--apply-chat-template") == ("passed", [])


def test_a_template_that_is_nowhere_and_a_stop_id_beyond_the_vocabulary_are_found(engine):
    vocabulary = json.loads((engine / "config.json").read_text())["vocab_size"]
    status, (finding,) = judged(engine, STOPS, "3", str(vocabulary))
    assert (status, finding.actual) == ("failed", text_with(f"{STOPS} {vocabulary} command"))
    (engine / "chat_template.jinja").unlink()
    status, (finding,) = judged(engine, "--apply-chat-template")
    assert (status, finding.severity) == ("failed", "error")
    assert finding.expected == text_with("--apply-chat-template")
