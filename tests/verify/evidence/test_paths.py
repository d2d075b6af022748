"""Relative paths, `--hf`, files with Megatron's names in an HF directory, and what a launch makes of paths."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.fixture_types import CopyOf, PathOf

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.checks.witnesses.megatron import _never_asked_for
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.megatron.job import RankReport


@pytest.mark.parametrize(
    ("inside", "path"), [("release", "."), ("hf", "../release"), ("hf", "../hf/../release"), (".", "release")]
)
def test_the_config_beside_an_iteration_is_found_from_anywhere(
    inside: str, path: str, converted: PathOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(converted("qwen2-tied") / inside)
    report = verify(path)
    assert report.findings == []
    assert {check.status for check in report.checks} == {"passed"}


def test_relative_paths_are_resolved(converted: PathOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(converted("qwen2-tied") / "hf")
    subject = Subject(Path(".."), source_path=Path("."), hf_path=Path("../hf"))
    assert [subject.path, subject.source_path, subject.hf_path] == [
        converted("qwen2-tied"),
        *[converted("qwen2-tied") / "hf"] * 2,
    ]


@pytest.mark.parametrize("kind", ["megatron", "hf"])
def test_hf_without_a_config_is_bad_input(kind: str, releases: PathOf, converted: PathOf, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match=r"config\.json"):
        verify(converted("qwen2-tied") if kind == "megatron" else releases("qwen2-tied"), hf=tmp_path)


@pytest.mark.parametrize("name", ["metadata.json", "common.pt"])
def test_an_hf_directory_with_a_file_that_megatron_has_too(name: str, releases: PathOf, copy_of: CopyOf) -> None:
    path = copy_of(releases("qwen2-tied"))
    (path / name).write_text("{}")
    assert Subject(path).kind == "hf"
    assert verify(path).findings == []


@pytest.mark.parametrize("name", ["metadata.json", "common.pt"])
def test_single_megatron_file_counts_as_a_megatron_directory(name: str, converted: PathOf, copy_of: CopyOf) -> None:
    path = copy_of(converted("qwen2-tied") / "release")
    for file in path.iterdir():
        if file.name != name:
            os.remove(file)
    assert Subject(path).kind == "megatron"


@pytest.mark.parametrize(("inside", "said"), [(".", "a Megatron checkpoint"), ("release", "a Megatron checkpoint")])
def test_an_engine_without_an_hf_directory_cannot_start(inside: str, said: str, converted: PathOf) -> None:
    path = converted("qwen2-tied") / inside
    lines = preflight(hf_checkpoint=path).facts["what would be loaded"]
    assert lines == [f"rollout engine cannot start: --hf-checkpoint {path} is not an HF directory: {said}"]


def test_what_training_saves_beside_weights_is_not_missed(converted: PathOf) -> None:
    beside = [
        "chained_0.optimizer.state.exp_avg.decoder.x",
        "optimizer.state.fp32_param.x",
        "rng_state/shard_0_2",
        "decoder.layers.0.x._extra_state/shard_0_1",
    ]
    report = RankReport(0, "0", 1, 1, 1, ((0,),), 1, (*beside, "decoder.layers.12.mlp.linear_fc2.weight"), (), (), ())
    assert [issue.names for issue in _never_asked_for([report], set())] == [["decoder.layers.12.mlp.linear_fc2.weight"]]


def test_verify_of_megatron_without_an_hf_config_is_inconclusive(converted: PathOf, copy_of: CopyOf) -> None:
    """Nothing says what the model should be, so no name and no shape was held against anything."""
    path = copy_of(converted("qwen2-tied"))
    shutil.rmtree(path / "hf")
    report = verify(path)
    assert (report.status, report.findings) == ("inconclusive", [])
    assert all(reason.endswith("name the HF directory with --hf") for reason in report.reasons)
    assert verify(path, hf=converted("qwen2-tied") / "hf").status == "passed"
