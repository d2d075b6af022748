torchrun --standalone --nproc_per_node=8 -m verl.trainer.sft_trainer \
  data.train_files=$HOME/data/train.parquet model=hf_model model.path=HF optim=megatron optim.lr=1e-5 \
  engine=megatron engine.tensor_model_parallel_size=2 "optim.betas=[0.9,0.95]" \
  trainer.project_name=sft trainer.default_local_dir=LOCAL trainer.logger='["console","wandb"]' "$@"
