"""What one Megatron-LM argument is, a row of the table in `argument_table.py`, and what Megatron makes of some.

Source of what is more than the argument or its default: Megatron-LM 0.13 to 0.19 `megatron/training/arguments.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from ckptkit.converters.config.dims import ModelDims

Args = Mapping[str, Any]
# A field of ModelDims (`mla.kv_rank`) or a function of it. As a condition, it applies where that is not empty.
OfModel = str | Callable[[ModelDims], Any]
# How argparse reads the word behind an option: a switch has none, `frequency` is a number or a list of one number a
# layer, `sizes` are numbers with commas between them.
Kind = type[int] | type[float] | type[str] | type[bool] | Literal["frequency", "sizes"]


def always(dims: ModelDims) -> bool:
    """For an argument of every model."""
    return True


def never(dims: ModelDims) -> bool:
    """For an argument that no model is compared by: it follows from the others, or is a choice of the run."""
    return False


@dataclass(frozen=True)
class Argument:
    """An argument of Megatron-LM by its argparse name, and all that this program knows of it."""

    name: str
    kind: Kind | None = None  # None: preflight does not read its option
    value: OfModel | None = None  # what a model needs; None: converted checkpoints do not store it
    default: Any = None  # Megatron-LM's own; that of a switch follows from its options
    when: OfModel = always  # the models that need it
    compared: OfModel | None = None  # the models whose training arguments are held against it; None: those of `when`
    read: Callable[[Args], Any] | None = None  # what a run's arguments come to; None: the argument or its default
    switches: Mapping[str, bool] | None = None  # what each option of a switch sets; None: `--name` turns it on
    printed: Literal["option", "comment", "never"] = "option"  # comment: Megatron-LM has no option for it
    of_run: bool = False  # a choice of the run that changes what training computes, and not of the model
    own_modules: bool = False  # only of megatron-core's modules; slime's take their sizes from the HF config
    config: str | None = None  # its name in TransformerConfig, where that is another

    @property
    def options(self) -> Mapping[str, bool]:
        """Its options; of a switch, what each sets."""
        return self.switches or {f"--{self.name.replace('_', '-')}": True}

    @property
    def starts(self) -> Any:
        """What it is where a run does not set it: a switch is off, unless an option turns it off."""
        return False in self.options.values() if self.kind is bool else self.default

    @property
    def scope(self) -> OfModel:
        """The models whose training arguments are held against it."""
        return self.when if self.compared is None else self.compared

    def of_args(self, args: Args) -> Any:
        """What Megatron 0.13 to 0.19 makes of a run's arguments; None and absent both mean the default."""
        if self.read is not None:
            return self.read(args)
        value = args.get(self.name)
        return self.starts if value is None else value


def of_model(what: OfModel, dims: ModelDims) -> Any:
    """A value or a condition of a row, for this model. Raises CkptkitError where its config does not say."""
    return attrgetter(what)(dims) if isinstance(what, str) else what(dims)


def get(args: Args, name: str, default: Any) -> Any:
    """An argument; None and absent both mean Megatron's default."""
    value = args.get(name)
    return default if value is None else value


def groups(args: Args) -> Any:
    """Without --group-query-attention every head has its own keys and values, whatever num_query_groups says."""
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
    """Latent attention takes yarn by default, which with a factor of 1 is plain rotary embedding."""
    return "rope" if get(args, "rotary_scaling_factor", 1.0) == 1 else get(args, "rope_type", "yarn")


def llama3_factor(args: Args) -> Any:
    """Llama 3's factor: --rotary-scaling-factor is another."""
    return get(args, "rope_scaling_factor", 8.0) if get(args, "use_rope_scaling", False) else None


def _by_layer(args: Args, freq: Any, is_one: Callable[[int, int], bool]) -> Any:
    """A list of 1 or 0 a layer: `freq`, or for a number n what `is_one` gives for each layer (from 0) and n."""
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
    """1 for each layer with a sliding window, else 0; a number n in the argument means all but every n-th, None all."""
    layers, freq = args.get("num_layers"), args.get("window_attn_skip_freq")
    if not args.get("window_size") or not isinstance(layers, int):
        return None
    found = _by_layer(args, freq, lambda layer, every: (layer + 1) % every != 0)
    return (1,) * layers if found is None else tuple(found) if isinstance(found, list) else found


def no_rope(args: Args) -> Any:
    """1 for each layer without rotary embedding, else 0, or None where all have it; a number n means every n-th."""
    found = _by_layer(args, args.get("no_rope_freq"), lambda layer, every: (layer + 1) % every == 0)
    if not isinstance(found, list):
        return found or None
    return tuple(found) if any(found) else None


def indexer_first(args: Args) -> Any:
    """The first layers with an indexer of their own, which matter only where not all layers have one."""
    every = get(args, "dsa_indexer_topk_freq", 1)
    return max(get(args, "dsa_indexer_skip_topk_offset", 0), 1) if every > 1 else 0


def indexer_rope(args: Args) -> Any:
    """Without the argument, Megatron's modules are from before 0.19."""
    return str(args.get("dsa_indexer_rope_interleaved", "nothing, as before 0.19: there it turns other rows"))
