"""The indexer of sparse attention: the rows of Megatron and of slime, configs, and Megatron's arguments.

That Megatron's own indexer chooses the tokens that transformers' chooses, its logits show in test_families.py.
"""

from __future__ import annotations

import filecmp
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES
from families.case import save
from families.table import config_of

from ckptkit.app.api import convert
from ckptkit.converters.families.deepseek_v32 import RotaryLast
from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.planner import dims_of, rules_of
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.verify.checks.config.arguments import mismatches
from ckptkit.verify.checks.witnesses.megatron import right_slices, strict_load
from ckptkit.verify.core.check import Tally
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses.megatron.run import run_megatron

Config = dict[str, Any]
SINCE_0_19 = find_spec("megatron") is not None and tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 19)


def test_rotary_last_op_inverts_and_shards() -> None:
    # Two heads of four rows, of which the first three turn.
    op = RotaryLast(head_dim=4, rope=3)
    released = torch.tensor([[0, 10], [1, 11], [2, 12], [3, 13], [4, 14], [5, 15], [6, 16], [7, 17]])
    moved = torch.tensor([[3, 13], [0, 10], [1, 11], [2, 12], [7, 17], [4, 14], [5, 15], [6, 16]])
    assert torch.equal(op.merge([released]), moved)
    assert torch.equal(op.split(moved)[0], released)
    assert torch.equal(op.shard(moved, 1, 2), moved)
    assert op.merge([torch.tensor([0, 1, 2, 3])]).tolist() == [3, 0, 1, 2]


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa-shared"])
def test_slime_dialect(tmp_path: Path, name: str) -> None:
    """slime's names and rows for whatever the indexer is made of, and the same release again."""
    save(name, CASES[name], tmp_path / "release", torch.bfloat16)
    convert(tmp_path / "release", tmp_path / "megatron", dialect="slime")
    convert(tmp_path / "release", tmp_path / "mcore")
    slime, mcore = (TorchDistCheckpoint(tmp_path / path / "release") for path in ("megatron", "mcore"))
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
        released, rope = before[own], 16
        expected = (
            released
            if "weights_proj" in own
            else torch.cat([part for head in released.split(64) for part in (head[rope:], head[:rope])])
        )
        assert torch.equal(after[new], expected), new
    convert(tmp_path / "megatron", tmp_path / "back")
    files = sorted(path.name for path in (tmp_path / "release").glob("*.safetensors"))
    assert all(filecmp.cmp(tmp_path / "release" / file, tmp_path / "back" / file, shallow=False) for file in files)


def test_every_rank_holds_the_whole_indexer(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    save("glm_moe_dsa-shared", CASES["glm_moe_dsa-shared"], tmp_path / "release", torch.bfloat16)
    convert(tmp_path / "release", tmp_path / "megatron")
    subject = Subject(tmp_path / "megatron", tmp_path / "release", options=VerifyOptions(tp=2, ep=2))
    if not SINCE_0_19:
        with pytest.raises(CannotCheck, match="0.19"):
            run_megatron(subject)
        return
    assert run_megatron(subject).failures == {}
    tallies = [Tally() for _ in range(2)]
    assert [
        finding
        for check, tally in zip((strict_load, right_slices), tallies, strict=True)
        for finding in check(subject, tally)
    ] == []
    for report in run_megatron(subject).reports:
        held = {seen.name: seen.elements for seen in report.tensors if ".indexer." in seen.name}
        assert len(held) == 6 * 5
        assert held["decoder.layers.10.self_attention.core_attention.indexer.linear_wq_b.weight"] == 14 * 64 * 48


def test_layers_that_share_have_no_rules() -> None:
    shared = {rule.megatron for rule in rules_of(config_of(CASES["glm_moe_dsa-shared"]))}
    every = {rule.megatron for rule in rules_of(config_of(CASES["glm_moe_dsa"]))}
    gone = {name for name in every - shared if ".indexer." in name}
    assert shared == every - gone
    assert {int(name.split(".")[2]) for name in gone} == {3, 4, 5, 7, 8, 9, 11}
    assert len(gone) == 7 * 5


@pytest.mark.parametrize(
    ("change", "every", "first", "layers"),
    [
        ({"indexer_types": ["full"] * 12}, 1, 0, range(12)),
        ({"indexer_types": None}, 1, 0, range(12)),
        ({"indexer_types": None, "index_topk_pattern": "FFFSSSFSSSFS"}, 4, 3, [0, 1, 2, 6, 10]),
        ({"indexer_types": None, "index_topk_freq": 4, "index_skip_topk_offset": 3}, 4, 3, [0, 1, 2, 6, 10]),
        # Without an offset transformers and SGLang take 2.
        ({"indexer_types": None, "index_topk_freq": 5}, 5, 2, [0, 1, 6, 11]),
        ({"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 1}, 2, 1, [0, 2, 4, 6, 8, 10]),
        # Nothing comes after: any distance that reaches beyond the last layer is right.
        ({"indexer_types": ["full"] * 9 + ["shared"] * 3}, 4, 9, range(9)),
    ],
)
def test_which_layers_have_an_indexer(change: Config, every: int, first: int, layers: list[int]) -> None:
    sizes = dims_of(config_of(CASES["glm_moe_dsa"]) | change).indexer
    assert sizes is not None
    assert (sizes.every, sizes.first, sizes.layers) == (every, first, tuple(layers))


def test_how_an_indexer_turns() -> None:
    """DeepSeek's as halves unless the config says otherwise."""
    assert not megatron_args(dims_of(config_of(CASES["deepseek_v32"])))["dsa_indexer_rope_interleaved"]
    assert megatron_args(dims_of(config_of(CASES["deepseek_v32"]) | {"indexer_rope_interleave": True}))[
        "dsa_indexer_rope_interleaved"
    ]
    assert megatron_args(dims_of(config_of(CASES["glm_moe_dsa"])))["dsa_indexer_rope_interleaved"]


def test_megatrons_arguments() -> None:
    sizes = {
        "dsa_indexer_n_heads": 14,
        "dsa_indexer_head_dim": 64,
        "dsa_indexer_topk": 5,
        "dsa_indexer_topk_freq": 4,
        "dsa_indexer_skip_topk_offset": 3,
    }
    args = megatron_args(dims_of(config_of(CASES["glm_moe_dsa-shared"])))
    assert (
        args.items() >= {"experimental_attention_variant": "dsa", "dsa_indexer_k_norm_epsilon": 1e-6, **sizes}.items()
    )
    slime = megatron_args(dims_of(config_of(CASES["glm_moe_dsa-shared"])), "slime")
    assert [name for name in slime if "dsa" in name or "experimental" in name] == []


def test_arguments_of_another_score() -> None:
    dims = dims_of(config_of(CASES["glm_moe_dsa-shared"]))
    args = megatron_args(dims) | {"dsa_indexer_scoring_relu": False}
    assert [name for name, _, _ in mismatches(dims, args)] == ["dsa_indexer_scoring_relu"]


def test_arguments_from_before_0_19_and_without_an_indexer() -> None:
    dims = dims_of(config_of(CASES["deepseek_v32"]))
    args = {name: value for name, value in megatron_args(dims).items() if name != "dsa_indexer_rope_interleaved"}
    ((argument, expected, actual),) = mismatches(dims, args)
    assert (argument, expected) == ("dsa_indexer_rope_interleaved", "False")
    assert "before 0.19" in actual
    # A run with slime's module stores no size of it.
    none = {"dsa_indexer_n_heads": None, "experimental_attention_variant": None}
    assert list(mismatches(dims, megatron_args(dims, "slime") | none)) == []
