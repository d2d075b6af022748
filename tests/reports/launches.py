"""Reports about launches: arguments, sizes and paths that are not the model's, or that no stack can start with."""

from functools import cache

from support.launch_scripts import write_headers, write_launch

from reports.report import Case

SCRIPT = "ckptkit preflight run.sh"


@cache
def launch(family):
    """One for each family, so that reports of it share a sound twin."""

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


def wrong(prepare, before, after, *names):
    """A right launch in which a text of its files is replaced by another."""
    return Case(names=names, damage=said(before, after), prepare=prepare)


_PER_ENGINE, _EXPERTS = "--rollout-num-gpus-per-engine", "--expert-model-parallel-size"
_STAGES, _LAYOUT, _CONTEXTS = "--pipeline-model-parallel-size", "--pipeline-model-parallel-layout", "--context-parallel"
_UNTIED, _DRAFTING = "MODEL+=( --untie-embeddings-and-output-weights )", "--sglang-speculative-algorithm"

CASES = {
    "slime#641": wrong(launch("qwen2"), "--rotary-base 1000000", "", "rotary_base", "10000"),
    "miles#742": wrong(launch("qwen3"), "THETA:-1000000", "THETA:-10000000", "rotary_base", "10000000"),
    "miles#2377": wrong(launch("deepseek_v3"), "scaling-factor 40", "scaling-factor 32", "rotary_scaling_factor"),
    "vllm#52435": wrong(launch("qwen2"), f"{_PER_ENGINE} 4", f"{_PER_ENGINE} 8", "num_attention_heads"),
    "NeMo-RL#3150": wrong(_nemo_rl, "context_parallel_size: 2", "context_parallel_size: 4", "16"),
    "sglang#36528": wrong(launch("qwen2"), f"{_PER_ENGINE} 4", f"{_PER_ENGINE} 4 {_DRAFTING} EAGLE3", "draft"),
    "sglang#36536": wrong(launch("llama"), f"{_PER_ENGINE} 8", f"{_PER_ENGINE} 8 {_DRAFTING} EAGLE", "draft"),
    "slime#2366": wrong(_one_step, "--global-batch-size 64", "--global-batch-size 256", "global_batch_size"),
    "slime#1871": wrong(
        *(launch("qwen3"), f"{_CONTEXTS}-size 2", f"{_CONTEXTS}-size 2 --allgather-cp"),
        "no --allgather-cp with context_parallel_size above 1 for Qwen3ForCausalLM",
    ),
    "verl#7952": wrong(_verl, "async_save=False", "async_save=True", "async_save"),
    "Megatron-Bridge#5354": Case("qwen2-untied/megatron", ("run_config.yaml",), _bridge_format, _nemo_rl_from_megatron),
    "slime#2077": wrong(launch("qwen3_moe"), f"{_EXPERTS} 8", f"{_EXPERTS} 8 {_STAGES} 2", "= 8 x 1 x 2 = 16"),
    "Megatron-Bridge#5754": wrong(launch("qwen3_moe"), "--expert-tensor-parallel-size 1", "", "= 8 x 4 x 1 = 32"),
    "slime#1796": wrong(launch("deepseek_v3"), "--sglang-ep-size 64 ", "", "moe_intermediate_size = 2048, 32 a rank"),
    "Megatron-Bridge#5551": wrong(
        *(launch("glm4_moe"), f"{_STAGES} 4 {_CONTEXTS}-size 2 {_EXPERTS} 16", f"{_STAGES} 8 {_EXPERTS} 8"),
        *("divisible by pp = 8", "num_hidden_layers = 92"),
    ),
    "Megatron-Bridge#5581": wrong(_four_stages, f"{_STAGES} 4", f"{_STAGES} 2", "14 ", "stages"),
    "Megatron-Bridge#5846": wrong(
        _uneven, "pipeline_model_parallel_size: 2", "pipeline_model_parallel_size: 1", "uneven"
    ),
    "Megatron-Bridge#5578": wrong(with_options("qwen2", f"{_LAYOUT} 'Et*13|t*15,L'"), "t*15", "t*14", "27"),
    "sglang#31799": wrong(_glm_in_one_group, f"{_PER_ENGINE} 16", f"{_PER_ENGINE} 24", "vocab_size", "24 "),
    "Megatron-Bridge#5884": wrong(_eight_stages, _ENDS, "", "divisible by pp = 8", "num_hidden_layers = 28"),
    "Megatron-Bridge#5443": wrong(
        *(with_options("qwen2", f"{_LAYOUT} 'Et*7|t*7|t*7|t*7,L'"), _LAYOUT, f"{_ONE_CHUNK} {_LAYOUT}"),
        "--num-virtual-stages-per-pipeline-rank and --pipeline-model-parallel-layout",
    ),
    "slime#253": wrong(launch("qwen2"), _UNTIED, "", "untie_embeddings_and_output_weights = False"),
    "vllm#55193": Case(names=(_NO_TRAINER,), prepare=_serving("--max-lora-rank 8 --lora-target-modules qkv_proj")),
    "gpustack#5438": Case(names=(_NO_TRAINER,), prepare=_serving("")),
}
