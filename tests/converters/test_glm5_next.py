"""GLM-5.3-Flash: its layer for multi-token prediction, its words, and what its config says that nothing here does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import UNWITNESSED
from families.case import save
from families.table import config_of
from support import floats, models
from support.fixture_types import PathOf
from support.messages import text_with

from ckptkit.app.api import quantize
from ckptkit.verify.run import verify

LINEAR: dict[str, Any] = config_of(UNWITNESSED["glm5_next"])["text_config"]["linear_attn_config"]
DRAFT = "model.language_model.layers.12."


@pytest.fixture
def release(releases: PathOf) -> Path:
    return releases("glm5_next")


@pytest.mark.parametrize(("kept", "expected"), [("", []), (f"{DRAFT}enorm.weight", ["CK104"])])
def test_a_save_without_the_draft_layer_is_taken_for_a_model_without(
    kept: str, expected: list[str], tmp_path: Path
) -> None:
    """As transformers writes it. A part of the layer alone is damage."""
    part = replace(
        UNWITNESSED["glm5_next"],
        whole=lambda tensors: {
            name: tensor for name, tensor in tensors.items() if not name.startswith(DRAFT) or name == kept
        },
    )
    save("glm5_next", part, tmp_path / "saved", torch.bfloat16)
    report = verify(tmp_path / "saved")
    assert sorted({finding.code for finding in report.findings}) == expected
    assert any(note == text_with("no tensor stored") for note in report.facts["notes"]) == (not kept)


def test_a_release_in_fp8_is_read_by_its_tensors(release: Path, tmp_path: Path) -> None:
    """As the release: latent attention, MLP and experts in blocks, KDA and what joins a draft in BF16."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic", "fmt": "e4m3"}
    kept = ("indexer", "kv_b_proj", "eh_proj", "visual", "lm_head")
    linear = tuple(f".layers.{layer}.self_attn." for layer in LINEAR["kda_layers"])

    def wanted(name: str) -> bool:
        return name.endswith(("_proj.weight", "_with_mqa.weight")) and not any(
            part in name for part in (*kept, *linear)
        )

    spelling = floats.Spelling(floats.deepseek, {"quantization_config": fp8})
    packed = floats.write(release, tmp_path / "fp8", spelling, wanted)
    stored = models.tensors(packed)
    assert f"{DRAFT}mlp.experts.3.up_proj.weight_scale_inv" in stored
    assert f"{DRAFT}eh_proj.weight_scale_inv" not in stored
    report = verify(packed, source=release)
    assert (report.status, report.findings) == ("passed", [])
    quantize(packed, tmp_path / "plain", None)
    plain, name = models.tensors(tmp_path / "plain"), f"{DRAFT}mlp.experts.3.up_proj.weight"
    scale = stored[f"{name}_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert plain[name].equal((stored[name].float() * scale).bfloat16())
