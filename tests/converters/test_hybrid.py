"""Linear attention: its parts and dtypes on disk, and what ranks of real Megatron hold and save of it."""

import pytest
import torch
from families import CASES
from families.case import save
from families.mtp import small
from support import models
from support.installed import require_megatron
from support.megatron_saves import Save, save_with_megatron
from support.messages import refusal

from ckptkit.app.api import convert
from ckptkit.converters.megatron.parallel import ParallelSizes
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint, read_metadata
from ckptkit.verify.checks.witnesses.megatron import all_layers, right_slices, strict_load
from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses.megatron.run import run_megatron


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    path = tmp_path_factory.mktemp("hybrid") / "release"
    save("hybrid", small(CASES["qwen3_5"], 4), path, torch.bfloat16)
    return path


IN_PROJ = "decoder.layers.2.self_attention.in_proj.weight"


def test_a_part_that_is_missing_is_named(release, tmp_path):
    convert(release, tmp_path / "megatron")
    path = tmp_path / "megatron" / "release"
    models.edit_metadata(path, lambda metadata: metadata.state_dict_metadata.pop(IN_PROJ + ".z"))
    refusal(rf"{IN_PROJ} .*\.z", TorchDistCheckpoint, path)


def test_float32_state_is_never_rounded_and_the_norm_is_exact(release, tmp_path):
    """Qwen3.5 has a float32 A_log in bfloat16 releases. Megatron stores its gated norm minus one, in a wider dtype."""
    before, layer = models.tensors(release), "model.language_model.layers.1.linear_attn."
    assert before[layer + "A_log"].dtype == before[layer + "norm.weight"].dtype == torch.float32
    convert(release, tmp_path / "same")
    convert(release, tmp_path / "narrow", dtype="bfloat16")
    for name, dtype in (("same", "float64"), ("narrow", "float32")):
        megatron = TorchDistCheckpoint(tmp_path / name / "release").specs
        assert megatron["decoder.layers.1.self_attention.A_log"].dtype == "float32"
        assert megatron["decoder.layers.1.self_attention.out_norm.weight"].dtype == dtype
        convert(tmp_path / name, tmp_path / f"{name}-back")
    same, narrow = models.tensors(tmp_path / "same-back"), models.tensors(tmp_path / "narrow-back")
    assert all(torch.equal(same[name], tensor) and same[name].dtype == tensor.dtype for name, tensor in before.items())
    assert torch.equal(narrow[layer + "A_log"], before[layer + "A_log"])
    assert torch.equal(narrow[layer + "norm.weight"], before[layer + "norm.weight"].bfloat16())


def test_a_norm_that_would_be_rounded_is_refused(release, copy_of, tmp_path):
    name, source = "model.language_model.layers.1.linear_attn.norm.weight", copy_of(release)
    norm = models.tensors(source)[name].bfloat16()
    norm[3] = 1e-9
    models.edit(source, name, norm)
    refusal(rf"{name} .*decoder\.layers\.1\.self_attention\.out_norm\.weight", convert, source, tmp_path / "out")


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    require_megatron()
    path = tmp_path_factory.mktemp("next") / "megatron"
    save("hybrid", small(CASES["qwen3_next"], 4), path.with_name("release"), torch.bfloat16)
    convert(path.with_name("release"), path)
    return path


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("sizes", [{"tp": 2}, pytest.param({"pp": 2}, marks=pytest.mark.nightly)])
def test_every_rank_holds_what_the_rules_say(megatron, sizes):
    """With two pipeline stages the first has linear attention only, the second both kinds and the MTP layer."""
    subject = Subject(
        megatron, megatron.with_name("release"), options=VerifyOptions(**sizes, against=frozenset({"megatron"}))
    )
    result = CheckResult("", "")
    assert [finding for check in (strict_load, right_slices, all_layers) for finding in check(subject, result)] == []
    held = [{seen.name for seen in report.tensors} for report in run_megatron(subject).reports]
    assert all("decoder.layers.1.self_attention.in_proj.weight" in names for names in held[: 1 if "pp" in sizes else 2])
    assert "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight" in held[1]
    if "tp" in sizes:
        elements = {seen.name: seen.elements for seen in run_megatron(subject).reports[1].tensors}
        # Half of 2 x 48 rows of queries and keys, 2 x 160 of values and gates, and 2 x 8 of beta and alpha.
        assert elements["decoder.layers.1.self_attention.in_proj.weight"] == 216 * 128
        assert elements["decoder.layers.1.self_attention.conv1d.weight"] == 128 * 4
        assert elements["decoder.layers.1.self_attention.A_log"] == 4


def test_what_megatron_saves_on_two_ranks_is_read(megatron, tmp_path):
    """A training run saves bfloat16 throughout. That rounds the gated norm minus one, and nothing else."""
    release = megatron.with_name("release")
    save_with_megatron(
        [Save(HfCheckpoint(release).config, megatron / "release", tmp_path / "saved", ParallelSizes(tp=2, etp=2))],
        world=2,
    )
    stored = read_metadata(tmp_path / "saved" / "iter_0000010").tensors
    assert len(stored["decoder.layers.0.self_attention.in_proj.weight.beta"].chunks) == 2
    convert(tmp_path / "saved", tmp_path / "back", hf=release)
    before, after = models.tensors(release), models.tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        expected = (
            ((tensor.float() - 1).bfloat16().float() + 1).bfloat16()
            if name.endswith("linear_attn.norm.weight")
            else tensor
        )
        assert torch.equal(after[name], expected), name
