"""Whether a model predicts text: the probabilities of fixed texts, without generation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.converters.config.values import language_part
from ckptkit.core.errors import words_of
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.evidence.side_files import TOKENIZER
from ckptkit.verify.witnesses.reference.job import Ids, Predicted

if TYPE_CHECKING:
    from torch import Tensor, nn

# English, Python, Chinese: the text that a model predicts best counts.
TEXTS = (
    "The history of the city begins with a small harbour, where fishermen mended their nets and sold their catch in "
    "the morning market. Over the years the harbour grew, and with it the town: merchants built houses along the "
    "water, a church was raised on the hill, and the first school was opened near the old bridge. In winter, when the "
    "river was frozen, children played on the ice and the boats lay still until the spring.\n",
    "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n    while low <= high:\n"
    "        middle = (low + high) // 2\n        if items[middle] == target:\n            return middle\n"
    "        if items[middle] < target:\n            low = middle + 1\n        else:\n            high = middle - 1\n"
    "    return -1\n",
    "从前有一个小村庄，村里住着一位老人和他的孙女。每天早晨，老人到河边打水，孙女在院子里喂鸡。春天来了，山上开满了花，"
    "孩子们跑到田野里去放风筝，大人们在地里忙着播种。到了晚上，大家坐在大树下面，听老人讲过去的故事。\n",
)
# Bits for a byte of the text that is predicted best. A model with only the frequencies of tokens needs about 2.2 for
# English. Measured: sound models 0.2 to 1.3, those with a fault in every layer 1.3 to 6.
NO_TEXT, POOR_TEXT = 2.0, 1.4
_MATRICES = 64  # the number of measured matrices
# Standard deviations from random numbers, in the median of all matrices: trained models have 23 to 460.
_UNTRAINED = 6.0
_MIN_NUMBERS, _MIN_COUNTED = 4, 32
_TINY = 1e-30


def tokenizer_of(path: Path) -> Any | None:
    """The tokenizer of tokenizer.json, which runs no code, or None without one. Raises CannotCheck for another file."""
    from transformers import PreTrainedTokenizerFast

    file = path / TOKENIZER
    if not file.exists():
        return None
    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:
        if type(error) is not Exception:  # the only class that tokenizers' own code raises for a file
            raise
        raise CannotCheck(f"{file} is not a tokenizer ({words_of(error)}): take it from the release") from error
    named = [token for _, token in tokenizer.added_tokens_decoder.items() if token.special]
    tokenizer.add_special_tokens({"additional_special_tokens": [str(token) for token in named]})
    return tokenizer


def texts_of(tokenizer: Any | None, config: Mapping[str, Any]) -> Ids:
    """Token ids of TEXTS, and again with the config's first token. Raises CannotCheck without a fitting tokenizer."""
    if tokenizer is None:
        raise CannotCheck("tokenizer.json, which encodes texts, is missing: take it from the release")
    text_config = language_part(config)
    plain = [list(tokenizer.encode(text)) for text in TEXTS]
    begin = text_config.get("bos_token_id", config.get("bos_token_id"))
    texts = plain + [ids if begin in ids[:1] or not isinstance(begin, int) else [begin, *ids] for ids in plain]
    if any(len(ids) < 2 or max(ids) >= text_config["vocab_size"] for ids in texts):
        raise CannotCheck("the tokenizer gives ids of a plain text that are outside the model's vocabulary (CK706)")
    return texts


def predicted(model: nn.Module, texts: Ids) -> Predicted:
    import torch

    device = next(model.parameters()).device
    losses = []
    for text in texts:
        ids = torch.tensor([text], device=device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        losses.append(-float(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).double().sum()))
    matrices = [one for name, one in model.named_parameters() if one.dim() == 2 and ".layers." in name]
    structures = (structure(one.detach().cpu()) for one in matrices[:: max(1, len(matrices) // _MATRICES)])
    measured = list(islice((one for one in structures if one is not None), _MATRICES))
    return Predicted(losses, float(np.median(measured)) if measured else 0.0)


def bits_a_byte(found: Predicted) -> Sequence[float]:
    """The bits for a byte of each of TEXTS, the better of both beginnings; infinite if not finite."""
    sizes = [len(text.encode()) * math.log(2) for text in TEXTS]
    losses = [loss if math.isfinite(loss) else math.inf for loss in found.losses]
    bits = [loss / size for loss, size in zip(losses, sizes * 2, strict=True)]
    return [min(pair) for pair in zip(bits[: len(TEXTS)], bits[len(TEXTS) :], strict=True)]


def looks_trained(found: Predicted) -> bool:
    """Whether the weights have the structure that training leaves."""
    return found.structure >= _UNTRAINED


def structure(matrix: Tensor) -> float | None:
    """How much more the sizes of rows and columns vary than those of independent normal numbers.

    `matrix` is [rows, columns] of any float dtype. The result is in standard deviations, combined over both axes; or
    None if the matrix is too small or has numbers that are not finite.
    """
    import torch

    if matrix.dim() != 2 or matrix.shape[1] < _MIN_COUNTED or matrix.shape[0] < _MIN_NUMBERS:
        return None
    deviations = []
    for axis, numbers in ((1, matrix.shape[1]), (0, matrix.shape[0])):
        squares = torch.linalg.vector_norm(matrix, dim=axis, dtype=torch.float32).square() / numbers
        sizes = squares.clamp_min(_TINY).log().double()
        if not sizes.isfinite().all():
            return None
        deviations.append((float(sizes.var(unbiased=False)) / _spread(numbers) - 1) * ((len(sizes) - 1) / 2) ** 0.5)
    return float(sum(deviations) / len(deviations) ** 0.5)


def _spread(numbers: int) -> float:
    """The variance of the logarithm of the mean square of normal numbers: trigamma(numbers / 2)."""
    half, total = numbers / 2, 0.0
    while half < 6:
        total, half = total + half**-2, half + 1
    return total + 1 / half + 1 / (2 * half**2) + 1 / (6 * half**3)
