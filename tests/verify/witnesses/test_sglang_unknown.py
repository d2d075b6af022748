"""A release of SGLang that ckptkit was not tested with: it runs, says so, and is never the checkpoint's fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.fixture_types import PathOf
from support.messages import text_with

from ckptkit.app.api import quantize
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.core.report import Report
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.loading import run as sglang_run
from ckptkit.verify.witnesses.process.interpreter import Interpreter

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.usefixtures("served_sglang")]

INT4 = "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors"


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """What `verify --against-sglang` says with SGLang 9.9.9, which lacks something."""

    def with_unknown(path: Path, lacks: str = "") -> Report:
        monkeypatch.setattr(sglang_run, "_WITNESS", "support.sglang_unknown")
        monkeypatch.setattr(Interpreter, "release", lambda *_: "9.9.9")
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        monkeypatch.setenv("LACKS", lacks)
        return verify(path, against=frozenset({"sglang"}))

    return with_unknown


def test_an_untested_release_runs_and_says_so(releases: PathOf, verified: Callable[..., Report]) -> None:
    report = verified(releases("qwen2-tied"))
    assert (report.status, report.findings) == ("passed", [])
    assert report.facts["SGLang"][0] == text_with("9.9.9 0.5.15.post1 0.5.16 0.5.23 Qwen2ForCausalLM")


def test_a_missing_function_is_inconclusive(releases: PathOf, verified: Callable[..., Report]) -> None:
    report = verified(releases("qwen2-tied"), "sglang.srt.layers.moe:initialize_moe_config")
    assert (report.status, report.findings) == ("inconclusive", [])
    assert "initialize_moe_config" in report.reasons[0]


def test_what_it_refuses_is_a_verdict_on_a_gpu_alone(
    releases: PathOf, tmp_path: Path, verified: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method of its own that it calls is missing: whose fault that is cannot be told."""
    quantize(releases("qwen2-untied"), tmp_path / "int4", scheme=QuantScheme(32, "minmax", ("lm_head",)))
    report = verified(tmp_path / "int4", f"{INT4}:CompressedTensorsConfig._get_scheme_from_parts")
    assert (report.status, report.findings) == ("inconclusive", [])
    assert report.reasons[0] == text_with("SGLang 9.9.9 GPU 0.5.15.post1 0.5.16 0.5.23")
    monkeypatch.setattr(sglang_run, "_gpus", lambda: True)
    report = verified(tmp_path / "int4", f"{INT4}:CompressedTensorsConfig._get_scheme_from_parts")
    assert [finding.code for finding in report.findings] == ["CK501"]
