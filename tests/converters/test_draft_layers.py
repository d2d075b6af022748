"""Draft layers of Step-3.5 and GLM-5.3-Flash, which their releases have and saves leave out; their FP8 releases."""

import re
from dataclasses import replace

import pytest
import torch
from families import UNWITNESSED
from families.case import save
from families.table import config_of
from support import floats, models
from support.messages import text_with

from ckptkit.app.api import quantize
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.loading.names import routers

GLM_DRAFT = "model.language_model.layers.12."
STEP_DRAFTS = ("model.layers.12.", "model.layers.13.")


def test_routers_of_step_are_those_of_the_layers_with_experts():
    names = [f"model.layers.{layer}.moe.gate.weight" for layer in range(3, 12)]
    assert routers(config_of(UNWITNESSED["step3p5"])) == names


def test_output_layers_of_drafts_need_not_be_that_of_the_model(releases, copy_of):
    source, draft = releases("step3p5"), "model.layers.12.transformer.shared_head.output.weight"
    head = models.tensors(source)["lm_head.weight"]
    assert not head.equal(models.tensors(source)[draft])
    path = copy_of(source)
    models.edit(path, draft, head.clone())
    report = verify(path, source=source)
    assert [(finding.code, finding.tensor) for finding in report.findings] == [("CK202", draft)]


@pytest.mark.parametrize(
    ("name", "drafts", "kept", "expected", "note"),
    [
        ("step3p5", STEP_DRAFTS, "", [], "2 multi-token"),
        ("glm5_next", (GLM_DRAFT,), "", [], "multi-token"),
        ("glm5_next", (GLM_DRAFT,), f"{GLM_DRAFT}enorm.weight", ["CK104"], ""),
    ],
)
def test_a_save_without_its_draft_layers_is_taken_for_a_model_without(name, drafts, kept, expected, note, tmp_path):
    """As transformers writes it. A part of a layer alone is damage."""

    def without(tensors):
        return {key: one for key, one in tensors.items() if not key.startswith(drafts) or key == kept}

    save(name, replace(UNWITNESSED[name], whole=without), tmp_path / "saved", torch.bfloat16)
    report = verify(tmp_path / "saved")
    assert sorted({finding.code for finding in report.findings}) == expected
    assert not note or any(one == text_with(note) for one in report.facts["notes"])


def test_names_of_the_nvfp4_release_of_step_are_told_apart(tmp_path):
    """It has `language_model.` in the names of the language model, and `model.` before those of the tower."""

    def nested(found):
        deeper = {re.sub(r"^model\.(?=layers|embed|norm)", "model.language_model.", key): key for key in found}
        return {f"model.{name}" if name.startswith("vi") else name: found[key] for name, key in deeper.items()}

    save("step3p7", replace(UNWITNESSED["step3p7"], whole=nested), tmp_path / "s", torch.bfloat16)
    report = verify(tmp_path / "s")
    assert report.status == "failed"
    assert any("model.language_model." in f"{one.expected} {one.actual} {one.hint}" for one in report.findings)


@pytest.mark.nightly
def test_experts_of_step_in_fp8_with_stacked_scales_are_read_beside_their_source(releases, tmp_path):
    """Codes [experts, rows, columns] and the scales of their blocks, as the FP8 releases have them."""

    def blocks(module, weight):
        parts = [floats.fp8_block(one, 16) for one in weight.reshape(-1, *weight.shape[-2:])]
        codes, scales = (torch.stack(found) for found in zip(*parts, strict=True))
        if weight.dim() == 2:
            codes, scales = codes[0], scales[0]
        return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scales}

    spelling, source = floats.Spelling(blocks, floats.SPELLINGS["fp8"].config), releases("step3p5")
    wanted = re.compile(r".*\.(share_expert|mlp|moe)\.(gate|up|down)_proj\.weight")
    packed = floats.write(source, tmp_path / "packed", spelling, lambda name: wanted.fullmatch(name) is not None)
    report = verify(packed, source=source)
    assert (report.status, report.findings) == ("passed", [])
    name = "model.layers.7.moe.up_proj.weight"
    models.edit(packed, f"{name}_scale_inv", models.tensors(packed)[f"{name}_scale_inv"].flip(0))
    (finding,) = verify(packed, source=source).findings
    assert (finding.code, finding.tensor) == ("CK305", name)


def test_a_release_of_glm_in_fp8_is_read_by_its_tensors(releases, tmp_path):
    """As the release: latent attention, MLP and experts in blocks, KDA and what joins a draft in BF16."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic", "fmt": "e4m3"}
    linear = config_of(UNWITNESSED["glm5_next"])["text_config"]["linear_attn_config"]["kda_layers"]
    kept = ["indexer", "kv_b_proj", "eh_proj", "visual", "lm_head", *(f".layers.{one}.self_attn." for one in linear)]

    def wanted(name):
        return name.endswith(("_proj.weight", "_with_mqa.weight")) and not any(part in name for part in kept)

    spelling, source = floats.Spelling(floats.deepseek, {"quantization_config": fp8}), releases("glm5_next")
    packed = floats.write(source, tmp_path / "fp8", spelling, wanted)
    stored = models.tensors(packed)
    assert f"{GLM_DRAFT}eh_proj.weight_scale_inv" not in stored
    report = verify(packed, source=source)
    assert (report.status, report.findings) == ("passed", [])
    quantize(packed, tmp_path / "plain", None)
    name = f"{GLM_DRAFT}mlp.experts.3.up_proj.weight"
    scale = stored[f"{name}_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert models.tensors(tmp_path / "plain")[name].equal((stored[name].float() * scale).bfloat16())
