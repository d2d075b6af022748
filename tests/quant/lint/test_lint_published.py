"""Published FP8, MXFP4 and NVFP4 configs: `lint` and `inspect` read each, and neither raises a false alarm.

`published_configs.json` has of each release the quantization section, and of its config what its modules follow from,
as a public repository has them (`source`). Names that differ in numbers alone stand folded. Experts are cut to 16:
no list names one of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from support.nightly import daily
from support.published import PUBLISHED, PUBLISHED_FILE, restored

from ckptkit.app.cli import cli
from quant.lint.lint import lint

EVERY_DAY = ("Qwen/Qwen3-32B-FP8", "deepseek-ai/DeepSeek-V3", "nvidia/Qwen3.6-27B-NVFP4", "openai/gpt-oss-20b")
# Models whose modules ckptkit does not know: their entries are not held against any.
UNKNOWN = ("deepseek_ref", "gpt_oss", "kimi_k3", "mimo_v2_flash")


def write(path: Path, release: str) -> Path:
    """A directory with the release's configs."""
    entry = PUBLISHED[release]
    config = restored(entry["config"])
    if "first_k_dense_replace" in config:  # a family whose configs may leave the number of experts out
        config.setdefault("n_routed_experts", 16)
    if "quantization_config" in entry:
        config["quantization_config"] = restored(entry["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))
    if "hf_quant_config" in entry:
        (path / "hf_quant_config.json").write_text(json.dumps(restored(entry["hf_quant_config"])))
    return path


def test_there_are_as_many_as_the_page_says() -> None:
    assert len(PUBLISHED) == 44
    assert f"{len(PUBLISHED)} published" in (Path(__file__).parents[3] / "docs" / "lint.md").read_text()
    assert PUBLISHED_FILE.stat().st_size < 150_000


@pytest.mark.parametrize("release", daily(PUBLISHED, EVERY_DAY))
def test_lint_reads_a_published_config_without_a_false_alarm(tmp_path: Path, release: str) -> None:
    report = lint(write(tmp_path, release))
    assert [one for one in report.findings if one.severity != "note"] == []
    assert (report.tensors == 0) == (PUBLISHED[release]["config"]["model_type"] in UNKNOWN)


@pytest.mark.parametrize("release", daily(PUBLISHED, EVERY_DAY))
def test_inspect_reads_a_published_config(tmp_path: Path, release: str) -> None:
    save_file({"model.norm.weight": torch.zeros(4)}, write(tmp_path, release) / "model.safetensors")
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "model.norm.weight [4]" in shown.output
