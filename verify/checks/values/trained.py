"""CK216: a trained checkpoint against the release that its training started from (`--source RELEASE --trained`).

Training moves values by little: a row of a matrix by less than its length. It does not move:
- integers, such as tables of token ids. The counters of batch norms and the codes of quantized weights it does.
- rotary frequencies (`inv_freq`), which follow from config.json.
Router biases and statistics of batch norms are buffers too, and move. A vector may move anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.specs import summarize
from verify.check import Skip, Tally, check, without
from verify.checks.values.source import other_names, other_places
from verify.checks.values.values import UNREAD, VOCABULARY
from verify.evidence.compare import TensorDiff
from verify.evidence.expected import Expected, expected_of, is_quantized, usable_config
from verify.evidence.extremes import Extremes
from verify.evidence.floats.rounding import float_weights
from verify.evidence.folding import group_by_pattern
from verify.evidence.reading import read_values
from verify.evidence.subject import Subject
from verify.evidence.values import Values
from verify.issue import Issue

_FLOATS = (*COMPUTED, "float64")
_COUNTER = "num_batches_tracked"
# Of the rows of a matrix that training may have made anew: of the vocabulary those of tokens that were not in use.
_ANEW, _ANEW_WORDS = 0.05, 0.5
_AGAIN = "save or convert again"


@check(
    "CK216",
    "training moved the source's values by little, and none that it cannot move",
    stage="values",
    needs=("source",),
    explained_by=("CK124", "CK204", "CK205", "CK702"),
    rationale="Values of a trained checkpoint differ from its release, so that swapped experts or a lost layer do not "
    "show in equal bits. Yet training moves no row of a matrix by as much as its length.",
    fix="Save or convert again from the training run; name the release that the training started from as --source.",
    unless=without(lambda subject: subject.options.trained, "--trained was not given, so values must be the source's"),
)
def moved_by_training(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Names and shapes are the source's; values may differ, but for those in the module's first lines.

    What did not move at all is a note, since layers and towers are often frozen; if that is everything, a warning.
    """
    values = subject.once(read_values)
    if not values.stats:
        raise Skip(UNREAD)
    for nbytes in values.compared.values():
        tally.compared(nbytes)
    yield from other_names(subject)
    judged = subject.once(float_weights).judged
    differing = {name: one for name, one in values.differences.items() if one.unequal and name not in judged}
    for name, one in differing.items():
        if not one.same_shape:
            yield Issue(f"shape {list(one.source.shape)}", f"shape {list(one.actual.shape)}", names=[name])
    moved = list(other_places(subject, differing))
    yield from moved
    placed = {name for one in moved for name in one.names or ()}
    left = {name: one for name, one in differing.items() if name not in placed and one.same_shape}
    yield from _untouched(subject, left)
    yield from _unlike(left, values)
    yield from _still(values, tally)


def _untouched(subject: Subject, differing: Mapping[str, TensorDiff]) -> Iterator[Issue]:
    """Values that no training moves."""
    indices = (subject.once(expected_of) or Expected({})).indices
    has_codes = is_quantized(usable_config(subject) or {})
    names = [
        name
        for name, one in differing.items()
        if name in indices
        or name.endswith("inv_freq")
        or not (has_codes or name.endswith(_COUNTER) or one.source.dtype in _FLOATS)
    ]
    hint = f"{_AGAIN}, with this tensor as the release has it"
    yield Issue("the source's values, which no training moves", "other values", hint, names=names)


def _unlike(differing: Mapping[str, TensorDiff], values: Values) -> Iterator[Issue]:
    """Matrices with rows that are further from the source's than training moves them."""
    shares = {
        name: one.unlike / max(1, stats.rows)
        for name, one in differing.items()
        if (stats := values.stats[name]).finite and not stats.constant and stats.rows > 1
    }
    odd = {name: share for name, share in shares.items() if share > (_ANEW_WORDS if _is_words(name) else _ANEW)}
    if not odd:
        return
    expected = "rows that are near the source's, as training leaves them"
    if median(shares.values()) > _ANEW:
        actual = f"{len(odd)} of {len(shares)} matrices that differ have nothing in common with the source's"
        hint = "name the release that the training started from as --source"
        yield Issue(expected, f"{actual}: another model", hint, names=odd, together=True)
        return
    hint = f"{_AGAIN}: its values are those of another tensor, in another order, or were initialized anew"
    for names in group_by_pattern(odd):
        worst = max(names, key=lambda name: odd[name])
        yield Issue(expected, _describe(worst, differing[worst], values.stats[worst], len(names)), hint, names=names)


def _is_words(name: str) -> bool:
    return name.endswith(VOCABULARY)


def _describe(name: str, difference: TensorDiff, stats: Extremes, count: int) -> str:
    rows = f", {difference.unlike_rows}" if difference.unlike_rows else ""
    where = f" of {name}" if count > 1 else ""
    return f"{difference.unlike} of {stats.rows} rows{where}{rows}: they have little in common with the source's"


def _still(values: Values, tally: Tally) -> Iterator[Issue]:
    """Floats that have the source's bits."""
    floats = [name for name, one in values.stats.items() if name in values.compared and one.rms and not one.constant]
    still = [name for name in floats if name not in values.differences or not values.differences[name].unequal]
    if not still:
        return
    if len(still) < len(floats):
        tally.note(f"training left {len(still)} of {len(floats)} tensors as they were: {summarize(still)}")
        return
    actual = f"the source's bits in all {len(still)} tensors: nothing was trained"
    hint = "name the checkpoint that the training wrote; without --trained every value is compared"
    yield Issue("values that training moved", actual, hint, severity="warning")
