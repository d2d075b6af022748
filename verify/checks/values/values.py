"""CK201 and CK204 to CK206: what the bytes tell without a source. Everything is read once, streamed.

What may legally be constant, so that a fresh or tiny model raises no false alarm:
- norm weights: all ones is how training starts, so any constant but zero is a warning only where it is not one;
- biases and the router's selection bias: all zero is how training starts, so it is a warning, never an error;
- a single number: any but zero;
- matrices: never. Initialization is random, and nothing makes a trained matrix constant, so it is an error.
Rows of zeros inside a matrix are a warning (a hole in a file, or a dead neuron), and normal in the vocabulary's
matrices.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence, Sized

from ckptkit.core.specs import ranges
from quant.formats.floats.table import SCALE_ENDINGS
from quant.formats.part_names import INT4_PARTS, WEIGHT_PACKED
from verify.check import Skip, Tally, check
from verify.checks.values.merged import FILE as MERGED
from verify.checks.values.merged import are_copies, layer_origins
from verify.evidence.expected import Expected, expected_of, is_cache_scale, usable_config
from verify.evidence.extremes import Extremes
from verify.evidence.floats.stored import scales_in_floats
from verify.evidence.folding import layers_of, pattern_of
from verify.evidence.moved.repeated import repeated_experts, repeated_layers
from verify.evidence.moved.stages import stages_of
from verify.evidence.reading import read_values
from verify.evidence.subject import Subject
from verify.evidence.values import Values
from verify.issue import Issue
from verify.report import Severity

# Where in its file a tensor lies, in the message that says why it cannot be read.
_AT_BYTE = re.compile(r" at byte \d+(?=: )")
_VOCABULARY = (
    *("embed_tokens.weight", "lm_head.weight", "word_embeddings.weight", "output_layer.weight"),
    *("embed.weight", "head.weight"),
)

UNREAD = "not run because no tensor can be read (CK201)"
# What stands beside the words of quantized weights.
PARTS = (*(part for part in INT4_PARTS if part != WEIGHT_PACKED), *SCALE_ENDINGS)


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
    explained_by=("CK112", "CK117"),
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
    "CK204",
    "every value is finite",
    stage="values",
    needs=("sound headers",),
    explained_by=("CK124",),
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
    explained_by=("CK124", "CK202"),
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
    scales = subject.once(scales_in_floats)
    for name, stats in values.items():
        if name in scales:
            continue
        spec = subject.specs.get(name)  # None of an expert that is stored with the others
        one_number = is_cache_scale(name, config) or (spec is not None and math.prod(spec.shape) == 1)
        if stats.low != 0 and one_number:
            continue
        if (verdict := _constant(name, stats)) is not None:
            verdicts[verdict].append(name)
    for (severity, actual), found in verdicts.items():
        for names, hint in _by_source(found, subject.once(read_values)):
            yield Issue("values that vary", actual, hint, names=names, file=subject.path, severity=severity)


def _differs(values: Values, name: str) -> bool:
    difference = values.differences.get(name)
    return difference is not None and difference.unequal > 0


def _by_source(found: Sequence[str], values: Values) -> Iterator[tuple[list[str], str]]:
    """The tensors that a source shares, and the others, each with the next move."""
    shared = {name: None for name in found if name in values.compared and not _differs(values, name)}
    own = [name for name in found if name not in shared]
    if shared:
        yield list(shared), "the source holds the same: compare that with the release that it was made from"
    if own:
        yield own, "copy it from the release again; a hole in a file, as after an interrupted copy, reads as zeros"


def _constant(name: str, stats: Extremes) -> tuple[Severity, str] | None:
    """Severity and description, or None where the tensor is as it may be."""
    if name.endswith((*PARTS, ".k_zero_point", ".v_zero_point")) or not stats.finite or not stats.rows:
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
    explained_by=("CK202",),
    rationale="Two experts with the same bytes are an expert read by its rank-local number; two equal layers are an "
    "offset by a pipeline stage.",
    fix="Convert again. Only a model whose layers a merge repeated, or whose experts were all copied from one dense "
    "MLP, and never trained since, may be so.",
)
def distinct(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """By digest: no two experts of a layer and no two layers hold the same matrix, but those that a merge repeated.

    It is only a warning where the source holds the same bits: then the source is to be asked.
    """
    read = subject.once(read_values)
    values, same = read.stats, read.compared.keys() - read.differences.keys()
    counted(tally, values, UNREAD)
    others = (subject.once(expected_of) or Expected({})).indices | subject.once(scales_in_floats)
    groups: dict[tuple[str, bytes], list[str]] = defaultdict(list)
    for name, stats in values.items():
        if name in others:
            continue
        if pattern_of(name) != name and stats.rows > 1 and not stats.constant and not name.endswith(PARTS):
            groups[pattern_of(name), stats.digest].append(name)
    equal = [found for found in groups.values() if len(found) > 1]
    origins = layer_origins(subject.config_root)
    if merged := layers_of(name for found in equal if are_copies(found, origins) for name in found):
        tally.note(f"layers {ranges(merged)} repeat one another, as {MERGED} says of the merge that made them")
        equal = [found for found in equal if not are_copies(found, origins)]
    layers = repeated_layers(equal, subject.once(stages_of))
    experts = repeated_experts(found for found in equal if len(layers_of(found)) < len(found))
    for one in (*layers, *experts):
        expected, text, hint = "bytes of its own for each layer and expert", one.text, one.hint
        severity: Severity = "warning" if same.issuperset(one.names) else "error"
        if severity == "warning":
            text, hint = f"as in the source, {text}", "ask whoever made the source whether that is meant"
        yield Issue(expected, text, hint, names=one.names, together=True, file=subject.path, severity=severity)
