"""The arguments that say how a model is cut over ranks, by the names that parsing gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# The size or number of layers that an argument gives, as fields of `LaunchArguments`.
NUMBERS = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "decoder_first_pipeline_num_layers": "first",
    "decoder_last_pipeline_num_layers": "last",
    "num_virtual_stages_per_pipeline_rank": "vpp",
    "num_layers_per_virtual_pipeline_stage": "chunk",
    "mtp_num_layers": "mtp",
    "rollout_num_gpus_per_engine": "engine",
    "sglang_pp_size": "engine_pp",
    "sglang_pipeline_parallel_size": "engine_pp",
    "sglang_ep_size": "engine_ep",
    "sglang_expert_parallel_size": "engine_ep",
    "sglang_ep": "engine_ep",
    "vllm_pipeline_parallel_size": "engine_pp",
}
SWITCHES = {
    "account_for_embedding_in_pipeline_split": "embedding",
    "account_for_loss_in_pipeline_split": "loss",
    "sglang_enable_dp_attention": "dp_attention",
}
STAGES = "pipeline_model_parallel_layout"


def option_of(name: str) -> str:
    """The option that gives an argument."""
    return f"--{name.replace('_', '-')}"


# Every option that is read, and how argparse reads those that no other table has.
READ = frozenset(option_of(name) for name in (*NUMBERS, *SWITCHES, STAGES))
_OWN: Mapping[str, Callable[[str], Any] | bool] = {
    "num_virtual_stages_per_pipeline_rank": int,
    "num_layers_per_virtual_pipeline_stage": int,
    "account_for_embedding_in_pipeline_split": True,
    "account_for_loss_in_pipeline_split": True,
    STAGES: str,
}
LAYOUT: Mapping[str, tuple[str, Callable[[str], Any] | bool]] = {
    option_of(name): (name, kind) for name, kind in _OWN.items()
}
