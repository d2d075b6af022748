
. models/FAMILY.sh
export CUDA_DEVICE_MAX_CONNECTIONS=1
exec torchrun --nproc_per_node 8 train_async.py GPUS --hf-checkpoint=ROOT --ref-load=ROOT \
  SIZES "${MODEL[@]}" --attention-dropout=0.0 --hidden-dropout 0
