"""Whether what a model writes reads like text: openings that it continues, and figures of the continuations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.core.errors import words_of
from converters.config.values import language_part
from verify.evidence.side_files import TOKENIZER
from verify.skip import Unable
from verify.witnesses.reference.job import Continuation

OPENINGS = (
    "The history of the city begins with a small harbour, where",
    "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n",
    "Three things matter when a model is trained:\n1.",
    "从前有一个小村庄，村里住着",
)
_RUN = 4  # tokens; a run of so many that came before counts as repeated
_REPLACED = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Figures:
    """Of all continuations of a model together."""

    loss: float  # the mean of -ln p over the tokens, in nats; exp(loss) is the perplexity
    repeated: float  # the share of runs of four tokens that came before in the same continuation
    odd: float | None  # the share of special tokens, unknown ids and bytes that are not UTF-8; None: no tokenizer

    def __str__(self) -> str:
        odd = "" if self.odd is None else f", {self.odd:.1%} of the tokens no text"
        return f"perplexity {perplexity(self.loss)}, {self.repeated:.0%} repeated{odd}"


def perplexity(loss: float) -> str:
    """exp(loss), where that can be written."""
    return f"{math.exp(loss):.2f}" if loss < 100 else "beyond all bounds"


def loss(logprobs: Sequence[Sequence[float]]) -> float:
    """The mean of -ln p over all tokens, NaN without any."""
    values = [value for one in logprobs for value in one]
    return -sum(values) / len(values) if values else math.nan


def figures(written: Sequence[Continuation], tokenizer: Any = None) -> Figures:
    """`tokenizer` is one of transformers', of the checkpoint."""
    odd = None if tokenizer is None else _odd([one.ids for one in written], tokenizer)
    return Figures(loss([one.logprobs for one in written]), _repeated([one.ids for one in written]), odd)


def _repeated(texts: Sequence[Sequence[int]]) -> float:
    runs = [[tuple(ids[at : at + _RUN]) for at in range(len(ids) - _RUN + 1)] for ids in texts]
    total = sum(map(len, runs))
    return 1 - sum(len(set(one)) for one in runs) / total if total else 0.0


def _odd(texts: Sequence[Sequence[int]], tokenizer: Any) -> float:
    """A special token that ends a continuation is as it should be."""
    special = set(tokenizer.all_special_ids)
    count = total = 0
    for ids in texts:
        tokens = ids[:-1] if ids and ids[-1] in special else ids
        plain = [token for token in tokens if token not in special and token < len(tokenizer)]
        count += len(tokens) - len(plain) + tokenizer.decode(plain).rstrip(_REPLACED).count(_REPLACED)
        total += len(tokens)
    return min(1.0, count / total) if total else 0.0


def tokenizer_of(path: Path) -> Any | None:
    """The tokenizer of an HF directory by its tokenizer.json alone, so that no code runs; None without that file.

    Raises Unable for a file that is not a tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    file = path / TOKENIZER
    if not file.exists():
        return None
    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:
        if type(error) is not Exception:  # the only class that tokenizers' own code raises for a file
            raise
        raise Unable(f"{file} is not a tokenizer ({words_of(error)}): take it from the release") from error
    named = [token for _, token in tokenizer.added_tokens_decoder.items() if token.special]
    tokenizer.add_special_tokens({"additional_special_tokens": [str(token) for token in named]})
    return tokenizer


def openings_of(tokenizer: Any | None, config: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> Sequence[Any]:
    """Token ids of OPENINGS; the first `prompts` where there is not a tokenizer or it has ids beyond the vocabulary."""
    if tokenizer is None:
        return list(prompts[: len(OPENINGS)])
    found = [tokenizer.encode(text) for text in OPENINGS]
    vocabulary = language_part(config)["vocab_size"]
    fits = all(ids and max(ids) < vocabulary for ids in found)
    return found if fits else list(prompts[: len(OPENINGS)])
