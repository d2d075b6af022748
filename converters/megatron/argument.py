"""What one Megatron-LM argument is: a row of the table in `argument_table.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from converters.config.dims import ModelDims

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
