
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
