#!/usr/bin/env bash
# A run of slime on one GPU, colocated: a small Qwen3, two rollouts, two training steps each, with ckptkit's hooks.
# usage: SLIME=CHECKOUT MEGATRON_LM=CHECKOUT slime.sh [OPTION OF TRAIN.PY...]
#   SLIME        slime 624b824a898ab0ec1fcb4d373004c7f3852bf515
#   MEGATRON_LM  Megatron-LM 1dcf0dafa884ad52ffb243625717a3471643e087, with slime's docker/patch/latest/megatron*.patch
#   python3 has torch 2.11, sglang 0.5.16, sglang-router 0.3.2, ray 2.60, pylatexenc, httpx, transformers 5.12
#   MODEL=dense|moe   SAVED=1: save after each rollout, then resume in a second job   OFFLOAD=0: the trainer stays
#   INT4=1: the engine serves INT4 (moe; SGLang with slime's patch)   QUANTIZER=ckptkit in place of slime's own
#   FAULT='bucket expert offset head': a fault in each update from the second on (slime_job.py; give --num-rollout 5)
#   HF= LOAD= REF= other checkpoints than those made here   GATE=0   TE=0   ASK=1: only preflight --ask-trainer
#   OUT= where logs go   WORK= where models are made   LIMIT= seconds for a job
# Left out of slime's environment (docker/Dockerfile): apex, flash-attn, DeepEP, DeepGEMM's fork, FlashQLA, modelopt,
# wandb (imported by name only: an empty module takes its place), slime's fork of torch_memory_saver (0.0.10 from the
# index). Without Transformer Engine slime_job.py has layers under its names.
# Changed: train.py starts Ray itself, in place of `ray start` and `ray job submit`. slime asserts that NumPy is not 2,
# which is taken out of a copy. Megatron's kernels that apex has are off. For INT4 the parameter of SGLang's route
# `post_process_weights`, from slime's patch, needs `Annotated[..., Body()]` like the others there.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd) root=$(cd "$(dirname "$0")/../.." && pwd)
out=${OUT:-$PWD/slime-out} work=${WORK:-/tmp/slime-run}; mkdir -p "$out" "$work/stubs" "$work/ray"
began=$SECONDS; facts=$out/facts.tsv; : > "$facts"
fact() { printf '%s\t%s\n' "$1" "$((SECONDS - began))" >> "$facts"; echo "== $1 [$((SECONDS - began)) s]"; }
step() { # NAME COMMAND...
    local name=$1 code; shift; "$@" > "$out/$name.log" 2>&1; code=$?
    if [ $code = 0 ]; then fact "$name"; else fact "$name FAILED ($code)"; tail -n 25 "$out/$name.log"; fi
    return $code
}
has() { python3 -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"; }
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_NVLS_ENABLE=0 \
    RAY_DEDUP_LOGS=0 RAY_USAGE_STATS_ENABLED=0 RAY_TMPDIR="$work/ray" \
    PYTHONPATH="$work/slime:$MEGATRON_LM:$here:$root:$work/stubs${PYTHONPATH:+:$PYTHONPATH}"

rm -rf "$work/slime"; cp -r "$SLIME" "$work/slime"
if python3 -c 'import numpy, sys; sys.exit(numpy.__version__ < "2")'; then
    sed -i '/assert np.__version__.startswith("1.")/d' "$work/slime/slime/backends/megatron_utils/initialize.py"
fi
has wandb || echo 'run = None' > "$work/stubs/wandb.py"
kind=${MODEL:-dense}
if [ ! -e "$work/$kind/prompts.jsonl" ]; then
    step model python3 -W ignore "$here/slime_model.py" "$kind" "$work/$kind" || exit 1
fi
for name in hf other; do
    [ -e "$work/$kind/$name-megatron/latest_checkpointed_iteration.txt" ] ||
        step "convert-$name" python3 -m ckptkit convert "$work/$kind/$name" "$work/$kind/$name-megatron" || exit 1
done
if [ "${INT4:-0}" = 1 ]; then
    if [ ! -e "$work/$kind/int4" ]; then
        step int4 python3 -m ckptkit quantize "$work/$kind/hf" "$work/$kind/int4" --preset rl --group-size 32 || exit 1
    fi
    HF=${HF:-$work/$kind/int4}
fi
HF=${HF:-$work/$kind/hf} REF=${REF:-$work/$kind/hf-megatron} LOAD=${LOAD:-$REF}
python3 -m ckptkit inspect "$work/$kind/hf" --megatron-args > "$work/$kind/args.sh" && . "$work/$kind/args.sh"

job=(
    --actor-num-nodes 1 --actor-num-gpus-per-node 1 --num-gpus-per-node 1 --colocate --rollout-num-gpus-per-engine 1
    --hf-checkpoint "$HF" --ref-load "$REF" --load "$LOAD"
    --prompt-data "$work/$kind/prompts.jsonl" --input-key prompt --label-key label --custom-rm-path slime_job.reward
    --num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2 --num-steps-per-rollout 2 --rollout-shuffle
    --rollout-max-response-len 32 --rollout-temperature 1 --use-dynamic-batch-size --max-tokens-per-gpu 2048
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl --entropy-coef 0.0
    --optimizer adam --lr 1e-4 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 1
    --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion --update-weight-buffer-size 1000000
    --sglang-attention-backend triton --sglang-sampling-backend pytorch --sglang-mem-fraction-static 0.2
    --sglang-max-total-tokens 20000 --sglang-max-running-requests 32
    --sglang-grammar-backend none --sglang-disable-cuda-graph --sglang-context-length 512 --seq-length 2048
    --custom-megatron-init-path slime_job.init
    --custom-megatron-before-log-prob-hook-path ckptkit.hooks.before_log_prob
    --custom-megatron-before-train-step-hook-path ckptkit.hooks.before_train_step
)
[ "${OFFLOAD:-1}" = 1 ] || job+=(--no-offload-train)
if has transformer_engine && [ "${TE:-1}" = 1 ]; then
    job+=(--transformer-impl transformer_engine --attention-backend "${ATTENTION:-auto}")
else
    job+=(--transformer-impl local --spec slime_job spec)
    words=(); for word in "${MODEL_ARGS[@]}"; do [ "$word" = --moe-permute-fusion ] || words+=("$word"); done
    MODEL_ARGS=("${words[@]}"); fact "no Transformer Engine"
fi
[ "$kind" = dense ] || job+=(--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none)
words=(); for word in "${MODEL_ARGS[@]}" "${job[@]}" "$@"; do [ -z "$word" ] || words+=("$word"); done

launch() { # NAME WORDS...: train.py as one job
    local name=$1; shift
    { printf 'cd %q\nexport PYTHONPATH=%q CUDA_DEVICE_MAX_CONNECTIONS=1\n' "$work/slime" "$PYTHONPATH"
      printf 'python3 train.py'; printf ' %q' "$@"; echo; } > "$out/$name.sh"
    if [ "${ASK:-0}" = 1 ]; then
        step "$name-asked" python3 -m ckptkit preflight "$out/$name.sh" --ask-trainer --all; return
    fi
    local gate=(); [ "${GATE:-1}" = 0 ] || gate=(python3 -m ckptkit gate --report "$out/$name-gate.json" --)
    step "$name" timeout -k 10 "${LIMIT:-300}" "${gate[@]}" bash "$out/$name.sh"; local code=$?
    grep -hoE 'FACT .*|ckptkit: .*|CkptkitError.*|Timer [a-z_]+ end.*|(perf|rollout|step) [0-9]+: .*' "$out/$name.log" |
        cut -c1-400 | tail -n 80
    return $code
}
[ "${SAVED:-0}" = 0 ] || words+=(--save "$work/$kind/saved" --save-interval 1)
launch first "${words[@]}"; code=$?
if [ "${SAVED:-0}" = 1 ] && [ $code = 0 ]; then
    launch second "${words[@]}" --load "$work/$kind/saved" --num-rollout 3 --override-opt-param-scheduler; code=$?
fi
[ "${ASK:-0}" = 1 ] || cp -rL "$work/ray/ray/session_latest/logs" "$out/ray" 2> /dev/null
echo; column -t -s "$(printf '\t')" "$facts" 2>/dev/null || cat "$facts"
exit $code
