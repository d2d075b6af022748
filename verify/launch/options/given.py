"""A launch's words as Megatron's arguments: parsed as argparse does, with what slime and miles make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from converters.config.bounds import MAX_LAYERS, MAX_RANKS, MAX_SIZE
from verify.issue import Issue
from verify.launch.options.argv import Option, options_of
from verify.launch.options.tables import GPUS, LAYOUT, MODEL, NUMBERS, RUN, SWITCHES, Kind, option_of
from verify.launch.words import UnresolvedWord, Word
from verify.report import Severity

_TABLE: Mapping[str, tuple[str, Kind]] = {**MODEL, **SWITCHES, **RUN, **GPUS, **LAYOUT}
_CHOICES = {
    "position_embedding_type": ("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "moe_router_score_function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "rope_type": ("rope", "yarn"),
    "softmax_type": ("vanilla", "off-by-one", "learnable"),
}
_OF_CLUSTER = frozenset({*NUMBERS, *(name for name, _ in GPUS.values())})
# Either of them, and a launch is one that describes its model.
_SIZES = frozenset({"num_layers", "hidden_size"})
# What they set says nothing of a model by itself.
_OF_A_RUN = frozenset({"seq_length", "max_position_embeddings", "make_vocab_size_divisible_by", "mtp_num_layers"})


@dataclass(frozen=True)
class RefusedWord:
    """A word that argparse refuses: its option, what it takes, and the word."""

    option: str
    expected: str
    word: Word


@dataclass(frozen=True)
class GivenArguments:
    """The arguments that a launch gives: their values, where each is written, and which are not known.

    `unknown`: arguments whose option is given with a value that could not be told. `anything`: some words are not
    known at all, so that any argument may be given. `refused`: values that argparse does not take.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, Word] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()
    anything: bool = False
    refused: tuple[RefusedWord, ...] = ()

    @property
    def describes_model(self) -> bool:
        """Whether it says anything of the model, so that what is not given has Megatron's defaults."""
        return not _SIZES.isdisjoint(self.values)

    @property
    def of_model(self) -> frozenset[str]:
        """The arguments of the model that are given."""
        model = {name for name, _ in MODEL.values()}
        return frozenset(name for name in self.values if name in model and name not in _OF_A_RUN)

    def get(self, name: str, default: Any) -> Any:
        """An argument, or Megatron's default; None where it is given and not known."""
        return None if name in self.unknown else self.values.get(name, default)

    def has(self, name: str) -> bool:
        """Whether it is certain that an argument is given, and not turned off by a file of settings."""
        return name in self.places and self.values.get(name) is not False

    def lacks(self, name: str) -> bool:
        """Whether it is certain that an argument is not given."""
        return not self.has(name) and not self.anything

    def known(self, name: str, default: Any = None) -> Any:
        """An argument, `default` where it is certain that it is not given; None where its value is not known."""
        if name in self.unknown or (name not in self.values and not self.lacks(name)):
            return None
        return self.values.get(name, default)

    def issue(self, names: Sequence[str], expected: str, hint: str, severity: Severity = "error") -> Issue:
        """What is wrong with these arguments, the first of which that is given names the file."""
        word = next((self.places[name] for name in names if name in self.places), None)
        actual = ", ".join(map(self._written, names))
        return Issue(expected, actual, hint, file=word.file if word else None, severity=severity)

    def _written(self, name: str) -> str:
        """`--n-samples-per-prompt 8 (run.sh:12)`, or `no --n-samples-per-prompt`."""
        if name not in self.places:
            return f"no {option_of(name)}"
        value = self.values.get(name)
        shown = option_of(name) if value is None or isinstance(value, bool) else f"{option_of(name)} {value}"
        return f"{shown} ({self.place(name)})"

    def place(self, name: str) -> str:
        """`run.sh:12`, or that the argument is not given."""
        word = self.places.get(name)
        return word.place if word else "not given"


_KINDS: Mapping[str, Kind] = {name: bool if isinstance(kind, bool) else kind for name, kind in _TABLE.values()}
_TRUTH = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def given_arguments(words: Sequence[Word], settings: Mapping[str, Word] | None = None) -> GivenArguments:
    """Parses words as argparse does: the last one counts, other options are passed over.

    `settings` are arguments by name, which a file sets after the words were parsed, whatever these say.
    Source: Megatron-LM `parse_args`, whose parser takes no abbreviations. Raises CkptkitError for a size that no model
    or cluster has.
    """
    values: dict[str, Any] = {}
    places: dict[str, Word] = {}
    unknown: set[str] = set()
    refused: list[RefusedWord] = []
    for option in options_of(words):
        if option.name not in _TABLE:
            continue
        name, kind = _TABLE[option.name]
        values.pop(name, None)
        unknown.discard(name)
        places.pop(name, None)  # in the order in which they count
        places[name] = option.word if isinstance(kind, bool) else option.value or option.word
        value = _parsed(name, kind, option) if option.known else None
        if value is None:
            unknown.add(name)
        else:
            values[name] = value
            _check_size(option.name, name, value, places[name])
        if value is None and option.known:
            refused.append(RefusedWord(option.name, _expected(name, kind), places[name]))
    for name, word in (settings or {}).items():
        if name in _KINDS:
            places[name] = word
            unknown.discard(name)
            if (value := _set(_KINDS[name], word.text)) is None:
                unknown.add(name)
            else:
                values[name] = value
                _check_size(name, name, value, word)
    anything = any(isinstance(word, UnresolvedWord) and word.anything for word in words)
    return GivenArguments(values, places, frozenset(unknown), anything, tuple(refused))


def _check_size(option: str, name: str, value: Any, word: Word) -> None:
    """Raises CkptkitError for a size that no model or cluster has, before lists of that length are made."""
    most = MAX_LAYERS if "num_layers" in name else MAX_RANKS if name in _OF_CLUSTER else MAX_SIZE
    for one in value if isinstance(value, tuple | list) else (value,):
        if isinstance(one, int) and abs(one) > most:
            message = f"{word.place}: {option} {shortened(str(one))} is larger than {most:,}, the most that is read"
            raise CkptkitError(message, "correct it, or leave it out")


def _set(kind: Kind, text: str) -> Any:
    """The value of an argument that YAML sets; None where it is none of its kind."""
    if kind is bool:
        return _TRUTH.get(text.lower())
    try:
        return None if isinstance(kind, bool) else kind(text)
    except ValueError:
        return None


def _parsed(name: str, kind: Kind, option: Option) -> Any:
    """The value that argparse makes of an option; None where it refuses it."""
    if isinstance(kind, bool):
        return None if "=" in option.word.text else kind
    if option.value is None or len(option.value.text) > 200_000:
        return None
    try:
        parsed = kind(option.value.text)
    except ValueError:
        return None
    return parsed if name not in _CHOICES or parsed in _CHOICES[name] else None


def _expected(name: str, kind: Kind) -> str:
    if name in _CHOICES:
        return f"one of {', '.join(_CHOICES[name])}"
    if isinstance(kind, bool):
        return "no value"
    if kind is int:
        return "a whole number"
    return {float: "a number", str: "a word"}.get(kind, "a number, or a list of one number a layer")  # type: ignore[call-overload,no-any-return]
