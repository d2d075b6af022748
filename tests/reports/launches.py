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


def with_options(family: str, options: str) -> Change:
    """The launch of a family with more options, quoted as they are."""

    def prepare(work: Path) -> None:
        launch(family)(work)
        said("  --rollout-batch-size 32", f"  {options} --rollout-batch-size 32")(work)

    return prepare


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


def _four_stages(work: Path) -> None:
    """Four stages of 7 layers each, two of them by number."""
    launch("qwen2")(work)
    ends = "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7"
    sizes = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"
    said(sizes, f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 {ends}")(work)


def _glm_in_one_group(work: Path) -> None:
    """Each engine shares attention and experts out over all of its 16 GPUs."""
    launch("glm4_moe")(work)
    said("--rollout-num-gpus-per-engine 32 --sglang-ep-size 32", "--rollout-num-gpus-per-engine 16")(work)
    said(" --sglang-dp-size 4 --sglang-enable-dp-attention", "")(work)


def _uneven(work: Path) -> None:
    """NeMo-RL's settings, with other numbers of layers in the first and the last of two stages."""
    _nemo_rl(work)
    ends = "num_layers_in_first_pipeline_stage: 13\n    num_layers_in_last_pipeline_stage: 15\n"
    said("  generation:\n", f"    {ends}  generation:\n")(work)


_ENDS = "    num_layers_in_first_pipeline_stage: 2\n    num_layers_in_last_pipeline_stage: 2\n"
_ONE_CHUNK = "--num-virtual-stages-per-pipeline-rank 1"
_NO_TRAINER = "no command starts a trainer"
_ENGINE_ALONE = "`preflight` reads launches of trainers, not of an engine alone"


def _eight_stages(work: Path) -> None:
    """NeMo-RL's settings for 16 GPUs of training: 2 layers in the first and the last of 8 stages, 4 in the others."""
    _nemo_rl(work)
    said("pipeline_model_parallel_size: 2\n", f"pipeline_model_parallel_size: 8\n{_ENDS}")(work)
    said("context_parallel_size: 2", "context_parallel_size: 1")(work)
    said("num_nodes: 2}", "num_nodes: 3}")(work)


def _serving(options: str) -> Change:
    """A script that serves a model with an adapter."""

    def prepare(work: Path) -> None:
        write_headers(work / "CKPT", "qwen2")
        (work / "run.sh").write_text(f"vllm serve CKPT --enable-lora {options} --lora-modules one=ADAPTER\n")

    return prepare


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
    Report(
        "slime#2077",
        "2026-06",
        "A script was cut down to 8 GPUs, and its expert parallel size was not: with 2 stages it needs 16.",
        SCRIPT,
        code="CK722",
        names=("ep x etp x pp = 8 x 1 x 2 = 16",),
        damage=said(
            "--expert-model-parallel-size 8", "--expert-model-parallel-size 8 --pipeline-model-parallel-size 2"
        ),
        prepare=launch("qwen3_moe"),
    ),
    Report(
        "Megatron-Bridge#5754",
        "2026-08",
        "Recipes do not state the expert tensor parallel size, which then is the tensor parallel one: too few GPUs.",
        SCRIPT,
        code="CK722",
        names=("ep x etp x pp = 8 x 4 x 1 = 32",),
        damage=said("--expert-tensor-parallel-size 1", ""),
        prepare=launch("qwen3_moe"),
    ),
    Report(
        "slime#1796",
        "2026-04",
        "FP8 rollouts by a guide's sizes: a rank would have 48 rows of an expert (32 here), and a block has 128.",
        SCRIPT,
        code="CK722",
        names=("moe_intermediate_size = 2048, 32 a rank",),
        damage=said("--sglang-ep-size 64 ", ""),
        prepare=launch("deepseek_v3"),
    ),
    Report(
        "Megatron-Bridge#5551",
        "2026-08",
        "The 92 layers of GLM-4.5 over 8 stages, without numbers for the first and the last.",
        SCRIPT,
        code="CK703",
        names=("divisible by pp = 8", "num_hidden_layers = 92"),
        damage=said(
            "--pipeline-model-parallel-size 4 --context-parallel-size 2 --expert-model-parallel-size 16",
            "--pipeline-model-parallel-size 8 --expert-model-parallel-size 8",
        ),
        prepare=launch("glm4_moe"),
    ),
    Report(
        "Megatron-Bridge#5581",
        "2026-08",
        "Another number of stages is chosen, and the layers of the first and last stay: no stage has the others.",
        SCRIPT,
        code="CK703",
        names=("14 layers do not divide over the 0 other stages",),
        damage=said("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 2"),
        prepare=_four_stages,
    ),
    Report(
        "Megatron-Bridge#5846",
        "2026-08",
        "A recipe for one stage keeps the numbers of layers in the first and the last of two.",
        "ckptkit preflight job.yaml",
        code="CK703",
        names=("uneven stages in a pipeline of one",),
        damage=said("pipeline_model_parallel_size: 2", "pipeline_model_parallel_size: 1"),
        prepare=_uneven,
    ),
    Report(
        "Megatron-Bridge#5578",
        "2026-08",
        "A pipeline layout has one decoder layer less than the model.",
        SCRIPT,
        code="CK703",
        names=("27",),
        damage=said("t*15", "t*14"),
        prepare=with_options("qwen2", "--pipeline-model-parallel-layout 'Et*13|t*15,L'"),
    ),
    Report(
        "sglang#31799",
        "2026-07",
        "The vocabulary does not divide over 24 ranks: on a GPU SGLang pads it to a multiple of 64 alone.",
        f"{SCRIPT} --strict",
        code="CK722",
        names=("vocab_size that, padded to a multiple of 64, divides over 24 ranks",),
        damage=said("--rollout-num-gpus-per-engine 16", "--rollout-num-gpus-per-engine 24"),
        prepare=_glm_in_one_group,
    ),
    Report(
        "Megatron-Bridge#5884",
        "2026-08",
        "Recipes choose 8 stages for 60 layers, and no numbers for the first and the last (28 layers here).",
        "ckptkit preflight job.yaml",
        code="CK703",
        names=("divisible by pp = 8", "num_hidden_layers = 28"),
        damage=said(_ENDS, ""),
        prepare=_eight_stages,
    ),
    Report(
        "Megatron-Bridge#5443",
        "2026-08",
        "A layout of twice as many stages as ranks stays, and one virtual stage a rank is asked for.",
        SCRIPT,
        code="CK703",
        names=("--num-virtual-stages-per-pipeline-rank and --pipeline-model-parallel-layout",),
        damage=said("--pipeline-model-parallel-layout", f"{_ONE_CHUNK} --pipeline-model-parallel-layout"),
        prepare=with_options("qwen2", "--pipeline-model-parallel-layout 'Et*7|t*7|t*7|t*7,L'"),
    ),
    Report(
        "slime#253",
        "2025-09",
        "The script of Qwen3-32B leaves out --untie-embeddings-and-output-weights.",
        SCRIPT,
        code="CK718",
        names=("untie_embeddings_and_output_weights = False, by default",),
        damage=said("MODEL+=( --untie-embeddings-and-output-weights )", ""),
        prepare=launch("qwen2"),
    ),
    Report(
        "vllm#55193",
        "2026-09",
        "`vllm serve --lora-target-modules qkv_proj` with an adapter of down_proj: it is applied to nothing.",
        SCRIPT,
        names=(_NO_TRAINER,),
        prepare=_serving("--max-lora-rank 8 --lora-target-modules qkv_proj"),
        verdict="named",
        reason=_ENGINE_ALONE,
    ),
    Report(
        "gpustack#5438",
        "2026-06",
        "An adapter of rank 64 is served without --max-lora-rank, which is 16 then: vLLM refuses it.",
        SCRIPT,
        names=(_NO_TRAINER,),
        prepare=_serving(""),
        verdict="named",
        reason=_ENGINE_ALONE,
    ),
)
