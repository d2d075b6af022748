"""Step-3.5 and 3.7: lists and strings of settings by layer, heads by kind of layer, and output layers of drafts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import UNWITNESSED
from families.case import save
from families.table import config_of
from support import floats, models
from support.fixture_types import CopyOf, PathOf
from torch import Tensor

from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.loading.names import routers


def test_routers_are_those_of_the_layers_with_experts() -> None:
    assert routers(config_of(UNWITNESSED["step3p5"])) == [
        f"model.layers.{layer}.moe.gate.weight" for layer in range(3, 12)
    ]


def test_output_layers_of_drafts_need_not_be_that_of_the_model(releases: PathOf, copy_of: CopyOf) -> None:
    """Nothing is taken for a copy of lm_head, and a change in one is found."""
    source = releases("step3p5")
    head, draft = "lm_head.weight", "model.layers.12.transformer.shared_head.output.weight"
    tensors = models.tensors(source)
    assert not tensors[head].equal(tensors[draft])
    path = copy_of(source)
    models.edit(path, draft, tensors[head].clone())
    report = verify(path, source=source)
    assert [(finding.code, finding.tensor) for finding in report.findings] == [("CK202", draft)]


def test_a_release_without_draft_layers_is_taken_for_such_a_model(tmp_path: Path) -> None:
    def plain(found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        drafts = ("model.layers.12.", "model.layers.13.")
        return {name: one for name, one in found.items() if not name.startswith(drafts)}

    save("step3p5", replace(UNWITNESSED["step3p5"], whole=plain), tmp_path / "s", torch.bfloat16)
    report = verify(tmp_path / "s")
    assert report.findings == []
    assert any("promises 2 multi-token prediction layers" in note for note in report.facts["notes"])


def test_names_of_the_nvfp4_release_are_told_apart(tmp_path: Path) -> None:
    """It has `language_model.` in the names of the language model, and `model.` before those of the tower."""

    def nested(found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        deeper = {name.replace("model.layers", "model.language_model.layers"): one for name, one in found.items()}
        deeper = {
            re.sub(r"^model\.(embed|norm)", r"model.language_model.\1", name): one for name, one in deeper.items()
        }
        return {f"model.{name}" if name.startswith("vi") else name: one for name, one in deeper.items()}

    save("step3p7", replace(UNWITNESSED["step3p7"], whole=nested), tmp_path / "s", torch.bfloat16)
    report = verify(tmp_path / "s")
    assert report.status == "failed"
    assert any("model.language_model." in f"{one.expected} {one.actual} {one.hint}" for one in report.findings)


@pytest.mark.nightly
def test_experts_in_fp8_with_stacked_scales_are_read_beside_their_source(releases: PathOf, tmp_path: Path) -> None:
    """Codes [experts, rows, columns] and the scales of their blocks, as the FP8 releases have them."""

    def blocks(module: str, weight: Tensor) -> Mapping[str, Tensor]:
        parts = [floats.fp8_block(one, 16) for one in weight.reshape(-1, *weight.shape[-2:])]
        codes, scales = (torch.stack(found) for found in zip(*parts, strict=True))
        if weight.dim() == 2:
            codes, scales = codes[0], scales[0]
        return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scales}

    spelling = floats.Spelling(blocks, floats.SPELLINGS["fp8"].config)
    wanted = re.compile(r".*\.(share_expert|mlp|moe)\.(gate|up|down)_proj\.weight")
    packed = floats.write(
        releases("step3p5"), tmp_path / "packed", spelling, lambda name: wanted.fullmatch(name) is not None
    )
    report = verify(packed, source=releases("step3p5"))
    assert (report.status, report.findings) == ("passed", [])
    name = "model.layers.7.moe.up_proj.weight_scale_inv"
    models.edit(packed, name, models.tensors(packed)[name].flip(0))
    (finding,) = verify(packed, source=releases("step3p5")).findings
    assert (finding.code, finding.tensor) == ("CK305", "model.layers.7.moe.up_proj.weight")
