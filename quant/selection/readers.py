"""Names the readers of `ignore` lists, who of them counts, and how severe it is where one reads a list otherwise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from ckptkit.core.errors import CkptkitError

VLLM = ("vLLM 0.26", "vLLM 0.33")
SGLANG = ("SGLang 0.5.16", "SGLang 0.5.23")
BY_CLASS = ("compressed-tensors", "transformers")
# The readers of compressed-tensors' lists. Which names each looks up, and how, is in `quant.lists.table`.
INT4_READERS = (*BY_CLASS, *VLLM, *SGLANG, "slime")
# What `--reader` takes, and the readers that it stands for.
READERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sglang": SGLANG,
        "vllm": VLLM,
        "transformers": BY_CLASS,
        "slime": ("slime",),
        "miles": ("slime",),  # the same rule; only its bridge goes by the names of the checkpoint
    }
)
ALL_READERS = tuple(READERS)
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
    """The severity where `reader` (of `INT4_READERS`) reads an `ignore` list that contradicts the packed weights.

    `asked` and `engine` are as in `counting`. `published`: the list is one that releases have, which are made for
    engines; a contradiction for a trainer alone is then a warning, unless `updated`: a launch quantizes by this list.
    Raises CkptkitError as `readers_of`.
    """
    spared = asked is None and published and not updated and reader == "slime"
    return "error" if reader in counting(asked, engine) and not spared else "warning"


def worst(severities: Iterable[Literal["error", "warning"]]) -> Literal["error", "warning"]:
    """The worst of some severities."""
    return "error" if "error" in set(severities) else "warning"


def severity_of_all(
    readers: Collection[str], asked: Iterable[str] | None, engine: str = "sglang"
) -> Literal["error", "warning"]:
    """The severity of what all of `readers` refuse or misread: the worst of each, or as `refuses_own_format`."""
    if refuses_own_format(readers, asked):
        return "error"
    return worst(severity_of(reader, asked, engine) for reader in readers)


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
    return tuple(reader for reader in INT4_READERS if reader in wanted)
