"""Decides by name, as each reader does, whether an `ignore` entry covers a tensor.

compressed-tensors (and transformers, which calls it), vLLM and SGLang look at module names, slime at parameter names; a
plain entry is the whole name, any part of it, a dotted ending or a prefix. Which names a reader looks up is in
`quant.selection.matrices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Literal

from ckptkit.core.errors import CkptkitError
from quant.patterns import matcher

Rule = Callable[[str, str], bool]
VLLM = ("vLLM 0.26", "vLLM 0.33")
LINEAR_CLASSES = ("Linear", "Module")


def _or_regex(plain: Rule) -> Rule:
    """Adds `re:` entries to a rule for plain ones: they match from the start of a name."""

    @wraps(plain)
    def rule(name: str, pattern: str) -> bool:
        if pattern.startswith("re:"):
            return bool(matcher(pattern)(name))
        return plain(name, pattern)

    return rule


def compressed_tensors(module: str, pattern: str) -> bool:
    """Whether an entry covers a Linear module for compressed-tensors and transformers.

    `re:` from the start, else the whole name or a class name.
    Source: compressed-tensors `utils/match.py`, `is_match`.
    """
    return pattern in LINEAR_CLASSES or vllm(module, pattern)


@_or_regex
def vllm(layer: str, pattern: str) -> bool:
    """Whether an entry covers a layer for vLLM: `re:` from the start, else the whole name.

    Source: vLLM `compressed_tensors/utils.py`, `should_ignore_layer`.
    """
    return pattern == layer


@_or_regex
def sglang(layer: str, pattern: str) -> bool:
    """Whether an entry covers a layer for SGLang up to at least 0.5.16.

    `re:` from the start, else any part of the name, in any case.
    Source: SGLang `layers/quantization/compressed_tensors/utils.py`, `check_equal_or_regex_match`.
    """
    return pattern.lower() in layer.lower()


@_or_regex
def sglang_suffix(layer: str, pattern: str) -> bool:
    """Whether an entry covers a layer for SGLang 0.5.23: `re:` from the start, else the name or a dotted ending."""
    return pattern == layer or layer.endswith("." + pattern)


@_or_regex
def slime(parameter: str, pattern: str) -> bool:
    """Whether an entry covers a parameter (`….weight`) for slime, miles and Relax: `re:` from the start, or a prefix.

    What is not covered is quantized when it ends in `.weight` and has two or more axes, whatever its class: `targets`
    is not read. Source: slime `quantizer_compressed_tensors.py`, `quantize_params_compressed_tensors`; read, not run.
    """
    return parameter.startswith(pattern)


# The readers, and what each does with one name and one entry.
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "compressed-tensors": compressed_tensors,
        "transformers": compressed_tensors,
        "vLLM 0.26": vllm,
        "vLLM 0.33": vllm,
        "SGLang 0.5.16": sglang,
        "SGLang 0.5.23": sglang_suffix,
        "slime": slime,
    }
)
# What `--reader` takes, and the readers that it stands for.
READERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sglang": ("SGLang 0.5.16", "SGLang 0.5.23"),
        "vllm": VLLM,
        "transformers": ("compressed-tensors", "transformers"),
        "slime": ("slime",),
        "miles": ("slime",),  # the same rule; only its bridge goes by the names of the checkpoint
    }
)
ALL_READERS = tuple(READERS)
SGLANG = READERS["sglang"]
TRANSFORMERS = ("transformers 5.12", "transformers 5.24")
TRAINERS = ("slime", "miles", "verl", "NeMo-RL")
# The same for the lists of other formats than compressed-tensors', which `quant.lists.table` reads.
LIST_READERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sglang": SGLANG,
        "vllm": VLLM,
        "transformers": TRANSFORMERS,
        "slime": ("slime",),
        "miles": ("miles",),
        "verl": ("verl",),
        "nemo-rl": ("NeMo-RL",),
    }
)
# Trainers that quantize for an engine by its list.
_RL_TRAINERS = ("slime", "miles")


def counting(asked: Iterable[str] | None, engine: str = "sglang") -> tuple[str, ...]:
    """The readers whose reading of a list decides: those of `--reader` (`asked`), or of reinforcement learning.

    Where none is named these are the engine, if its reading is known, and the trainers that quantize for it. Raises
    CkptkitError as `readers_of`.
    """
    return readers_of(asked if asked is not None else (*({engine} & READERS.keys()), *_RL_TRAINERS))


def severity_of(
    reader: str, asked: Iterable[str] | None, engine: str = "sglang", *, published: bool = False, updated: bool = False
) -> Literal["error", "warning"]:
    """The severity where `reader` (of `RULES`) reads an `ignore` list that contradicts the packed weights.

    `asked` and `engine` are as in `counting`. `published`: the list is one that releases have, which are made for
    engines; a contradiction for a trainer alone is then a warning, unless `updated`: a launch quantizes by this list.
    Raises CkptkitError as `readers_of`.
    """
    spared = asked is None and published and not updated and reader == "slime"
    return "error" if reader in counting(asked, engine) and not spared else "warning"


def worst(severities: Iterable[Literal["error", "warning"]]) -> Literal["error", "warning"]:
    """The worst of some severities."""
    return "error" if "error" in set(severities) else "warning"


def refuses_own_format(readers: Iterable[str], asked: Iterable[str] | None) -> bool:
    """Whether compressed-tensors is among `readers`, and no reader is named.

    It defines the format, and trainers load checkpoints with it through transformers: what it refuses of a config as a
    whole, or reads otherwise than weights are stored, is then an error, whichever engine serves.
    """
    return asked is None and "compressed-tensors" in readers


def readers_of(names: Iterable[str]) -> tuple[str, ...]:
    """The readers behind some names of `--reader`, in a fixed order.

    Raises CkptkitError for an unknown name, or without any.
    """
    chosen = set(names)
    if unknown := sorted(chosen - READERS.keys()):
        raise CkptkitError(f"unknown reader {unknown[0]!r}", f"choose from {', '.join(READERS)}")
    if not chosen:
        raise CkptkitError("no reader is named", f"choose from {', '.join(READERS)}")
    wanted = {reader for name in chosen for reader in READERS[name]}
    return tuple(reader for reader in RULES if reader in wanted)
