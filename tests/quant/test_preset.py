"""`quantize --preset rl`: a checkpoint that slime's training and SGLang's updates agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner
from support import models
from support.fixture_types import PathOf

from ckptkit.app.api import convert, quantize
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from quant.formats.scheme import QuantScheme
from quant.schemes.w4a16 import int4_scheme
from verify.launch.preflight import preflight

SCHEME = int4_scheme(group_size=32)
QAT = ("OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1", "OPEN_TRAINING_INT4_GROUP_SIZE=32")


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_only_routed_experts_are_packed_and_a_launch_that_trains_in_int4_accepts_it(
    name: str, releases: PathOf, tmp_path: Path
) -> None:
    quantize(releases(name), tmp_path / "int4", SCHEME, preset="rl")
    tensors = models.tensors(tmp_path / "int4")
    packed = {key.removesuffix("_packed") for key in tensors if key.endswith(".weight_packed")}
    plain = models.tensors(releases(name))
    layers = json.loads((releases(name) / "config.json").read_text())["num_hidden_layers"]
    draft = f"model.layers.{layers}."
    assert packed == {key for key in plain if ".mlp.experts." in key and not key.startswith(draft)}
    assert {key for key in plain if key in tensors} == plain.keys() - packed
    convert(releases(name), tmp_path / "megatron")
    report = preflight(tmp_path / "int4", ref_load=tmp_path / "megatron", arguments=QAT)
    status = {check.code: check.status for check in report.checks}
    assert [status[code] for code in ("CK301", "CK302", "CK709", "CK715")] == ["passed"] * 4, report.findings


def test_the_command_line_records_the_preset(releases: PathOf, tmp_path: Path) -> None:
    words = ["quantize", str(releases("qwen3_moe")), str(tmp_path / "int4"), "--preset", "rl", "--group-size", "32"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    command = json.loads((tmp_path / "int4" / "ckptkit.json").read_text())["command"]
    assert command[3:5] == ["--preset", "rl"]


def test_a_dense_model_is_refused(releases: PathOf, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="packs routed experts alone") as refused:
        quantize(releases("qwen2-tied"), tmp_path / "int4", SCHEME, preset="rl")
    assert "serve it in BF16" in str(refused.value.hint)
    assert not (tmp_path / "int4").exists()


def test_another_grid_is_refused(releases: PathOf, tmp_path: Path) -> None:
    for scheme in (int4_scheme(grid="minmax"), int4_scheme(symmetric=False)):
        with pytest.raises(CkptkitError, match="symmetric and on the qmax7 grid"):
            quantize(releases("qwen3_moe"), tmp_path / "int4", scheme, preset="rl")


def test_a_run_on_trainings_grid_says_what_loses_less_where_no_training_rounds_so(
    releases: PathOf, tmp_path: Path
) -> None:
    def advice(name: str, scheme: QuantScheme = SCHEME, preset: Literal["rl"] | None = None) -> str | None:
        found = quantize(releases(name), tmp_path / "out", scheme, dry_run=True, preset=preset)
        assert found.packed is not None
        return found.packed.advice

    assert "--asymmetric, or --search mse, loses less" in str(advice("qwen2-tied"))
    assert "others --search mse loses less" in str(advice("qwen3_moe"))
    assert advice("qwen3_moe", preset="rl") is None
    assert advice("qwen3_moe", int4_scheme(grid="minmax", group_size=32)) is None


def test_a_reference_beside_the_preset_is_refused(releases: PathOf, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="both say what is packed"):
        quantize(releases("qwen3_moe"), tmp_path / "int4", SCHEME, preset="rl", like=releases("qwen3_moe"))
