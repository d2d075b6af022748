#!/bin/bash
HERE=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)
source $HERE/common.env
STEPS=20
stop_if_done
cd $ROOT
uv run examples/run_grpo.py \
    --config $CONFIG \
    grpo.max_num_steps=$STEPS \
    logger.log_dir=$HERE/$NAME/logs \
    logger.wandb.name=$NAME-$(date +%s) \
    cluster.num_nodes=NODES \
    checkpointing.checkpoint_dir=$HERE/$NAME/steps \
    $@ 2>&1 | tee run.log
