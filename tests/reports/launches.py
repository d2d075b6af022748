"""Reports about launches: arguments, sizes and paths that are not the model's, or that no stack can start with."""

from support.launch_scripts import write_headers, write_launch

from reports.report import Case

SCRIPT = "ckptkit preflight run.sh"


def launch(family):
    def prepare(work):
        write_headers(work / "CKPT", family)
        write_launch(work, family, work / "CKPT")

    return prepare


def said(before, after):
    def damage(work):
        changed = 0
        for file in (work / "run.sh", work / "job.yaml", *(work / "models").glob("*.sh")):
            if file.exists() and before in (text := file.read_text()):
                file.write_text(text.replace(before, after))
                changed += 1
        assert changed == 1, (before, changed)

    return damage


def _one_step(work):
    launch("qwen2")(work)
    batch = "--num-rollout 2 --rollout-batch-size 8 --n-samples-per-prompt 8 --global-batch-size 64"
    said("--rollout-batch-size 32", batch)(work)


def with_options(family, options):
    def prepare(work):
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


def _nemo_rl(work):
    write_headers(work / "CKPT", "qwen2")
    (work / "job.yaml").write_text(NEMO_RL.format(work=work))


VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.resume_mode=auto \\
  actor_rollout_ref.model.path=CKPT actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.actor.checkpoint.async_save=False \\
  trainer.nnodes=1 trainer.n_gpus_per_node=8 trainer.default_local_dir=steps
"""


def _verl(work):
    write_headers(work / "CKPT", "qwen2")
    (work / "run.sh").write_text(VERL)


def _bridge_format(work):
    """The settings take a checkpoint of Megatron-LM for one of Megatron-Bridge."""
    said("format: megatron_lm", "format: megatron_bridge")(work)


def _nemo_rl_from_megatron(work):
    text = NEMO_RL.replace("{work}/CKPT", "{work}/RELEASE").replace(
        "  megatron_cfg:", "  pretrained_checkpoint: {{path: {work}/CKPT, format: megatron_lm}}\n  megatron_cfg:"
    )
    (work / "job.yaml").write_text(text.format(work=work))


def _four_stages(work):
    launch("qwen2")(work)
    ends = "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7"
    sizes = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"
    said(sizes, f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 {ends}")(work)


def _glm_in_one_group(work):
    launch("glm4_moe")(work)
    said("--rollout-num-gpus-per-engine 32 --sglang-ep-size 32", "--rollout-num-gpus-per-engine 16")(work)
    said(" --sglang-dp-size 4 --sglang-enable-dp-attention", "")(work)


def _uneven(work):
    _nemo_rl(work)
    ends = "num_layers_in_first_pipeline_stage: 13\n    num_layers_in_last_pipeline_stage: 15\n"
    said("  generation:\n", f"    {ends}  generation:\n")(work)


_ENDS = "    num_layers_in_first_pipeline_stage: 2\n    num_layers_in_last_pipeline_stage: 2\n"
_ONE_CHUNK = "--num-virtual-stages-per-pipeline-rank 1"
_NO_TRAINER = "trainer"


def _eight_stages(work):
    """NeMo-RL's settings for 16 GPUs of training: 2 layers in the first and the last of 8 stages, 4 in the others."""
    _nemo_rl(work)
    said("pipeline_model_parallel_size: 2\n", f"pipeline_model_parallel_size: 8\n{_ENDS}")(work)
    said("context_parallel_size: 2", "context_parallel_size: 1")(work)
    said("num_nodes: 2}", "num_nodes: 3}")(work)


def _serving(options):
    def prepare(work):
        write_headers(work / "CKPT", "qwen2")
        (work / "run.sh").write_text(f"vllm serve CKPT --enable-lora {options} --lora-modules one=ADAPTER\n")

    return prepare


CASES = {
    "slime#641": Case(
        names=("rotary_base", "10000"), damage=said("--rotary-base 1000000", ""), prepare=launch("qwen2")
    ),
    "miles#742": Case(
        names=("rotary_base", "10000000"), damage=said("THETA:-1000000", "THETA:-10000000"), prepare=launch("qwen3")
    ),
    "miles#2377": Case(
        names=("rotary_scaling_factor",),
        damage=said("--rotary-scaling-factor 40", "--rotary-scaling-factor 32"),
        prepare=launch("deepseek_v3"),
    ),
    "vllm#52435": Case(
        names=("num_attention_heads",),
        damage=said("--rollout-num-gpus-per-engine 4", "--rollout-num-gpus-per-engine 8"),
        prepare=launch("qwen2"),
    ),
    "NeMo-RL#3150": Case(
        names=("16",), damage=said("context_parallel_size: 2", "context_parallel_size: 4"), prepare=_nemo_rl
    ),
    "sglang#36528": Case(
        names=("draft",),
        damage=said(
            "--rollout-num-gpus-per-engine 4", "--rollout-num-gpus-per-engine 4 --sglang-speculative-algorithm EAGLE3"
        ),
        prepare=launch("qwen2"),
    ),
    "sglang#36536": Case(
        names=("draft",),
        damage=said(
            "--rollout-num-gpus-per-engine 8", "--rollout-num-gpus-per-engine 8 --sglang-speculative-algorithm EAGLE"
        ),
        prepare=launch("llama"),
    ),
    "slime#2366": Case(
        names=("global_batch_size",),
        damage=said("--global-batch-size 64", "--global-batch-size 256"),
        prepare=_one_step,
    ),
    "slime#1871": Case(
        names=("no --allgather-cp with context_parallel_size above 1 for Qwen3ForCausalLM",),
        damage=said("--context-parallel-size 2", "--context-parallel-size 2 --allgather-cp"),
        prepare=launch("qwen3"),
    ),
    "verl#7952": Case(names=("async_save",), damage=said("async_save=False", "async_save=True"), prepare=_verl),
    "Megatron-Bridge#5354": Case("qwen2-untied/megatron", ("run_config.yaml",), _bridge_format, _nemo_rl_from_megatron),
    "slime#2077": Case(
        names=("= 8 x 1 x 2 = 16",),
        damage=said(
            "--expert-model-parallel-size 8", "--expert-model-parallel-size 8 --pipeline-model-parallel-size 2"
        ),
        prepare=launch("qwen3_moe"),
    ),
    "Megatron-Bridge#5754": Case(
        names=("= 8 x 4 x 1 = 32",), damage=said("--expert-tensor-parallel-size 1", ""), prepare=launch("qwen3_moe")
    ),
    "slime#1796": Case(
        names=("moe_intermediate_size = 2048", "32 per rank"),
        damage=said("--sglang-ep-size 64 ", ""),
        prepare=launch("deepseek_v3"),
    ),
    "Megatron-Bridge#5551": Case(
        names=("divisible by pp = 8", "num_hidden_layers = 92"),
        damage=said(
            "--pipeline-model-parallel-size 4 --context-parallel-size 2 --expert-model-parallel-size 16",
            "--pipeline-model-parallel-size 8 --expert-model-parallel-size 8",
        ),
        prepare=launch("glm4_moe"),
    ),
    "Megatron-Bridge#5581": Case(
        names=("14 ", "stages"),
        damage=said("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 2"),
        prepare=_four_stages,
    ),
    "Megatron-Bridge#5846": Case(
        names=("uneven",),
        damage=said("pipeline_model_parallel_size: 2", "pipeline_model_parallel_size: 1"),
        prepare=_uneven,
    ),
    "Megatron-Bridge#5578": Case(
        names=("27",),
        damage=said("t*15", "t*14"),
        prepare=with_options("qwen2", "--pipeline-model-parallel-layout 'Et*13|t*15,L'"),
    ),
    "sglang#31799": Case(
        names=("vocab_size", "24 "),
        damage=said("--rollout-num-gpus-per-engine 16", "--rollout-num-gpus-per-engine 24"),
        prepare=_glm_in_one_group,
    ),
    "Megatron-Bridge#5884": Case(
        names=("divisible by pp = 8", "num_hidden_layers = 28"), damage=said(_ENDS, ""), prepare=_eight_stages
    ),
    "Megatron-Bridge#5443": Case(
        names=("--num-virtual-stages-per-pipeline-rank and --pipeline-model-parallel-layout",),
        damage=said("--pipeline-model-parallel-layout", f"{_ONE_CHUNK} --pipeline-model-parallel-layout"),
        prepare=with_options("qwen2", "--pipeline-model-parallel-layout 'Et*7|t*7|t*7|t*7,L'"),
    ),
    "slime#253": Case(
        names=("untie_embeddings_and_output_weights = False",),
        damage=said("MODEL+=( --untie-embeddings-and-output-weights )", ""),
        prepare=launch("qwen2"),
    ),
    "vllm#55193": Case(names=(_NO_TRAINER,), prepare=_serving("--max-lora-rank 8 --lora-target-modules qkv_proj")),
    "gpustack#5438": Case(names=(_NO_TRAINER,), prepare=_serving("")),
}
