
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
