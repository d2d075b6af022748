"""Rotary frequencies of each layer, which transformers before 4.32 saved, are kept and disturb nothing."""

from __future__ import annotations

import filecmp
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save
from support import models
from torch import Tensor
from transformers import PreTrainedModel

from ckptkit.app.api import convert, quantize
from quant.formats.scheme import QuantScheme
from verify.report import Report
from verify.run import verify

NAME = "model.layers.{}.self_attn.rotary_emb.inv_freq"


def frequencies(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Those that the model computes with, once a layer, in float32."""
    return {
        NAME.format(layer): model.model.rotary_emb.inv_freq.float() for layer in range(model.config.num_hidden_layers)
    }


@pytest.fixture(scope="module", params=["llama", "mistral", "mixtral", "qwen2-untied"])
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frequencies") / "release"
    save(request.param, replace(CASES[request.param], added=frequencies), path, torch.bfloat16)
    assert NAME.format(11) in models.tensors(path)
    return path


def passes(report: Report) -> None:
    assert [str(finding) for finding in report.findings] == []
    assert report.status == "passed"


def test_rotary_frequencies_come_back_from_megatron(release: Path, tmp_path: Path) -> None:
    passes(verify(release))
    convert(release, tmp_path / "megatron")
    passes(verify(tmp_path / "megatron", source=release))
    convert(tmp_path / "megatron", tmp_path / "back")
    files = sorted(file.name for file in release.glob("*.safetensors"))
    assert filecmp.cmpfiles(release, tmp_path / "back", files, shallow=False) == (files, [], [])


def test_rotary_frequencies_stay_beside_int4_weights(release: Path, tmp_path: Path) -> None:
    quantize(release, tmp_path / "int4", QuantScheme(32, "qmax7"))
    passes(verify(tmp_path / "int4", source=release))
    name = NAME.format(3)
    assert torch.equal(models.tensors(tmp_path / "int4")[name], models.tensors(release)[name])
