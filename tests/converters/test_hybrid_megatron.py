"""Linear attention in real Megatron on several ranks: what pipeline and tensor-parallel ranks hold and save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families.case import save
from support.installed import require_megatron
from support.megatron_saves import Save, save_with_megatron
from test_hybrid import four_layers, tensors_of

from ckptkit.app.api import convert
from ckptkit.converters.megatron.parallel import ParallelSizes
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.torch_dist.reader import read_metadata
from ckptkit.verify.checks.witnesses.megatron import all_layers, right_slices, strict_load
from ckptkit.verify.core.check import Tally
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses.megatron.run import run_megatron

require_megatron()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "release"
    save("hybrid", four_layers("qwen3_next"), path, torch.bfloat16)
    return path


@pytest.fixture(scope="module")
def megatron(release: Path) -> Path:
    convert(release, release.parent / "megatron")
    return release.parent / "megatron"


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("sizes", [{"tp": 2}, pytest.param({"pp": 2}, marks=pytest.mark.nightly)])
def test_every_rank_holds_what_the_rules_say(release: Path, megatron: Path, sizes: dict[str, int]) -> None:
    """With two pipeline stages the first has linear attention only, the second both kinds and the MTP layer."""
    subject = Subject(megatron, release, options=VerifyOptions(**sizes, against=frozenset({"megatron"})))
    tally = Tally()
    assert [finding for check in (strict_load, right_slices, all_layers) for finding in check(subject, tally)] == []
    held = [{seen.name for seen in report.tensors} for report in run_megatron(subject).reports]
    assert all("decoder.layers.1.self_attention.in_proj.weight" in names for names in held[: 1 if "pp" in sizes else 2])
    assert "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight" in held[1]
    if "tp" in sizes:
        elements = {seen.name: seen.elements for seen in run_megatron(subject).reports[1].tensors}
        # Half of 2 x 48 rows of queries and keys, 2 x 160 of values and gates, and 2 x 8 of beta and alpha.
        assert elements["decoder.layers.1.self_attention.in_proj.weight"] == 216 * 128
        assert elements["decoder.layers.1.self_attention.conv1d.weight"] == 128 * 4
        assert elements["decoder.layers.1.self_attention.A_log"] == 4


def test_what_megatron_saves_on_two_ranks_is_read(release: Path, megatron: Path, tmp_path: Path) -> None:
    """A training run saves bfloat16 throughout. That rounds the gated norm minus one, and nothing else."""
    save_with_megatron(
        [Save(HfCheckpoint(release).config, megatron / "release", tmp_path / "saved", ParallelSizes(tp=2, etp=2))],
        world=2,
    )
    stored = read_metadata(tmp_path / "saved" / "iter_0000010").tensors
    assert len(stored["decoder.layers.0.self_attention.in_proj.weight.beta"].chunks) == 2
    convert(tmp_path / "saved", tmp_path / "back", hf=release)
    before, after = tensors_of(release), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        expected = (
            ((tensor.float() - 1).bfloat16().float() + 1).bfloat16()
            if name.endswith("linear_attn.norm.weight")
            else tensor
        )
        assert torch.equal(after[name], expected), name
