"""CK207 to CK210: numbers that are possible one by one and cannot be what was trained."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import models
from support.fixture_types import PathOf, RunAlone
from torch import Tensor

from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.formats.torch_dist.writer import TorchDistFiles
from ckptkit.transfer.copy import copy
from ckptkit.transfer.files import FilesWriter
from verify.evidence.extremes import extremes, same_bytes
from verify.run import verify

UP = "model.layers.3.mlp.up_proj.weight"
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_extremes_are_those_of_the_tensor(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 400_000)
    tensor[0, 17], tensor[2, 399_999] = -3.0, 4.0
    found = extremes(tensor.to(dtype))
    assert (found.low, found.high, found.rows, found.zero_rows, found.finite) == (-3.0, 4.0, 3, 1, True)
    assert found.rms == pytest.approx(math.sqrt(25 / 1_200_000), rel=0.01)


@pytest.mark.parametrize("value", [1e-25, 1e25])
def test_sizes_whose_squares_float32_cannot_hold(value: float) -> None:
    assert extremes(torch.full((4, 8), value, dtype=torch.bfloat16)).rms == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.uint8, torch.int32])
def test_extremes_of_non_float_dtypes_have_no_rms(dtype: torch.dtype) -> None:
    found = extremes(torch.tensor([[0, 0], [1, 0]]).to(dtype))
    assert (found.low, found.high, found.zero_rows, found.rms) == (0, 1, 1, 0)


@pytest.mark.parametrize(("value", "denormal"), [(2.0**-127, True), (2.0**-126, False), (0.0, False)])
def test_where_denormal_numbers_begin(value: float, denormal: bool) -> None:
    assert extremes(torch.tensor([0.0, -value])).denormal is denormal


def test_bytes_are_compared_and_not_numbers() -> None:
    nan = torch.tensor([math.nan, 0.0])
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(nan, torch.tensor([math.nan, -0.0]))
    assert not same_bytes(torch.zeros(2, dtype=torch.int32), torch.zeros(2))
    assert not same_bytes(torch.zeros(2, 3), torch.zeros(3, 2))
    assert same_bytes(torch.zeros(0), torch.zeros(0))


def grown(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: (tensor.float() * factor).to(tensor.dtype)


@pytest.mark.parametrize("factor", [16, 1 / 16])
def test_layers_that_training_made_larger_or_smaller(factor: float, fresh: PathOf, passes: Callable[..., None]) -> None:
    path = fresh("qwen2-tied")
    models.edit(path, UP, grown(factor)(models.tensors(path)[UP]))
    passes("CK208", path, 146)


def test_a_matrix_of_another_size_in_the_source_too_is_a_warning(
    releases: PathOf, fresh: PathOf, alone: RunAlone
) -> None:
    path = fresh("qwen2-tied")
    models.edit(path, UP, grown(200)(models.tensors(path)[UP]))
    _, (finding,) = alone("CK208", path, source_path=path)
    assert finding.severity == "warning"
    _, (finding,) = alone("CK208", path, source_path=releases("qwen2-tied"))
    assert finding.severity == "error"


def sized(path: Path, size: float) -> None:
    """Every matrix of layers at this root mean square."""
    for name, found in models.tensors(path).items():
        if name.endswith("_proj.weight"):
            models.edit(path, name, (torch.randn(found.shape) * size).to(found.dtype))


def test_matrices_that_are_all_larger_than_any_that_was_trained(fresh: PathOf, alone: RunAlone) -> None:
    """As codes of FP8 without their scales: each is as large as its siblings. A tenth of that is left alone."""
    path = fresh("qwen2-tied")
    sized(path, 100.0)
    _, (finding,) = alone("CK208", path)
    assert (finding.severity, finding.count) == ("error", 7 * 12)
    assert "of at most 64" in finding.expected
    _, (finding,) = alone("CK208", path, source_path=path)
    assert finding.severity == "warning"
    sized(path, 10.0)
    assert alone("CK208", path)[1] == []


def coarse(path: Path, layers: range) -> None:
    found = models.tensors(path)
    for layer in layers:
        models.edit(path, BIAS.format(layer), found[BIAS.format(layer)].bfloat16().float())


def test_float32_biases_that_were_bfloat16_once(releases: PathOf, fresh: PathOf, alone: RunAlone) -> None:
    path = fresh("glm4_moe")
    coarse(path, range(2, 12))
    _, (finding,) = alone("CK210", path)
    assert (finding.tensor, finding.count, finding.severity) == (BIAS.format("{2..11}"), 10, "warning")
    assert alone("CK210", path, source_path=path)[1] == []
    assert len(alone("CK210", path, source_path=releases("glm4_moe"))[1]) == 1


def test_a_bias_of_zeros_is_not_coarse(fresh: PathOf, alone: RunAlone) -> None:
    path = fresh("glm4_moe")
    models.edit(path, BIAS.format(4), torch.zeros(12))
    assert alone("CK210", path)[1] == []


def test_a_model_without_float32_biases(releases: PathOf, alone: RunAlone) -> None:
    assert alone("CK210", releases("qwen2-tied"))[0] is None


def test_biases_of_megatron(converted: PathOf, passes: Callable[..., None]) -> None:
    passes("CK210", converted("glm4_moe"), 10)


def padded(source: Path, path: Path, rows: Tensor, iteration: str = "release") -> Path:
    """A copy of a Megatron checkpoint with these rows below the embedding."""
    before = TorchDistCheckpoint(source / "release")
    tensors = before.read(list(before.specs))
    name = "embedding.word_embeddings.weight"
    tensors[name] = torch.cat([tensors[name], rows])
    checkpoint = models.InMemory(before.config, tensors)
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("release"))
    copy(checkpoint, FilesWriter(path, TorchDistFiles(checkpoint.specs, dict(before.args))), "padding")
    return (path / "release").rename(path / iteration)


@pytest.mark.parametrize(("iteration", "severity"), [("release", "error"), ("iter_0000010", "warning")])
def test_vocabulary_padding_that_is_not_zero_is_found(
    iteration: str, severity: str, converted: PathOf, tmp_path: Path, alone: RunAlone
) -> None:
    rows = torch.zeros(32, 128, dtype=torch.bfloat16)
    rows[5:8, 3] = 0.02
    path = padded(converted("qwen2-tied"), tmp_path / "padded", rows, iteration)
    _, (finding,) = alone("CK209", path)
    assert (finding.tensor, finding.severity) == ("embedding.word_embeddings.weight", severity)
    assert finding.actual == "3 of 32 rows from row 352 on are not zero"


def test_vocabulary_padding_of_zeros_is_silent(converted: PathOf, releases: PathOf, tmp_path: Path) -> None:
    path = padded(converted("qwen2-tied"), tmp_path / "padded", torch.zeros(32, 128, dtype=torch.bfloat16))
    report = verify(path, source=releases("qwen2-tied"))
    assert [finding for finding in report.findings if finding.code.startswith("CK2")] == []
    assert {check.code: check.status for check in report.checks}["CK209"] == "passed"
