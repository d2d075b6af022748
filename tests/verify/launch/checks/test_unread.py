"""Words of a launch that matter and are not read: preflight never passes over them in silence."""

import shlex

import pytest
from click.testing import CliRunner
from support.messages import text_with

from ckptkit.app.cli import cli
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.launch.stacks.slime import overrides, unread

# As slime's scripts launch it, with the environment that ray gets.
SLIME = shlex.split(
    "no_proxy=127.0.0.1 PYTHONPATH=/data/Megatron-LM/ python3 train.py --actor-num-nodes 8 "
    "--tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 1 --context-parallel-size 2 --expert-model-parallel-size 4 "
    "--expert-tensor-parallel-size 1 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--rollout-num-gpus-per-engine 4 --sglang-ep-size 4 --sglang-dp-size 2 "
    "--sglang-enable-dp-attention "
    "--sglang-mem-fraction-static 0.7 "
    "--eval-prompt-data aime /data/aime.jsonl --no-load-optim --load-debug-rollout-data /data/a.pt --lr 1e-6 "
    "--save /data/out --save-interval 20 "
    "--custom-rm-path rm.module.function --wandb-group a.b --seq-length 4096"
)


@pytest.mark.parametrize(
    ("word", "is_one"),
    [
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4", True),
        ("+actor_rollout_ref.model.override_config.x=1", True),
        ("~a", True),
        ("a.b", False),
        ("OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1", False),
        ("no_proxy=127.0.0.1", False),
        ("~/models/GLM-4.5", False),
        ("/data/step.5=x", False),
        ('{"a.b": "c=d"}', False),
    ],
)
def test_overrides_are_recognized_by_their_form(word, is_one):
    assert bool(overrides([word])) is is_one


def test_launch_arguments_that_matter_and_are_unread_are_listed():
    for words in (
        "--load /runs/a",
        "--ref-ckpt-step 10",
        "--opd-teacher-load /t",
        "--megatron-config-path a.yaml",
        "--tensor_model_parallel_size 4",
        "--tp 4",
        "--vllm-tp-size 4",
        "a.tensor_model_parallel_size=4",
        "+data.seed=4",
    ):
        assert unread(words.split(), frozenset()) == [text_with(words)]
    # What slime and miles overwrite, and paths that preflight was given.
    assert unread(["--sglang-tp-size", "8", "--sglang-tensor-parallel-size=4"], frozenset()) == []
    assert unread(["--hf-checkpoint", "/hf", "--load", "/a"], frozenset({"--load", "--hf-checkpoint"})) == []


def test_a_launch_that_is_read_passes(releases):
    report = preflight(hf_checkpoint=releases("qwen3_moe"), arguments=SLIME)
    assert (report.status, report.findings, list(report.reasons)) == ("passed", [], [])
    assert next(one.status for one in report.checks if one.code == "CK717") == "passed"
    assert "CK717" not in [one.code for one in preflight(hf_checkpoint=releases("qwen3_moe")).checks]


@pytest.mark.parametrize("word", ["+a.b=1", "--tp=4"])
def test_preflight_command_with_an_unread_override_is_inconclusive(word, releases):
    done = CliRunner().invoke(cli, ["preflight", "--hf-checkpoint", str(releases("qwen2-tied")), "--", word])
    assert done.exit_code == 2
    assert done.output.splitlines()[-1].startswith("INCONCLUSIVE")
    assert "among" in done.output
    assert "CK717" in done.output
