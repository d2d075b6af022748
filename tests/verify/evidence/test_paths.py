"""Relative paths, `--hf`, files with Megatron's names in an HF directory, and what a launch makes of paths."""

import shutil

import pytest

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.checks.witnesses.megatron import _not_requested
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.megatron.job import RankReport


@pytest.mark.parametrize(
    ("inside", "path"), [("release", "."), ("hf", "../release"), ("hf", "../hf/../release"), (".", "release")]
)
def test_the_config_beside_an_iteration_is_found_from_anywhere(inside, path, converted, monkeypatch):
    monkeypatch.chdir(converted("qwen2-tied") / inside)
    report = verify(path)
    assert report.findings == []
    assert {check.status for check in report.checks} == {"passed"}


@pytest.mark.parametrize("kind", ["megatron", "hf"])
def test_hf_without_a_config_is_bad_input(kind, releases, converted, tmp_path):
    with pytest.raises(CkptkitError, match=r"config\.json"):
        verify(converted("qwen2-tied") if kind == "megatron" else releases("qwen2-tied"), hf=tmp_path)


@pytest.mark.parametrize("name", ["metadata.json", "common.pt"])
def test_a_file_that_both_kinds_have_tells_neither(name, releases, converted, copy_of):
    path = copy_of(releases("qwen2-tied"))
    (path / name).write_text("{}")
    assert Subject(path).kind == "hf"
    assert verify(path).findings == []
    megatron = copy_of(converted("qwen2-tied") / "release")
    for file in megatron.iterdir():
        if file.name != name:
            file.unlink()
    assert Subject(megatron).kind == "megatron"


def test_what_training_saves_beside_weights_is_not_missed(converted):
    beside = [
        "chained_0.optimizer.state.exp_avg.decoder.x",
        "optimizer.state.fp32_param.x",
        "rng_state/shard_0_2",
        "decoder.layers.0.x._extra_state/shard_0_1",
    ]
    report = RankReport(0, "0", 1, 1, 1, ((0,),), 1, (*beside, "decoder.layers.12.mlp.linear_fc2.weight"), (), (), ())
    assert [issue.names for issue in _not_requested([report], set())] == [["decoder.layers.12.mlp.linear_fc2.weight"]]


def test_verify_of_megatron_without_an_hf_config_is_inconclusive(converted, copy_of):
    """Nothing says what the model should be, so no name and no shape was held against anything."""
    path = copy_of(converted("qwen2-tied"))
    shutil.rmtree(path / "hf")
    report = verify(path)
    assert (report.status, report.findings) == ("inconclusive", [])
    skipped = {check.code for check in report.checks if check.status == "skipped"}
    assert skipped == {"CK101", "CK105", "CK209", "CK701"}
    assert all(reason.endswith("--hf") for reason in report.reasons)
    assert verify(path, hf=converted("qwen2-tied") / "hf").status == "passed"
