"""`--like`, `--reader`, `--tp` and `--device` from the command line to the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support import models

from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import HfCheckpoint

ROUTER = r"re:.*\.mlp\.gate(\.weight)?$"
PLAIN = ["model.embed_tokens", ROUTER, "lm_head"]
ATTENTION = [r"re:.*\.self_attn\.(q|k|v|qkv)_proj(\.weight)?$", r"re:.*\.self_attn\.o_proj(\.weight)?$"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source")
    models.save("qwen3_moe", path)
    return path


@pytest.fixture(scope="module")
def reference(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention left as it is, in a spelling of its own."""
    path = tmp_path_factory.mktemp("reference") / "int4"
    run(source, path, "--group-size", "32", "--grid", "minmax", "--ignore", "re:.*self_attn.*")
    return path


def run(source: Path, path: Path, *options: str) -> None:
    result = CliRunner().invoke(cli, ["quantize", str(source), str(path), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def packed(path: Path) -> set[str]:
    return {name for name in HfCheckpoint(path).specs if name.endswith("_packed")}


def test_what_the_reference_has_packed_is_packed(source: Path, reference: Path, tmp_path: Path) -> None:
    """Group size, grid and scales come from there too; the list is spelled anew."""
    run(source, tmp_path / "int4", "--like", str(reference))
    assert packed(tmp_path / "int4") == packed(reference)
    config = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == [*PLAIN, *ATTENTION]
    weights = config["config_groups"]["group_0"]["weights"]
    assert (weights["group_size"], weights["observer_kwargs"]["grid"]) == (32, "minmax")
    assert HfCheckpoint(tmp_path / "int4").specs == HfCheckpoint(reference).specs
    both = [models.tensors(path) for path in (reference, tmp_path / "int4")]
    assert [name for name in both[0] if not both[0][name].equal(both[1][name])] == []


def test_what_an_int4_source_has_packed_is_packed_again(reference: Path, tmp_path: Path) -> None:
    """By itself it is its own reference: the classes of the model would pack the attention too."""
    run(reference, tmp_path / "again")
    both = [models.tensors(path) for path in (reference, tmp_path / "again")]
    assert both[0].keys() == both[1].keys()
    assert [name for name in both[0] if not both[0][name].equal(both[1][name])] == []


def test_an_int4_source_less_what_is_ignored(source: Path, reference: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "whole", "--group-size", "32")
    run(tmp_path / "whole", tmp_path / "less", "--ignore", "re:.*self_attn.*")
    assert packed(tmp_path / "whole") > packed(tmp_path / "less") == packed(reference)


def test_a_reference_that_is_not_there(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="config.json"):
        run(source, tmp_path / "int4", "--like", str(tmp_path / "none"))
    assert not (tmp_path / "int4").exists()


def test_only_engines_must_agree(source: Path, tmp_path: Path) -> None:
    """The entry spares o_proj for engines and not for slime."""
    options = ("--group-size", "32", "--ignore", "re:.*o_proj$")
    with pytest.raises(CkptkitError, match="slime would pack"):
        run(source, tmp_path / "int4", *options)
    run(source, tmp_path / "int4", *options, "--reader", "sglang", "--reader", "vllm")
    assert not any("o_proj" in name for name in packed(tmp_path / "int4"))


def test_a_tensor_parallel_size_that_does_not_fit(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="SGLang's INT4 kernels cannot load at tensor parallel size 2"):
        run(source, tmp_path / "int4", "--group-size", "32", "--tp", "2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and tests/gpu uses it")
def test_a_gpu_that_is_not_there(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="torch finds no GPU for --device cuda"):
        run(source, tmp_path / "int4", "--group-size", "32", "--device", "cuda")
    assert not (tmp_path / "int4").exists()
