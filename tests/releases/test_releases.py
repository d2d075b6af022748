"""Releases as they are published pass every verb that answers from headers, with no finding but those that lie in the release."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit import forecast
from ckptkit.api import convert, inspect, model_arguments
from ckptkit.errors import CkptkitError
from quant.lint import lint
from releases.header_only import write
from releases.record import Release, load, models
from verify.preflight import preflight
from verify.report import Report


@pytest.fixture(autouse=True)
def _as_the_command_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Garbage is collected as seldom as in `ckptkit`, and the disk is not measured, which takes a second for each release."""

    def unmeasured(*_: object) -> None:
        raise CkptkitError("not measured here", "")

    before = gc.get_threshold()
    gc.set_threshold(200_000, 10, 10)
    monkeypatch.setattr(forecast, "measure_throughput", unmeasured)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("model", models())
def test_release_as_published_has_no_finding(model: str, tmp_path: Path) -> None:
    release = load(model)
    check_against_published_numbers(release)
    path = write(release, tmp_path / "release")
    report = preflight(hf_checkpoint=path)
    assert found(report) == release.findings.get("preflight", []), "\n".join(map(str, report.findings))
    assert report.status == "passed"
    facts = inspect(path)
    assert (facts["tensors"], facts["bytes"]) == (len(release.tensors_in_order), release.nbytes)
    planned = convert(path, tmp_path / "megatron", dry_run=True)
    assert planned.tensors > 0
    assert not (tmp_path / "megatron").exists()
    assert model_arguments(path)["hidden_size"] == text_config(release)["hidden_size"]
    if packs_int4(release):
        linted = lint(path)
        assert [f"{one.kind} {one.severity}" for one in linted.findings if one.severity != "note"] == release.findings.get("lint", [])


def check_against_published_numbers(release: Release) -> None:
    """The record itself: what its folded names come to is what was published."""
    assert len({tensor.name for tensor in release.tensors_in_order}) == len(release.tensors_in_order)
    elements = sum(math.prod(tensor.shape) for tensor in release.tensors_in_order if release.scales or "_scale" not in tensor.name)
    assert release.tensors in (None, len(release.tensors_in_order))
    assert release.total_size in (None, release.nbytes)
    assert release.parameters in (None, elements)


def found(report: Report) -> list[str]:
    """Code and severity of what preflight finds, in its order."""
    return [f"{finding.code} {finding.severity}" for finding in report.findings]


def text_config(release: Release) -> dict[str, object]:
    """The config of the language model."""
    return dict(release.config.get("text_config") or release.config)


def packs_int4(release: Release) -> bool:
    """Whether its weights are packed as compressed-tensors packs them."""
    return any(tensor.name.endswith(".weight_packed") for tensor in release.tensors_in_order)


def test_records_are_of_many_kinds() -> None:
    """Sixty releases at least, among them each kind of model and of quantization."""
    releases = [load(model) for model in models()]
    kinds = {str(release.config["model_type"]) for release in releases}
    methods = {str((text_config(release).get("quantization_config") or {}).get("quant_method")) for release in releases}
    assert len(releases) >= 60
    assert len(kinds) >= 20
    assert methods == {"None", "fp8", "mxfp4", "compressed-tensors"}
