"""Launch scripts of six families, each written in another way that bash allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from releases.header_only import write
from releases.record import load

from ckptkit.verify.core.report import Report

QWEN2 = """
# Qwen2.5-7B
WIDTH=3584
MODEL=( --swiglu --disable-bias-linear --add-qkv-bias )
MODEL+=( --num-layers 28 --hidden-size $WIDTH --ffn-hidden-size 18944 )
MODEL+=(
  --num-attention-heads 28 --group-query-attention --num-query-groups 4   # grouped
  --position-embedding-type rope --rotary-base 1000000
  --normalization RMSNorm --norm-epsilon 1e-06
  --vocab-size 152064
)
MODEL+=( --untie-embeddings-and-output-weights )
"""
QWEN3 = """
# Qwen3-4B
BASE=${THETA:-1000000}
MODEL=(
  --num-layers 36
  --hidden-size 2560
  --ffn-hidden-size 9728
  --num-attention-heads 32
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --qk-layernorm
  --swiglu
  --disable-bias-linear
  --normalization "RMSNorm"
  --norm-epsilon 1e-6
  --use-rotary-position-embeddings
  --rotary-base "${BASE}"
  --vocab-size 151936
)
"""
QWEN3_MOE = """
# Qwen3-30B-A3B
LAYERS=48
freq=()
for ((layer = 0; layer < LAYERS; layer++)); do
  freq+=(1)
done
printf -v FREQ '[%s]' "$(IFS=,; echo "${freq[*]}")"
MODEL=(
  --num-layers $LAYERS --hidden-size 2048 --ffn-hidden-size 6144
  --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
  --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
  --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
  --untie-embeddings-and-output-weights --vocab-size 151936
  --num-experts 128 --moe-layer-freq "$FREQ"
  --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-router-score-function softmax
  --moe-router-dtype fp32 --moe-grouped-gemm --moe-permute-fusion
)
"""
GLM = """
# GLM-4.5
DENSE=3 MOE=89
EXPERT=1536
MODEL=(
  --num-layers $((DENSE + MOE)) --hidden-size 5120 --ffn-hidden-size 12288
  --num-attention-heads 96 --group-query-attention --num-query-groups 8 --kv-channels 128
  --qk-layernorm --add-qkv-bias --disable-bias-linear --swiglu --normalization RMSNorm
  --position-embedding-type rope --rotary-percent 0.5 --rotary-base 1000000
  --untie-embeddings-and-output-weights --vocab-size 151552
  --num-experts 160 --moe-layer-freq [0]*$DENSE+[1]*$MOE
  --moe-ffn-hidden-size $EXPERT --moe-shared-expert-intermediate-size $((1 * EXPERT))
  --moe-router-topk 8 --moe-router-pre-softmax --moe-router-score-function sigmoid
  --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5
  --moe-router-dtype fp32 --moe-grouped-gemm --moe-permute-fusion
)
"""
DEEPSEEK = """
# DeepSeek V3
function layers() {
  local dense=$1 all=$2 list=""
  for i in $(seq 1 3); do :; done
  i=0
  while [ $i -lt $all ]; do
    if (( i < dense )); then list="${list}0,"; else list="${list}1,"; fi
    i=$((i + 1))
  done
  echo "[${list%,}]"
}
MODEL=(
  --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
  --disable-bias-linear --swiglu --normalization RMSNorm --norm-epsilon 1e-6
  --position-embedding-type rope --rotary-base 10000 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
  --untie-embeddings-and-output-weights --vocab-size 129280
  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
  --v-head-dim 128 --qk-layernorm
  --num-experts 256 --moe-layer-freq "$(layers 3 61)"
  --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
  --moe-router-topk 8 --moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias
  --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
  --moe-router-dtype fp32 --moe-grouped-gemm --moe-permute-fusion
)
"""
LLAMA = """
# Llama 3.1 8B, as one string that is split at its blanks
SIZES="--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
SIZES="$SIZES --group-query-attention --num-query-groups 8 --kv-channels 128"
ROPE='--use-rotary-position-embeddings --rotary-base 500000 --use-rope-scaling'
MODEL=($SIZES $ROPE
  --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5
  --untie-embeddings-and-output-weights --vocab-size 128256)
"""
KIMI = DEEPSEEK.replace("layers 3 61", "layers 1 61")
for before, after in (
    ("--num-attention-heads 128 --kv-channels 128", "--num-attention-heads 64 --kv-channels 64"),
    ("--rotary-base 10000 --rotary-scaling-factor 40", "--rotary-base 50000 --rotary-scaling-factor 32"),
    ("129280", "163840"),
    ("--num-experts 256", "--num-experts 384"),
    ("--moe-router-num-groups 8 --moe-router-group-topk 4", ""),
    ("factor 2.5", "factor 2.827"),
):
    KIMI = KIMI.replace(before, after)


@dataclass(frozen=True)
class Family:
    """A release, the model's script, and sizes that suit it."""

    release: str
    model: str
    sizes: str
    gpus: str


FAMILIES = {
    "qwen2": Family(
        "Qwen/Qwen2.5-7B-Instruct",
        QWEN2,
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2",
        "--rollout-num-gpus 8 --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 4",
    ),
    "qwen3": Family(
        "Qwen/Qwen3-4B",
        QWEN3,
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2",
        "--rollout-num-gpus 8 --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 2",
    ),
    "qwen3_moe": Family(
        "Qwen/Qwen3-30B-A3B",
        QWEN3_MOE,
        "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 "
        "--expert-tensor-parallel-size 1",
        "--rollout-num-gpus 8 --actor-num-nodes 1 --actor-num-gpus-per-node 8 "
        "--rollout-num-gpus-per-engine 8 --sglang-ep-size 8",
    ),
    "glm4_moe": Family(
        "zai-org/GLM-4.5",
        GLM,
        "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
        "--context-parallel-size 2 --expert-model-parallel-size 16 --expert-tensor-parallel-size 1",
        "--rollout-num-gpus 64 --actor-num-nodes 8 --actor-num-gpus-per-node 8 "
        "--rollout-num-gpus-per-engine 32 --sglang-ep-size 32 "
        "--sglang-dp-size 4 --sglang-enable-dp-attention",
    ),
    "deepseek_v3": Family(
        "deepseek-ai/DeepSeek-V3",
        DEEPSEEK,
        "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
        "--decoder-last-pipeline-num-layers 13 --expert-model-parallel-size 32 --expert-tensor-parallel-size 1",
        "--rollout-num-gpus 128 --actor-num-nodes 16 --actor-num-gpus-per-node 8 "
        "--rollout-num-gpus-per-engine 64 --sglang-ep-size 64 "
        "--sglang-dp-size 8 --sglang-enable-dp-attention --sglang-moe-dense-tp-size 1",
    ),
    "llama": Family(
        "meta-llama/Meta-Llama-3.1-8B",
        LLAMA,
        "--tensor-model-parallel-size 8 --sequence-parallel",
        "--rollout-num-gpus 16 --actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 8",
    ),
    "kimi_k2": Family(
        "moonshotai/Kimi-K2-Instruct",
        KIMI,
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --decoder-last-pipeline-num-layers 5 "
        "--sequence-parallel --expert-model-parallel-size 32 --expert-tensor-parallel-size 1",
        "--rollout-num-gpus 256 --actor-num-nodes 32 --actor-num-gpus-per-node 8 "
        "--rollout-num-gpus-per-engine 16 --sglang-ep-size 16",
    ),
}

RAY = r"""#!/bin/bash
set -ex
pkill -9 sglang; ray stop --force   # what an earlier run left
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/FAMILY.sh"
PATHS=(
  --hf-checkpoint ROOT
  # --load /runs/old
  --ref-load ROOT
)
PARALLEL=(SIZES)
OFF=(--attention-dropout 0.0 --hidden-dropout 0.0)
LINKS=$(nvidia-smi topo -m 2>/dev/null | grep -c NV)
if [ "$LINKS" -gt 0 ]; then NVLS=1; else NVLS=0; fi
ENVIRONMENT="{\"env_vars\": {\"NCCL_NVLS_ENABLE\": \"${NVLS}\", \"PYTHONPATH\": \"/opt/Megatron-LM\"}}"
ray start --head --disable-usage-stats
ray job submit --address="http://127.0.0.1:8265" \
  --runtime-env-json="${ENVIRONMENT}" \
  -- python3 train.py --num-rollout 100 \
  GPUS \
  --rollout-batch-size 32 --wandb-key ${WANDB_KEY} \
  "${PATHS[@]}" \
  ${MODEL[@]} \
  ${PARALLEL[@]} \
  ${OFF[@]} 2>&1 | tee run.log
"""
PLAIN = r"""
. models/FAMILY.sh
export CUDA_DEVICE_MAX_CONNECTIONS=1
exec torchrun --nproc_per_node 8 train_async.py GPUS --hf-checkpoint=ROOT --ref-load=ROOT \
  SIZES "${MODEL[@]}" --attention-dropout=0.0 --hidden-dropout 0
"""


def write_launch(folder: Path, name: str, root: Path, template: str = RAY, change: Callable[[str], str] = str) -> Path:
    """Writes `run.sh` and `models/NAME.sh` of a family into a folder; `change` edits either text. Returns `run.sh`."""
    family = FAMILIES[name]
    (folder / "models").mkdir(parents=True, exist_ok=True)
    (folder / "models" / f"{name}.sh").write_text(change(family.model))
    for placeholder, text in (("FAMILY", name), ("ROOT", str(root))):
        template = template.replace(placeholder, text)
    script = folder / "run.sh"
    script.write_text(change(template.replace("SIZES", family.sizes).replace("GPUS", family.gpus)))
    return script


def write_config(folder: Path, name: str) -> Path:
    """A directory with the config.json of a family's release, and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(load(FAMILIES[name].release).config))
    return folder


def write_headers(folder: Path, name: str) -> Path:
    """The release of a family as headers without data."""
    return write(load(FAMILIES[name].release), folder)


def quantized_launch(
    folder: Path, name: str, quantization: Mapping[str, Any] | None, change: Callable[[str], str] = str
) -> Path:
    """The `run.sh` of a launch whose engine serves the family's release, quantized so, and no weights."""
    root = write_config(folder / "hf", name)
    config = json.loads((root / "config.json").read_text())
    config |= {} if quantization is None else {"quantization_config": dict(quantization)}
    (root / "config.json").write_text(json.dumps(config))
    return write_launch(folder, name, root, change=change)


def loads(report: Report) -> list[str]:
    """What preflight says each role loads."""
    return list(report.facts["what would be loaded"])


def passes(report: Report) -> bool:
    return (report.status, list(report.findings), list(report.reasons)) == ("passed", [], [])
