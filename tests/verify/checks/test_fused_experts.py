"""CK302 with `--reader transformers`: packed experts, which transformers 5 holds fused and initializes anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fixture_types import PathOf
from transformers import DeepseekV3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ckptkit
from ckptkit.core.errors import CkptkitError
from quant.schemes.w4a16 import int4_scheme
from quant.selection import tiles
from quant.selection.tiles import fused_in_transformers


@pytest.fixture(scope="module")
def int4(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen3_moe in INT4, experts packed."""
    path = tmp_path_factory.mktemp("fused") / "int4"
    ckptkit.quantize(releases("qwen3_moe"), path, int4_scheme(group_size=32))
    return path


def test_packed_experts_are_an_error_for_transformers_alone(int4: Path) -> None:
    report = ckptkit.verify(int4, readers=["transformers"])
    assert report.status == "failed"
    assert {(finding.code, finding.severity) for finding in report.findings} == {("CK302", "error")}
    assert all(".experts." in str(finding.tensor) for finding in report.findings)
    assert "Qwen3MoeExperts" in report.findings[0].actual
    assert ckptkit.verify(int4).status == "passed"
    assert ckptkit.verify(int4, readers=["sglang", "vllm", "slime", "miles"]).findings == []


def test_dense_model_and_plain_experts_have_no_finding_for_transformers(releases: PathOf, tmp_path: Path) -> None:
    ckptkit.quantize(releases("qwen2-untied"), tmp_path / "dense", int4_scheme(group_size=32), readers=["transformers"])
    scheme = int4_scheme(group_size=32, ignore=[r"re:.*\.experts\..*"])
    ckptkit.quantize(releases("qwen3_moe"), tmp_path / "plain", scheme, readers=["transformers"])
    for name in ("dense", "plain"):
        assert ckptkit.verify(tmp_path / name, readers=["transformers"]).findings == []


def test_quantize_for_transformers_refuses_experts(releases: PathOf, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="packed experts are not for --reader transformers") as caught:
        ckptkit.quantize(
            releases("qwen3_moe"), tmp_path / "int4", int4_scheme(group_size=32), readers=["transformers", "vllm"]
        )
    assert "--ignore" in str(caught.value.hint)
    assert not (tmp_path / "int4").exists()


def test_model_that_transformers_has_no_class_for_is_not_judged() -> None:
    assert fused_in_transformers({"model_type": "kimi_k2"}) is None


def test_model_that_sglang_registers_with_transformers_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `import sglang` does, in the process where it happens."""
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "kimi_k2", DeepseekV3Config)
    assert "kimi_k2" in CONFIG_MAPPING
    assert fused_in_transformers({"model_type": "kimi_k2"}) is None


def test_experts_that_a_target_names_are_left_to_a_later_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 64, "num_experts": 4}
    named = config | {"quantization_config": {"config_groups": {"group_0": {"targets": [r"re:.*experts.*"]}}}}
    assert fused_in_transformers(named) is not None
    monkeypatch.setattr(tiles, "find_spec", lambda name: object())
    assert fused_in_transformers(named) is None
    assert fused_in_transformers(config) is not None
