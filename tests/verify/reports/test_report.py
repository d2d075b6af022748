"""The report as data, as JSON (a contract) and as text."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.core.check import Check
from ckptkit.verify.core.report import ACCEPTED, CheckResult, Finding, Report
from ckptkit.verify.core.run import run_checks
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.reports import report_text as text_in
from ckptkit.verify.reports.render import render
from ckptkit.verify.reports.text import headline
from ckptkit.verify.run import verify, with_causes

BIAS, SHARD = "model.layers.{2..11}.mlp.gate.e_score_correction_bias", "/data/model-00001.safetensors"
FINDING = Finding("CK203", "float32", "bfloat16", "convert again", BIAS, 10, SHARD, "tp0pp1")
REPORT = Report(
    version="0.1.0",
    command=("ckptkit", "verify", "/data/a"),
    checkpoint="/data/a",
    source="/data/b",
    checks=(
        CheckResult("CK101", "config", "passed", None, 3, 0, 0.125),
        CheckResult("CK203", "dtypes", "failed", None, 10, 480, 1.5),
        CheckResult("CK501", "engine", "skipped", "sglang is not installed"),
    ),
    findings=(FINDING, Finding("CK107", "one dtype", "two", "look", severity="warning")),
    facts={"pipeline stages": ["stage 0: layers {0..5}", "stage 1: layers {6..11}"]},
)


def test_json_is_the_contract():
    assert REPORT.to_json() == json.loads(Path(__file__).with_name("contract.json").read_text())


def check(*findings, error=None, nbytes=1):
    def run(subject, result):
        if nbytes:
            result.compared(nbytes=nbytes)
        yield from findings
        if error is not None:
            raise error

    return run


WARNING = replace(FINDING, severity="warning")
NO_GPU = CannotCheck("no GPU")


def report_of(*runs):
    checks = [Check(f"CK7{index:02}", "t", "r", "f", run, "configuration") for index, run in enumerate(runs)]
    outcome = run_checks(Subject(Path("x")), checks)
    return replace(
        REPORT, checks=outcome.checks, findings=outcome.findings, facts=outcome.facts, reasons=outcome.reasons
    )


def test_a_skip_keeps_its_reason_and_headers_that_fail_skip_the_rest():
    failing = check(Finding("CK102", "a", "b", "c"))
    checks = [
        Check("CK101", "t", "r", "f", check(error=CannotCheck("no index", "CK103"), nbytes=0), "headers", gate=True),
        Check("CK102", "t", "r", "f", failing, "headers", gate=True),
        Check("CK201", "t", "r", "f", failing, "values", needs=("sound headers",)),
        Check("CK701", "t", "r", "f", failing, "configuration"),
    ]
    assert [(result.status, result.reason) for result in run_checks(Subject(Path("x")), checks).checks] == [
        ("skipped", "no index (CK103)"),
        ("failed", None),
        ("skipped", "not run because CK102 failed"),
        ("failed", None),
    ]


def test_checks_without_a_subject_are_not_in_the_results_and_grouped_by_reason():
    run = check(error=NotApplicable("no INT4 weights"), nbytes=0)
    checks = [Check(code, "t", "r", "f", run, "values") for code in ("CK201", "CK202")]
    outcome = run_checks(Subject(Path("x")), checks)
    assert (outcome.checks, outcome.findings, outcome.reasons) == ([], [], [])
    assert outcome.facts == {"not applicable": ["CK201, CK202: no INT4 weights"]}
    assert report_of(check(), run).status == "passed"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NO_GPU, "no GPU"),
        (NotApplicable("nothing more"), "nothing more"),
        (CkptkitError("a shard is gone", "copy it"), "a shard is gone"),
        (KeyError("a name of ours"), "an error inside this check"),
    ],
)
def test_findings_before_an_exception_count_and_its_reason_is_kept(error, reason):
    report = report_of(check(FINDING, error=error))
    assert (report.status, report.findings) == ("failed", [FINDING])
    (result,) = report.checks
    assert (result.status, result.tensors_compared) == ("failed", 1)
    assert str(result.reason).startswith(reason)


def test_warnings_before_an_exception_and_an_error_of_our_own_leave_a_report_inconclusive():
    report = report_of(check(WARNING, error=NO_GPU))
    assert (report.status, report.warnings, report.reasons) == ("inconclusive", 1, ["CK700: no GPU"])
    assert report.checks[0].status == "skipped"
    report = report_of(check(), check(error=KeyError("a name of ours")))
    assert (report.status, report.findings) == ("inconclusive", [])
    assert "KeyError: 'a name of ours' (test_report.py:" in report.reasons[0]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 byte")])
def test_a_lack_of_memory_is_not_a_fault_of_a_check(error):
    with pytest.raises(type(error)):
        report_of(check(FINDING, error=error))


def test_inconclusive_verdict_says_what_passed_and_what_was_not_looked_at():
    report = replace(report_of(check(), check(error=NO_GPU)), asked=("files", "values", "SGLang"))
    assert report.verdict == "INCONCLUSIVE: files, values and SGLang passed; not looked at: CK701 (no GPU)"
    several = replace(report, reasons=("CK701, CK702, CK703, CK704: it is unknown; take another", "CK705: no GPU"))
    assert several.verdict.endswith("not looked at: 4 checks, CK701 to CK704 (it is unknown), and 1 more")
    warned = replace(report, findings=(WARNING,), not_asked=("source",))
    assert warned.verdict.startswith("INCONCLUSIVE with 1 warning: files (sound and consistent) and SGLang passed; ")


def test_what_is_accepted_as_unchecked_is_listed_and_leaves_no_reason():
    run = check(error=CannotCheck("needs CUDA"), nbytes=0)
    checks = [Check(code, "t", "r", "f", run, "values") for code in ("CK505", "CK506")]

    def accepting(*codes):
        return run_checks(Subject(Path("x"), options=VerifyOptions(accept=frozenset(codes))), checks)

    assert accepting().reasons == ["CK505, CK506: needs CUDA"]
    report = accepting("CK506")
    assert (report.reasons, report.facts) == (["CK505: needs CUDA"], {ACCEPTED: ["CK506: needs CUDA"]})
    assert accepting("CK505", "CK506").reasons == []


UNCOMPARED = "not compared with a release (no --source): weights, config, tokenizer"


@pytest.mark.parametrize(
    ("facts", "asked", "not_asked", "scope"),
    [
        ("B", "files values behaviour", "source", f"files (sound and consistent); B; {UNCOMPARED}"),
        ("", "engine behaviour", "source", "engine; output compared with transformers; source not given"),
        ("", "files values manifest", "source", "files and values of the manifest"),
        ("", "adapter", "target", "adapter; target not given"),
    ],
)
def test_verdict_claims_what_was_compared(facts, asked, not_asked, scope):
    told = {"behaviour": [facts]} if facts else {}
    passed = replace(report_of(check()), facts=told, asked=asked.split(), not_asked=not_asked.split())
    assert passed.verdict == f"PASSED {scope}"
    assert passed.to_json()["asked"] == asked.split()


def test_every_format_has_the_verdict_of_a_pass():
    report = replace(report_of(check()), asked=("files",), not_asked=("weights", "engine"))
    scope = "PASSED files; weights not compared; engine not asked"
    assert f"# ckptkit: {scope}\n" in text_in(report, ".md")
    assert f"**{scope}**\n" in text_in(report, ".md")
    assert f">{scope}<" in text_in(report, ".html")
    suite = ElementTree.fromstring(text_in(report, ".xml"))[0]  # noqa: S314 - our own text
    properties = {one.get("name"): one.get("value") for one in suite.iter("property")}
    assert properties["verdict"] == scope
    assert json.loads(text_in(report, ".sarif"))["runs"][0]["properties"] == {"verdict": scope}


def test_inconclusive_report_is_an_error_in_junit_and_an_unsuccessful_run_in_sarif():
    report = report_of(check(), check(error=NO_GPU))
    suite = ElementTree.fromstring(text_in(report, ".xml"))[0]  # noqa: S314 - our own text
    assert (suite.get("tests"), suite.get("errors"), suite.get("failures")) == ("3", "1", "0")
    (error,) = suite.iter("error")
    assert error.get("message") == "no GPU"
    (invocation,) = json.loads(text_in(report, ".sarif"))["runs"][0]["invocations"]
    assert invocation["executionSuccessful"] is False
    assert invocation["toolExecutionNotifications"][0] == {
        "level": "error",
        "message": {"text": "not looked at: CK701: no GPU"},
    }


def text_of(report, width=80, *, every=False):
    stream = io.StringIO()
    render(report, Console(file=stream, width=width, highlight=False), every=every)
    return stream.getvalue()


def test_text_says_findings_first_and_the_verdict_last():
    assert text_of(REPORT) == Path(__file__).with_name("report.txt").read_text()


def test_text_fits_eighty_columns_and_loses_nothing(fresh):
    path = fresh("glm4_moe")
    shard = sorted(path.glob("*.safetensors"))[4]
    os.truncate(shard, shard.stat().st_size - 1)
    report = verify(path)
    text = text_of(report, every=True)
    words = {word for finding in report.findings for word in vars(finding).values() if isinstance(word, str)}
    words = {word for text in words for word in text.split()}
    for line in text.splitlines()[:-1]:
        assert line == line.rstrip()
        assert len(line) <= 80 or len(line.split()) <= 2  # a label and a name that is longer
    assert words <= {*text.split(), *(word.rstrip(":") for word in text.split())}
    assert "\x1b" not in text


def test_a_finding_follows_its_cause_in_every_format():
    names = frozenset({"model.layers.1.mlp.gate.weight"})
    (name,) = names
    found = [
        Finding("CK202", "the bits of the source", "8 of 8 elements differ", "convert again", name, names=names),
        Finding("CK205", "values that vary", "all zero", "copy it again", name, names=names),
        Finding("CK202", "the bits of the source", "1 of 8 elements differ", "convert again", "other"),
    ]
    findings = with_causes(found, {"CK202": ("CK204", "CK205")})
    assert [one.cause for one in findings] == ["CK205-1", None, None]
    made = replace(REPORT, findings=findings, checks=[CheckResult("CK202", "values", "failed", None, 10)])
    assert (made.errors, made.verdict) == (2, "FAILED with 2 errors")
    text = text_of(made, 200)
    assert "follows   CK202-1: 8 of 8 elements differ" in text
    assert text.count("8 of 8") == 1
    assert "CK202-1** `model.layers.1.mlp.gate.weight`: 8 of 8 elements differ (follows from CK205-1)" in text_in(
        made, ".md"
    )
    assert '<dt>follows from it</dt><dd id="CK202-1" tabindex="-1"><b>CK202-1</b>' in text_in(made, ".html")
    assert "follows from: CK205-1" in text_in(made, ".xml")
    assert '"cause": "CK205-1"' in text_in(made, ".sarif")


def test_a_cause_has_none_itself_and_two_that_explain_each_other_have_one():
    names = frozenset({"model.layers.1.mlp.gate.weight"})
    found = [Finding(f"CK{code}", "a", f"{code}", "c", *names, names=names) for code in (202, 205, 206, 505)]
    explained_by = {"CK202": ("CK205",), "CK205": ("CK202",), "CK206": ("CK202",), "CK505": ("CK206",)}
    assert [one.cause for one in with_causes(found, explained_by)] == ["CK205-1", None, "CK205-1", "CK205-1"]


def test_parts_of_a_packed_weight_are_the_weight_and_a_move_is_known_by_its_words():
    router, scale = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.weight_packed"
    found = [
        Finding("CK301", "plain", "packed", "c", scale, names=frozenset({scale})),
        Finding("CK505", "alive", "zero", "c", router, names=frozenset({router})),
    ]
    assert [one.cause for one in with_causes(found, {"CK505": ("CK301",)})] == [None, "CK301-1"]
    move = "layers 1 and 2 are exchanged"
    here, there = ({f"{prefix}.layers.{layer}.a.weight" for layer in (1, 2)} for prefix in ("model", "decoder"))
    found = [
        Finding(code, "own", move, "c", "t", names=frozenset(it)) for code, it in (("CK202", here), ("CK402", there))
    ]
    assert [one.cause for one in with_causes(found, {"CK402": ("CK202",)})] == [None, "CK202-1"]
    found[1] = replace(found[1], actual="layers 1 and 3 are exchanged")
    assert [one.cause for one in with_causes(found, {"CK402": ("CK202",)})] == [None, None]


def test_text_gives_details_of_the_first_finding_of_three_codes_and_of_all_if_asked():
    findings = [Finding(f"CK20{code}", "a", f"[/bold] b{number}", "c") for code in range(5) for number in range(7)]
    lines = text_of(replace(REPORT, findings=findings)).splitlines()
    first = [f"error  {one.code}  {one.actual}" for one in findings[:20]]
    assert [line for line in lines if line.startswith("error  CK")] == first
    assert lines[22] == "and 15 more findings"
    details = [f"CK20{code}-1 error" + ": dtypes" * (code == 3) for code in range(3)]
    assert [line for line in lines if line.startswith("CK20")] == details
    assert "Details of 32 more findings: --all shows them." in lines
    every = text_of(replace(REPORT, findings=findings), every=True).splitlines()
    assert sum(line.startswith("error  CK") for line in every) == 35
    assert sum(line.startswith("CK20") and "-" in line for line in every) == 35
    assert "CK101  passed      0.1 s        3  config" in every
    assert lines[-1] == every[-1] == "FAILED with 35 errors  /data/a against /data/b"


# The first sentence of a report: the cause and how much more, in words, without the names of tensors.
LAYERS = "model.layers.{70,80}.input_layernorm.weight, model.layers.{70,80}.mlp.gate.weight"


def report(*findings, reasons=()):
    status = "failed" if any(one.severity == "error" for one in findings) else "passed"
    checks = (CheckResult("CK202", "values", status, None, 3),)
    return Report("0", ("ckptkit",), "/ckpt", "/source", checks, findings, {}, reasons=reasons)


def finding(tensor, actual, expected="what should be", file=None):
    return Finding("CK202", expected, actual, "convert again", tensor, file=file)


UP, CONFIG = "model.layers.9.mlp.experts.{3..8}.up_proj.weight_scale", "/ckpt/c.json"
SEVERAL = "Router of layers 1, 3 and so on to 13: all zero."
Q = "model.layers.7.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (finding(LAYERS, "layers {70,80} are exchanged"), "Layers 70 and 80 are exchanged."),
        (finding("model.layers.{4..5}.mlp.gate.weight", "all zero"), "Router of layers 4 and 5: all zero."),
        (finding(UP, "NaN or infinity"), "weight_scale of up_proj of experts 3 to 8 in layer 9: NaN or infinity."),
        (finding(Q, f"3 of 9 differ in {Q}"), "q_proj of layer 7: 3 of 9 differ."),
        (finding("lm_head.weight", "shape [8, 4]", "shape [9, 4]"), "lm_head: shape [8, 4] instead of [9, 4]."),
        (finding("PASSED.weight", "missing"), "'PASSED': missing."),
        (finding("mtp.layers.0.*", "none stored"), "MTP layer 0: none stored."),
        (finding("model.layers.{1,3,5,7,9,11,13}.mlp.gate.weight", "all zero"), SEVERAL),
        (finding(None, "top_k = 2", "top_k = 3", CONFIG), "c.json: top_k = 2 instead of 3."),
        (finding(None, f"{CONFIG} is not JSON", file=CONFIG), "c.json is not JSON."),
        (finding(None, "no shard", file="/ckpt"), "No shard."),
        (finding(Q, "release/x.distcp ends early", file="/m/release/x.distcp"), "release/x.distcp ends early."),
        (finding(None, "no tokenizer file", file="/models/good"), "good: no tokenizer file."),
        (finding(None, "missing", file="/ckpt"), "ckpt: missing."),
        (finding(None, "none", "factors A and B"), "Factors A and B: none."),
        (finding(None, "its name is another", "factors A and B"), "Factors A and B: its name is another."),
    ],
)
def test_the_sentence_names_the_cause_in_words(found, sentence):
    assert headline(report(found)) == sentence


def test_other_errors_are_counted_and_what_follows_from_one_or_says_the_same_is_not():
    cause = finding(LAYERS, "layers {70,80} are exchanged")
    follows = Finding("CK305", "near", "far", "again", "a.b.weight", cause="CK202-1")
    others = [finding(f"model.layers.{layer}.mlp.gate.weight", f"{layer} differ") for layer in range(9)]
    assert headline(report(cause, follows)) == "Layers 70 and 80 are exchanged."
    assert headline(report(cause, follows, *others)) == "Layers 70 and 80 are exchanged, and 9 more errors."
    names = [f"model.layers.12.{tail}.weight" for tail in ("enorm", "hnorm", "eh_proj")]
    lost = [Finding("CK104", "there", "missing", "again", name, names=frozenset({name})) for name in names]
    assert headline(report(*lost)) == "3 tensors of layer 12: missing."


def test_without_an_error_the_sentence_says_what_is_known():
    assert headline(report()) == "1 check passed."
    assert headline(report(WARNING)) == "1 check passed, with 1 warning to read."
    assert headline(report(reasons=("CK501, CK502: SGLang is not installed", "CK401: no torch"))) == (
        "Not everything was checked: SGLang is not installed, and 1 more reason."
    )
