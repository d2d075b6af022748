"""CK746, CK722, CK745, CK747 and CK721 of verl, NeMo-RL and ROLL, each beside a right job.

Every row breaks one rule; without it the job is right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from mutations.edits import edit_config
from support.fixture_types import CopyOf, PathOf
from support.messages import text_with

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.core.report import Finding, Report
from ckptkit.verify.launch.preflight import preflight

AR = "actor_rollout_ref"
ACTOR, ROLLOUT = f"{AR}.actor", f"{AR}.rollout"
# The model has 10 heads of attention in 2 groups.
DENSE, MIXTURE = "qwen2-untied", "qwen3_moe"
ONE_RANK = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
NEMO_RL = {
    "policy": {
        "dtensor_cfg": {"enabled": True, "tensor_parallel_size": 1, "context_parallel_size": 1},
        "megatron_cfg": {"enabled": False},
        "generation": {
            "backend": "vllm",
            "vllm_cfg": ONE_RANK,
            "colocated": {"enabled": True, "resources": {"gpus_per_node": None, "num_nodes": None}},
        },
    },
    "loss_fn": {"reference_policy_kl_penalty": 0.0},
    "checkpointing": {"enabled": False, "checkpoint_dir": "results/none"},
    "cluster": {"gpus_per_node": 8, "num_nodes": 1},
}
MEGATRON = {
    "policy.dtensor_cfg.enabled": "false",
    "policy.megatron_cfg.enabled": "true",
    **{f"policy.megatron_cfg.{name}_parallel_size": "1" for name in ("tensor_model", "pipeline_model", "context")},
    "policy.megatron_cfg.expert_model_parallel_size": "1",
    "policy.megatron_cfg.expert_tensor_parallel_size": "1",
}
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
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No earlier run and no converted copy is near."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "copies"))


def of_verl(hf: Path, *more: str) -> Report:
    given = [
        *("algorithm.adv_estimator=grpo", f"{AR}.model.path={hf}", "trainer.resume_mode=disable"),
        *("trainer.nnodes=1", "trainer.n_gpus_per_node=8", f"{ROLLOUT}.tensor_model_parallel_size=1"),
        f"{ROLLOUT}.name=vllm",
    ]
    return preflight(arguments=[*given, *more])


def of_file(job: dict[str, Any], key: str, hf: Path, *more: str) -> Report:
    Path("job.yaml").write_text(yaml.safe_dump(job))
    return preflight(script="job.yaml", arguments=[f"{key}={hf}", *more])


REPORTS: dict[str, Callable[..., Report]] = {
    "verl": of_verl,
    "NeMo-RL": partial(of_file, NEMO_RL, "policy.model_name"),
    "ROLL": partial(of_file, ROLL, "pretrain"),
}


def found_by(stack: str, hf: Path, *more: str) -> list[Finding]:
    return list(REPORTS[stack](hf, *more).findings)


STACKS = {stack: partial(found_by, stack) for stack in REPORTS}
verl, nemo_rl, roll = STACKS.values()
VERL_MEGATRON = [f"{ACTOR}.strategy=megatron"]
NEMO_RL_MEGATRON = [f"++{key}={value}" for key, value in MEGATRON.items()]

VLLM = "policy.generation.vllm_cfg"

TRAINS = "++actor_train.model_args.lora_target=all-linear ++actor_train.model_args.lora_rank=8"
SERVES = "++actor_infer.model_args.lora_target=q_proj"
LORA, ENGINE, FITS = f"{AR}.model.lora_rank", f"{ROLLOUT}.engine_kwargs", "nodes of 8 GPUs"
HEADS = "num_attention_heads that divides over 4"
GENERATES = "policy.generation.colocated"
APART_ON_ONE = f"cluster.gpus_per_node=4 {GENERATES}.enabled=false {GENERATES}.resources.gpus_per_node=2"
OWN, VALUE = "++policy.generation.mcore_generation_config", "++value.megatron_cfg"
BY, TP, EP = "policy.generation.backend=megatron", "tensor_model_parallel_size", f"++{VLLM}.expert_parallel_size"
ALL = " ".join(NEMO_RL_MEGATRON)
TWO_NODES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2", f"{ROLLOUT}.tensor_model_parallel_size=2"]
# Of each stack: what the right job has besides, what breaks it, the check that finds it, and what is expected.
BROKEN = {
    "verl": [
        ("trainer.resume_mode=auto", f"{ACTOR}.checkpoint.async_save=True", "CK746", "async_save=False without"),
        (f"{ROLLOUT}.name=trtllm", f"{LORA}=8", "CK746", f"{ROLLOUT}.name = vllm or sglang"),
        (f"{AR}.model.lora.rank=8", f"{ROLLOUT}.name=trtllm", "CK746", f"{ROLLOUT}.name = vllm or sglang"),
        (" ".join(TWO_NODES), f"{ROLLOUT}.data_parallel_size=2", "CK722", "node of 2 GPUs"),
        (f"{LORA}=0", f"+{ENGINE}.vllm.enable_lora=True", "CK746", f"{LORA} with {ENGINE}.vllm.enable_lora"),
        (f"{ROLLOUT}.name=sglang {LORA}=0", f"+{ENGINE}.sglang.enable_lora=True", "CK746", f"{LORA} with {ENGINE}.sgl"),
        ("trainer.nnodes=3", f"{ROLLOUT}.tensor_model_parallel_size=12", "CK722", FITS),
        ("trainer.nnodes=3", f"{ROLLOUT}.tensor_model_parallel_size=3", "CK722", FITS),
        ("", f"{ACTOR}.ulysses_sequence_parallel_size=4", "CK722", HEADS),
        ("", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=3", "CK722", "ulysses_sequence_parallel_size = 3"),
        ("", f"{ROLLOUT}.tensor_model_parallel_size=4", "CK722", HEADS),
        ("", f"{AR}.model.mtp.enable=True {AR}.model.mtp.enable_rollout=True", "CK745", "multi-token"),
        ("", f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config.method=eagle3", "CK745", '"model"'),
    ],
    "NeMo-RL": [
        ("", "policy.dtensor_cfg.tensor_parallel_size=5", "CK722", "num_key_value_heads that divides over 5"),
        ("", "policy.dtensor_cfg.context_parallel_size=3", "CK722", "tp x cp = 1 x 3 = 3"),
        ("", f"{VLLM}.tensor_parallel_size=4", "CK722", HEADS),
        ("", "++policy.generation.vllm_kwargs.speculative_config.method=deepseek_mtp", "CK745", "multi-token"),
        ("", "++policy.train_micro_batchsize=4", "CK721", "train_micro_batch_size"),
        ("", f"{VLLM}.tensor_parallel_size=2 ++{VLLM}.expert_parallel_size=3", "CK722", "divide by tp = 2"),
        (f"{APART_ON_ONE} {VLLM}.tensor_parallel_size=2", f"{VLLM}.tensor_parallel_size=1 {EP}=4", "CK722", "ep x pp"),
        (f"{ALL} {APART_ON_ONE} {BY} {OWN}.{TP}=2", f"{OWN}.expert_model_parallel_size=8", "CK722", "rollout engine"),
        (f"{ALL} {BY} {OWN}.{TP}=4", f"{OWN}.{TP}=16", "CK722", "the rollout engine"),
        (ALL, f"{VALUE}.enabled=true {VALUE}.pipeline_model_parallel_size=3", "CK722", "critic"),
    ],
    "ROLL": [
        ("", TRAINS, "CK746", "actor_infer.model_args.lora_target with actor_train"),
        ("++actor_infer.model_args.lora_rank=64", TRAINS, "CK746", "actor_infer.model_args.lora_target with"),
        ("", SERVES, "CK746", "actor_train.model_args.lora_target with actor_infer"),
        ("", "++actor_train.model_args.ulysses_size=4", "CK722", HEADS),
        ("", "actor_infer.strategy_args.strategy_config.tensor_parallel_size=4", "CK722", HEADS),
        ("", "++actor_train.device_maping=list(range(0,8))", "CK721", "device_mapping"),
    ],
}


@pytest.mark.parametrize(
    ("stack", "right", "more", "code", "expected"), [(stack, *row) for stack, rows in BROKEN.items() for row in rows]
)
def test_settings_that_do_not_go_together_are_found(
    stack: str, right: str, more: str, code: str, expected: str, releases: PathOf
) -> None:
    hf = releases(DENSE)
    assert [str(one) for one in STACKS[stack](hf, *right.split())] == []
    found = [one for one in STACKS[stack](hf, *right.split(), *more.split()) if one.code == code]
    assert any(expected in one.expected for one in found), [str(one) for one in found]


@pytest.mark.parametrize(
    ("stack", "ranks", "fp8"),
    [
        ("verl", f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.quantization=fp8"),
        ("NeMo-RL", f"{VLLM}.tensor_parallel_size=2", f"++{VLLM}.precision=fp8"),
    ],
)
def test_ranks_that_cut_blocks_which_are_sent_in_fp8_are_found(
    stack: str, ranks: str, fp8: str, releases: PathOf
) -> None:
    assert STACKS[stack](releases(MIXTURE), ranks) == []
    found = [one.expected for one in STACKS[stack](releases(MIXTURE), ranks, fp8) if one.code == "CK722"]
    assert "moe_intermediate_size whose part on each of 2 ranks divides by the FP8 block of 128" in found


def test_sizes_that_share_the_heads_out_are_right(releases: PathOf) -> None:
    """10 heads in 2 groups: over 2 and 10 ranks by Ulysses and vLLM, over 2 by DTensor, which replicates none."""
    hf, gpus = releases(DENSE), "trainer.n_gpus_per_node=10"
    given = [gpus, "data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=100"]
    for ranks in (2, 10):
        assert verl(hf, *given, f"{ACTOR}.ulysses_sequence_parallel_size={ranks}") == []
        assert verl(hf, *given, f"{ROLLOUT}.tensor_model_parallel_size={ranks}") == []
    assert nemo_rl(hf, "cluster.gpus_per_node=10", "policy.dtensor_cfg.tensor_parallel_size=2") == []


def test_layers_that_nemo_rl_leaves_in_bf16_are_not_held_against_blocks(releases: PathOf) -> None:
    given = [f"{VLLM}.tensor_parallel_size=2", f"++{VLLM}.precision=fp8"]
    for more in (f"++{VLLM}.num_first_layers_in_bf16=1", f"++{VLLM}.quantization_ignored_layer_kws=[experts]"):
        assert nemo_rl(releases(MIXTURE), *given, more) == []


def test_a_quantized_model_that_verl_updates_in_bf16_is_found(releases: PathOf, copy_of: CopyOf) -> None:
    hf = copy_of(releases(DENSE))
    edit_config(hf, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})

    def found(*more: str) -> list[str]:
        return [one.expected for one in verl(hf, *more) if one.code == "CK747"]

    sglang = f"{ROLLOUT}.name=sglang"
    assert found(sglang) == [text_with(f"{ROLLOUT}.quantization=fp8 BF16")]
    assert found(sglang, f"{ROLLOUT}.quantization=fp8") == []
    # verl's patch of vLLM packs what an engine in FP8 is sent.
    assert found() == []


@pytest.mark.parametrize(
    ("program", "judged"),
    [
        ("verl.trainer.main_ppo", True),
        ("verl.experimental.fully_async_policy.fully_async_main", False),
        ("verl.experimental.one_step_off_policy.main_ppo", False),
    ],
)
def test_other_programs_of_verl_are_not_judged_by_the_rules_of_one(
    program: str, judged: bool, releases: PathOf
) -> None:
    given = f"{AR}.model.path={releases(DENSE)} {ACTOR}.checkpoint.async_save=True"
    Path("run.sh").write_text(f"python3 -m {program} {given}\n")
    try:
        report = preflight(script="run.sh")
    except CkptkitError:
        assert not judged  # a program that no reader of scripts knows
        return
    assert any(one.code == "CK746" for one in report.findings) == judged


@pytest.mark.parametrize("more", ["trainer.resume_mode=disable", "trainer.resume_mode=${oc.env:CKPTKIT_NO_SUCH}"])
def test_a_run_that_resumes_nothing_needs_no_tracker(more: str, releases: PathOf) -> None:
    found = verl(releases(DENSE), f"{ACTOR}.checkpoint.async_save=True", more)
    assert [one for one in found if one.code == "CK746"] == []


PIPELINE = "policy.megatron_cfg.pipeline_model_parallel_size"


def gpus(hf: Path, *more: str) -> list[str]:
    """What CK722 says of the GPUs of the actor."""
    found = [one for one in nemo_rl(hf, *more) if one.code == "CK722" and "of the actor" in one.expected]
    return [one.actual.partition(":")[0] + one.actual[one.actual.find(", less") :] for one in found]


def test_nodes_of_a_reward_model_are_taken_from_the_trainer(releases: PathOf) -> None:
    """4 nodes of 8, less one: 24 GPUs train, which 3 stages divide. Source: NeMo-RL `grpo.py`."""
    hf = releases(MIXTURE)
    reward = ["++data.default.env_name=reward_model", "++env.reward_model.resources.num_nodes=1", "cluster.num_nodes=4"]
    assert gpus(hf, *NEMO_RL_MEGATRON, *reward, f"{PIPELINE}=3") == []
    (found,) = gpus(hf, *NEMO_RL_MEGATRON, *reward[1:], f"{PIPELINE}=3")
    assert found.startswith("32 GPUs")  # no data asks for the reward model
    alone = [*reward[:1], "++env.reward_model.resources.gpus_per_node=2"]
    assert gpus(hf, *NEMO_RL_MEGATRON, *alone, f"{PIPELINE}=3") == []
    assert gpus(hf, *NEMO_RL_MEGATRON, *alone, f"{PIPELINE}=4") == [text_with("6 GPUs less 2")]


APART = "on_policy_distillation.non_colocated_teachers"
TEACHER = ["cluster.num_nodes=4", "++on_policy_distillation.enabled=true", f"++{APART}.enabled=true"]


@pytest.mark.parametrize(
    ("words", "stages", "expected"),
    [
        ([], 3, []),  # 4 nodes of 8, less one: 24 GPUs
        ([f"++{APART}.default_teacher_cfg.num_nodes=2"], 2, []),
        ([f"++{APART}.default_teacher_cfg.num_nodes=2"], 3, [("CK722", "16")]),
        ([f"++{APART}.teacher_overrides.a.num_nodes=4"], 2, [("CK722", "0")] * 2),
        ([f"++{APART}.default_teacher_cfg.tensor_model_parallel_size=16"], 3, [("CK722", "8")]),
        ([f"++{APART}.default_teacher_cfg.gpus_per_node=4"], 3, []),
        (["cluster.gpus_per_node=4"], 3, [("CK722", "4")]),
        (["cluster.gpus_per_node=4", f"++{APART}.teacher_overrides.a.gpus_per_node=4"], 3, []),
    ],
)
def test_nodes_of_teachers_are_taken_from_the_trainer(
    words: list[str], stages: int, expected: list[str], releases: PathOf
) -> None:
    """A teacher has one node of 8 GPUs by default. Source: NeMo-RL `opd.py` (TeacherResourceConfig)."""
    model = f"++on_policy_distillation.teacher_model_by_agent_name.a={releases(DENSE)}"
    found = nemo_rl(releases(MIXTURE), *NEMO_RL_MEGATRON, *TEACHER, model, *words, f"{PIPELINE}={stages}")
    assert [(one.code, one.actual.partition(" GPUs")[0].partition(":")[0]) for one in found] == expected


def test_names_of_engines_and_of_the_user_are_no_misspelling(releases: PathOf, copy_of: CopyOf) -> None:
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
        ("verl", [f"{AR}.model.lora_rank=8", f"{ROLLOUT}.name=sglang"]),
        ("verl", [*TWO_NODES, f"{ROLLOUT}.data_parallel_size=2", "trainer.n_gpus_per_node=4"]),
        ("verl", [*TWO_NODES, f"{ROLLOUT}.data_parallel_size=2", f"{ROLLOUT}.name=sglang"]),
        ("verl", [f"{AR}.model.lora.rank=8", f"{AR}.model.lora.merge=True", f"{ROLLOUT}.name=trtllm"]),
        ("verl", [f"{AR}.model.lora_rank=8", f"+{ROLLOUT}.engine_kwargs.vllm.enable_lora=True"]),
        ("verl", [f"{ROLLOUT}.name=sglang", f"+{ROLLOUT}.engine_kwargs.vllm.enable_lora=True"]),
        ("verl", ["trainer.nnodes=2", f"{ROLLOUT}.tensor_model_parallel_size=16"]),
        ("verl", ["trainer.nnodes=2", "trainer.n_gpus_per_node=4", f"{ROLLOUT}.tensor_model_parallel_size=8"]),
    ],
)
def test_adapters_and_nodes_that_go_with_the_engine_are_right(stack: str, words: list[str], releases: PathOf) -> None:
    found = STACKS[stack](releases(DENSE), *words)
    assert [one for one in found if one.code == "CK746" or "nodes" in one.expected] == []


DTENSOR_LORA = "++policy.dtensor_cfg.lora_cfg"
ADAPTERS = [
    ("verl", [f"{LORA}=8"], "of rank 8 on all-linear", "enable_lora"),
    ("verl", [f"{LORA}=8", f"{AR}.model.target_modules=[q_proj,v_proj]"], "on q_proj, v_proj", "to vllm"),
    ("verl", [f"{AR}.model.lora.rank=8", f"{AR}.model.lora.merge=True"], "of rank 8", "verl merges it"),
    ("ROLL", [*TRAINS.split(), SERVES], "of rank 8 on all-linear", "enable_lora"),
    ("ROLL", TRAINS.split(), "of rank 8", "vllm"),
    ("NeMo-RL", [f"{DTENSOR_LORA}.enabled=true", f"{DTENSOR_LORA}.dim=4"], "of rank 4", "merges it"),
]


@pytest.mark.parametrize(("stack", "words", "adapter", "engine"), ADAPTERS)
def test_an_adapter_is_in_what_would_be_loaded(
    stack: str, words: list[str], adapter: str, engine: str, releases: PathOf
) -> None:
    reports = [REPORTS[stack](releases(DENSE), *more) for more in (words, [])]
    lines, without = ([line for line in one.facts["what would be loaded"] if "adapter" in line] for one in reports)
    assert (len(lines), without) == (1, [])
    assert adapter in lines[0]
    assert engine in lines[0]
