
# Llama 3.1 8B, as one string that is split at its blanks
SIZES="--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
SIZES="$SIZES --group-query-attention --num-query-groups 8 --kv-channels 128"
ROPE='--use-rotary-position-embeddings --rotary-base 500000 --use-rope-scaling'
MODEL=($SIZES $ROPE
  --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5
  --untie-embeddings-and-output-weights --vocab-size 128256)
