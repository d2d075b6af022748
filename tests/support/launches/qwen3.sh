
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
