"""`verify` is silent on sound checkpoints of every family, all bytes compared: releases, Megatron, INT4.

What comes back from Megatron is the release byte for byte (tests/converters/test_families.py), so it
stands for it here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import CASES, case

from ckptkit.app.api import convert, quantize
from converters.registry import FAMILIES
from quant.formats.scheme import QuantScheme
from verify.report import Report
from verify.run import verify

Made = dict[str, Path]


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """A model of one family: as its release, as Megatron, and in INT4 where that is supported.

    Read only. One scale a row fits these small sizes, which groups of 32 do not all divide.
    """
    name, root = request.param, tmp_path_factory.mktemp("clean")
    case.save(name, CASES[name], root / "hf", torch.bfloat16)
    convert(root / "hf", root / "megatron")
    config = json.loads((root / "hf" / "config.json").read_text())
    if FAMILIES[config["model_type"]].release:
        quantize(root / "hf", root / "int4", QuantScheme(None, "qmax7"))
    yield {path.name: path for path in root.iterdir()}
    shutil.rmtree(root)


def silent(report: Report) -> None:
    assert [str(finding) for finding in report.findings] == []
    assert {check.code: check.reason for check in report.checks if check.status != "passed"} == {}


def codes(report: Report) -> set[str]:
    return {check.code for check in report.checks}


# What reads bytes: of one checkpoint, and beside its source.
VALUES, COMPARED = {"CK201", "CK204", "CK205", "CK206", "CK207", "CK208"}, {"CK202", "CK203"}


@pytest.mark.parametrize("source", [None, "megatron"])
def test_verify_hf_release_is_silent(source: str | None, made: Made) -> None:
    report = verify(made["hf"], source=made.get(source or ""))
    silent(report)
    assert codes(report) >= {"CK101", "CK104", *VALUES}
    assert (codes(report) >= COMPARED) == (source is not None)


def test_verify_megatron_of_release_is_silent(made: Made) -> None:
    report = verify(made["megatron"], source=made["hf"])
    silent(report)
    assert codes(report) >= {"CK101", "CK104", "CK111", "CK114", "CK701", *VALUES, *COMPARED}


def test_verify_int4_of_release_is_silent(made: Made) -> None:
    if "int4" not in made:
        pytest.skip("no INT4 reader knows these experts one by one")
    report = verify(made["int4"], source=made["hf"])
    silent(report)
    assert codes(report) >= {"CK301", "CK302", "CK303", "CK304", "CK305", *VALUES, *COMPARED}
