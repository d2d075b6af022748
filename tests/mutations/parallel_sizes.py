"""Parallel sizes that a sound checkpoint cannot be cut into: the arguments of `verify` are wrong, nothing on disk."""

from __future__ import annotations

from pathlib import Path

from mutations.mutation import Mutation


def nothing(path: Path, place: str) -> None:
    """The checkpoint stays as it is."""


_PLAN = "a launch script of a larger sibling"
# The test models have 12 layers, 12 experts, 10 heads in 2 groups, experts of 96 features.
MUTATIONS = (
    Mutation(
        "heads that tensor parallel ranks cannot share",
        _PLAN,
        ("F15",),
        "CK703",
        nothing,
        dict.fromkeys(("qwen2/hf", "glm4_moe/megatron"), "num_attention_heads"),
        arguments={"tp": 4},
    ),
    Mutation(
        "experts that expert parallel ranks cannot share",
        _PLAN,
        ("F15",),
        "CK703",
        nothing,
        dict.fromkeys(("qwen3_moe/hf", "glm4_moe/megatron"), "the number of experts"),
        arguments={"ep": 5},
    ),
    Mutation(
        "expert parallel ranks of a dense model",
        _PLAN,
        ("F15",),
        "CK703",
        nothing,
        {"qwen2/megatron": "the number of experts = 0"},
        arguments={"ep": 2},
    ),
    Mutation(
        "more pipeline stages than layers",
        _PLAN,
        ("F15",),
        "CK703",
        nothing,
        dict.fromkeys(("qwen2/megatron", "deepseek_v3/megatron"), "num_hidden_layers"),
        arguments={"pp": 16},
    ),
    Mutation(
        "pipeline stages with a remainder",
        "uneven stages that the launch script does not say",
        ("F15",),
        "CK703",
        nothing,
        {"qwen2/megatron": "num_hidden_layers"},
        ("slime#1486",),
        severity="warning",
        arguments={"pp": 5},
    ),
    Mutation(
        "kernel tile cut through by tensor parallel ranks",
        "an INT4 checkpoint is served on more GPUs than it was tried on",
        ("F15",),
        "CK307",
        nothing,
        dict.fromkeys(("glm4_moe/int4", "qwen3_moe/int4"), "experts of 96 features on 2 ranks"),
        ("sglang#35792", "vllm#57792"),
        arguments={"tp": 2},
    ),
)
