"""Parallel sizes and pipeline options among the arguments of a launch script, and what preflight says of them."""

import json
import shlex

import pytest
from support.launch_scripts import arguments_of
from support.messages import text_with

from ckptkit.converters.megatron.pipeline import Pipeline
from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

# As launch scripts for GLM-4.5 have it: 92 layers over 7 stages.
GLM45 = shlex.split(
    "python3 train.py --actor-num-nodes 8 --hf-checkpoint /models/GLM-4.5 "
    "--tensor-model-parallel-size 8 --sequence-parallel "
    "--pipeline-model-parallel-size 7 --decoder-last-pipeline-num-layers=2 --expert-model-parallel-size 8 "
    "--expert-tensor-parallel-size 1"
)


CHUNK, STAGES = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
LAYOUT, RANKS = "--pipeline-model-parallel-layout", "--pipeline-model-parallel-size"


@pytest.mark.parametrize(
    ("given", "pipeline"),
    [
        ("", Pipeline(92, 4)),
        (f"{STAGES} 23", Pipeline(92, 4, vpp=23)),
        (f"{CHUNK} 1", Pipeline(92, 4, vpp=23)),
        (f"{LAYOUT} E|t*46|t*46|mL --mtp-num-layers 1", Pipeline(92, 4, layout="E|t*46|t*46|mL", mtp=1)),
        (  # 94 + 2 = 96 layers: 24 a stage, in 6 chunks
            f"{CHUNK} 4 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            Pipeline(94, 4, vpp=6, embedding=True, loss=True),
        ),
    ],
)
def test_the_pipeline_that_follows(given, pipeline):
    found = arguments_of(given.split()).pipeline(pipeline.layers, 4)
    assert found == pipeline
    assert found.stages


SIZES = ("--tensor-model-parallel-size", "--expert-tensor-parallel-size", "--rollout-num-gpus-per-engine")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (f"{RANKS} ${{PP}}", r"\$\{PP\}"),
        (RANKS, "has no value"),
        (f"--mtp-num-layers {'9' * 5000}", "number"),
        *((f"{name} 0", f"{name} 0 ") for name in (*SIZES, "--sglang-ep-size")),
        (f"{CHUNK} 3", "92.*4.*chunks"),
        (f"{CHUNK} 1 --decoder-last-pipeline-num-layers 2", "stage"),
        (f"{CHUNK} 1 {STAGES} 2", "several"),
    ],
)
def test_values_that_are_none_and_what_megatrons_arguments_refuse(given, said):
    with pytest.raises(CkptkitError, match=said):
        arguments_of(given.split()).pipeline(92, 4)


def test_stages_of_a_launch(releases):
    for words, stages in (
        (f"{RANKS} 3 --decoder-last-pipeline-num-layers 2", ["0..4", "5..9", "10..11"]),
        (f"{RANKS} 2 {LAYOUT} E|t|t*11|L", ["none and 1..11", "0 and none"]),
    ):
        report = preflight(hf_checkpoint=releases("glm4_moe"), arguments=words.split())
        assert report.findings == []
        assert report.facts["pipeline stages"] == [f"pp rank {at}: layers {one}" for at, one in enumerate(stages)]


def test_sizes_that_megatron_would_refuse_are_a_finding(releases, only):
    hf = releases("glm4_moe")
    finding = only(preflight(hf_checkpoint=hf, pp=3, arguments=["--decoder-last-pipeline-num-layers", "3"]))
    assert (finding.code, finding.severity) == ("CK703", "error")
    assert finding.actual == text_with("9 2 num_layers 12 pipeline_model_parallel_size 3")
    assert only(preflight(hf_checkpoint=hf, pp=2, arguments=[LAYOUT, "Et*6|t*5L"])).actual == text_with("11 layers")
    assert only(preflight(hf_checkpoint=hf, arguments=["--expert-model-parallel-size", "5"])).code == "CK703"
    with pytest.raises(CkptkitError, match="--tp is 4.*8"):
        preflight(hf_checkpoint=hf, tp=4, arguments=GLM45)


def test_layers_left_over(releases, tmp_path, only):
    """verify puts them on the last stage, as slime does; a launch must say so itself."""
    assert only(preflight(hf_checkpoint=releases("glm4_moe"), pp=5)).severity == "error"
    odd = tmp_path / "eleven"
    odd.mkdir()
    config = (releases("glm4_moe") / "config.json").read_text()
    (odd / "config.json").write_text(config.replace('"num_hidden_layers": 12', '"num_hidden_layers": 11'))
    for report, severity in ((preflight(hf_checkpoint=odd, pp=2), "error"), (verify(odd, pp=2), "warning")):
        (finding,) = [finding for finding in report.findings if finding.code == "CK703"]
        assert (finding.severity, finding.actual) == (severity, "num_hidden_layers = 11")
        assert finding.hint.endswith("--decoder-last-pipeline-num-layers 5")


@pytest.mark.parametrize(
    ("words", "severity"),
    [
        (["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"], None),
        (["--tensor-model-parallel-size", "2"], "error"),  # Megatron takes that of tp
        ([], "warning"),  # nobody said
    ],
)
def test_expert_rows_of_an_odd_size_are_judged_by_what_the_launch_says(words, severity, releases, tmp_path, only):
    config = json.loads((releases("qwen3_moe") / "config.json").read_text()) | {"moe_intermediate_size": 95}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = preflight(hf_checkpoint=tmp_path, tp=2, ep=4, arguments=words)
    found = [finding for finding in report.findings if finding.code == "CK703"]
    expected = [(severity, "moe_intermediate_size = 95")] if severity else []
    assert [(finding.severity, finding.actual) for finding in found] == expected
