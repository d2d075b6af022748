"""The indexer of sparse attention: the rows of Megatron and of slime, and Megatron's arguments.

That Megatron's own indexer chooses the tokens that transformers' chooses, its logits show in test_families.py.
"""

from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from families import CASES
from families.table import config_of
from support import models
from support.installed import require_megatron

from ckptkit.app.api import convert
from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.planner import dims_of, rules_of
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.verify.checks.config.arguments import mismatches
from ckptkit.verify.checks.witnesses.megatron import right_slices, strict_load
from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses.megatron.run import run_megatron

SINCE_0_19 = find_spec("megatron") is not None and tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 19)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa-shared"])
def test_slime_dialect(releases, converted, tmp_path, name):
    """slime's names and rows for whatever the indexer is made of, and the same release again."""
    convert(releases(name), tmp_path / "megatron", dialect="slime")
    slime, mcore = (TorchDistCheckpoint(path / "release") for path in (tmp_path / "megatron", converted(name)))
    sizes = dims_of(config_of(CASES[name])).indexer
    assert sizes is not None
    places = [f"decoder.layers.{layer}." for layer in sizes.layers] + ["mtp.layers.0.transformer_layer."]
    names = {f"linear_{name}.weight": f"{name}.weight" for name in ("wq_b", "wk", "weights_proj")}
    names |= {name: name for name in ("k_norm.weight", "k_norm.bias")}
    renamed = {
        f"{at}self_attention.core_attention.indexer.{own}": f"{at}self_attention.{new}"
        for at in places
        for own, new in names.items()
    }
    assert {renamed.get(own, own) for own in mcore.specs} == set(slime.specs)
    before, after = mcore.read(list(renamed)), slime.read(list(renamed.values()))
    for own, new in renamed.items():
        released = before[own]
        if "weights_proj" not in own:
            released = torch.cat([part for head in released.split(64) for part in (head[16:], head[:16])])
        assert torch.equal(after[new], released), new
    convert(tmp_path / "megatron", tmp_path / "back")
    assert models.unequal(tmp_path / "back", releases(name)) == []


def test_every_rank_holds_the_whole_indexer(releases, converted):
    require_megatron()
    name = "glm_moe_dsa-shared"
    subject = Subject(converted(name), releases(name), options=VerifyOptions(tp=2, ep=2))
    if not SINCE_0_19:
        with pytest.raises(CannotCheck, match="0.19"):
            run_megatron(subject)
        return
    assert run_megatron(subject).failures == {}
    assert [finding for check in (strict_load, right_slices) for finding in check(subject, CheckResult("", ""))] == []
    for report in run_megatron(subject).reports:
        held = {seen.name: seen.elements for seen in report.tensors if ".indexer." in seen.name}
        assert len(held) == 6 * 5
        assert held["decoder.layers.10.self_attention.core_attention.indexer.linear_wq_b.weight"] == 14 * 64 * 48


def test_layers_that_share_have_no_rules():
    shared = {rule.megatron for rule in rules_of(config_of(CASES["glm_moe_dsa-shared"]))}
    every = {rule.megatron for rule in rules_of(config_of(CASES["glm_moe_dsa"]))}
    gone = {name for name in every - shared if ".indexer." in name}
    assert shared == every - gone
    assert {int(name.split(".")[2]) for name in gone} == {3, 4, 5, 7, 8, 9, 11}
    assert len(gone) == 7 * 5


def test_a_run_with_slimes_module_stores_no_size_of_it():
    dims = dims_of(config_of(CASES["deepseek_v32"]))
    args = megatron_args(dims, "slime")
    assert [name for name in args if "dsa" in name or "experimental" in name] == []
    none = {"dsa_indexer_n_heads": None, "experimental_attention_variant": None}
    assert list(mismatches(dims, args | none)) == []


def test_arguments_from_before_0_19_are_named_with_the_release():
    dims = dims_of(config_of(CASES["deepseek_v32"]))
    args = {name: value for name, value in megatron_args(dims).items() if name != "dsa_indexer_rope_interleaved"}
    ((argument, expected, actual),) = mismatches(dims, args)
    assert (argument, expected, "0.19" in actual) == ("dsa_indexer_rope_interleaved", "False", True)
