"""Every family comes back byte for byte from Megatron, and real Megatron computes the reference's logits.

A round trip cannot see a mapping that is wrong in both directions, but logits can.
To show it, each rule is made wrong in every way.
"""

import json
from importlib.metadata import version

import pytest
import torch
from families import CASES, OF_A_KIND, UNWITNESSED
from families.case import far, save, tokens
from families.table import DOCUMENT, config_of, table
from families.worker import ask
from support import models
from support.installed import require_megatron
from support.nightly import daily

from ckptkit.app.api import convert
from ckptkit.converters.planner import rules_of
from ckptkit.converters.registry import FAMILIES
from ckptkit.formats.torch_dist.names import norm_alias
from ckptkit.formats.torch_dist.reader import NOT_WEIGHTS

TOLERANCE = 1e-4
ENOUGH = 10 * TOLERANCE  # a change that is smaller would let a wrong mapping pass for a right one
FUSED = ("qwen3_moe", "moonlight", "qwen3_5_moe")  # of those whose experts may be stored as one tensor
INDEX = "model.safetensors.index.json"


def test_every_family_has_a_case_and_a_row_in_the_documentation():
    unwitnessed = {str(config_of(case)["model_type"]) for case in UNWITNESSED.values()}
    assert unwitnessed == {name for name, family in FAMILIES.items() if family.unwitnessed}
    assert {str(config_of(case)["model_type"]) for case in CASES.values()} == set(FAMILIES) - unwitnessed
    assert table() in DOCUMENT.read_text(), "run `make families`"


def assert_comes_back(release, megatron, back):
    """All files byte for byte; the index may have other spaces."""
    convert(megatron, back)
    before, after = models.content(release), models.content(back)
    assert len([file for file in before if file.endswith(".safetensors")]) > 1
    assert [file for file in before if file != INDEX and before[file] != after[file]] == []
    there, here = (json.loads(content[INDEX]) for content in (before, after))
    assert here["weight_map"] == there["weight_map"]
    assert here["metadata"]["total_size"] == there["metadata"]["total_size"]


LAYOUTS = [(name, fused) for name, case in CASES.items() for fused in (False, True)[: 1 + case.fused]]
LAYOUTS_DAILY = [*((name, False) for name in OF_A_KIND), *((name, True) for name in FUSED)]


@pytest.mark.parametrize("layout", daily(LAYOUTS, LAYOUTS_DAILY), ids=lambda layout: "-".join(map(str, layout)))
def test_bfloat16_comes_back_byte_for_byte(tmp_path, layout):
    name, fused = layout
    save(name, CASES[name], tmp_path / "release", torch.bfloat16, fused=fused)
    convert(tmp_path / "release", tmp_path / "megatron")
    assert_comes_back(tmp_path / "release", tmp_path / "megatron", tmp_path / "back")


def needs_megatron_of(name):
    """Skips where the installed megatron-core has no modules for a model."""
    require_megatron()
    found, case = tuple(map(int, version("megatron-core").split(".")[:2])), CASES[name]
    if found < case.since or (case.before and found >= case.before):
        pytest.skip(f"megatron-core {found} has no modules for it: since {case.since}, before {case.before}")


@pytest.mark.parametrize("name", daily(CASES, OF_A_KIND))
def test_megatron_loads_it_strictly_and_computes_the_logits_of_the_reference(name, tmp_path):
    """Of layers for multi-token prediction too; and others with a mapping that is wrong in its last layer."""
    case = CASES[name]
    model, added = save(name, case, tmp_path / "hf", torch.float32)
    convert(tmp_path / "hf", tmp_path / "megatron")
    assert_comes_back(tmp_path / "hf", tmp_path / "megatron", tmp_path / "back")
    needs_megatron_of(name)
    answer = ask(tmp_path / "hf", tmp_path / "megatron", tokens(), ENOUGH)
    assert answer.unexpected == []
    # Objects that only Transformer Engine asks for, and the second names of norms.
    names, missing = {rule.megatron for rule in rules_of(config_of(case))}, {None, *answer.missing}
    weights = [key for key in answer.missing if not NOT_WEIGHTS.fullmatch(key)]
    assert [key for key in weights if norm_alias(key, names) in missing] == []
    with torch.no_grad():
        assert far(answer.logits, case.reference(model, tokens())) < TOLERANCE
        if case.mtp:
            assert far(answer.mtp, case.mtp(model, added, tokens())) < TOLERANCE
    assert len(answer.mutated) > 20
    assert {label: change for label, change in answer.mutated.items() if not change > ENOUGH} == {}
