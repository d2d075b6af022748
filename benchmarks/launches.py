"""`ckptkit preflight` of a launch of each stack, from its file to the verdict, for a model of a trillion parameters."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROUNDS, Run, run
from plan import HF, LAYERS, MEGATRON, make

_MODEL = f"""
  --num-layers {LAYERS} --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 64 --kv-channels 64
  --disable-bias-linear --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --untie-embeddings-and-output-weights
  --position-embedding-type rope --rotary-base 50000 --vocab-size 163840 --multi-latent-attention --q-lora-rank 1536
  --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --num-experts 384
  --moe-layer-freq [0]+[1]*{LAYERS - 1} --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
  --moe-router-topk 8 --moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias
  --moe-router-topk-scaling-factor 2.827 --moe-router-dtype fp32 --moe-permute-fusion
  --attention-dropout 0.0 --hidden-dropout 0.0 --sequence-parallel
"""
_SLIME = """MODEL=({model})
python3 train.py --actor-num-nodes 32 --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 16 \\
  --sglang-ep-size 16 --hf-checkpoint {hf} {paths} --tensor-model-parallel-size 8 --expert-model-parallel-size 32 \\
  --expert-tensor-parallel-size 1 ${{MODEL[@]}}
"""
_VERL = """python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml algorithm.adv_estimator=grpo \\
  actor_rollout_ref.model.path={hf} actor_rollout_ref.actor.use_kl_loss=True trainer.resume_mode=disable \\
  {paths} actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.quantization=fp8 \\
  trainer.nnodes=32 trainer.n_gpus_per_node=8
"""
_VERL_MEGATRON = " ".join(
    f"actor_rollout_ref.{role}.megatron.{word}"
    for role in ("actor", "ref")
    for word in ("use_dist_checkpointing=True", "dist_checkpointing_path={megatron}/release")
)
_VERL_HF = "actor_rollout_ref.actor.megatron.use_mbridge=True actor_rollout_ref.ref.megatron.use_mbridge=True"
_NEMO_RL = """
loss_fn: {{reference_policy_kl_penalty: 0.01}}
policy:
  model_name: {hf}
  {paths}
  megatron_cfg: {{enabled: true, tensor_model_parallel_size: 8, pipeline_model_parallel_size: 1,
    context_parallel_size: 1, expert_model_parallel_size: 32, expert_tensor_parallel_size: 1}}
  generation: {{backend: vllm, vllm_cfg: {{tensor_parallel_size: 16, pipeline_parallel_size: 1}}}}
cluster: {{gpus_per_node: 8, num_nodes: 32}}
"""
_ROLL = """
pretrain: {hf}
reward_pretrain: {hf}
adv_estimator: reinforce
resume_from_checkpoint: false
actor_train:
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {{tensor_model_parallel_size: 8, sequence_parallel: true}}
  device_mapping: list(range(0,256))
actor_infer:
  strategy_args: {{strategy_name: sglang, strategy_config: {{load_format: dummy}}}}
  num_gpus_per_worker: 16
  device_mapping: list(range(0,256))
"""
# A stack, its file, and whether the trainer's weights are Megatron's.
LAUNCHES = {
    "slime, HF": ("run.sh", _SLIME, "--ref-load {hf}"),
    "slime, Megatron": ("run.sh", _SLIME, "--ref-load {megatron}"),
    "miles, bridge": ("run.sh", _SLIME, "--megatron-to-hf-mode bridge --ref-load {hf}"),
    "verl, HF": ("run.sh", _VERL, _VERL_HF),
    "verl, Megatron": ("run.sh", _VERL, _VERL_MEGATRON),
    "NeMo-RL, HF": ("job.yaml", _NEMO_RL, ""),
    "NeMo-RL, Megatron": ("job.yaml", _NEMO_RL, "pretrained_checkpoint: {{path: {megatron}, format: megatron_lm}}"),
    "ROLL, HF": ("job.yaml", _ROLL, ""),
}


def rows() -> list[dict[str, Any]]:
    """Seconds and memory of whole processes."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        work = Path(directory)
        hf, megatron = work / "hf", work / "megatron"
        make(HF, str(hf), "fp8")
        make(MEGATRON, str(megatron))
        files = {stack: _file(work, number, hf, megatron) for number, stack in enumerate(LAUNCHES)}
        return [_row(stack, file) for stack, file in files.items()]


def _file(work: Path, number: int, hf: Path, megatron: Path) -> Path:
    name, text, paths = list(LAUNCHES.values())[number]
    folder = work / str(number)
    folder.mkdir()
    paths = paths.format(hf=hf, megatron=megatron)
    (folder / name).write_text(text.format(hf=hf, megatron=megatron, model=_MODEL, paths=paths))
    return folder / name


def _row(stack: str, file: Path) -> dict[str, Any]:
    runs = [_run(file) for _ in range(ROUNDS)]
    return {
        "launch": stack,
        "seconds": round(statistics.median(one.seconds for one in runs), 2),
        "CPU s": round(statistics.median(one.busy for one in runs), 2),
        "peak MiB": max(one.resident for one in runs) >> 20,
    }


def _run(file: Path) -> Run:
    return run([sys.executable, "-m", "ckptkit", "preflight", str(file)])
