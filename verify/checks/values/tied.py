"""CK211: an output layer that is stored beside tied embeddings holds the embedding."""

from __future__ import annotations

from collections.abc import Iterator

from verify.check import Skip, Tally, check
from verify.checks.values.values import UNREAD
from verify.evidence.expected import tied_head_of
from verify.evidence.reading import read_values
from verify.evidence.subject import Subject
from verify.issue import Issue


def no_second_head(subject: Subject) -> str | None:
    """For what compares a stored output layer with the embedding that it is tied to."""
    tied = tied_head_of(subject) if subject.is_hf else None
    return None if tied and tied[0] in subject.hf_files.specs else "no output layer is stored beside tied embeddings"


@check(
    "CK211",
    "a tied output layer repeats the embedding",
    stage="values",
    needs=("sound headers",),
    rationale="Where tie_word_embeddings is true, Megatron and most engines use the embedding and never read lm_head; "
    "some readers load both as they are.",
    fix="Compare with the release. Set tie_word_embeddings to false for a model with an output layer of its own; "
    "restore the tensor that is stale otherwise.",
    unless=no_second_head,
)
def tied_head_repeats(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """`lm_head.weight` and the embedding are the same bytes, where config.json ties them and both are stored."""
    tied = tied_head_of(subject)
    stats = subject.once(read_values).stats
    if tied is None or not stats.keys() >= set(tied):
        raise Skip(UNREAD)
    head, embedding = tied
    specs = subject.hf_files.specs
    tally.compared(stats[head].nbytes)
    if stats[head].digest != stats[embedding].digest or specs[head].dtype != specs[embedding].dtype:
        expected, actual = f"the bytes of {embedding}: tie_word_embeddings is true", "different bytes"
        hint = "compare both with the release: either tie_word_embeddings must be false, or one of the two is stale"
        yield Issue(expected, actual, hint, names=[head], file=subject.path)
