"""Words of a launch that matter and are not read: preflight never passes over them in silence."""

import pytest
from support.messages import text_with

from ckptkit.verify.launch.stacks.slime import overrides, unread


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
