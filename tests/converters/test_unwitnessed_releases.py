"""DeepSeek-V4, Kimi K3, Step-3.5, GLM-5.3-Flash: names, dtypes and formats of releases, and saves that are others."""

import json
import re
from dataclasses import replace

import pytest
import torch
from families import UNWITNESSED
from families.case import build, save
from families.table import config_of
from mutations.edits import edit_config
from mutations.edits import replace as exchange
from releases.record import load
from support import floats, models
from support.messages import refusal, text_with
from support.nightly import daily
from support.quantized import E2M1
from transformers import AutoModelForCausalLM

from ckptkit.app.api import convert, inspect, quantize
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.loading.names import routers

TABLE = "layers.1.ffn.gate.tid2eid"


@pytest.fixture
def release(releases):
    return releases("deepseek_v4")


@pytest.fixture(scope="module")
def published(releases, tmp_path_factory):
    path = tmp_path_factory.mktemp("v4") / "published"
    return floats.write(releases("deepseek_v4"), path, floats.DEEPSEEK_V4, is_quantized)


def is_quantized(name):
    return floats.V4_QUANTIZED.fullmatch(name) is not None


def findings(path, **options):
    return [(one.code, one.severity, str(one.tensor)) for one in verify(path, **options).findings]


def test_transformers_finds_every_tensor_of_the_release_where_its_class_wants_it(release):
    """All but the multi-token prediction layer, which it leaves out."""
    model = build("deepseek_v4", UNWITNESSED["deepseek_v4"], torch.bfloat16)
    loaded, info = AutoModelForCausalLM.from_pretrained(release, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert {name.split(".")[0] for name in info["unexpected_keys"]} <= {"mtp"}
    found = loaded.state_dict()
    differing = [name for name, tensor in model.state_dict().items() if not found[name].equal(tensor.to(found[name]))]
    assert {name.rpartition(".")[2] for name in differing} == {"e_score_correction_bias"}  # float32 in the release


def test_formats_of_the_release_are_read_and_found_sound(release, published):
    text = inspect(published)["quantization"]
    assert re.search(r"FP8 .* 128 x 128\): 111 tensors and MXFP4 .*: 468 tensors", text), text
    assert findings(published) == []
    assert findings(published, source=release) == []
    assert findings(release, source=release) == []


def test_the_format_of_the_experts_must_be_the_one_that_config_json_states(release, published, copy_of, tmp_path):
    """vLLM builds experts by `expert_dtype`, SGLang by the dtype of the first one."""
    all_fp8 = floats.Spelling(_in_fp8, floats.DEEPSEEK_V4.config)
    for path, right, wrong in (
        (copy_of(published), "fp4", "fp8"),
        (floats.write(release, tmp_path / "fp8", all_fp8, is_quantized), "fp8", "fp4"),
    ):
        edit_config(path, expert_dtype=right)
        assert findings(path) == []
        edit_config(path, expert_dtype=wrong)
        assert {code for code, *_ in findings(path)} == {"CK303"}


def _in_fp8(module, weight):
    codes, scale = floats.fp8_block(weight, powers=True)
    return {f"{module}.weight": codes, f"{module}.scale": scale}


TABLES = {
    "zeros": (torch.zeros_like, "CK205"),
    "lost": (lambda table: None, "CK104"),
    "bfloat16": (lambda table: table.bfloat16(), "CK107"),
    "no such expert": (lambda table: torch.where(table == 11, 12, table), "CK215"),
    "less than none": (lambda table: table - 1, "CK215"),
    "int32": (lambda table: table.int(), "CK203"),
    "rows moved": (lambda table: table.roll(1, 0), "CK202"),
}


@pytest.mark.parametrize("fault", daily(TABLES, ("zeros", "bfloat16", "no such expert", "int32")))
def test_a_wrong_table_is_found(release, copy_of, fault):
    (change, code), path = TABLES[fault], copy_of(release)
    models.edit(path, TABLE, change(models.tensors(path)[TABLE]))
    assert (code, "error", TABLE) in findings(path, source=release)
    assert (code in {found for found, *_ in findings(path)}) == (code not in ("CK202", "CK203"))


def test_tables_that_repeat_in_every_layer_are_not_suspicious(release, copy_of):
    """SGLang's own default is the same in all layers; nothing says that releases differ there."""
    path = copy_of(release)
    table = models.tensors(path)[TABLE]
    exchange(path, {f"layers.{layer}.ffn.gate.tid2eid": table for layer in range(3)})
    assert findings(path) == []


# Kimi K3


STATE = "language_model.model.layers.4.self_attn.A_log"
K3_LAYER = "language_model.model.layers.5.block_sparse_moe."


@pytest.fixture
def k3(releases):
    return releases("kimi_k3")


def changed(path, place, value):
    state = models.tensors(path)[STATE].clone()
    state[place] = value
    models.edit(path, STATE, state)
    return path


@pytest.mark.parametrize("value", [-0.0, float("nan")])
def test_state_behind_the_heads_that_is_not_zero_is_not_dropped(value, k3, copy_of, tmp_path):
    """The release has 96 heads and room for 128. Megatron has no place for the rest, which must be bits of 0."""
    broken = changed(copy_of(k3), 96, value)
    refusal(f"{STATE}.*96", convert, broken, tmp_path / "megatron", unwitnessed=True)
    assert "CK202" in {finding.code for finding in verify(broken, source=k3).findings}


def test_megatron_has_the_state_of_its_heads_alone(k3, copy_of, tmp_path):
    """A zero in the last head is no padding."""
    other = changed(copy_of(k3), 95, 0.0)
    convert(other, tmp_path / "megatron", unwitnessed=True)
    held = TorchDistCheckpoint(tmp_path / "megatron" / "release").specs
    state = held["decoder.layers.4.self_attention.A_log"]
    assert (state.shape, state.dtype) == ((96,), "float32")
    output = sorted(name for name in held if "output_attn_res" in name)
    assert output == [f"decoder.layers.11.output_attn_res_{part}.weight" for part in ("norm", "proj")]
    convert(tmp_path / "megatron", tmp_path / "back", unwitnessed=True)
    assert models.unequal(tmp_path / "back", other) == []


def test_experts_in_mxfp4_are_told_by_their_tensors(k3, tmp_path):
    """The release's `ignore` names neither the projections around the experts nor the router, which are BF16."""
    text = json.loads((k3 / "config.json").read_text())["text_config"]
    text["quantization_config"] = load("moonshotai/Kimi-K3").config["text_config"]["quantization_config"]
    spelling = floats.Spelling(floats.mxfp4("weight_packed"), {"text_config": text})
    packed = floats.write(k3, tmp_path / "packed", spelling, lambda name: ".block_sparse_moe.experts." in name)
    report = verify(packed, source=k3)
    assert (report.status, report.findings) == ("passed", [])
    quantize(packed, tmp_path / "plain", None)
    stored, plain = models.tensors(packed), models.tensors(tmp_path / "plain")
    codes = stored[f"{K3_LAYER}experts.11.w2.weight_packed"]
    numbers = E2M1[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()]
    scales = torch.exp2(stored[f"{K3_LAYER}experts.11.w2.weight_scale"].float() - 127).repeat_interleave(32, dim=1)
    assert plain[f"{K3_LAYER}experts.11.w2.weight"].equal((numbers * scales).bfloat16())
    for name in ("gate.weight", "routed_expert_down_proj.weight", "routed_expert_norm.weight"):
        assert plain[K3_LAYER + name].equal(models.tensors(k3)[K3_LAYER + name])
    convert(packed, tmp_path / "megatron", unwitnessed=True)
    assert verify(tmp_path / "megatron", source=packed).findings == []


# Draft layers of Step-3.5 and GLM-5.3-Flash


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
