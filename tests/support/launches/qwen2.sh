
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
