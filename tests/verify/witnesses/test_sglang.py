"""Real SGLang as a witness: sound checkpoints pass, and each kind of broken one gives the finding that names it."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from support import models
from support.messages import text_with
from support.quantized import fp8_blocks, fp8_config, small_groups_allowed, write
from support.sglang_runs import Case, int4_config, online_int4, refusal, reported, run_cases, written

from ckptkit.app.api import quantize
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.checks.witnesses.loading import KEEP_ROUTER
from ckptkit.verify.core.check import all_checks
from ckptkit.verify.core.run import run_checks
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.loading import run as sglang_run
from ckptkit.verify.witnesses.process.interpreter import Interpreter

pytestmark = pytest.mark.sglang

GROUP = 32
ONLINE = ["lm_head", "model.embed_tokens"]
EXPERTS = "model.layers.{0..11}.mlp.experts.{0..11}."
ROUTER, DEAD = "mlp.gate.weight", {2: 0.0, 3: 0.5}  # layers whose routers have this number alone


def online(root, name, release, ignore):
    packed = online_int4(models.tensors(release), ignore, GROUP)
    return Case(written(root, name, release, packed, quantization_config=int4_config(ignore, GROUP)))


def sound_cases(root, releases, converted):
    qwen, glm = releases("qwen3_moe"), releases("glm4_moe")
    quantize(qwen, root / "int4", QuantScheme(GROUP, "qmax7"))
    asymmetric = QuantScheme(GROUP, "minmax", (), symmetric=False)
    quantize(releases("qwen2-tied"), root / "zeros", asymmetric)
    with small_groups_allowed():
        quantize(qwen, root / "zeros-moe", asymmetric, readers=("sglang",))
    return {
        "qwen2-tied": Case(releases("qwen2-tied")),
        "qwen3_moe": Case(qwen),
        "int4 qwen3_moe": Case(root / "int4"),
        "online int4 glm4_moe": online(root, "online-glm", glm, [*ONLINE, KEEP_ROUTER, "re:.*shared_experts.*"]),
        "zero points int4 qwen2-tied": Case(root / "zeros"),
        "zero points int4 qwen3_moe": Case(root / "zeros-moe"),
        "fp8 qwen3_moe": Case(in_fp8(qwen, root / "fp8")),
        "megatron qwen2-tied": Case(converted("qwen2-tied"), releases("qwen2-tied")),
        "megatron glm4_moe": Case(converted("glm4_moe"), glm),
        "draft layers": Case(releases("glm4_moe-mtp")),
    }


def in_fp8(release, path, block=(32, 64)):
    kept = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(12))]
    write(
        release,
        path,
        lambda name: name.endswith("_proj.weight"),
        fp8_blocks(*block),
        lambda config: config | {"quantization_config": fp8_config(block, kept)},
    )
    return path


def broken_cases(root, releases, converted):
    qwen, glm = releases("qwen3_moe"), releases("glm4_moe")
    tensors = models.tensors(qwen)
    lost = "model.layers.4.mlp.experts.7.up_proj.weight"
    gates = {f"model.layers.{layer}.{ROUTER}": torch.full((12, 128), value).bfloat16() for layer, value in DEAD.items()}
    stray = {"model.layers.12.input_layernorm.weight": torch.ones(128).bfloat16()}
    other = {".experts.8.": ".experts.9.", ".experts.9.": ".experts.8."}
    swapped = {re.sub(r"\.experts\.[89]\.", lambda match: other[match[0]], name): one for name, one in tensors.items()}
    shards = [f"model.layers.3.self_attn.{part}_proj" for part in "qkv"]
    models.save("qwen2-tied", root / "float32", torch.float32)
    return {
        "lost": Case(written(root, "lost", qwen, {name: one for name, one in tensors.items() if name != lost})),
        "fused": Case(releases("qwen3_moe", fused=True)),
        "packed router qwen3_moe": online(root, "router-qwen", qwen, ONLINE),
        # Ignored by module name, which an online quantizer that goes by parameter names does not understand.
        "packed router glm4_moe": online(root, "router-glm", glm, [*ONLINE, r"re:.*mlp\.gate$"]),
        "dead routers": Case(written(root, "dead", qwen, tensors | gates)),
        "stray": Case(written(root, "stray", qwen, tensors | stray)),
        "bf16 shards": online(root, "shards", glm, [*ONLINE, KEEP_ROUTER, *shards]),
        "float32": Case(root / "float32"),
        "other source": Case(converted("qwen3_moe"), written(root, "swapped", qwen, swapped)),
        # An expert has 96 rows: one and a half blocks of 64.
        "fp8 uneven": Case(in_fp8(qwen, root / "fp8-uneven", (64, 64))),
        "swapped_scales": Case(root / "fp8", alter="swapped_scales"),
        **{alter: Case(qwen, alter=alter) for alter in ("swapped_experts", "one_bit", "half_written")},
    }


@pytest.fixture(scope="module")
def cases(releases, converted, tmp_path_factory):
    root = tmp_path_factory.mktemp("sglang")
    return sound_cases(root, releases, converted) | broken_cases(root, releases, converted)


SOUND = (
    *("qwen2-tied", "qwen3_moe", "int4 qwen3_moe", "online int4 glm4_moe", "zero points int4 qwen2-tied"),
    *("zero points int4 qwen3_moe", "fp8 qwen3_moe", "megatron qwen2-tied", "megatron glm4_moe", "draft layers"),
)


@pytest.mark.parametrize("name", SOUND)
def test_sound_checkpoints_pass(name, judged):
    results, findings, facts = judged(name)
    assert findings == []
    status = {code: result.status for code, result in results.items()}
    draft = {"CK508": "passed"} if "draft" in name else {}
    routers = {} if "qwen2" in name else {"CK505": "passed"}
    packed = {"CK506": "skipped"} if "int4" in name or "fp8" in name else {}
    loaded = dict.fromkeys(("CK501", "CK502", "CK503", "CK504"), "passed")
    assert status == {**loaded, **routers, **packed, **draft}
    assert all(results[code].reason == text_with("CUDA") for code in packed)
    assert facts["SGLang"][0].startswith(f"SGLang {version('sglang')}, ")


def test_draft_layers_are_a_model_of_their_own(judged):
    _, _, facts = judged("draft layers")
    assert not [line for line in facts["SGLang"] if "layers.12." in line]
    assert facts["SGLang's draft model"][0] == text_with("Glm4MoeForCausalLM")


BROKEN = {
    "lost": {("CK502", "model.layers.4.mlp.experts.7.up_proj.weight", 1)},
    "fused": {
        *(("CK502", f"{EXPERTS}{part}_proj.weight", 144) for part in ("gate", "up", "down")),
        ("CK503", "model.layers.{0..11}.mlp.experts.gate_up_proj", 12),
        ("CK503", "model.layers.{0..11}.mlp.experts.down_proj", 12),
    },
    "packed router qwen3_moe": {
        ("CK502", f"model.layers.{{0..11}}.{ROUTER}", 12),
        *(("CK503", f"model.layers.{{0..11}}.{ROUTER}_{part}", 12) for part in ("packed", "scale", "shape")),
        ("CK505", f"model.layers.{{0..11}}.{ROUTER}", 12),
    },
    "packed router glm4_moe": {
        ("CK502", f"model.layers.{{2..11}}.{ROUTER}", 10),
        *(("CK503", f"model.layers.{{2..11}}.{ROUTER}_{part}", 10) for part in ("packed", "scale", "shape")),
        ("CK505", f"model.layers.{{2..11}}.{ROUTER}", 10),
    },
    "dead routers": {("CK505", f"model.layers.2.{ROUTER}", 1), ("CK505", f"model.layers.3.{ROUTER}", 1)},
    "stray": {("CK503", "model.layers.12.input_layernorm.weight", 1)},
    "bf16 shards": {
        *(
            ("CK502", f"model.layers.3.self_attn.{one}_proj.weight_{part}", 1)
            for one in "qkv"
            for part in ("packed", "scale", "shape")
        ),
        *(("CK503", f"model.layers.3.self_attn.{one}_proj.weight", 1) for one in "qkv"),
    },
    "other source": {
        ("CK504", f"model.layers.{{0..11}}.mlp.experts.{{8..9}}.{part}_proj.weight", 24)
        for part in ("gate", "up", "down")
    },
    "swapped_experts": {
        ("CK504", f"model.layers.3.mlp.experts.{{4..5}}.{part}_proj.weight", 2) for part in ("gate", "up", "down")
    },
    "one_bit": {("CK504", "model.layers.7.self_attn.k_proj.weight", 1)},
    "half_written": {
        ("CK502", "model.layers.{0..11}.mlp.experts.w2_weight", 12),
        ("CK503", f"{EXPERTS}down_proj.weight", 144),
    },
    "swapped_scales": {
        ("CK504", f"model.layers.5.mlp.experts.11.{part}_proj.weight_scale_inv", 1) for part in ("gate", "up")
    },
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints_are_found(name, judged):
    results, findings, _ = judged(name)
    assert {(finding.code, finding.tensor, finding.count) for finding in findings} == BROKEN[name]
    assert {code for code, result in results.items() if result.status == "failed"} == {
        code for code, _, _ in BROKEN[name]
    }


def test_findings_count_elements_and_name_parameters(judged):
    def first(name, code):
        return next(finding for finding in judged(name)[1] if finding.code == code)

    assert all(KEEP_ROUTER in first("packed router qwen3_moe", code).hint for code in ("CK503", "CK505"))
    assert first("packed router qwen3_moe", "CK505").actual == text_with("1536 1536")
    assert [finding.actual for finding in judged("dead routers")[1]] == [text_with("zero"), text_with("0.5")]
    assert first("one_bit", "CK504").actual == text_with("1 8192 [3 4]")
    assert first("half_written", "CK502").actual == text_with("73728 147456")
    assert first("half_written", "CK503").actual == text_with("6144 12288")
    assert first("lost", "CK502").actual == text_with("model.layers.4.mlp.experts.w13_weight SGLang")


def test_blocks_that_do_not_divide_an_experts_rows_are_refused_by_sglang(judged):
    (finding,) = judged("fp8 uneven")[1]
    assert finding.code == "CK501"
    assert "is not divisible by weight quantization block_n = 64" in finding.actual


def test_a_smaller_dtype_is_a_warning(runs, judged):
    results, findings, _ = judged("float32")
    assert {result.status for result in results.values()} <= {"passed", "skipped"}
    assert {(finding.code, finding.severity) for finding in findings} == {("CK504", "warning")}
    assert all(finding.actual == text_with(f"float32 {reported(runs['float32']).dtype}") for finding in findings)


def test_verify_streams_a_megatron_checkpoint_and_keeps_stdout_clean(releases, converted, capfd, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # tests/gpu looks at what happens with one
    report = verify(converted("glm4_moe"), source=releases("glm4_moe"), against=frozenset({"sglang"}))
    assert (report.status, report.findings) == ("passed", [])
    passed = {check.code for check in report.checks if check.status == "passed"}
    assert passed >= {f"CK50{number}" for number in range(1, 6)}
    assert capfd.readouterr().out == ""


@pytest.mark.usefixtures("served_sglang")
def test_a_model_that_sglang_cannot_load_is_a_finding(releases, tmp_path):
    release = releases("qwen2-tied")
    path = written(tmp_path, "wide", release, models.tensors(release), vocab_size=640)
    subject = Subject(path, options=VerifyOptions(against=frozenset({"sglang"})))
    outcome = run_checks(subject, [one for one in all_checks() if one.stage == "sglang"])
    results, findings = outcome.checks, outcome.findings
    assert [finding.code for finding in findings] == ["CK501"]
    assert {result.status for result in results[1:] if result.code != "CK507"} == {"skipped"}


def test_an_exception_of_ours_while_sglang_loads_is_inconclusive(releases, tmp_path):
    """Our feed, in the middle of SGLang's load_weights: raised by us, so nothing about the checkpoint."""
    run = run_cases({"broken": Case(releases("qwen2-tied"), alter="broken_feed")}, tmp_path)["broken"]
    assert (run.report, refusal(run)) == (None, "")
    assert "loading" in str(run.failure)
    assert "KeyError: 'a defect of ours'" in str(run.failure)


# A release that ckptkit was not tested with: it runs, says so, and is never the checkpoint's fault.
GET_SCHEME = (
    "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors"
    ":CompressedTensorsConfig._get_scheme_from_parts"
)


@pytest.fixture
def verified(monkeypatch):
    """What `verify --against-sglang` says with SGLang 9.9.9, which lacks something."""

    def with_unknown(path, lacks=""):
        monkeypatch.setattr(sglang_run, "_WITNESS", "support.sglang_unknown")
        monkeypatch.setattr(Interpreter, "release", lambda *_: "9.9.9")
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        monkeypatch.setenv("LACKS", lacks)
        return verify(path, against=frozenset({"sglang"}))

    return with_unknown


@pytest.mark.usefixtures("served_sglang")
def test_an_untested_release_runs_and_says_so(releases, verified):
    report = verified(releases("qwen2-tied"))
    assert (report.status, report.findings) == ("passed", [])
    assert report.facts["SGLang"][0] == text_with("9.9.9 0.5.15.post1 0.5.16 0.5.23 Qwen2ForCausalLM")


@pytest.mark.usefixtures("served_sglang")
def test_a_missing_function_is_inconclusive(releases, verified):
    report = verified(releases("qwen2-tied"), "sglang.srt.layers.moe:initialize_moe_config")
    assert (report.status, report.findings) == ("inconclusive", [])
    assert "initialize_moe_config" in report.reasons[0]


@pytest.mark.usefixtures("served_sglang")
def test_what_it_refuses_is_a_verdict_on_a_gpu_alone(releases, tmp_path, verified, monkeypatch):
    """A method of its own that it calls is missing: whose fault that is cannot be told."""
    quantize(releases("qwen2-untied"), tmp_path / "int4", scheme=QuantScheme(32, "minmax", ("lm_head",)))
    report = verified(tmp_path / "int4", GET_SCHEME)
    assert (report.status, report.findings) == ("inconclusive", [])
    assert report.reasons[0] == text_with("SGLang 9.9.9 GPU 0.5.15.post1 0.5.16 0.5.23")
    monkeypatch.setattr(sglang_run, "_gpus", lambda: True)
    report = verified(tmp_path / "int4", GET_SCHEME)
    assert [finding.code for finding in report.findings] == ["CK501"]
