"""A launch's words as Megatron's arguments: parsed as argparse does, with what slime and miles make of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.converters.config.bounds import MAX_LAYERS, MAX_RANKS, MAX_SIZE
from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.verify.launch.options.argv import Option, options_of
from ckptkit.verify.launch.options.tables import GPUS, MODEL, NUMBERS, TABLE, Kind, option_of
from ckptkit.verify.launch.settings.settings import Settings, SettingValue
from ckptkit.verify.launch.words import UnresolvedWord, Word

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
class Arguments(Settings):
    """The arguments that a command line gives, by the names that argparse stores them under.

    values: the value of each, in the order in which they count.
    anything: some words are not known at all, so that any argument may be given.
    refused: values that argparse does not take.
    """

    values: Mapping[str, SettingValue] = field(default_factory=dict)
    anything: bool = False
    refused: tuple[RefusedWord, ...] = ()

    def get(self, key: str) -> SettingValue:
        return self.values.get(key) or SettingValue(known=not self.anything)

    @property
    def known(self) -> dict[str, Any]:
        """The values that are known, by name."""
        return {name: found.value for name, found in self.values.items() if found.known}

    @property
    def unknown(self) -> frozenset[str]:
        """The arguments that are given with a value that could not be told."""
        return frozenset(name for name, found in self.values.items() if not found.known)

    @property
    def describes_model(self) -> bool:
        """Whether it says anything of the model, so that what is not given has Megatron's defaults."""
        return not _SIZES.isdisjoint(self.known)

    @property
    def of_model(self) -> frozenset[str]:
        """The arguments of the model that are given."""
        model = {name for name, _ in MODEL.values()}
        return frozenset(name for name in self.known if name in model and name not in _OF_A_RUN)

    def words(self, names: Iterable[str]) -> Mapping[str, Word]:
        """The words that give these arguments, of those that are given."""
        found = {name: self.get(name).word for name in names}
        return {name: word for name, word in found.items() if word}

    def name(self, key: str) -> str:
        return option_of(key)

    def _format(self, key: str) -> str:
        """`--n-samples-per-prompt 8 (run.sh:12)`, or `no --n-samples-per-prompt`."""
        found = self.get(key)
        if found.word is None:
            return f"no {self.name(key)}"
        shown = "" if found.value is None or isinstance(found.value, bool) else f" {found.value}"
        return f"{self.name(key)}{shown} ({found.where})"


_KINDS: Mapping[str, Kind] = {name: bool if isinstance(kind, bool) else kind for name, kind in TABLE.values()}
_TRUTH = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def parse_arguments(words: Sequence[Word], settings: Mapping[str, Word] | None = None) -> Arguments:
    """Parses words as argparse does: the last one counts, other options are passed over.

    `settings` are arguments by name, which a file sets after the words were parsed, whatever these say.
    Source: Megatron-LM `parse_args`, whose parser takes no abbreviations. Raises CkptkitError for a size that no model
    or cluster has.
    """
    given: dict[str, SettingValue] = {}
    refused: list[RefusedWord] = []
    for option in options_of(words):
        if option.name not in TABLE:
            continue
        name, kind = TABLE[option.name]
        given.pop(name, None)  # in the order in which they count
        word = option.word if isinstance(kind, bool) else option.value or option.word
        value = _parsed(name, kind, option) if option.known else None
        given[name] = SettingValue(value, word, known=value is not None)
        _check_size(option.name, name, given[name])
        if value is None and option.known:
            refused.append(RefusedWord(option.name, _expected(name, kind), word))
    for key, word in (settings or {}).items():
        name, _ = TABLE.get(option_of(key), (key, None))
        if name in _KINDS:
            value = _set(_KINDS[name], word.text)
            given[name] = SettingValue(value, word, known=value is not None)
            _check_size(name, name, given[name])
    anything = any(isinstance(word, UnresolvedWord) and word.anything for word in words)
    return Arguments(given, anything, tuple(refused))


def _check_size(option: str, name: str, found: SettingValue) -> None:
    """Raises CkptkitError for a size that no model or cluster has, before lists of that length are made."""
    most = MAX_LAYERS if "num_layers" in name else MAX_RANKS if name in _OF_CLUSTER else MAX_SIZE
    for one in found.value if isinstance(found.value, tuple | list) else (found.value,):
        if isinstance(one, int) and abs(one) > most:
            message = f"{found.where}: {option} {shortened(str(one))} is larger than {most:,}, the most that is read"
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
