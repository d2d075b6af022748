"""Hooks of slime and miles, as their options name them: `--custom-megatron-init-path ckptkit.hooks.after_init`."""

from ckptkit.app.hooks import after_init, after_save, after_weight_write, before_log_prob, before_train_step

__all__ = ["after_init", "after_save", "after_weight_write", "before_log_prob", "before_train_step"]
