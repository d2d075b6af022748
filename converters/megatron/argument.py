"""Defines a row of the table of Megatron-LM arguments (`argument_table.py`), and computes derived values.

Source of derived values: Megatron-LM 0.13 to 0.19 `megatron/training/arguments.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from ckptkit.converters.config.dims import ModelDims

Args = Mapping[str, Any]
# A field of ModelDims (`mla.kv_rank`) or a function of it. As a condition, it holds if the value is not empty.
OfModel = str | Callable[[ModelDims], Any]
# The type of an option's value: switches (bool) have no value, `frequency` is a number or a list with one number per
# layer, `sizes` are comma-separated numbers.
Kind = type[int] | type[float] | type[str] | type[bool] | Literal["frequency", "sizes"]


def always(dims: ModelDims) -> bool:
    """The condition of an argument for all models."""
    return True


def never(dims: ModelDims) -> bool:
    """The condition of an argument that is never compared: it follows from others, or is a choice of the run."""
    return False


@dataclass(frozen=True)
class Argument:
    """An argument of Megatron-LM, by its argparse name."""

    name: str
    kind: Kind | None = None  # None if preflight does not read its option
    value: OfModel | None = None  # the value for a model, or None if converted checkpoints do not store it
    default: Any = None  # Megatron-LM's default; a switch's default follows from its options
    when: OfModel = always  # the models that need it
    compared: OfModel | None = None  # the models for which it is compared, or None for those of `when`
    read: Callable[[Args], Any] | None = None  # derives the value from a run's arguments
    switches: Mapping[str, bool] | None = None  # option -> value of a switch, or None if `--name` turns it on
    printed: Literal["option", "comment", "never"] = "option"  # comment: Megatron-LM has no option for it
    of_run: bool = False  # a choice of the run, not of the model, that affects the computation
    own_modules: bool = False  # only for megatron-core's modules; slime's read their sizes from the HF config
    config: str | None = None  # its name in TransformerConfig, if different

    @property
    def options(self) -> Mapping[str, bool]:
        """Its options, with the value that each option of a switch sets."""
        return self.switches or {f"--{self.name.replace('_', '-')}": True}

    @property
    def starts(self) -> Any:
        """The value if a run does not set it: a switch is off, unless an option turns it off."""
        return False in self.options.values() if self.kind is bool else self.default

    @property
    def scope(self) -> OfModel:
        """The models for which the argument is compared."""
        return self.when if self.compared is None else self.compared

    def of_args(self, args: Args) -> Any:
        """The effective value in a run of Megatron 0.13 to 0.19; None and absent both mean the default."""
        if self.read is not None:
            return self.read(args)
        value = args.get(self.name)
        return self.starts if value is None else value


def of_model(what: OfModel, dims: ModelDims) -> Any:
    """A value or condition of a row, for this model. Raises CkptkitError if its config lacks the value."""
    return attrgetter(what)(dims) if isinstance(what, str) else what(dims)


def get(args: Args, name: str, default: Any) -> Any:
    """An argument; None and absent both mean Megatron's default."""
    value = args.get(name)
    return default if value is None else value


def groups(args: Args) -> Any:
    """Query groups; without --group-query-attention every head is one, and num_query_groups is ignored."""
    if not get(args, "group_query_attention", False):
        return args.get("num_attention_heads")
    return get(args, "num_query_groups", 1)


def head_dim(args: Args) -> Any:
    """`kv_channels`, else the hidden size over the heads."""
    if args.get("kv_channels") is not None:
        return args["kv_channels"]
    hidden, heads = args.get("hidden_size"), args.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def positions(args: Args) -> Any:
    """The older --use-rotary-position-embeddings means the same."""
    if get(args, "use_rotary_position_embeddings", False):
        return "rope"
    return get(args, "position_embedding_type", "learned_absolute")


def latent_rope(args: Args) -> Any:
    """Latent attention uses yarn by default; with a factor of 1 that is plain rotary embedding."""
    return "rope" if get(args, "rotary_scaling_factor", 1.0) == 1 else get(args, "rope_type", "yarn")


def llama3_factor(args: Args) -> Any:
    """Llama 3's factor, which is not --rotary-scaling-factor."""
    return get(args, "rope_scaling_factor", 8.0) if get(args, "use_rope_scaling", False) else None


def _by_layer(args: Args, freq: Any, is_one: Callable[[int, int], bool]) -> Any:
    """A list of 1 or 0 per layer: `freq`, or for a number n the results of `is_one` for each layer (from 0) and n."""
    layers = args.get("num_layers")
    if isinstance(freq, int) and isinstance(layers, int) and freq > 0:
        return [int(is_one(layer, freq)) for layer in range(layers)]
    return list(freq) if isinstance(freq, (list, tuple)) else freq


def moe_layers(args: Args) -> Any:
    """1 for each layer with routed experts, else 0. `moe_layer_freq` is a number n (every n-th) or such a list."""
    if not get(args, "num_experts", 0):
        layers = args.get("num_layers")
        return [0] * layers if isinstance(layers, int) else None
    return _by_layer(args, get(args, "moe_layer_freq", 1), lambda layer, every: layer % every == 0)


def linear_layers(args: Args) -> Any:
    """1 for each layer with linear attention, else 0; a number n in the argument means all but every n-th."""
    return _by_layer(args, args.get("linear_attention_freq"), lambda layer, every: (layer + 1) % every != 0)


def windows(args: Args) -> Any:
    """1 for each layer with a sliding window, else 0; a number n means all but every n-th layer, None means all."""
    layers, freq = args.get("num_layers"), args.get("window_attn_skip_freq")
    if not args.get("window_size") or not isinstance(layers, int):
        return None
    ones = _by_layer(args, freq, lambda layer, every: (layer + 1) % every != 0)
    return (1,) * layers if ones is None else tuple(ones) if isinstance(ones, list) else ones


def no_rope(args: Args) -> Any:
    """1 for each layer without rotary embedding, else 0, or None if all have it; a number n means every n-th."""
    ones = _by_layer(args, args.get("no_rope_freq"), lambda layer, every: (layer + 1) % every == 0)
    if not isinstance(ones, list):
        return ones or None
    return tuple(ones) if any(ones) else None


def indexer_first(args: Args) -> Any:
    """The number of first layers with an indexer, or 0 if all layers have one."""
    every = get(args, "dsa_indexer_topk_freq", 1)
    return max(get(args, "dsa_indexer_skip_topk_offset", 0), 1) if every > 1 else 0


def indexer_rope(args: Args) -> Any:
    """The value as text; without the argument, Megatron's modules are older than 0.19."""
    return str(args.get("dsa_indexer_rope_interleaved", "missing: Megatron before 0.19 rotates other rows"))
