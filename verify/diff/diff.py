"""`diff`: compares two checkpoints of any formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.installation import INSTALL_CONVERT, program_version
from ckptkit.core.specs import summarize
from ckptkit.formats.detect import locate
from ckptkit.formats.hf.side_files import is_own
from ckptkit.storage.fingerprint import unchanged
from verify.diff.pairs import Pair, moved_names, moves_of, pairs_of, pairs_of_headers
from verify.diff.result import Diff, badness
from verify.diff.sides import Sides, config_or_empty, fp32_state, opened, tied_names


def diff(a: str | Path, b: str | Path, *, hf: str | Path | None = None, exact: bool = False) -> Diff:
    """Compares two checkpoints, tensor by tensor under HF names; each may be HF, quantized HF, torch_dist or legacy.

    So are config.json and the files that loaders read next to the weights: a difference there is one of the model.
    `hf` gives the config of a Megatron checkpoint that has none beside it; without it, that of the other side does.
    `exact`: a tensor in another dtype is a difference even where a cast makes it equal. Without torch no values are
    compared, only names, shapes and dtypes. Raises CkptkitError where one cannot be opened or read. Memory holds a few
    groups of tensors, and of all others a digest.
    """
    sides = opened(a, b, hf)
    if find_spec("torch") is None:
        return _compare_headers(sides, str(a), str(b), exact)
    with unchanged([locate(a).path, locate(b).path], is_own):
        return compare(sides, str(a), str(b), exact=exact)


def compare(sides: Sides, a: str, b: str, *, exact: bool = False) -> Diff:
    """The same of two checkpoints that are open."""
    pairs = {pair.name: pair for pair in pairs_of(sides.a, sides.b)}
    if not pairs:
        raise CkptkitError(f"{a} and {b} hold no tensor", "check the paths")
    redundant = _redundant(sides, pairs)
    found = [pair for pair in pairs.values() if pair.name not in redundant]
    whose = moved_names(found)
    renamed = {other for name, other in whose.items() if pairs[name].state == "only_a"}
    left = [pair for pair in found if pair.name not in whose and pair.name not in renamed]
    cast = [pair for pair in left if pair.state == "cast"]
    return Diff(
        *(program_version(), a, b, sides.formats, exact),
        nbytes=sum(pair.nbytes for pair in pairs.values()),
        equal=[pair.name for pair in left if pair.state == "equal"],
        cast=cast,
        redundant=sorted(redundant),
        moves=list(moves_of(found, whose)),
        differing=sorted((pair for pair in left if pair.state == "differing"), key=badness, reverse=True),
        only_a=[pair for pair in left if pair.state == "only_a"],
        only_b=[pair for pair in left if pair.state == "only_b"],
        notes=[*sides.notes, *_rounded(sides.a, cast)],
        files=sides.files,
    )


def _compare_headers(sides: Sides, a: str, b: str, exact: bool) -> Diff:
    found = list(pairs_of_headers(sides.a, sides.b))
    tied = {head[0] for side in (sides.a, sides.b) if (head := tied_names(config_or_empty(side)))}
    note = f"values were not read: torch is not installed here: {INSTALL_CONVERT}"
    return Diff(
        *(program_version(), a, b, sides.formats, exact),
        differing=[pair for pair in found if pair.state == "differing"],
        only_a=[pair for pair in found if pair.state == "only_a" and pair.name not in tied],
        only_b=[pair for pair in found if pair.state == "only_b" and pair.name not in tied],
        notes=[*sides.notes, note],
        files=sides.files,
        # Whether a tied output layer that one side lacks repeats the embedding, its values would tell.
        unread=[pair for pair in found if pair.state == "unread" or (pair.state != "differing" and pair.name in tied)],
    )


def _redundant(sides: Sides, pairs: Mapping[str, Pair]) -> set[str]:
    """Names that one side lacks and that follow from the rest: an output layer that repeats the embedding, and so on.

    An output layer is one only where the side that stores it has the embedding's own bits in it.
    """
    alone = {name for name, pair in pairs.items() if pair.state in ("only_a", "only_b")}
    found: set[str] = set()
    for config in (config_or_empty(sides.a), config_or_empty(sides.b)):
        tied = tied_names(config)
        if tied and tied[0] in alone and tied[1] in pairs:
            head, embedding = (pairs[name] for name in tied)
            is_same = head.content_b == embedding.content_b
            if head.a is not None:
                is_same = head.content_a == embedding.content_a
            found |= {head.name} if is_same else set()
    return found


def _rounded(checkpoint: Checkpoint, cast: Sequence[Pair]) -> Iterator[str]:
    """Yields a note for state that must stay float32 and was cast to something narrower."""
    state = fp32_state(config_or_empty(checkpoint))
    if names := [pair.name for pair in cast if pair.name in state]:
        yield (
            f"{summarize(names)}: state that must stay float32 is narrower on one side, which changes routing; "
            "`ckptkit verify --source` judges it (CK203)"
        )
