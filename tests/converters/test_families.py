"""Every family comes back byte for byte from Megatron, and real Megatron computes the reference's logits.

A round trip cannot see a mapping that is wrong in both directions, but logits can.
To show it, each rule is made wrong in every way.
"""

from __future__ import annotations

import filecmp
import json
import math
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES, OF_A_KIND, UNWITNESSED
from families.case import far, save, tokens
from families.table import DOCUMENT, config_of, table
from families.worker import Answer, ask
from support.installed import require_megatron
from support.nightly import daily
from torch import Tensor

from ckptkit.app.api import convert
from ckptkit.converters.planner import rules_of
from ckptkit.converters.registry import FAMILIES
from ckptkit.formats.torch_dist.names import norm_alias
from ckptkit.formats.torch_dist.reader import NOT_WEIGHTS

TOLERANCE = 1e-4
FUSED = ("qwen3_moe", "deepseek_v3", "gpt_oss-v4")  # of those whose experts may be stored as one tensor
LAYOUTS = [
    pytest.param(name, fused, marks=[pytest.mark.nightly] if name not in (FUSED if fused else OF_A_KIND) else [])
    for name, case in CASES.items()
    for fused in (False, True)[: 1 + case.fused]
]


OF_A_TYPE = {str(config_of(case)["model_type"]): name for name, case in reversed(CASES.items())}
DAILY = {*OF_A_TYPE.values(), *OF_A_KIND}
MTP = [name for name, case in CASES.items() if case.mtp]


def test_every_family_has_a_case() -> None:
    unwitnessed = {str(config_of(case)["model_type"]) for case in UNWITNESSED.values()}
    assert unwitnessed == {name for name, family in FAMILIES.items() if family.unwitnessed}
    assert set(OF_A_TYPE) == set(FAMILIES) - unwitnessed


@pytest.mark.parametrize(("name", "fused"), LAYOUTS)
def test_roundtrip_gives_the_same_files_byte_for_byte(tmp_path: Path, name: str, fused: bool) -> None:
    save(name, CASES[name], tmp_path / "release", torch.bfloat16, fused=fused)
    convert(tmp_path / "release", tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    files = sorted(path.name for path in (tmp_path / "release").iterdir())
    assert len([file for file in files if file.endswith(".safetensors")]) > 1
    for file in files:
        if file != "model.safetensors.index.json":
            assert filecmp.cmp(tmp_path / "release" / file, tmp_path / "back" / file, shallow=False), file
    before, after = (
        json.loads((tmp_path / side / "model.safetensors.index.json").read_text()) for side in ("release", "back")
    )
    assert after["weight_map"] == before["weight_map"]
    assert after["metadata"]["total_size"] == before["metadata"]["total_size"]


def test_the_table_in_the_documentation_is_that_of_the_registry() -> None:
    assert table() in DOCUMENT.read_text(), "run `make families`"


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """By name: Megatron's answer, and the logits to compare with (the model's, and those of its first MTP layer)."""
    require_megatron()
    made_wrong = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and item.originalname == "test_wrong_mapping_changes_the_logits"
    }

    @cache
    def prove(name: str, enough: float | None = None) -> tuple[Answer, Tensor, Tensor | None]:
        enough = 10 * TOLERANCE if enough is None and name in made_wrong else enough
        root, case = tmp_path_factory.mktemp(name), CASES[name]
        if (found := tuple(map(int, version("megatron-core").split(".")[:2]))) < case.since:
            pytest.skip(f"megatron-core {found} has no modules for this model, {case.since} has")
        if case.before and found >= case.before:
            pytest.skip(f"megatron-core {found} has no modules for this model, versions before {case.before} have")
        model, added = save(name, case, root / "hf", torch.float32)
        with torch.no_grad():
            expected = case.reference(model, tokens())
            mtp = case.mtp(model, added, tokens()) if case.mtp else None
        convert(root / "hf", root / "megatron")
        return ask(root / "hf", root / "megatron", tokens(), enough), expected, mtp

    return prove


@pytest.mark.parametrize("name", daily(CASES, DAILY))
def test_megatron_loads_the_conversion_strictly(proofs: Any, name: str) -> None:
    answer, _, _ = proofs(name)
    assert answer.unexpected == []
    never_asked_for = set(answer.missing)
    # Objects that only Transformer Engine asks for, and the second names of norms.
    names = {rule.megatron for rule in rules_of(config_of(CASES[name]))}
    assert [
        key
        for key in answer.missing
        if not NOT_WEIGHTS.fullmatch(key) and norm_alias(key, names) in {None, *never_asked_for}
    ] == []


@pytest.mark.parametrize("name", daily(CASES, DAILY))
def test_megatron_computes_the_logits_of_the_reference(proofs: Any, name: str) -> None:
    answer, expected, _ = proofs(name)
    assert far(answer.logits, expected) < TOLERANCE


@pytest.mark.parametrize("name", daily(MTP, DAILY.intersection(MTP)))
def test_megatrons_mtp_layer_computes_the_logits_of_the_reference(proofs: Any, name: str) -> None:
    answer, _, expected = proofs(name)
    assert answer.mtp is not None
    assert expected is not None
    assert far(answer.mtp, expected) < TOLERANCE


@pytest.mark.parametrize("name", daily(CASES, OF_A_KIND))
def test_wrong_mapping_changes_the_logits(proofs: Any, name: str) -> None:
    """A change smaller than ten times the tolerance would let a wrong mapping pass for a right one."""
    answer, _, _ = proofs(name)
    assert len(answer.mutated) > 20
    assert {label: change for label, change in answer.mutated.items() if not change > 10 * TOLERANCE} == {}


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(CASES))
def test_mapping_wrong_in_every_layer_changes_the_logits(proofs: Any, name: str) -> None:
    """As above; there most are wrong in the last of their layers alone, which the layers before need not compute."""
    answer, _, _ = proofs(name, math.inf)
    assert len(answer.mutated) > 20
    assert {label: change for label, change in answer.mutated.items() if not change > 10 * TOLERANCE} == {}
