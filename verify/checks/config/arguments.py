"""Compares Megatron's training arguments with an HF config; absent arguments have Megatron's defaults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.megatron.argument import Args, Argument, OfModel, always, of_model
from ckptkit.converters.megatron.argument_table import ARGUMENTS, BY_NAME
from ckptkit.converters.megatron.argument_values import not_latent
from ckptkit.converters.megatron.arguments import comparable_args
from ckptkit.converters.megatron.hybrid_model import (
    SAID_BY_THE_PATTERN,
    as_gpt_args,
    hybrid_pattern,
    own_layers,
    stored_pattern,
)


def hint_of(argument: str) -> str:
    """The hint for an argument of another model."""
    if argument in BY_NAME and BY_NAME[argument].printed == "comment":
        set_it = "set the attribute of args before Megatron builds the model"
        return f"Megatron-LM has no flag for this argument: {set_it}, or accept that training uses its default"
    return "correct the launch script of the run, or config.json: they describe different models"


def _rows(dims: ModelDims, args: Args) -> list[Argument]:
    """The arguments to compare; those of an indexer or linear attention only for Megatron's own modules."""
    own = args.get("experimental_attention_variant") is not None
    return [row for row in ARGUMENTS if of_model(row.scope, dims) and (own or not row.own_modules)]


def mismatches(dims: ModelDims, args: Args) -> Iterator[tuple[str, str, str]]:
    """Each argument that does not fit the model (a HybridModel as GPTModel), its expected and its actual value."""
    expected = as_gpt_args(comparable_args(dims))
    pattern, args = stored_pattern(args), as_gpt_args(args)
    if (pattern is not None or dims.pattern) and (pattern or "").replace("|", "") != hybrid_pattern(dims):
        yield "hybrid_layer_pattern", hybrid_pattern(dims), pattern or "None, which gives a GPTModel"
        args = {**args, **{name: expected.get(name) for name in SAID_BY_THE_PATTERN}}
    for row in _rows(dims, args):
        right, actual = row.of_args(expected), row.of_args(args)
        if not _same(right, actual):
            yield row.name, _text(right), "None" if actual is None else _text(actual)
    # `vocab_size`, which cuts rows at export, must be right if given; `padded_vocab_size` may be larger.
    vocab, padded = args.get("vocab_size"), args.get("padded_vocab_size")
    if vocab is not None and vocab != dims.vocab:
        yield "vocab_size", str(dims.vocab), str(vocab)
    if padded is not None and padded < dims.vocab:
        yield "padded_vocab_size", f"at least {dims.vocab}", str(padded)


def differing(here: Args, there: Args) -> Iterator[tuple[str, str, str]]:
    """Each argument that gives two runs different models, and both values. A run may leave MTP layers out."""
    if (one := own_layers(here)) != (other := own_layers(there)):
        yield "hybrid_layer_pattern", _text(one), _text(other)
    here, there = as_gpt_args(here), as_gpt_args(there)
    compared: dict[OfModel, Any] = {
        always: True,
        not_latent: not BY_NAME["multi_latent_attention"].of_args(here),
        "experts": BY_NAME["num_experts"].of_args(here),
        "rotary": BY_NAME["position_embedding_type"].of_args(here) != "none",
    }
    for row in ARGUMENTS:
        if row.name != "mtp_num_layers" and compared.get(row.scope):
            one, other = row.of_args(here), row.of_args(there)
            if not _same(one, other):
                yield row.name, _text(one), _text(other)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return bool(one) == bool(other)
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def _text(value: Any) -> str:
    if isinstance(value, list) and set(value) <= {0, 1} and sorted(value) == value:
        return f"{value.count(0)} dense layers, then {value.count(1)} MoE layers"
    return str(value)


def compared(dims: ModelDims) -> int:
    """The number of arguments that `mismatches` compares."""
    return len(_rows(dims, {})) + 2
