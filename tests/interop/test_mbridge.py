"""mbridge, which slime, miles and verl have used: its conversions against ckptkit's, both ways, bit for bit.

Its models have Transformer Engine's layers, for whose parameters a stand-in is there on the CPU. Everything that maps,
cuts, saves and loads weights is mbridge's and megatron-core's own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import CASES
from families.gqa import as_v4
from families.mla import DEEPSEEK_ROUTER

import ckptkit
from interop.beside import start_jobs
from interop.compare import differences
from interop.releases import release

SUPPORTED = ("llama", "qwen2-untied", "qwen2-tied", "qwen2_moe", "qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3")
AGAIN = "qwen2-untied, after a tied model in the same process"
MTP = ("glm4_moe-mtp", "deepseek_v3-mtp")
# mbridge's DeepSeek can only have the multi-token prediction layer of the 61 layers' release.
PLAIN_DEEPSEEK = replace(
    CASES["deepseek_v3"], added=lambda model, dtype: {}, edit=lambda config: as_v4(config) | DEEPSEEK_ROUTER, mtp=None
)
SPECIAL = {"deepseek_v3": PLAIN_DEEPSEEK, AGAIN: CASES["qwen2-untied"], "deepseek_v3-mtp": CASES["deepseek_v3"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By name of the model: `hf`, mbridge's `imported` and `exported`, and ckptkit's `megatron`."""
    return tmp_path_factory.mktemp("mbridge")


@pytest.fixture(scope="module")
def results(root: Path) -> dict[str, dict[str, Any]]:
    """What mbridge said of each model; all in one process, in this order."""
    names = (*SUPPORTED, AGAIN, *MTP)
    for name in names:
        release(name, root / name / "hf", SPECIAL.get(name) or CASES[name])
        ckptkit.convert(root / name / "hf", root / name / "megatron")
    jobs = [{part: str(root / name / part) for part in ("hf", "imported", "megatron", "exported")} for name in names]
    return dict(zip(names, start_jobs("mbridge_worker", root, jobs), strict=True))


@pytest.mark.parametrize("name", SUPPORTED)
def test_what_mbridge_imports_comes_back_from_ckptkit_bit_for_bit(
    root: Path, results: dict[str, dict[str, Any]], name: str
) -> None:
    assert "refused" not in results[name]
    ckptkit.convert(root / name / "imported", root / name / "back", hf=root / name / "hf")
    assert differences(root / name / "hf", root / name / "back") == []


@pytest.mark.parametrize("name", SUPPORTED)
def test_mbridge_exports_what_ckptkit_converted_bit_for_bit(
    root: Path, results: dict[str, dict[str, Any]], name: str
) -> None:
    assert "refused" not in results[name]
    assert differences(root / name / "hf", root / name / "exported") == []


def test_an_untied_model_after_a_tied_one_loses_its_output_layer(root: Path, results: dict[str, Any]) -> None:
    # `_adjust_mapping_for_shared_weights` changes a dict of the class, and so every later model of the process.
    assert differences(root / AGAIN / "hf", root / AGAIN / "exported") == ["lm_head.weight", "model.embed_tokens.weight"]
    report = ckptkit.verify(root / AGAIN / "exported", root / AGAIN / "hf")
    assert codes(report) == {"CK104", "CK201"}


def test_multi_token_prediction_layers_are_lost_without_a_word(root: Path, results: dict[str, Any]) -> None:
    name = "glm4_moe-mtp"
    assert "refused" not in results[name]
    report = ckptkit.verify(root / name / "exported", root / name / "hf")
    assert codes(report) == {"CK104"}


def test_multi_token_prediction_of_a_shallow_deepseek_is_refused(results: dict[str, Any]) -> None:
    assert results["deepseek_v3-mtp"] == {"refused": "only support 61 layers for now"}


def codes(report: Any) -> set[str]:
    """The codes of all findings."""
    return {finding.code for finding in report.findings}
