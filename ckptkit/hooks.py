"""Hooks of slime and miles, as their options name them: `--custom-megatron-init-path ckptkit.hooks.after_init`."""

from ckptkit.app.hooks import after_init, after_save, after_weight_write, before_log_prob, before_train_step
from ckptkit.verify.weight_sync.check import WeightSyncCheck
from ckptkit.verify.weight_sync.judge import SyncResult
from ckptkit.verify.weight_sync.watch import watch_rollout, watch_updates

__all__ = [
    "SyncResult",
    "WeightSyncCheck",
    "after_init",
    "after_save",
    "after_weight_write",
    "before_log_prob",
    "before_train_step",
    "watch_rollout",
    "watch_updates",
]
