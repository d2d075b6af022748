"""The options of `quantize` and `convert --quantize` that say how weights are rounded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.fixture_types import PathOf

from ckptkit.app.api import quantize
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from quant.formats.scheme import QuantScheme, read_scheme
from verify.run import verify

CASES = [
    (["--ignore", r"re:.*\.o_proj(\.weight)?$"], QuantScheme(128, "qmax7")),  # 320 input features
    (["--group-size", "channel"], QuantScheme(None, "qmax7")),
    (["--group-size", "64", "--asymmetric"], QuantScheme(64, "minmax", (), symmetric=False)),
    (["--group-size", "channel", "--grid", "minmax", "--search", "mse"], QuantScheme(None, "minmax", (), True, "mse")),
    (["--group-size", "32", "--scale-dtype", "float32"], QuantScheme(32, "qmax7", scale_dtype=torch.float32)),
]
IGNORED = ["--ignore", r"re:.*\.mlp\.down_proj(\.weight)?$"]  # 288 input features, which only 32 divides


def run(*arguments: str | Path) -> None:
    """Runs the command line."""
    CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)


def scheme_of(path: Path) -> QuantScheme:
    """What the config says, without `ignore`."""
    scheme = read_scheme(json.loads((path / "config.json").read_text()))
    return QuantScheme(scheme.group_size, scheme.grid, (), scheme.symmetric, scheme.search, scheme.scale_dtype)


@pytest.mark.parametrize(("options", "scheme"), CASES)
def test_every_option_is_recorded_and_the_result_verifies(
    options: list[str], scheme: QuantScheme, releases: PathOf, tmp_path: Path
) -> None:
    """`verify` unpacks with compressed-tensors and compares every weight with its source."""
    run("quantize", releases("qwen2-tied"), tmp_path / "out", *options, *IGNORED)
    assert scheme_of(tmp_path / "out") == scheme
    report = verify(tmp_path / "out", source=releases("qwen2-tied"))
    assert report.status == "passed", report.findings
    assert {check.code for check in report.checks if check.status == "passed"} >= {"CK302", "CK303", "CK304", "CK305"}


def test_convert_from_megatron_with_quantize_takes_the_int4_options(converted: PathOf, tmp_path: Path) -> None:
    run(
        "convert",
        converted("qwen2-tied"),
        tmp_path / "out",
        "--quantize",
        "w4a16",
        "--group-size",
        "32",
        "--asymmetric",
    )
    assert scheme_of(tmp_path / "out") == QuantScheme(32, "minmax", (), symmetric=False)


def test_options_not_given_default_to_those_of_an_int4_source(releases: PathOf, tmp_path: Path) -> None:
    run("quantize", releases("qwen2-tied"), tmp_path / "first", "--group-size", "32", "--asymmetric")
    run("quantize", tmp_path / "first", tmp_path / "second")
    assert scheme_of(tmp_path / "second") == QuantScheme(32, "minmax", (), symmetric=False)


@pytest.mark.parametrize(
    "options", [["--grid", "qmax7", "--asymmetric"], ["--grid", "qmax7", "--search", "mse"]], ids=str
)
def test_qmax7_options_that_contradict_it_are_refused(options: list[str], releases: PathOf, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="qmax7 grid"):
        run("quantize", releases("qwen2-tied"), tmp_path / "out", *options)


@pytest.mark.usefixtures("kernel_tiles")
def test_layers_that_no_kernel_of_sglang_runs_are_noted(releases: PathOf, tmp_path: Path) -> None:
    """down_proj has 288 columns, which no tile divides; other readers have other kernels."""
    scheme = QuantScheme(32, "qmax7")
    (note,) = quantize(releases("qwen2-untied"), tmp_path / "all", scheme).notes
    assert "mlp.down_proj.weight: 128 rows of 288 columns" in note
    assert r"--ignore 're:.*\.mlp\.down_proj(\.weight)?$'" in note
    assert quantize(releases("qwen2-untied"), tmp_path / "vllm", scheme, readers=("vllm",)).notes == ()
