"""Families that no released Megatron loads: their HF side is whole, and Megatron's names are there for the asking."""

import json
import math
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from families import UNWITNESSED
from families.case import save, tokens
from families.table import config_of
from families.worker import ask
from mutations.edits import edit_config
from mutations.edits import replace as exchange
from support import models
from support.installed import require_megatron
from support.messages import refusal
from support.nightly import daily
from support.sglang_sizes import widened

from ckptkit.app.api import convert, inspect, model_arguments, quantize
from ckptkit.app.cli import main
from ckptkit.converters.experts import is_fused, unfuse
from ckptkit.converters.passthrough import passthrough_names
from ckptkit.converters.planner import expected_hf
from ckptkit.converters.registry import FAMILIES
from ckptkit.converters.stored import adapt_config
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.core.plan import View
from ckptkit.formats.hf.reader import HfCheckpoint, read_json
from ckptkit.quant.engines.registry import engine_class
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.ignore.lint import lint
from ckptkit.quant.schemes.floats import FloatScheme
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.loading.names import routers

TOLERANCE = 1e-4
NAMED = [name for name, case in UNWITNESSED.items() if FAMILIES[config_of(case)["model_type"]].unwitnessed.names]
UNNAMED = [name for name in UNWITNESSED if name not in NAMED]


@pytest.fixture(params=UNWITNESSED)
def release(request, releases):
    return releases(request.param)


def test_names_and_shapes_are_those_of_the_release_and_reports_say_that_no_megatron_has_loaded_it(release):
    """Those that transformers saves, or that are written down by hand: one by one, without what is carried along."""
    source = HfCheckpoint(release)
    carried, config = passthrough_names(source), adapt_config(source.config, source.specs)
    specs = View(source, unfuse(source.specs, config, "")).specs if is_fused(source.specs) else source.specs
    assert {name: spec.shape for name, spec in specs.items() if name not in carried} == expected_hf(config)
    words = f"no released Megatron has loaded {config['model_type']}: "
    assert inspect(release)["unwitnessed"].startswith(words)
    report = verify(release)
    assert (report.status, report.findings) == ("passed", [])
    assert [note for note in report.facts["notes"] if words in note]
    with pytest.raises(UnsupportedError, match=words):
        model_arguments(release)


@pytest.mark.parametrize("release", daily(UNWITNESSED, list(UNWITNESSED)[::4]), indirect=True)
def test_faults_are_found_beside_the_source(release, tmp_path):
    tensors = models.tensors(release)
    (norm,) = (name for name in tensors if re.search(r"layers\.5\.(post_attention_layernorm|ffn_norm)\.", name))
    outputs = [name for name in sorted(tensors) if re.search(r"layers\.\d+\.(self_attn\.o_proj|attn\.wq_b)\.", name)]
    matrices = [name for name in outputs if tensors[name].shape == tensors[outputs[0]].shape][:2]
    flipped = tensors[matrices[0]].clone()
    flipped.view(torch.int16)[2, 1] ^= 1
    wide = {name: one.bfloat16() for name, one in tensors.items() if one.dtype == torch.float32 and one.any()}
    exchanged = dict(zip(matrices, (tensors[matrices[1]], tensors[matrices[0]]), strict=True))
    for label, changes, expected in (
        ("clean", {}, set()),
        ("lost", {norm: None}, {"CK104"}),
        ("exchanged", exchanged, {"CK202"}),
        ("flipped", {matrices[0]: flipped}, {"CK202"}),
        *((f"rounded {name}", {name: tensor}, {"CK203"}) for name, tensor in list(wide.items())[:: len(wide) // 5 + 1]),
    ):
        shutil.copytree(release, tmp_path / label)
        for name, tensor in changes.items():
            models.edit(tmp_path / label, name, tensor)
        codes = {finding.code for finding in verify(tmp_path / label, source=release).findings}
        assert (expected <= codes, bool(codes)) == (True, label != "clean"), label


@pytest.mark.nightly
def test_int4_is_read_as_every_reader_reads_it(release, tmp_path):
    """Or refused, where no reader packs it."""
    config, scheme = HfCheckpoint(release).config, QuantScheme(None, "qmax7")
    reason = "Linear layers" if FAMILIES[config["model_type"]].release is None else None
    if reason is None and engine_class("sglang", config).fp8_only:
        reason = "deepseek_v4.*SGLang.*vLLM"
    if reason is not None:
        refusal(reason, quantize, release, tmp_path / "int4", scheme)
        return
    quantize(release, tmp_path / "int4", scheme)
    report = verify(tmp_path / "int4", source=release)
    assert (report.status, report.findings) == ("passed", [])


FAULTS = ("olmoe", "ernie4_5_moe", "step3p5")


@pytest.mark.parametrize("name", daily(FAULTS, FAULTS[:1]))
def test_an_entry_that_is_missing_and_a_packed_router_are_found(name, tmp_path):
    save(name, UNWITNESSED[name], tmp_path / "hf", torch.bfloat16)
    out = tmp_path / "int4"
    quantize(tmp_path / "hf", out, QuantScheme(None, "qmax7"))
    assert lint(out).findings == ()
    config = read_json(out / "config.json")
    section = config["quantization_config"]
    for entry in section["ignore"]:
        rest = [one for one in section["ignore"] if one != entry]
        edit_config(out, quantization_config=section | {"ignore": rest})
        stored = any(re.match(entry.removeprefix("re:"), spec) for spec in HfCheckpoint(out).specs)
        assert bool([one for one in lint(out).findings if one.severity == "error"]) == stored, entry
    edit_config(out, quantization_config=section)
    router = sorted(routers(config))[-1]
    module, weight = router.removesuffix(".weight"), models.tensors(out)[router]
    words, scale = torch.zeros(len(weight), weight.shape[1] // 8, dtype=torch.int32), torch.ones(len(weight), 1)
    parts = {"packed": words, "scale": scale, "shape": torch.tensor(weight.shape)}
    exchange(out, {f"{module}.weight_{part}": one for part, one in parts.items()}, [router])
    found = {one.code: one for one in verify(out, readers=("sglang",)).findings}
    assert module in str(found["CK301"].tensor)


@pytest.mark.nightly
def test_a_router_and_a_table_of_deepseek_v4_in_fp8_are_found(tmp_path):
    save("deepseek_v4", widened("deepseek_v4"), tmp_path / "hf", torch.bfloat16)
    out = tmp_path / "fp8"
    quantize(tmp_path / "hf", out, FloatScheme("fp8-block"))
    assert json.loads((out / "config.json").read_text())["expert_dtype"] == "fp8"
    router, table = "layers.4.ffn.gate.weight", "layers.1.ffn.gate.tid2eid"
    codes, scales = models.tensors(out)[router].to(torch.float8_e4m3fn), torch.ones(1, 1)
    exchange(out, {router: codes, f"{router}_scale_inv": scales}, [router])
    models.edit(out, table, models.tensors(out)[table].to(torch.float8_e4m3fn))
    lost = "layers.3.attn.wq_b.weight_scale_inv"
    models.edit(out, lost, None)
    found = {(one.code, str(one.tensor)) for one in verify(out, readers=("sglang",)).findings}
    assert {code for code, tensor in found if tensor == router} >= {"CK301"}
    assert [code for code, tensor in found if tensor == table]
    assert [code for code, tensor in found if tensor == lost or lost.removesuffix("_scale_inv") == tensor]


def test_megatrons_names_are_refused_unless_asked_for(release, tmp_path, monkeypatch, capfd):
    hint = "--unwitnessed" if release.name in NAMED else "published"
    monkeypatch.setattr(sys, "argv", ["ckptkit", "convert", str(release), str(tmp_path / "megatron")])
    with pytest.raises(SystemExit) as ended:
        main()
    stderr = capfd.readouterr().err
    assert (ended.value.code, "no released Megatron has loaded" in stderr, hint in stderr) == (2, True, True)
    assert not (tmp_path / "megatron").exists()
    if release.name in UNNAMED:
        family = FAMILIES[HfCheckpoint(release).config["model_type"]]
        assert ("lint and quantize" in stderr) == (family.release is not None)
        with pytest.raises(UnsupportedError, match="published"):
            convert(release, tmp_path / "megatron", unwitnessed=True)
        return
    done = convert(release, tmp_path / "megatron", unwitnessed=True)
    assert [note for note in done.notes if note.startswith("no released Megatron has loaded")]
    with pytest.raises(UnsupportedError, match="no released Megatron has loaded"):
        convert(tmp_path / "megatron", tmp_path / "back")
    convert(tmp_path / "megatron", tmp_path / "back", unwitnessed=True)
    assert models.unequal(tmp_path / "back", release) == []
    assert verify(tmp_path / "megatron", source=release).findings == []
    asked = verify(tmp_path / "megatron", source=release, against=frozenset({"megatron"}))
    (reason,) = {check.reason for check in asked.checks if check.code == "CK401"}
    assert (asked.status, str(reason).startswith("no released Megatron has loaded")) == ("inconclusive", True)


def test_what_megatron_loads_needs_no_asking(releases, tmp_path):
    with pytest.raises(UsageError, match="--unwitnessed .* qwen3_moe"):
        convert(releases("qwen3_moe"), tmp_path / "megatron", unwitnessed=True)
    assert "unwitnessed" not in inspect(releases("qwen3_moe"))


def test_the_draft_layer_of_ernie_is_carried_along(tmp_path):
    added = {"model.mtp_emb_norm.0.weight": torch.randn(128, dtype=torch.bfloat16)}
    with_draft = replace(UNWITNESSED["ernie4_5_moe"], added=lambda model, dtype: added)
    save("ernie4_5_moe", with_draft, tmp_path / "release", torch.bfloat16)
    assert verify(tmp_path / "release").findings == []
    convert(tmp_path / "release", tmp_path / "megatron", unwitnessed=True)
    convert(tmp_path / "megatron", tmp_path / "back", unwitnessed=True)
    assert models.unequal(tmp_path / "back", tmp_path / "release") == []


@pytest.mark.nightly
def test_megatrons_own_norms_are_not_olmoes_and_megatron_bridges_are(tmp_path):
    """Released megatron-core refuses them; with norms over all heads it computes transformers' logits."""
    require_megatron()
    model, _ = save("olmoe", UNWITNESSED["olmoe"], tmp_path / "hf", torch.float32)
    convert(tmp_path / "hf", tmp_path / "megatron", unwitnessed=True)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    with torch.no_grad():
        expected = model(tokens()).logits
    answer = ask(tmp_path / "hf", tmp_path / "megatron", tokens(), 10 * TOLERANCE)
    # The model that differs from it in the width of these norms alone.
    like = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    sizes = {"head_dim": config["hidden_size"] // 8, "moe_intermediate_size": config["intermediate_size"]}
    for place in ("hf", "megatron/hf"):
        (tmp_path / place / "config.json").write_text(json.dumps(config | like | sizes))
    with pytest.raises(RuntimeError, match=r"q_layernorm"):
        ask(tmp_path / "hf", tmp_path / "megatron", tokens(), None)
    assert float((answer.logits - expected).abs().max() / expected.abs().max()) < TOLERANCE
    assert {label: change for label, change in answer.mutated.items() if not change > 10 * TOLERANCE} == {}
    assert math.isfinite(sum(answer.mutated.values()))
