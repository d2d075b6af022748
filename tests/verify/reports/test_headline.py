"""The first sentence of a report: the cause and how much more, in words, without the names of tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptkit.core.findings_text import plain
from verify.report import CheckResult, Finding, Report
from verify.reports import text_of
from verify.reports.headline import headline
from verify.reports.render import report_lines
from verify.reports.text import said_of

LAYERS = "model.layers.{70,80}.input_layernorm.weight, model.layers.{70,80}.mlp.gate.weight"


def report(*findings: Finding, reasons: tuple[str, ...] = ()) -> Report:
    status = "failed" if any(one.severity == "error" for one in findings) else "passed"
    checks = (CheckResult("CK202", "values", status, None, 3),)
    return Report("0", ("ckptkit",), "/ckpt", "/source", checks, findings, {}, reasons=reasons)


def finding(tensor: str | None, actual: str, expected: str = "what should be", file: str | None = None) -> Finding:
    return Finding("CK202", expected, actual, "convert again", tensor, file=file)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (finding(LAYERS, "layers {70,80} are exchanged"), "Layers 70 and 80 are exchanged."),
        (finding("model.layers.{4..5}.mlp.gate.weight", "all zero"), "Router of layers 4 and 5: all zero."),
        (
            finding("model.layers.9.mlp.experts.{3..8}.up_proj.weight_scale", "NaN or infinity"),
            "weight_scale of up_proj of experts 3 to 8 in layer 9: NaN or infinity.",
        ),
        (
            finding(
                "model.layers.7.self_attn.q_proj.weight", "3 of 9 differ in model.layers.7.self_attn.q_proj.weight"
            ),
            "q_proj of layer 7: 3 of 9 differ.",
        ),
        (
            finding("model.layers.{2..11}.mlp.gate.bias", "bfloat16", "float32"),
            "Bias of router of layers 2 to 11: bfloat16 instead of float32.",
        ),
        (finding("lm_head.weight", "shape [8, 4]", "shape [9, 4]"), "lm_head: shape [8, 4] instead of [9, 4]."),
        (finding("model.embed_tokens.weight", "missing"), "embed_tokens: missing."),
        (finding("PASSED.weight", "missing"), "'PASSED': missing."),
        (finding("mtp.layers.0.*", "none stored"), "MTP layer 0: none stored."),
        (
            finding("model.layers.{1,3,5,7,9,11,13}.mlp.gate.weight", "all zero"),
            "Router of layers 1, 3 and so on to 13: all zero.",
        ),
        (finding(None, "top_k = 2", "top_k = 3", "/ckpt/config.json"), "config.json: top_k = 2 instead of 3."),
        (finding(None, "/ckpt/config.json is not JSON", file="/ckpt/config.json"), "config.json is not JSON."),
        (finding(None, "no shard", file="/ckpt"), "No shard."),
        (finding(None, "no tokenizer file", file="/models/good"), "good: no tokenizer file."),
        (finding(None, "vLLM reads a.safetensors too", file="/ckpt/a.safetensors"), "vLLM reads a.safetensors too."),
    ],
)
def test_the_sentence_names_the_cause_in_words(found: Finding, sentence: str) -> None:
    assert headline(report(found)) == sentence


def test_of_a_path_only_the_whole_checkpoint_is_left_out() -> None:
    found = finding(None, f"{Path.cwd()}/e2/config.json: no such file", file="e2/config.json")
    assert headline(replace(report(found), checkpoint="e2")) == "config.json: no such file."
    assert headline(replace(report(found), checkpoint="2")) == f"{found.actual}."


@pytest.mark.parametrize(
    ("actual", "file", "sentence"),
    [
        ("none: the adapter changes nothing", "/run/ADAPTER", "ADAPTER: none: the adapter changes nothing."),
        (
            "it changes nothing: every lora_B is zero",
            "/run/ADAPTER",
            "ADAPTER: it changes nothing: every lora_B is zero.",
        ),
        ("not stored", "/run/ADAPTER", "ADAPTER: not stored."),
        ("missing", "/run/ADAPTER", "ADAPTER: missing."),
        ("none", None, "Factors A and B: none."),
        ("not given", None, "Factors A and B: not given."),
        ("they differ", "/run/ADAPTER/x.json", "x.json: they differ."),
        ("every lora_B is zero", "/run/ADAPTER", "Every lora_B is zero."),
        ("its name is another", None, "Factors A and B: its name is another."),
        ("itself a link", None, "Itself a link."),
    ],
)
def test_the_sentence_has_a_subject(actual: str, file: str | None, sentence: str) -> None:
    found = Finding("CK131", "factors A and B", actual, "export it again", None, file=file)
    assert headline(replace(report(found), checkpoint="/run/ADAPTER")) == sentence
    named = actual.startswith(("every", "itself"))
    assert said_of(found) == (f"{file}: {actual}" if file else actual if named else f"factors A and B: {actual}")


def test_other_errors_are_counted_and_what_follows_from_one_is_not() -> None:
    cause = finding(LAYERS, "layers {70,80} are exchanged")
    follows = Finding("CK305", "near", "far", "again", "a.b.weight", cause="CK202-1")
    others = [finding(f"model.layers.{layer}.mlp.gate.weight", f"{layer} differ") for layer in range(9)]
    assert headline(report(cause, follows)) == "Layers 70 and 80 are exchanged."
    assert headline(report(cause, others[0])) == "Layers 70 and 80 are exchanged, and 1 more error."
    assert headline(report(cause, follows, *others)) == "Layers 70 and 80 are exchanged, and 9 more errors."


def test_findings_that_say_the_same_are_one_cause() -> None:
    names = [f"model.layers.12.{tail}.weight" for tail in ("enorm", "hnorm", "eh_proj")]
    lost = [Finding("CK104", "there", "missing", "again", name, names=frozenset({name})) for name in names]
    assert headline(report(*lost)) == "3 tensors of layer 12: missing."
    assert headline(report(*lost, finding("lm_head.weight", "different"))) == (
        "3 tensors of layer 12: missing, and 1 more error."
    )


def test_without_an_error_the_sentence_says_what_is_known() -> None:
    warned = Finding("CK107", "one dtype", "two", "look", severity="warning")
    assert headline(report()) == "1 check passed."
    assert headline(report(warned)) == "1 check passed, with 1 warning to read."
    assert headline(report(reasons=("CK501, CK502: SGLang is not installed", "CK401: no torch"))) == (
        "Not everything was checked: SGLang is not installed, and 1 more reason."
    )


def test_every_format_for_people_begins_with_it() -> None:
    made = report(finding(LAYERS, "layers {70,80} are exchanged"))
    sentence = headline(made)
    assert next(iter(plain(report_lines(made, 80)))) == sentence
    assert text_of(made, ".md").splitlines()[2] == f"**{sentence}**"
    page = text_of(made, ".html")
    assert 0 < page.index(sentence) < page.index("input_layernorm")
