"""Every known way in which a checkpoint can be silently wrong, as mutations of clean ones that `verify` has to find."""

from __future__ import annotations

from mutations import (
    arguments,
    configuration,
    hf_config,
    hf_files,
    hf_names,
    hf_shapes,
    hybrid_model,
    int4,
    int4_parts,
    manifest,
    optimizer,
    order,
    order_megatron,
    parallel_sizes,
    ranks,
    torch_dist,
    values,
)
from mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *hf_files.MUTATIONS,
    *hf_names.MUTATIONS,
    *hf_config.MUTATIONS,
    *hf_shapes.MUTATIONS,
    *configuration.MUTATIONS,
    *torch_dist.MUTATIONS,
    *arguments.MUTATIONS,
    *hybrid_model.MUTATIONS,
    *values.MUTATIONS,
    *order.MUTATIONS,
    *order_megatron.MUTATIONS,
    *manifest.MUTATIONS,
    *optimizer.MUTATIONS,
    *int4.MUTATIONS,
    *int4_parts.MUTATIONS,
    *parallel_sizes.MUTATIONS,
    *ranks.MUTATIONS,
)
