"""CK746, CK722, CK745, CK747 and CK721 of verl, NeMo-RL and ROLL, each beside a right job."""

import json
import tomllib
from functools import partial
from pathlib import Path

import pytest
import yaml
from mutations.edits import edit_config
from support.messages import text_with

from ckptkit.verify.launch.preflight import preflight

AR = "actor_rollout_ref"
ACTOR, ROLLOUT = f"{AR}.actor", f"{AR}.rollout"
# The model has 10 heads of attention in 2 groups.
DENSE, MIXTURE = "qwen2-untied", "qwen3_moe"
ONE_RANK = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
JOBS = Path(__file__).parents[1] / "jobs"
REFUSED = JOBS / "refused.toml"
NEMO_RL = yaml.safe_load((JOBS / "nemo_rl.yaml").read_text())
DTENSOR = "++policy.dtensor_cfg.tensor_parallel_size=1 ++policy.dtensor_cfg.context_parallel_size=1"
DTENSOR += " ++policy.dtensor_cfg.enabled=true policy.megatron_cfg.enabled=false loss_fn.reference_policy_kl_penalty=0"
ROLL = {
    "pretrain": "",
    "reward_pretrain": "",
    "adv_estimator": "reinforce",
    "rollout_batch_size": 64,
    "resume_from_checkpoint": False,
    "actor_train": {"strategy_args": {"strategy_name": "fsdp2_train"}, "device_mapping": "list(range(0,8))"},
    "actor_infer": {
        "strategy_args": {"strategy_name": "vllm", "strategy_config": ONE_RANK},
        "device_mapping": "list(range(0,8))",
    },
}


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "copies"))


def of_verl(hf, *more):
    given = [
        *("algorithm.adv_estimator=grpo", f"{AR}.model.path={hf}", "trainer.resume_mode=disable"),
        *("trainer.nnodes=1", "trainer.n_gpus_per_node=8", f"{ROLLOUT}.tensor_model_parallel_size=1"),
        f"{ROLLOUT}.name=vllm",
    ]
    return preflight(arguments=[*given, *more])


def of_file(job, words, hf, *more):
    Path("job.yaml").write_text(yaml.safe_dump(job))
    return preflight(script="job.yaml", arguments=[*words.format(hf=hf).split(), *more])


REPORTS = {
    "verl": of_verl,
    "NeMo-RL": partial(of_file, NEMO_RL, f"policy.model_name={{hf}} {DTENSOR}"),
    "ROLL": partial(of_file, ROLL, "pretrain={hf}"),
}


def found_by(stack, hf, *more):
    return list(REPORTS[stack](hf, *more).findings)


STACKS = {stack: partial(found_by, stack) for stack in REPORTS}
verl, nemo_rl, roll = STACKS.values()
NEMO_RL_MEGATRON = ["++policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true"]

VLLM = "policy.generation.vllm_cfg"

TRAINS = "++actor_train.model_args.lora_target=all-linear ++actor_train.model_args.lora_rank=8"
SERVES = "++actor_infer.model_args.lora_target=q_proj"
LORA = f"{AR}.model.lora_rank"
TWO_NODES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2", f"{ROLLOUT}.tensor_model_parallel_size=2"]


@pytest.mark.parametrize(
    ("stack", "row"), [(stack, row) for stack, rows in tomllib.loads(REFUSED.read_text()).items() for row in rows]
)
def test_settings_that_do_not_go_together_are_found(stack, row, releases):
    hf, right = releases(DENSE), row.get("right", "").split()
    assert [str(one) for one in STACKS[stack](hf, *right)] == []
    found = [one for one in STACKS[stack](hf, *right, *row["breaks"].split()) if one.code == row["code"]]
    assert any(row["expected"] in one.expected for one in found), [str(one) for one in found]


@pytest.mark.parametrize(
    ("stack", "ranks", "fp8"),
    [
        ("verl", f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.quantization=fp8"),
        ("NeMo-RL", f"{VLLM}.tensor_parallel_size=2", f"++{VLLM}.precision=fp8"),
    ],
)
def test_ranks_that_cut_blocks_which_are_sent_in_fp8_are_found(stack, ranks, fp8, releases):
    assert STACKS[stack](releases(MIXTURE), ranks) == []
    found = [one.expected for one in STACKS[stack](releases(MIXTURE), ranks, fp8) if one.code == "CK722"]
    assert any(one.startswith("moe_intermediate_size") and one.endswith("block of 128") for one in found)


def test_sizes_that_share_the_heads_out_are_right(releases):
    """10 heads in 2 groups: over 2 and 10 ranks by Ulysses and vLLM, over 2 by DTensor, which replicates none."""
    hf, gpus = releases(DENSE), "trainer.n_gpus_per_node=10"
    given = [gpus, "data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=100"]
    for ranks in (2, 10):
        assert verl(hf, *given, f"{ACTOR}.ulysses_sequence_parallel_size={ranks}") == []
        assert verl(hf, *given, f"{ROLLOUT}.tensor_model_parallel_size={ranks}") == []
    assert nemo_rl(hf, "cluster.gpus_per_node=10", "policy.dtensor_cfg.tensor_parallel_size=2") == []


def test_layers_that_nemo_rl_leaves_in_bf16_are_not_held_against_blocks(releases):
    given = [f"{VLLM}.tensor_parallel_size=2", f"++{VLLM}.precision=fp8"]
    for more in (f"++{VLLM}.num_first_layers_in_bf16=1", f"++{VLLM}.quantization_ignored_layer_kws=[experts]"):
        assert nemo_rl(releases(MIXTURE), *given, more) == []


def test_a_quantized_model_that_verl_updates_in_bf16_is_found(releases, copy_of):
    hf = copy_of(releases(DENSE))
    edit_config(hf, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})

    def found(*more):
        return [one.expected for one in verl(hf, *more) if one.code == "CK747"]

    sglang = f"{ROLLOUT}.name=sglang"
    assert found(sglang) == [text_with(f"{ROLLOUT}.quantization=fp8 BF16")]
    assert found(sglang, f"{ROLLOUT}.quantization=fp8") == []
    # verl's patch of vLLM packs what an engine in FP8 is sent.
    assert found() == []


PIPELINE = "policy.megatron_cfg.pipeline_model_parallel_size"


def test_another_program_of_verl_is_not_judged_by_the_rules_of_one(releases):
    program = "verl.experimental.fully_async_policy.fully_async_main"
    given = f"{AR}.model.path={releases(DENSE)} {ACTOR}.checkpoint.async_save=True"
    for name, judged in (("verl.trainer.main_ppo", True), (program, False)):
        Path("run.sh").write_text(f"python3 -m {name} {given}\n")
        assert any(one.code == "CK746" for one in preflight(script="run.sh").findings) == judged


REWARD = ["++data.default.env_name=reward_model", "++env.reward_model.resources.num_nodes=1"]
APART = "on_policy_distillation.non_colocated_teachers"
TEACHER = ["++on_policy_distillation.enabled=true", f"++{APART}.enabled=true"]
FOUR_NODES = "cluster.num_nodes=4"


@pytest.mark.parametrize(
    ("words", "stages", "gpus"),
    [
        ([FOUR_NODES, *REWARD], 3, []),  # 4 nodes of 8, less one: 24 GPUs
        ([FOUR_NODES, REWARD[1]], 3, ["32"]),  # no data asks for the reward model
        ([REWARD[0], "++env.reward_model.resources.gpus_per_node=2"], 4, ["6"]),
        ([FOUR_NODES, *TEACHER], 3, []),
        ([FOUR_NODES, *TEACHER, f"++{APART}.default_teacher_cfg.num_nodes=2"], 3, ["16"]),
        ([FOUR_NODES, *TEACHER, f"++{APART}.teacher_overrides.a.num_nodes=4"], 2, ["0", "0"]),
        ([FOUR_NODES, *TEACHER, f"++{APART}.default_teacher_cfg.tensor_model_parallel_size=16"], 3, ["8"]),
        ([FOUR_NODES, *TEACHER, "cluster.gpus_per_node=4"], 3, ["4"]),
    ],
)
def test_nodes_of_a_reward_model_and_of_teachers_are_taken_from_the_trainer(words, stages, gpus, releases):
    """A teacher has one node of 8 GPUs by default. Source: NeMo-RL `grpo.py`, `opd.py` (TeacherResourceConfig)."""
    model = f"++on_policy_distillation.teacher_model_by_agent_name.a={releases(DENSE)}"
    found = nemo_rl(releases(MIXTURE), *NEMO_RL_MEGATRON, model, *words, f"{PIPELINE}={stages}")
    assert {one.code for one in found} <= {"CK722"}
    assert [one.actual.partition(" GPUs")[0].partition(":")[0] for one in found] == gpus


def test_names_of_engines_and_of_the_user_are_no_misspelling(releases, copy_of):
    hf = releases(DENSE)
    free = [
        *("++policy.generation.vllm_kwargs.max_num_seq=8", "++env.mine.sedd=1"),
        *("++policy.generation.vllm_cfg.enforce_eager=true", "++_teacher.a=1"),
    ]
    assert nemo_rl(hf, *free) == []
    assert roll(hf, "++actor_train.training_args.learning_rate=1e-6", "++custom_envs.a.lrr=1") == []
    assert verl(hf, f"+{ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3", "+data.my_keyy=1") == []
    assert json.loads((hf / "config.json").read_text())["num_attention_heads"] == 10


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        ("ROLL", [*TRAINS.split(), SERVES, "++actor_infer.model_args.lora_rank=64"]),
        ("ROLL", [*TRAINS.split(), "++actor_infer.model_args.lora_target=${unknown}"]),
        ("verl", [f"{AR}.model.lora_rank=8"]),
        ("verl", [*TWO_NODES, f"{ROLLOUT}.data_parallel_size=2", "trainer.n_gpus_per_node=4"]),
        ("verl", [f"{AR}.model.lora.rank=8", f"{AR}.model.lora.merge=True", f"{ROLLOUT}.name=trtllm"]),
        ("verl", [f"{AR}.model.lora_rank=8", f"+{ROLLOUT}.engine_kwargs.vllm.enable_lora=True"]),
        ("verl", [f"{ACTOR}.checkpoint.async_save=True"]),  # resumes nothing, so needs no tracker
        ("verl", [f"{ROLLOUT}.name=sglang", f"+{ROLLOUT}.engine_kwargs.vllm.enable_lora=True"]),
        ("verl", ["trainer.nnodes=2", f"{ROLLOUT}.tensor_model_parallel_size=16"]),
    ],
)
def test_settings_that_go_together_are_right(stack, words, releases):
    found = STACKS[stack](releases(DENSE), *words)
    assert [one for one in found if one.code == "CK746" or "nodes" in one.expected] == []


DTENSOR_LORA = "++policy.dtensor_cfg.lora_cfg"


@pytest.mark.parametrize(
    ("stack", "words", "adapter", "engine"),
    [
        ("verl", [f"{LORA}=8", f"{AR}.model.target_modules=[q_proj,v_proj]"], "of rank 8 on q_proj, v_proj", "to vllm"),
        ("verl", [f"{AR}.model.lora.rank=8", f"{AR}.model.lora.merge=True"], "of rank 8", "verl merges it"),
        ("ROLL", [*TRAINS.split(), SERVES], "of rank 8 on all-linear", "enable_lora"),
        ("NeMo-RL", [f"{DTENSOR_LORA}.enabled=true", f"{DTENSOR_LORA}.dim=4"], "of rank 4", "merges it"),
    ],
)
def test_an_adapter_is_in_what_would_be_loaded(stack, words, adapter, engine, releases):
    lines = REPORTS[stack](releases(DENSE), *words).facts["what would be loaded"]
    (line,) = [one for one in lines if "adapter" in one]
    assert adapter in line
    assert engine in line
