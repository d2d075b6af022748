"""CK404: every element on disk is read by some rank of Megatron."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptkit.formats.torch_dist.reader import NOT_WEIGHTS, TorchDistCheckpoint
from converters.planner import dims_of
from verify.check import Tally, check
from verify.checks.witnesses.megatron import finished
from verify.evidence.expected import config_of
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.witnesses.megatron.job import Box

_OF_VOCABULARY = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})


def _only_some_ranks(subject: Subject) -> str | None:
    return "--ranks leaves ranks out" if subject.options.megatron.ranks else None


@check(
    "CK404",
    "every element on disk is read by some rank",
    stage="megatron",
    needs=("megatron",),
    rationale="Every key can be asked for while a slice of one, an expert or a rank's rows, is read by nobody: those "
    "weights of the release are not trained.",
    fix="Please report it with the parallel sizes and the megatron-core version.",
    unless=_only_some_ranks,
)
def all_regions(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The boxes of each tensor that ranks read, against its shape; rows that pad the vocabulary do not count."""
    asked: dict[str, list[Box]] = defaultdict(list)
    for report in finished(subject).reports:
        for key, boxes in report.asked.items():
            asked[key] += boxes
    left: dict[str, list[str]] = defaultdict(list)
    twice: dict[str, list[str]] = defaultdict(list)
    for key, shape in _shapes(subject).items():
        if not asked[key]:
            continue  # CK401 says so
        tally.compared(0)
        for found, region in ((left, unread(shape, asked[key])), (twice, doubly_owned(shape, asked[key]))):
            if region is not None:
                found[_said(shape, region)].append(key)
    for words, keys in left.items():
        yield Issue("read by some rank", f"no rank reads {words}", "these weights would not be trained", names=keys)
    for words, keys in twice.items():
        yield Issue("one rank that saves it", f"two ranks would save {words}", "Megatron refuses this", names=keys)


def _shapes(subject: Subject) -> Mapping[str, tuple[int, ...]]:
    """The shape of each weight on disk, without rows that pad the vocabulary."""
    stored = TorchDistCheckpoint(subject.location.path, hf=subject.hf_path).metadata.tensors
    vocabulary = dims_of(config_of(subject)).vocab
    shapes = {key: tensor.shape for key, tensor in stored.items() if not NOT_WEIGHTS.fullmatch(key)}
    return {
        key: (min(shape[0], vocabulary), *shape[1:]) if key in _OF_VOCABULARY else shape
        for key, shape in shapes.items()
    }


def _said(shape: tuple[int, ...], region: Region) -> str:
    return f"{region} of {list(shape)}, {region.elements / math.prod(shape):.1%} of it"


_Grid = list[NDArray[np.int64]]


@dataclass(frozen=True)
class Region:
    """The smallest box around some elements of a tensor, and how many they are."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    elements: int

    def __str__(self) -> str:
        box = ", ".join(f"{start}:{end}" for start, end in zip(self.starts, self.ends, strict=True))
        inside = math.prod(end - start for start, end in zip(self.starts, self.ends, strict=True))
        return f"[{box}]" if inside == self.elements else f"{self.elements} elements of [{box}]"


def unread(shape: Sequence[int], boxes: Sequence[Box]) -> Region | None:
    """What no box holds of a tensor of this shape; None where they cover it. What lies outside does not count."""
    grid, count = _counted(shape, boxes)
    return _region(grid, count == 0)


def doubly_owned(shape: Sequence[int], boxes: Sequence[Box]) -> Region | None:
    """What several different boxes of main replicas hold; Megatron's rule is that each element has one."""
    grid, count = _counted(shape, [box for box in boxes if box.main])
    return _region(grid, count > 1)


def _counted(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[_Grid, NDArray[np.int64]]:
    """The tensor, cut wherever a box begins or ends, and how many distinct boxes hold each cell."""
    distinct = sorted({(box.offsets, box.sizes) for box in boxes})
    low = np.array([offsets for offsets, _ in distinct], dtype=np.int64).reshape(len(distinct), len(shape))
    high = low + np.array([sizes for _, sizes in distinct], dtype=np.int64).reshape(low.shape)
    limits = np.array(shape, dtype=np.int64)
    low, high = np.clip(low, 0, limits), np.clip(high, 0, limits)
    grid = [np.unique([0, size, *low[:, axis], *high[:, axis]]) for axis, size in enumerate(shape)]
    count = np.zeros([len(edges) - 1 for edges in grid], dtype=np.int64)
    for start, end in zip(low, high, strict=True):
        cells = zip(grid, start, end, strict=True)
        count[tuple(slice(*np.searchsorted(edges, (first, last))) for edges, first, last in cells)] += 1
    return grid, count


def _region(grid: _Grid, cells: NDArray[np.bool_]) -> Region | None:
    if not cells.any():
        return None
    places = np.nonzero(cells) if cells.ndim else ()
    sizes = [np.diff(edges)[at] for edges, at in zip(grid, places, strict=True)]
    elements = int(np.prod(sizes, axis=0).sum()) if sizes else 1
    starts = tuple(int(edges[at.min()]) for edges, at in zip(grid, places, strict=True))
    ends = tuple(int(edges[at.max() + 1]) for edges, at in zip(grid, places, strict=True))
    return Region(starts, ends, elements)
