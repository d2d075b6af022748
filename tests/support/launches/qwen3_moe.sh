
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
