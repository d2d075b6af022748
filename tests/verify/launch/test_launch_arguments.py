"""Parallel sizes and pipeline options among the arguments of a launch script, and what preflight says of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from support.fixture_types import OnlyFinding, PathOf
from support.launch_words import arguments_of

from ckptkit.core.errors import CkptkitError
from converters.megatron.pipeline import Pipeline
from verify.launch.arguments import LaunchArguments
from verify.launch.preflight import preflight
from verify.run import verify

# As launch scripts for GLM-4.5 have it: 92 layers over 7 stages.
GLM45 = shlex.split(
    "python3 train.py --actor-num-nodes 8 --hf-checkpoint /models/GLM-4.5 "
    "--tensor-model-parallel-size 8 --sequence-parallel "
    "--pipeline-model-parallel-size 7 --decoder-last-pipeline-num-layers=2 --expert-model-parallel-size 8 "
    "--expert-tensor-parallel-size 1"
)


def test_launch_arguments_are_read_with_defaults_and_last_value() -> None:
    assert arguments_of(GLM45) == LaunchArguments(tp=8, pp=7, ep=8, etp=1, last=2)
    assert arguments_of([]) == LaunchArguments()
    assert arguments_of(
        ["--account-for-loss-in-pipeline-split", "--pipeline-model-parallel-layout", "Et|(tt|)*2L"]
    ) == LaunchArguments(loss=True, layout="Et|(tt|)*2L")
    # argparse takes the last one
    assert arguments_of(["--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"]).pp == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pipeline-model-parallel-size", "${PP}"], r"\$\{PP\} among the launch arguments is not a number"),
        (["--pipeline-model-parallel-size"], "has no value"),
        (["--pipeline-model-parallel-layout", "--swiglu"], "has no value"),
        (["--mtp-num-layers", "9" * 5000], "is not a number"),
    ],
)
def test_values_that_are_none(words: list[str], said: str) -> None:
    with pytest.raises(CkptkitError, match=said):
        arguments_of(words)


@pytest.mark.parametrize(
    ("given", "pipeline"),
    [
        ("", Pipeline(92, 4)),
        ("--decoder-first-pipeline-num-layers 20", Pipeline(92, 4, first=20)),
        ("--num-virtual-stages-per-pipeline-rank 23", Pipeline(92, 4, vpp=23)),
        ("--num-layers-per-virtual-pipeline-stage 1", Pipeline(92, 4, vpp=23)),
        ("--pipeline-model-parallel-layout E|t*46|t*46|L", Pipeline(92, 4, layout="E|t*46|t*46|L")),
        (
            "--pipeline-model-parallel-layout E|t*46|t*46|mL --mtp-num-layers 1",
            Pipeline(92, 4, layout="E|t*46|t*46|mL", mtp=1),
        ),
    ],
)
def test_the_pipeline_that_follows(given: str, pipeline: Pipeline) -> None:
    found = arguments_of(given.split()).pipeline(92, 4)
    assert found == pipeline
    assert found.stages


def test_chunks_of_a_given_size_with_embedding_and_loss() -> None:
    words = [
        "--num-layers-per-virtual-pipeline-stage",
        "4",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
    ]
    # 94 + 2 = 96 layers: 24 a stage, in 6 chunks
    assert arguments_of(words).pipeline(94, 4) == Pipeline(94, 4, vpp=6, embedding=True, loss=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--num-layers-per-virtual-pipeline-stage 3", "92 layers over 4 stages do not divide into chunks"),
        ("--num-layers-per-virtual-pipeline-stage 0", "do not divide into chunks"),
        (
            "--num-layers-per-virtual-pipeline-stage 1 --decoder-last-pipeline-num-layers 2",
            "with a first or last stage of its own size",
        ),
        ("--num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2", "more than one of"),
    ],
)
def test_what_megatrons_arguments_refuse(given: str, said: str) -> None:
    with pytest.raises(CkptkitError, match=said):
        arguments_of(given.split()).pipeline(92, 4)


def test_stages_of_a_launch(releases: PathOf) -> None:
    report = preflight(
        hf_checkpoint=releases("glm4_moe"),
        arguments=["--pipeline-model-parallel-size", "3", "--decoder-last-pipeline-num-layers", "2"],
    )
    assert report.findings == []
    assert report.facts["pipeline stages"] == [
        "pp rank 0: layers 0..4",
        "pp rank 1: layers 5..9",
        "pp rank 2: layers 10..11",
    ]
    report = preflight(
        hf_checkpoint=releases("glm4_moe"), pp=2, arguments=["--pipeline-model-parallel-layout", "E|t|t*11|L"]
    )
    assert report.findings == []
    assert report.facts["pipeline stages"] == ["pp rank 0: layers none and 1..11", "pp rank 1: layers 0 and none"]


def test_options_that_megatron_would_refuse_are_a_finding(releases: PathOf, only: OnlyFinding) -> None:
    finding = only(
        preflight(hf_checkpoint=releases("glm4_moe"), pp=3, arguments=["--decoder-last-pipeline-num-layers", "3"])
    )
    assert (finding.code, finding.severity) == ("CK703", "error")
    assert finding.actual.startswith(
        "9 layers do not divide over the 2 other stages: num_layers 12, pipeline_model_parallel_size 3"
    )
    finding = only(
        preflight(hf_checkpoint=releases("glm4_moe"), pp=2, arguments=["--pipeline-model-parallel-layout", "Et*6|t*5L"])
    )
    assert "the layout has 11 layers" in finding.actual


def test_layers_left_over(releases: PathOf, only: OnlyFinding) -> None:
    """verify puts them on the last stage, as slime does; a launch must say so itself."""
    assert only(preflight(hf_checkpoint=releases("glm4_moe"), pp=5)).severity == "error"
    directory = releases("glm4_moe")
    odd = directory.parent / "eleven"
    odd.mkdir()
    (odd / "config.json").write_text(
        (directory / "config.json").read_text().replace('"num_hidden_layers": 12', '"num_hidden_layers": 11')
    )
    for report, severity in ((preflight(hf_checkpoint=odd, pp=2), "error"), (verify(odd, pp=2), "warning")):
        (finding,) = [finding for finding in report.findings if finding.code == "CK703"]
        assert (finding.severity, finding.actual) == (severity, "num_hidden_layers = 11")
        assert finding.hint.endswith("--decoder-last-pipeline-num-layers 5")


def test_a_size_given_twice(releases: PathOf, only: OnlyFinding) -> None:
    with pytest.raises(CkptkitError, match="--tp 4, but it is 8 among the launch arguments"):
        preflight(hf_checkpoint=releases("glm4_moe"), tp=4, arguments=GLM45)
    finding = only(preflight(hf_checkpoint=releases("glm4_moe"), arguments=["--expert-model-parallel-size", "5"]))
    assert (finding.code, finding.actual) == ("CK703", "the number of experts = 12")


@pytest.mark.parametrize(
    ("words", "severity"),
    [
        (["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"], None),
        (["--tensor-model-parallel-size", "2"], "error"),  # Megatron takes that of tp
        ([], "warning"),  # nobody said
    ],
)
def test_expert_rows_of_an_odd_size_are_judged_by_what_the_launch_says(
    words: list[str], severity: str | None, releases: PathOf, tmp_path: Path, only: OnlyFinding
) -> None:
    config = json.loads((releases("qwen3_moe") / "config.json").read_text()) | {"moe_intermediate_size": 95}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = preflight(hf_checkpoint=tmp_path, tp=2, ep=4, arguments=words)
    found = [finding for finding in report.findings if finding.code == "CK703"]
    assert [(finding.severity, finding.actual) for finding in found] == (
        [(severity, "moe_intermediate_size = 95")] if severity else []
    )


@pytest.mark.parametrize(
    "name",
    [
        "--tensor-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--rollout-num-gpus-per-engine",
        "--sglang-ep-size",
    ],
)
def test_a_parallel_size_of_zero_is_no_size(name: str) -> None:
    with pytest.raises(CkptkitError, match=f"{name} 0 among the launch arguments is not a number of ranks"):
        arguments_of([name, "0"])
