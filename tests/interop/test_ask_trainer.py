"""`preflight --ask-trainer` with the programs of verl, NeMo-RL and ROLL: wrong launches, and those that are published.

`VERL`, `NEMO_RL` and `ROLL` name checkouts; their packages are in the Python of `make test-interop TOOL=ask_trainer`.
"""

import os
import re

import pytest

from ckptkit.verify.launch.preflight import preflight

AR = "actor_rollout_ref"
VERL = [
    *(f"{AR}.model.path={{tmp}}", "algorithm.adv_estimator=grpo", "data.train_batch_size=8"),
    *(f"{AR}.actor.ppo_mini_batch_size=8", f"{AR}.actor.ppo_micro_batch_size_per_gpu=1", "trainer.n_gpus_per_node=8"),
    *(f"{AR}.rollout.log_prob_micro_batch_size_per_gpu=1", f"{AR}.rollout.name=vllm"),
]
# What breaks the right launch, Hydra's or verl's own words, and the setting that is named with its line.
WRONG_VERL = [
    ("data.train_batch_size=9", "real_train_batch_size (9) must be divisible by", ""),
    (f"{AR}.actor.ppo_micro_batch_size=2", "You have set both", f"{AR}.actor.ppo_micro_batch_size"),
    (f"{AR}.rollout.log_prob_micro_batch_size=2", "You have set both", f"{AR}.rollout.log_prob_micro_batch_size"),
    (f"{AR}.rollout.nam=vllm", f"Could not override '{AR}.rollout.nam'", f"{AR}.rollout.nam"),
    (f"{AR}.actor.ppo_mini_batch_size=16", "train_batch_size (8) must be >=", f"{AR}.actor.ppo_mini_batch_size"),
    (f"+{AR}.actor.typo=1", "unexpected keyword argument 'typo'", f"{AR}.actor.typo"),
    (
        f"{AR}.rollout.val_kwargs.do_sample=True {AR}.rollout.temperature=0",
        "temperature should be greater than 0",
        "do_sample",
    ),
    (f"model_engine=megatron {AR}.actor.megatron.tensor_model_parallel_size=3", "n_gpus (8) must be divisible by", ""),
    (f"{AR}.actor.loss_agg_mode=sum", "Invalid loss_agg_mode: sum", f"{AR}.actor.loss_agg_mode"),
    ("data.train_batch_size=[", "no viable alternative at input", ""),
    (f"{AR}.actor.ppo_micro_batch_size_per_gpu=null", "Please set at least one of", ""),
    ("--config-name=nope", "Cannot find primary config 'nope'", ""),
]
PUBLISHED_VERL = [
    *("grpo_trainer/run_deepseek_v3_671b_megatron.sh", "grpo_trainer/run_qwen3_30b_a3b_megatron.sh"),
    *("grpo_trainer/run_qwen3_8b_megatron.sh", "grpo_trainer/run_seed_oss_36b_fsdp.sh"),
    "rloo_trainer/run_qwen3_8b_fsdp.sh",
]
WRONG_NEMO = [
    ("grpo.num_generations_per_prompt=many", "Input should be a valid integer", "grpo.num_generations_per_prompt"),
    ("grpo.num_generation_per_prompt=4", "Could not override", "grpo.num_generation_per_prompt"),
    ("checkpointing.save_period=often", "Input should be a valid integer", "checkpointing.save_period"),
    ("logger.wandb_enabled=2", "Input should be a valid boolean", "logger.wandb_enabled"),
    ("~policy.precision", "Interpolation key 'policy.precision' not found", "policy.megatron_cfg.pipeline_dtype"),
]
# What one line of ROLL's published settings is replaced by.
WRONG_ROLL = [
    ("ppo_epochs: 1", "ppo_epochs: many", 'wrong value type for field "ppo_epochs"'),
    ('adv_estimator: "reinforce"', "adv_estimator: none_such", 'wrong value type for field "adv_estimator"'),
    ("pretrain: Qwen/Qwen2.5-7B", "pretrain: ${nothing}", "Interpolation key 'nothing' not found"),
]


@pytest.fixture
def asked(tmp_path):
    """Has a trainer judge a launch, and gives what it refuses; it was asked and answered."""
    if not (python := os.environ.get("INTEROP_PYTHON")):
        pytest.skip("needs the trainers' packages: make test-interop TOOL=ask_trainer")

    def ask(text, script):
        script.write_text(text)
        report = preflight(script=script, ask_trainer=python)
        assert any("executed" in note for note in report.facts["notes"]), report.reasons
        return [one for one in report.findings if one.expected.startswith("a launch that")]

    return ask


def launch(variable, root, tmp_path, words):
    if variable == "VERL":
        lines = [*(one.format(tmp=tmp_path) for one in VERL), *words.split()]
        return f"cd {root}\npython3 -m verl.trainer.main_ppo " + " \\\n".join(lines) + "\n"
    program = "examples/run_grpo.py --config examples/configs/grpo_math_1B.yaml"
    return f"cd {root}\nexport PYTHONPATH={root}\npython {program} \\\n {words}\n"


WRONG = [
    *(("VERL", *one) for one in [("", "", ""), *WRONG_VERL]),
    *(("NEMO_RL", *one) for one in [("", "", ""), *WRONG_NEMO]),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("variable", "words", "message", "key"), WRONG)
def test_wrong_launches_are_refused_in_the_trainers_own_words(variable, words, message, key, asked, tmp_path, checkout):
    """The setting is named with its line where the message names it; the right launch is accepted."""
    found = asked(launch(variable, checkout(variable), tmp_path, words), tmp_path / "run.sh")
    place = re.compile(rf"{re.escape(key)} at \S+:\d+" if key else "")
    judged = [(one.severity, message in one.actual, place.search(one.actual) is not None) for one in found]
    assert judged == [("error", True, True)] * bool(words)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PUBLISHED_VERL)
def test_verls_published_launches_are_accepted(name, asked, tmp_path, checkout):
    root = checkout("VERL")
    assert asked(f"cd {root}\n{(root / 'examples' / name).read_text()}", tmp_path / "run.sh") == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("line", "other", "message"), [("", "", ""), *WRONG_ROLL])
def test_roll_refuses_wrong_settings_in_its_own_words(line, other, message, asked, tmp_path, checkout):
    """Its published settings, in a folder beside a copy of its program."""
    root, home = checkout("ROLL"), tmp_path / "examples"
    (home / "job").mkdir(parents=True)
    (home / "start_rlvr_pipeline.py").write_text((root / "examples" / "start_rlvr_pipeline.py").read_text())
    settings = (root / "examples/qwen2.5-7B-rlvr_megatron/rlvr_config.yaml").read_text()
    (home / "job" / "rlvr_config.yaml").write_text(settings.replace(line, other) if line else settings)
    start = "python examples/start_rlvr_pipeline.py --config_path job --config_name rlvr_config"
    text = f"cd {tmp_path}\nexport PYTHONPATH={root}:{root}/mcore_adapter/src\n{start}\n"
    found = asked(text, tmp_path / "run.sh")
    assert [(one.severity, message in one.actual) for one in found] == [("error", True)] * bool(line)
    assert all(re.search(r" at \S+rlvr_config.yaml:\d+", one.actual) for one in found)
