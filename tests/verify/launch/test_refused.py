"""CK746 and CK721: options of slime, miles and Megatron that do not go together or are misspelled."""

import json

import pytest
from support.launch_scripts import write_config
from support.messages import text_with

from ckptkit.verify.core.check import all_checks
from ckptkit.verify.core.run import run_checks
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.launch.job import Launch
from ckptkit.verify.launch.options.names import trainer_options
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.launch.stacks.which import read_job
from ckptkit.verify.launch.words import LaunchText, Word

TRAINER = "--rollout-batch-size 16 --n-samples-per-prompt 8 --num-rollout 100 --ref-load /models/megatron"
MIXTURE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-experts 8"


def findings(words, code, program="train.py"):
    text = LaunchText(tuple(map(Word, ["--hf-checkpoint", "/models/hf", *words.split()])), program=program)
    job = read_job(Launch(text))
    subject = Subject(job.root, job=job, arguments=job.actor)
    checks = [one for one in all_checks() if one.code == code]
    return run_checks(subject, checks).findings


def refused(words, program="train.py"):
    return findings(words, "CK746", program)


FOUR = "--actor-num-gpus-per-node 8 --tensor-model-parallel-size 2"  # data parallel ranks
# A right launch, what breaks it, and what is expected instead.
BROKEN = [
    ("--global-batch-size 128", "--num-steps-per-rollout 2", "= 16 x 8 / 2 = 64"),
    ("--num-steps-per-rollout 2", "--global-batch-size 128", "= 16 x 8 / 2 = 64"),
    ("", "--global-batch-size 256", "of at most rollout_batch_size x n_samples_per_prompt = 16 x 8 = 128"),
    ("--over-sampling-batch-size 32", "--over-sampling-batch-size 8", "of at least rollout_batch_size"),
    (f"--global-batch-size 128 {FOUR}", "--micro-batch-size 3", "micro_batch_size = 4 x 3 = 12"),
]


@pytest.mark.parametrize(("right", "more", "expected"), BROKEN)
def test_batches_that_do_not_divide_are_found(right, more, expected):
    (found,) = [one for one in refused(f"{TRAINER} {right} {more}") if one.severity == "error"]
    assert expected in found.expected
    # The right twin of it.
    assert [one for one in refused(f"{TRAINER} {right}") if one.expected == found.expected] == []


@pytest.mark.parametrize(
    ("words", "adapter"),
    [
        ("--lora-rank 16 --target-modules a,b", "adapter of rank 16 on a,b (--lora-rank (the command line))"),
        ("--lora-rank 16 --target-modules q_proj --lora-train-only", "without"),
        ("--lora-rank 0", ""),
    ],
)
def test_an_adapter_of_miles_is_in_what_would_be_loaded(words, adapter):
    text = LaunchText(tuple(map(Word, ["--hf-checkpoint", "/models/hf", *TRAINER.split(), *words.split()])))
    found = read_job(Launch(text)).adapter
    assert (found is None) == (not adapter)
    assert adapter in str(found)


@pytest.mark.parametrize("engine", ["--sglang-enable-lora", "--sglang-lora-paths a=/adapter", "--vllm-enable-lora"])
def test_an_adapter_in_the_engine_alone_is_found(engine):
    (found,) = refused(f"{TRAINER} --lora-rank 0 {engine}")
    assert (found.severity, found.expected) == ("error", text_with(f"--lora-rank {engine.split()[0]}"))
    for twin in ("--lora-rank 8 --target-modules q_proj", "--lora-adapter-path /adapter", "--lora-rank $RANK"):
        assert refused(f"{TRAINER} {twin} {engine}") == []


def test_what_slime_only_warns_of_is_a_warning():
    cases = {
        "--global-batch-size 96": "32 samples",
        "--num-epoch 2": "--num-epoch",
        "--advantage-estimator cispo": "slime",
        f"{MIXTURE} --moe-token-dispatcher-type allgather": "alltoall",
        "--n-samples-per-prompt 1": "every advantage is 0",
        "--lora-rank 8 --target-modules q_proj --lora-train-only": "base model",
    }
    for words, hint in cases.items():
        (found,) = refused(f"{TRAINER} {words}")
        assert (found.severity, hint in found.hint) == ("warning", True), found
    sound = ["--global-batch-size 64", "--num-rollout 2", "--advantage-estimator cispo --eps-clip 1.0"]
    sound += ["--lora-rank 8 --target-modules q_proj --sglang-enable-lora", "--lora-train-only"]
    sound += ["--n-samples-per-prompt 1 --loss-type sft_loss", f"{MIXTURE} --moe-token-dispatcher-type alltoall"]
    assert [refused(f"{TRAINER} {words}") for words in sound] == [[]] * len(sound)


GOES_ON = [
    ("--num-rollout 11", True),
    ("--num-rollout 12", False),
    ("--num-rollout 11 --start-rollout-id 0", False),
    ("--num-rollout 11 --advantage-estimator ppo", False),
    ("--num-epoch 1", False),
]


@pytest.mark.parametrize(("more", "warned"), GOES_ON)
def test_a_run_that_goes_on_needs_more_rollouts_than_it_had(more, warned, tmp_path):
    """From iteration 10, whose rollout was the eleventh. An iteration of --ref-load is no run that goes on."""
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    words = f"--rollout-batch-size 16 {more}"
    found = [one for one in refused(f"--load {tmp_path} {words}") if "--load" in one.expected]
    assert [one.severity for one in found] == ["warning"] * warned
    assert [one for one in refused(f"--ref-load {tmp_path} {words}") if "--load" in one.expected] == []


def test_contiguous_parts_of_the_tokens_are_for_sparse_attention(tmp_path):
    """DeepSeek-V3.2 and GLM-5 have `index_topk`. miles, told by an option of its own, trains other models so too."""
    script, cut = tmp_path / "run.sh", "--context-parallel-size 2"

    def asked(model, words, **config):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [model], **config}))
        script.write_text(f"python3 train.py --hf-checkpoint {tmp_path} {TRAINER} {words}\n")
        return [one.expected for one in preflight(script=script).findings if one.code == "CK746"]

    expected = "no --allgather-cp with context_parallel_size above 1 for Qwen3ForCausalLM"
    assert asked("Qwen3ForCausalLM", f"{cut} --allgather-cp") == [expected]
    for words in (cut, "--allgather-cp", f"{cut} --allgather-cp --ci-check-model-hash", "--allgather-cp $MORE"):
        assert asked("Qwen3ForCausalLM", words) == []
    assert asked("Qwen3ForCausalLM", "--allgather-cp --context-parallel-size $N") == []
    assert asked("GlmMoeDsaForCausalLM", f"{cut} --allgather-cp", index_topk=2048) == []


@pytest.mark.parametrize(
    ("words", "model_type", "program", "found"),
    [
        ("", "qwen3_vl", "miles/train.py", ["no --megatron-to-hf-mode"]),
        ("--megatron-to-hf-mode raw", "qwen3_vl", "train.py", ["--megatron-to-hf-mode raw"]),
        ("--megatron-to-hf-mode bridge", "qwen3_vl", "train.py", []),
        ("--megatron-to-hf-mode raw", "kimi_vl", "train.py", []),
        ("", "qwen3_vl", "slime/train.py", []),
    ],
)
def test_mode_raw_of_miles_needs_a_converter(words, model_type, program, found, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "text_config": {}}))
    script = tmp_path / "run.sh"
    script.write_text(f"python3 /srv/{program} --hf-checkpoint {tmp_path} {TRAINER} {words}\n")
    issues = [one for one in preflight(script=script).findings if one.code == "CK746"]
    assert [one.actual.partition(" (")[0] for one in issues] == found


def test_values_that_are_not_known_break_no_rule(tmp_path):
    script, hf = tmp_path / "run.sh", write_config(tmp_path / "hf", "qwen3")
    text = f"python3 train.py --hf-checkpoint {hf} --rollout-batch-size $N --num-rollout 9"
    text += " --global-batch-size 256 --use-kl-loss $MORE_ARGS\n"
    script.write_text(text)
    report = preflight(script=script)
    assert [one for one in report.findings if one.code == "CK746"] == []
    script.write_text(text.replace("$MORE_ARGS", "").replace("$N", "16"))
    found = {one.expected.partition(" ")[0] for one in preflight(script=script).findings if one.code == "CK746"}
    assert found == {"global_batch_size"}
    # Which slime reads after it judged its options.
    (tmp_path / "custom.yaml").write_text("global_batch_size: 4096\n")
    assert refused(f"{TRAINER} --custom-config-path {tmp_path / 'custom.yaml'}") == []


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--n-sample-per-prompt 8", "--n-samples-per-prompt"),
        ("--sglang-mem-fraction-statik 0.7", "--sglang-mem-fraction-static"),
        ("--router-polcy random", "--router-policy"),
    ],
)
def test_an_option_of_any_part_that_is_misspelt_is_named(words, meant):
    (found,) = findings(words, "CK721")
    assert (found.severity, found.expected) == ("warning", text_with(meant))
    assert trainer_options()[meant] in found.hint
    right = f"{meant} {words.partition(' ')[2]}"
    assert findings(right, "CK721") == []
    # slime's up to 0.2.4, a newer one, Megatron's; vLLM has no list.
    known = "--critic-num-nodes 1 --keep-old-actor --seed 1 --sglang-dtype auto --vllm-config a --vllm-dpp 1"
    assert findings(known, "CK721") == []
