"""Quantized releases, end to end: to Megatron, back to HF in bfloat16, and what other readers make of them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from families import CASES
from families.case import save, tokens
from support import models, quantized
from support.messages import text_with
from support.nightly import daily
from support.published import KIMI_LIST
from transformers import AutoModelForCausalLM
from transformers.quantizers import quantizer_finegrained_fp8

from ckptkit.app.api import convert, inspect
from ckptkit.converters.planner import to_megatron
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.verify.run import verify

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}

# The published list, but that it says `lm_head`, which compressed-tensors does not find in `language_model.lm_head`.
K25_LIST = ["re:.*lm_head.*", *KIMI_LIST[1:], "re:vision_tower.*", "re:mm_projector.*"]
MINIMAX_KEPT = ["gate", "e_score_correction_bias", "lm_head"]
GPT_OSS_KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]


@dataclass(frozen=True)
class Release:
    """How a model is released: the test model, which tensors are quantized and how, and what its config says.

    `inside`: in `text_config`. `copies`: quantized copies of unquantized tensors, which come back as those.
    `unpacked`: what SGLang's draft class builds in BF16 all the same (`glm4_moe_nextn.py`), so that CK302 is right.
    """

    case: str
    wanted: Callable[[str], bool]
    quantizer: quantized.Quantizer
    says: Mapping[str, Any]
    words: str
    inside: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)
    unpacked: str = ""

    def save(self, path):
        save(self.case, CASES[self.case], path / "plain", torch.bfloat16)
        return quantized.write(path / "plain", path / "release", self.wanted, self.quantizer, self._edit)

    def _edit(self, config):
        stated = {"quantization_config": dict(self.says)}
        return config | ({"text_config": config["text_config"] | stated} if self.inside else stated)


def linear(name):
    inside = name.endswith(".weight") and ("_proj" in name or ".experts." in name)
    return inside and "norm" not in name and "eh_proj" not in name


CHANNEL = quantized.compressed_config("float-quantized", num_bits=8, type="float", strategy="channel")
RELEASES = {
    "Qwen3, scales in bfloat16": Release(
        "qwen3_moe",
        linear,
        quantized.fp8_blocks(32, 32, torch.bfloat16),
        FP8 | {"weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]},
        "FP8 float8_e4m3fn 32 32",
    ),
    "DeepSeek V3.1": Release(
        "deepseek_v3",
        linear,
        quantized.fp8_blocks(128, 128, torch.float8_e8m0fnu),
        FP8 | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        "FP8 float8_e4m3fn 128 128",
    ),
    "MiniMax": Release(
        "minimax_m2",
        linear,
        quantized.fp8_blocks(50, 70),
        FP8 | {"fmt": "float8_e4m3fn", "weight_block_size": [50, 70], "modules_to_not_convert": MINIMAX_KEPT},
        "FP8 float8_e4m3fn 50 70",
    ),
    "GLM, with a quantized copy of the output layer": Release(
        "glm4_moe-mtp",
        lambda name: linear(name) or name.endswith(("eh_proj.weight", "shared_head.head.weight")),
        quantized.fp8_blocks(1, 0, torch.bfloat16, "_scale"),
        CHANNEL,
        "FP8 float8_e4m3fn",
        copies={"model.layers.12.shared_head.head.weight": "lm_head.weight"},
        unpacked="eh_proj.weight shared_head.head.weight",
    ),
    "Kimi K2.5": Release(
        "kimi_k25",
        lambda name: ".mlp.experts." in name,
        quantized.int4(symmetric=True, strategy="group", group_size=32),
        quantized.compressed_config("pack-quantized", strategy="group", group_size=32) | {"ignore": K25_LIST},
        "INT4 32",
        inside=True,
    ),
    "asymmetric INT4": Release(
        "qwen2-tied",
        lambda name: "_proj.weight" in name,
        quantized.int4(symmetric=False, strategy="group", group_size=32),
        quantized.compressed_config("pack-quantized", strategy="group", group_size=32, symmetric=False),
        "INT4 32",
    ),
    "gpt-oss": Release(
        "gpt_oss-v4",
        lambda name: name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
        quantized.mxfp4,
        {"quant_method": "mxfp4", "modules_to_not_convert": [*GPT_OSS_KEPT, "lm_head"]},
        "MXFP4 4-bit 32",
    ),
}


def errors(path, source=None):
    """Code and cause of what verify finds wrong, and checks that did not run although they compare values."""
    report = verify(path, source=source)
    skipped = [(one.code, "") for one in report.checks if one.status == "skipped" and one.code.startswith("CK2")]
    return [(one.code, one.actual) for one in report.findings if one.severity == "error"] + skipped


@pytest.mark.parametrize("name", daily(RELEASES, list(RELEASES)[::4]))
def test_quantized_release_converted_to_megatron_and_back_is_dequantized(name, tmp_path):
    release = RELEASES[name]
    meant = release.save(tmp_path)
    said = json.loads((tmp_path / "plain/config.json").read_text())

    written = convert(tmp_path / "release", tmp_path / "megatron")
    assert written.dequantized == text_with(release.words)
    count = sum(map(release.wanted, meant))
    assert count > 0
    assert inspect(tmp_path / "release")["quantization"] == text_with(f"{release.words} {count} ckptkit convert")

    meant |= {copy: meant[original] for copy, original in release.copies.items()}
    megatron = TorchDistCheckpoint(tmp_path / "megatron/release")
    view = to_megatron(models.InMemory(said, meant), "meant")
    expected = {key: tensor for names in view.groups for key, tensor in view.read(names).items()}
    assert models.unequal(megatron.read(list(megatron.specs)), expected) == []

    convert(tmp_path / "megatron", tmp_path / "back")
    assert models.unequal(tmp_path / "back", meant) == []
    convert(tmp_path / "megatron", tmp_path / "back-with-hf", hf=tmp_path / "release")
    for side in ("back", "back-with-hf"):
        assert json.loads((tmp_path / side / "config.json").read_text()) == said
        names = {file.name for file in (tmp_path / "plain").iterdir() if not file.name.startswith("model")}
        assert {file.name for file in (tmp_path / side).iterdir()} == {"ckptkit.json", "model.safetensors", *names}
    written, with_hf = (tmp_path / side / "model.safetensors" for side in ("back", "back-with-hf"))
    assert written.read_bytes() == with_hf.read_bytes()

    assert errors(tmp_path / "megatron", tmp_path / "release") == []
    readers = ("SGLang 0.5.16", "SGLang 0.5.23") if release.unpacked else ()
    found = errors(tmp_path / "release")
    assert found == [("CK302", text_with(f"{reader} {release.unpacked}")) for reader in readers]


def test_transformers_loads_the_same_model_from_fp8(tmp_path, monkeypatch):
    """Without a GPU transformers dequantizes FP8 itself; the model from Megatron is the same bit for bit."""
    # It asks for a package that would only place modules on devices.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    RELEASES["Qwen3, scales in bfloat16"].save(tmp_path)
    convert(tmp_path / "release", tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    expected, found = (
        AutoModelForCausalLM.from_pretrained(tmp_path / side, dtype=torch.bfloat16) for side in ("release", "back")
    )
    assert models.unequal(found.state_dict(), expected.state_dict()) == []
    assert torch.equal(found(tokens()).logits, expected(tokens()).logits)


@pytest.mark.usefixtures("served")
def test_real_megatron_holds_the_dequantized_weights(tmp_path):
    RELEASES["asymmetric INT4"].save(tmp_path)
    convert(tmp_path / "release", tmp_path / "megatron")
    report = verify(tmp_path / "megatron", source=tmp_path / "release", against=frozenset({"megatron"}))
    assert report.findings == []
    assert [check.status for check in report.checks if check.code == "CK402"] == ["passed"]
