#!/bin/bash
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
