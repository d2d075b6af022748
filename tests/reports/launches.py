"""Reports about launches: arguments, sizes and paths that are not the model's, or that no stack can start with."""

from __future__ import annotations

from pathlib import Path

from support.launch_scripts import write_headers, write_launch

from reports.report import Change, Report

SCRIPT = "ckptkit preflight run.sh"


def launch(family: str) -> Change:
    """A right launch of slime, for the headers of a release."""

    def prepare(work: Path) -> None:
        write_headers(work / "CKPT", family)
        write_launch(work, family, work / "CKPT")

    return prepare


def said(before: str, after: str) -> Change:
    """The launch, or its model's file, says something else."""

    def damage(work: Path) -> None:
        changed = 0
        for file in (work / "run.sh", work / "job.yaml", *(work / "models").glob("*.sh")):
            if file.exists() and before in (text := file.read_text()):
                file.write_text(text.replace(before, after))
                changed += 1
        assert changed == 1, (before, changed)

    return damage


def _one_step(work: Path) -> None:
    """A step for each rollout of 8 x 8 samples."""
    launch("qwen2")(work)
    batch = "--num-rollout 2 --rollout-batch-size 8 --n-samples-per-prompt 8 --global-batch-size 64"
    said("--rollout-batch-size 32", batch)(work)


NEMO_RL = """
loss_fn: {{reference_policy_kl_penalty: 0}}
checkpointing: {{enabled: true, checkpoint_dir: {work}/results}}
policy:
  model_name: {work}/CKPT
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 2
    context_parallel_size: 2
    expert_model_parallel_size: 1
    expert_tensor_parallel_size: 1
  generation:
    backend: vllm
    vllm_cfg: {{tensor_parallel_size: 2, pipeline_parallel_size: 1}}
    colocated: {{enabled: false, resources: {{num_nodes: 1, gpus_per_node: 8}}}}
cluster: {{gpus_per_node: 8, num_nodes: 2}}
"""


def _nemo_rl(work: Path) -> None:
    write_headers(work / "CKPT", "qwen2")
    (work / "job.yaml").write_text(NEMO_RL.format(work=work))


VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.resume_mode=auto \\
  actor_rollout_ref.model.path=CKPT actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.actor.checkpoint.async_save=False \\
  trainer.nnodes=1 trainer.n_gpus_per_node=8 trainer.default_local_dir=steps
"""


def _verl(work: Path) -> None:
    write_headers(work / "CKPT", "qwen2")
    (work / "run.sh").write_text(VERL)


def _bridge_format(work: Path) -> None:
    """The settings take a checkpoint of Megatron-LM for one of Megatron-Bridge."""
    said("format: megatron_lm", "format: megatron_bridge")(work)


def _nemo_rl_from_megatron(work: Path) -> None:
    text = NEMO_RL.replace("{work}/CKPT", "{work}/RELEASE").replace(
        "  megatron_cfg:", "  pretrained_checkpoint: {{path: {work}/CKPT, format: megatron_lm}}\n  megatron_cfg:"
    )
    (work / "job.yaml").write_text(text.format(work=work))


REPORTS = (
    Report(
        "slime#641",
        "2025-10",
        "The model script leaves out --rotary-base; Megatron takes 10000, the model has 1000000.",
        SCRIPT,
        code="CK718",
        names=("rotary_base", "10000"),
        damage=said("--rotary-base 1000000", ""),
        prepare=launch("qwen2"),
    ),
    Report(
        "miles#742",
        "2026-03",
        "The model script's base is another than that of the checkpoint, which is a variant of the model.",
        SCRIPT,
        code="CK718",
        names=("rotary_base", "10000000"),
        damage=said("THETA:-1000000", "THETA:-10000000"),
        prepare=launch("qwen3"),
    ),
    Report(
        "miles#2377",
        "2026-08",
        "YaRN's factor in a hand-written model script is not the checkpoint's.",
        SCRIPT,
        code="CK718",
        names=("rotary_scaling_factor",),
        damage=said("--rotary-scaling-factor 40", "--rotary-scaling-factor 32"),
        prepare=launch("deepseek_v3"),
    ),
    Report(
        "vllm#52435",
        "2026-08",
        "An engine's tensor parallel size does not divide the attention heads; the message speaks of experts first.",
        SCRIPT,
        code="CK722",
        names=("num_attention_heads",),
        damage=said("--rollout-num-gpus-per-engine 4", "--rollout-num-gpus-per-engine 8"),
        prepare=launch("qwen2"),
    ),
    Report(
        "NeMo-RL#3150",
        "2026-07",
        "Sizes of a recipe for 32 nodes on two: generation takes one of them, and 8 GPUs are left for 16.",
        "ckptkit preflight job.yaml",
        code="CK722",
        names=("16",),
        damage=said("context_parallel_size: 2", "context_parallel_size: 4"),
        prepare=_nemo_rl,
    ),
    Report(
        "sglang#36528",
        "2026-08",
        "EAGLE3 without the path of a draft: the served model is loaded as its own draft, and the server dies.",
        SCRIPT,
        code="CK745",
        names=("draft",),
        damage=said(
            "--rollout-num-gpus-per-engine 4", "--rollout-num-gpus-per-engine 4 --sglang-speculative-algorithm EAGLE3"
        ),
        prepare=launch("qwen2"),
    ),
    Report(
        "sglang#36536",
        "2026-08",
        "EAGLE for a Llama, which has no draft layers, and no path of a draft.",
        SCRIPT,
        code="CK745",
        names=("draft",),
        damage=said(
            "--rollout-num-gpus-per-engine 8", "--rollout-num-gpus-per-engine 8 --sglang-speculative-algorithm EAGLE"
        ),
        prepare=launch("llama"),
    ),
    Report(
        "slime#2366",
        "2026-09",
        "Fewer samples in the whole run than one global batch has: no training step, and a bare assertion of Megatron.",
        SCRIPT,
        code="CK746",
        names=("global_batch_size",),
        damage=said("--global-batch-size 64", "--global-batch-size 256"),
        prepare=_one_step,
    ),
    Report(
        "slime#1871",
        "2026-04",
        "--allgather-cp cuts tokens into contiguous parts, and attention other than DeepSeek's sparse one takes its "
        "parts in zigzag order: shapes fit, and tokens are scrambled. Since #1891 slime stops.",
        SCRIPT,
        code="CK746",
        names=("no --allgather-cp with context_parallel_size above 1 for Qwen3ForCausalLM",),
        damage=said("--context-parallel-size 2", "--context-parallel-size 2 --allgather-cp"),
        prepare=launch("qwen3"),
    ),
    Report(
        "verl#7952",
        "2026-09",
        "FSDP with async_save: the trainer leaves the tracker to a manager that does not write it, and the next run "
        "starts from step 0.",
        f"{SCRIPT} --strict",
        code="CK746",
        names=("async_save",),
        damage=said("async_save=False", "async_save=True"),
        prepare=_verl,
    ),
    Report(
        "Megatron-Bridge#5354",
        "2026-08",
        "A checkpoint of Megatron-LM where a bridge expects its own run_config.yaml.",
        "ckptkit preflight job.yaml",
        "qwen2-untied/megatron",
        "CK711",
        ("run_config.yaml",),
        _bridge_format,
        _nemo_rl_from_megatron,
    ),
)
