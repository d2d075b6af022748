"""CK404: every element on disk is read by some rank of Megatron."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod

from ckptkit.formats.torch_dist.reader import NOT_WEIGHTS, TorchDistCheckpoint
from converters.planner import dims_of
from verify.check import Tally, check
from verify.checks.witnesses.megatron import finished
from verify.evidence.expected import config_of
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.witnesses.megatron.boxes import Region, doubly_owned, unread
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
    return f"{region} of {list(shape)}, {region.elements / prod(shape):.1%} of it"
