"""The Megatron-LM arguments that a model's dimensions amount to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.config.dims import ModelDims
from converters.megatron.argument import of_model
from converters.megatron.argument_table import ARGUMENTS
from converters.megatron.argument_values import refuse_inexpressible
from converters.megatron.hybrid_model import hybrid_args


def megatron_args(dims: ModelDims, dialect: str = "mcore") -> dict[str, Any]:
    """Megatron-LM arguments (argparse names) of this model, as a training run of it would have stored them.

    Only plain values, so that the restricted loaders of every Megatron version accept them. In a `dialect` other than
    megatron-core's, linear and sparse attention have none: slime's modules take their sizes from the HF config. Raises
    CkptkitError for a model whose arguments Megatron has no words for, such as a rope scaling that it does not know,
    and in the dialect "hybrid" for one that HybridModel cannot hold. A model that only HybridModel holds has its
    arguments in every dialect.
    """
    refuse_inexpressible(dims)
    args = {
        row.name: of_model(row.value, dims)
        for row in ARGUMENTS
        if row.value is not None and of_model(row.when, dims) and (dialect != "slime" or not row.own_modules)
    }
    return hybrid_args(args, dims) if dialect == "hybrid" or dims.pattern else args


def comparable_args(dims: ModelDims) -> dict[str, Any]:
    """As `megatron_args`, but leaves out a rope scaling that has no arguments: for comparing two models."""
    try:
        return megatron_args(dims)
    except CkptkitError:
        return megatron_args(replace(dims, rope_scaling=None))
