python3 -m verl.experimental.fully_async_policy.fully_async_main \
  --config-name=fully_async_ppo_megatron_trainer.yaml algorithm.adv_estimator=grpo \
  actor_rollout_ref.model.path=HF actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  trainer.nnodes=1 trainer.n_gpus_per_node=4 rollout.nnodes=1 rollout.n_gpus_per_node=6 \
  trainer.experiment_name=job_$(date +%Y%m%d_%H%M) trainer.default_hdfs_dir=null
