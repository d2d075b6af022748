"""Parses a launch's words into arguments of Megatron, slime and miles, as argparse does."""

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
_SIZES = frozenset({"num_layers", "hidden_size"})  # a launch with one of these describes its model
# Arguments of a model that do not describe it by themselves.
_OF_A_RUN = frozenset({"seq_length", "max_position_embeddings", "make_vocab_size_divisible_by", "mtp_num_layers"})


@dataclass(frozen=True)
class RefusedWord:
    """A word that argparse refuses: its option, the expected value, and the word."""

    option: str
    expected: str
    word: Word


@dataclass(frozen=True)
class Arguments(Settings):
    """The arguments of a command line, by their names in argparse's namespace."""

    values: Mapping[str, SettingValue] = field(default_factory=dict)  # in the order of the last occurrences
    anything: bool = False  # unknown words may set any argument
    refused: tuple[RefusedWord, ...] = ()

    def get(self, key: str) -> SettingValue:
        return self.values.get(key) or SettingValue(known=not self.anything)

    @property
    def known(self) -> dict[str, Any]:
        """The known values, by name."""
        return {name: setting.value for name, setting in self.values.items() if setting.known}

    @property
    def unknown(self) -> frozenset[str]:
        """The arguments with an unknown value."""
        return frozenset(name for name, setting in self.values.items() if not setting.known)

    @property
    def describes_model(self) -> bool:
        """Whether they describe the model, so that Megatron's defaults apply to all other arguments."""
        return not _SIZES.isdisjoint(self.known)

    @property
    def of_model(self) -> frozenset[str]:
        """The known arguments of the model."""
        model = {name for name, _ in MODEL.values()}
        return frozenset(name for name in self.known if name in model and name not in _OF_A_RUN)

    def words(self, names: Iterable[str]) -> Mapping[str, Word]:
        """The words that set these arguments."""
        return {name: word for name in names if (word := self.get(name).word)}

    def name(self, key: str) -> str:
        return option_of(key)

    def _format(self, key: str) -> str:
        """`--n-samples-per-prompt 8 (run.sh:12)`, or `no --n-samples-per-prompt`."""
        setting = self.get(key)
        if setting.word is None:
            return f"no {self.name(key)}"
        value = "" if setting.value is None or isinstance(setting.value, bool) else f" {setting.value}"
        return f"{self.name(key)}{value} ({setting.where})"


_KINDS: Mapping[str, Kind] = {name: bool if isinstance(kind, bool) else kind for name, kind in TABLE.values()}
_TRUTH = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def parse_arguments(words: Sequence[Word], settings: Mapping[str, Word] | None = None) -> Arguments:
    """Parses words as argparse does in Megatron-LM `parse_args`. Later options override earlier ones.

    `settings` are arguments by name in a file, which override the words. Raises CkptkitError for an impossible size.
    """
    values: dict[str, SettingValue] = {}
    refused: list[RefusedWord] = []
    for option in options_of(words):
        if option.name not in TABLE:
            continue
        name, kind = TABLE[option.name]
        values.pop(name, None)  # keeps the order of the last occurrences
        word = option.word if isinstance(kind, bool) else option.value or option.word
        value = _parse(name, kind, option) if option.known else None
        values[name] = SettingValue(value, word, known=value is not None)
        _check_size(option.name, name, values[name])
        if value is None and option.known:
            refused.append(RefusedWord(option.name, _expected(name, kind), word))
    for key, word in (settings or {}).items():
        name, _ = TABLE.get(option_of(key), (key, None))
        if name in _KINDS:
            value = _convert(_KINDS[name], word.text)
            values[name] = SettingValue(value, word, known=value is not None)
            _check_size(name, name, values[name])
    return Arguments(values, any(isinstance(one, UnresolvedWord) and one.anything for one in words), tuple(refused))


def _check_size(option: str, name: str, setting: SettingValue) -> None:
    """Raises CkptkitError for a size that no model or cluster has, before lists of that length are made."""
    most = MAX_LAYERS if "num_layers" in name else MAX_RANKS if name in _OF_CLUSTER else MAX_SIZE
    for size in setting.value if isinstance(setting.value, tuple | list) else (setting.value,):
        if isinstance(size, int) and abs(size) > most:
            message = f"{setting.where}: {option} {shortened(str(size))} is above the maximum of {most:,}"
            raise CkptkitError(message, "correct or remove the option")


def _convert(kind: Kind, text: str) -> Any:
    """The value of an argument's text, or None if the text has another type."""
    if kind is bool:
        return _TRUTH.get(text.lower())
    try:
        return None if isinstance(kind, bool) else kind(text)
    except ValueError:
        return None


def _parse(name: str, kind: Kind, option: Option) -> Any:
    """The value that argparse gives an option, or None if argparse refuses it."""
    if isinstance(kind, bool):
        return None if "=" in option.word.text else kind
    if option.value is None or len(option.value.text) > 200_000:
        return None
    value = _convert(kind, option.value.text)
    return value if name not in _CHOICES or value in _CHOICES[name] else None


def _expected(name: str, kind: Kind) -> str:
    if name in _CHOICES:
        return f"one of {', '.join(_CHOICES[name])}"
    if isinstance(kind, bool):
        return "no value"
    if kind is int:
        return "a whole number"
    return {float: "a number", str: "a word"}.get(kind, "a number, or a list with one number per layer")  # type: ignore[call-overload,no-any-return]
