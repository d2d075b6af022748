"""CK201 to CK206: what the bytes tell, with and without a source. Everything is read once, streamed.

What may legally be constant, so that a fresh or tiny model raises no false alarm:
- norm weights: all ones is how training starts, so any constant but zero is a warning only where it is not one;
- biases and the router's selection bias: all zero is how training starts, so it is a warning, never an error;
- matrices: never. Initialization is random, and nothing makes a trained matrix constant, so it is an error.
Rows of zeros inside a matrix are a warning (a hole in a file, or a dead neuron), and normal in the vocabulary's
matrices.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set, Sized

from ckptkit.core.dtypes import COMPUTED, ITEMSIZE
from converters.planner import rules_of, tied_head
from quant.formats.part_names import (
    FP8_SCALE_INV,
    MXFP4_SCALES,
    PACKED,
    WEIGHT_G_IDX,
    WEIGHT_SCALE,
    WEIGHT_SHAPE,
    WEIGHT_ZERO_POINT,
    packed_in,
)
from verify.check import Skip, Tally, check
from verify.evidence.expected import is_cache_scale, is_quantized, usable_config
from verify.evidence.extremes import Extremes, same_bytes
from verify.evidence.float_rounding import float_weights
from verify.evidence.folding import alike
from verify.evidence.moved.experts import repeated_experts
from verify.evidence.moved.layers import layers_of, moved_layers, repeated_layers
from verify.evidence.moved.stages import stages_of
from verify.evidence.packed import format_of
from verify.evidence.reading import read_values
from verify.evidence.subject import Subject
from verify.evidence.values import Difference, Values
from verify.issue import Issue
from verify.report import Severity

# Where in its file a tensor lies, in the message that says why it cannot be read.
_AT_BYTE = re.compile(r" at byte \d+(?=: )")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "word_embeddings.weight", "output_layer.weight")
_FLOATS = frozenset({*COMPUTED, "float64"})
UNREAD = "not run because no tensor can be read (CK201)"
# What stands beside the words of quantized weights.
PARTS = (WEIGHT_SCALE, WEIGHT_SHAPE, WEIGHT_ZERO_POINT, WEIGHT_G_IDX, FP8_SCALE_INV, MXFP4_SCALES)


def counted(tally: Tally, names: Sized, none: str) -> None:
    """Counts tensors whose bytes CK201 or CK202 has counted. Raises Skip, saying `none`, where there are none."""
    if not len(names):
        raise Skip(none)
    tally.tensors += len(names)


@check(
    "CK201",
    "every tensor can be read",
    stage="values",
    needs=("sound headers",),
    rationale="Headers can be whole while the bytes behind them are not, after a disk error or a copy that was cut "
    "short.",
    fix="Copy the named file again, or convert again.",
)
def readable(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every tensor is read once; this pass also feeds the other CK2xx checks."""
    values, unreadable = subject.once(read_values).stats, subject.once(read_values).unreadable
    for stats in values.values():
        tally.compared(stats.nbytes)
    files: dict[str, list[str]] = defaultdict(list)
    for name, reason in unreadable.items():
        files[_AT_BYTE.split(reason)[0]].append(name)
    for names in files.values():
        actual = _AT_BYTE.sub("", unreadable[names[0]])
        yield Issue(
            "bytes that can be read",
            actual,
            "copy the file again, or convert again",
            names=names,
            together=True,
            file=subject.path,
        )


@check(
    "CK202",
    "values equal the source's, bit for bit",
    stage="values",
    needs=("sound headers", "source"),
    rationale="A swap of gate and up, experts off by one, or a layer in the wrong place keeps every name and shape "
    "right.",
    fix="Convert again from the source. If the finding says whose values are there instead, the mapping between the "
    "two is the defect.",
)
def same_values(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every value, with both sides seen as HF; where the dtype differs (CK203), the source is cast.

    Weights that are quantized here and plain in the source are for CK305 to judge.
    """
    values = subject.once(read_values)
    if not values.stats:
        raise Skip(UNREAD)
    for nbytes in values.compared.values():
        tally.compared(nbytes)
    quantized, floats = _judged_by_steps(subject), subject.once(float_weights)
    dropped = _repeated_head(subject)
    extra = [name for name in values.only_here if name not in dropped | floats.parts and not _part_of(name, quantized)]
    lost = [name for name in values.only_source if name not in dropped | floats.judged | quantized]
    yield Issue(
        "the tensor of the source", "it is not here", "convert again from the source", names=lost, file=subject.path
    )
    yield Issue(
        "only tensors of the source",
        "the source has none of this name",
        "check --source",
        names=extra,
        file=subject.path,
    )
    wrong = {
        name: difference
        for name, difference in values.differences.items()
        if difference.unequal and name not in floats.judged
    }
    whose = {name: _whose(subject, name) for name in wrong}
    for moved in moved_layers(whose, subject.once(stages_of)):
        yield Issue(
            "each layer's own values", moved.text, moved.hint, names=moved.names, together=True, file=subject.path
        )
        wrong = {name: difference for name, difference in wrong.items() if name not in set(moved.names)}
    for misplaced in (True, False):
        for names in alike(name for name in wrong if (whose[name] is not None) == misplaced):
            worst = max(names, key=lambda name: wrong[name].largest)
            hint = "convert again from the source; if that does not help, name the right --source"
            yield Issue(
                "the bits of the source",
                _described(wrong[worst], worst, whose[worst]),
                hint,
                names=names,
                file=subject.path,
            )


def _part_of(name: str, quantized: Collection[str]) -> bool:
    return name.endswith((PACKED, *PARTS)) and f"{name.rpartition('.')[0]}.weight" in quantized


def _judged_by_steps(subject: Subject) -> Set[str]:
    """Weights of the source that are packed here, and whose rounding CK305 can judge: neither lost nor extra."""
    if (
        subject.kind == "megatron"
        or subject.source is None
        or is_quantized(subject.source.config)
        or format_of(subject.checkpoint.config) is None
    ):
        return frozenset()
    packed = {f"{module}.weight" for module in packed_in(subject.checkpoint.specs)}
    return packed & frozenset(subject.once(read_values).only_source)


def _repeated_head(subject: Subject) -> frozenset[str]:
    """The output layer of tied embeddings where only one side stores it.

    Stored here it is for CK211 to judge; stored in the source it must repeat the embedding.
    """
    config = usable_config(subject)
    tied = tied_head(config) if config else None
    values, source = subject.once(read_values), subject.source
    if tied is None or source is None or tied[0] not in (*values.only_here, *values.only_source):
        return frozenset()
    if tied[0] in values.only_source:
        found = source.read(tied)
        if not same_bytes(found[tied[0]], found[tied[1]]):
            return frozenset()
    return frozenset(tied[:1])


def _whose(subject: Subject, name: str) -> str | None:
    """The source tensor whose values stand under this name, where there is one."""
    return subject.once(read_values).source_names.get(subject.once(read_values).stats[name].digest)


def _described(difference: Difference, name: str, whose: str | None) -> str:
    if difference.source.shape != difference.actual.shape:
        return f"shape {list(difference.actual.shape)}, in the source {list(difference.source.shape)}"
    if whose is not None and whose != name:
        return f"{name} holds the values of {whose}"
    numel = math.prod(difference.actual.shape)
    rows = f", {difference.rows}" if difference.rows else ""
    return f"{difference.unequal} of {numel} elements differ in {name}{rows}, by up to {difference.largest:.3g}"


@check(
    "CK203",
    "dtypes are kept, fp32 state above all",
    stage="values",
    needs=("sound headers", "source"),
    rationale="A router bias rounded to bfloat16 loses most of its distinct values, and the top-k experts of almost "
    "every token change.",
    fix="Convert again with --dtype auto; fp32 state (e_score_correction_bias, expert_bias) must stay fp32.",
)
def dtypes_kept(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Each change of dtype: an error where none is legal and for rounded fp32 state, else a warning.

    Weights that are quantized here and plain in the source are for CK305 to judge.
    """
    values, quantized = subject.once(read_values), subject.once(float_weights).judged
    counted(tally, values.compared, "not run because no tensor could be compared with the source (CK201, CK202)")
    config = usable_config(subject)
    fp32 = _fp32_names(config) if config else frozenset()
    changed: dict[tuple[str, str, bool], list[str]] = defaultdict(list)
    for name, one in values.differences.items():
        if one.source.dtype != one.actual.dtype and name not in quantized:
            changed[one.source.dtype, one.actual.dtype, name in fp32].append(name)
    for (before, after, state), found in changed.items():
        for names in alike(found):
            severity, hint = _cast(before, after, state)
            first = values.differences[names[0]]
            counts = (
                f", {first.distinct_source} distinct values became {first.distinct_actual} in {names[0]}"
                if state and severity == "error"
                else ""
            )
            yield Issue(before, after + counts, hint, names=names, file=subject.path, severity=severity)


def _cast(before: str, after: str, state: bool) -> tuple[Severity, str]:
    """How bad a change of dtype is, and what to do.

    Only floats of at least 16 bits may change, and fp32 state only to a wider one.
    """
    if not {before, after} <= _FLOATS:
        return "error", "convert again: integers and floats of 8 bits mean nothing in another dtype"
    if state and ITEMSIZE[after] < ITEMSIZE[before]:
        return "error", "convert again: this state must stay fp32"
    return "warning", "convert with --dtype auto, unless the change was meant"


def _fp32_names(config: Mapping[str, object]) -> frozenset[str]:
    return frozenset(name for rule in rules_of(config) for name in rule.hf if rule.mapping.fp32)


@check(
    "CK204",
    "every value is finite",
    stage="values",
    needs=("sound headers",),
    rationale="One NaN or infinity in a weight makes every token after it NaN.",
    fix="Find the last good checkpoint of the run; or copy the file again, if the source is finite.",
)
def finite(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """No NaN and no infinity anywhere."""
    values = subject.once(read_values).stats
    counted(tally, values, UNREAD)
    hint = "look at the source: if it is finite there, convert again"
    yield Issue(
        "finite values",
        "NaN or infinity",
        hint,
        names=[name for name, stats in values.items() if not stats.finite],
        file=subject.path,
    )


@check(
    "CK205",
    "no tensor is all zero or constant",
    stage="values",
    needs=("sound headers",),
    rationale="A router of zeros sends every token to the same experts; the server still answers, fluently and "
    "wrongly.",
    fix="Convert again from the release. A hole in a file reads as zeros: compare the file with its source.",
)
def not_constant(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Constants that no training makes; the module's first lines say which may be."""
    values = subject.once(read_values).stats
    counted(tally, values, UNREAD)
    verdicts: dict[tuple[Severity, str], list[str]] = defaultdict(list)
    config = usable_config(subject) or {}
    for name, stats in values.items():
        if stats.low > 0 and is_cache_scale(name, config):
            continue  # one number
        if (verdict := _constant(name, stats)) is not None:
            verdicts[verdict].append(name)
    for (severity, actual), found in verdicts.items():
        for names, hint in _whence(found, subject.once(read_values)):
            yield Issue("values that vary", actual, hint, names=names, file=subject.path, severity=severity)


def _differs(values: Values, name: str) -> bool:
    difference = values.differences.get(name)
    return difference is not None and difference.unequal > 0


def _whence(found: Sequence[str], values: Values) -> Iterator[tuple[list[str], str]]:
    """The tensors that a source shares, and the others, each with the next move."""
    shared = {name: None for name in found if name in values.compared and not _differs(values, name)}
    own = [name for name in found if name not in shared]
    if shared:
        yield list(shared), "the source holds the same: compare that with the release that it was made from"
    if own:
        yield own, "take it from the release again; a hole in a file, as of an interrupted copy, reads as zeros"


def _constant(name: str, stats: Extremes) -> tuple[Severity, str] | None:
    """Severity and description, or None where the tensor is as it may be."""
    if name.endswith(PARTS) or not stats.finite or not stats.rows:
        return None
    if stats.constant:
        actual = "all zero" if stats.low == 0 else f"all {stats.low:g}"
        if "norm" in name:
            return None if stats.low == 1 else ("error" if stats.low == 0 else "warning", actual)
        return "warning" if stats.rows == 1 else "error", actual
    if stats.zero_rows and not name.endswith(_VOCABULARY):
        return "warning", f"{stats.zero_rows} of {stats.rows} rows are all zero"
    return None


@check(
    "CK206",
    "experts and layers differ from one another",
    stage="values",
    needs=("sound headers",),
    rationale="Two experts with the same bytes are an expert read by its rank-local number; two equal layers are an "
    "offset by a pipeline stage.",
    fix="Convert again. Only a model whose experts were all copied from one dense MLP, and never trained since, may be "
    "so.",
)
def distinct(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """By digest: no two experts of a layer and no two layers hold the same matrix."""
    values = subject.once(read_values).stats
    counted(tally, values, UNREAD)
    groups: dict[tuple[str, bytes], list[str]] = defaultdict(list)
    for name, stats in values.items():
        if kind_of(name) != name and stats.rows > 1 and not stats.constant and not name.endswith(PARTS):
            groups[kind_of(name), stats.digest].append(name)
    equal = [found for found in groups.values() if len(found) > 1]
    for one in repeated_layers(equal, subject.once(stages_of)):
        expected = "bytes of its own for each layer"
        yield Issue(expected, one.text, one.hint, names=one.names, together=True, file=subject.path)
    for one in repeated_experts(found for found in equal if len(layers_of(found)) < len(found)):
        expected = "bytes of its own for each"
        yield Issue(expected, one.text, one.hint, names=one.names, together=True, file=subject.path)


def kind_of(name: str) -> str:
    """The name with every number in it as `#`: what siblings over layers and experts have in common."""
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))
