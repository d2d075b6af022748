"""CK207 to CK210, and CK215: values that are possible one by one, but not together. They use what CK201 read."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress

from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import CkptkitError
from converters.planner import dims_of, rules_of
from converters.rules import ParamMapping
from verify.check import Skip, Tally, check, only, without
from verify.checks.values.values import PARTS, UNREAD, counted
from verify.evidence.expected import require_config, require_expected, usable_config
from verify.evidence.extremes import Extremes
from verify.evidence.floats.stored import parts_in_floats
from verify.evidence.folding import group_by_pattern, pattern_of
from verify.evidence.reading import read_values
from verify.evidence.subject import Subject
from verify.issue import Issue, warning_if
from verify.report import Severity

# The layers of trained models differ in size by less than 10 times; a scale lost or applied twice is 100 and more.
_FACTOR = 32.0
_SIBLINGS = 3  # fewer have no majority
# Weights of layers are below 1. FP8 codes without their scales are about 100, bytes of exponents taken for scales more.
_LARGEST = 64.0


@check(
    "CK207",
    "numbers are not all denormal",
    rationale="Bytes of another format or byte order, read as floats, are often numbers below 1e-38. They act as "
    "zeros.",
    fix="Convert again from the release. Check that the reader took the dtype from the file and did not guess it from "
    "the width.",
)
def not_denormal(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Some number of each tensor that is not zero is at least 2**-126 (about 1.2e-38), as every weight in use is."""
    stats = subject.once(read_values).stats
    counted(tally, stats, UNREAD)
    for names in group_by_pattern(name for name, one in stats.items() if one.finite and one.denormal):
        largest = max(max(abs(stats[name].low), abs(stats[name].high)) for name in names)
        yield Issue("values of at least 1.2e-38", f"the largest is {largest:.3g}", names=names)


@check(
    "CK208",
    "matrices are as large as their siblings",
    explained_by=("CK202", "CK204", "CK205"),
    rationale="A scale that was lost or applied twice makes a weight about 200 times too large. Memory that was never "
    "written holds numbers of any size.",
    fix="Convert again from the release. Of quantized releases, check that every scale was found and applied once.",
)
def no_outliers(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The root mean square of each matrix is within 32 times the median of the same matrix in other layers and experts.

    And that median is at most 64, which no trained model comes near. It is only a warning where the source holds the
    same bits: then the source is to be asked.
    """
    values = subject.once(read_values)
    counted(tally, values.stats, UNREAD)
    kinds = _kinds(values.stats, subject.once(parts_in_floats))
    medians = {kind: statistics.median(values.stats[name].rms for name in names) for kind, names in kinds.items()}
    ratios = {name: values.stats[name].rms / medians[kind] for kind, names in kinds.items() for name in names}
    same = values.compared.keys() - values.differences.keys()
    groups: dict[tuple[str, Severity], list[str]] = defaultdict(list)
    for name, ratio in ratios.items():
        if not 1 / _FACTOR <= ratio <= _FACTOR:
            groups["large" if ratio > 1 else "small", warning_if(name in same)].append(name)
    wanted = f"a root mean square within {_FACTOR:g} times the median of its siblings"
    for (way, severity), found in groups.items():
        for names in group_by_pattern(found):
            worst = max(names, key=lambda name: abs(math.log(ratios[name])))
            times = ratios[worst] if way == "large" else 1 / ratios[worst]
            actual = f"{worst} is {times:.3g} times too {way}: its root mean square is {values.stats[worst].rms:.3g}"
            yield Issue(wanted, actual, names=names, severity=severity)
    # Kinds of which the median is larger than any that was trained, but for codes and tables: all have one cause.
    plain = [kind for kind, size in medians.items() if size > _LARGEST and not kind[1]]
    specs = {kind: subject.specs.get(kinds[kind][0]) for kind in plain}
    large = [kind for kind, spec in specs.items() if spec is None or spec.dtype in COMPUTED]
    found = [name for kind in large for name in kinds[kind]]
    actual = f"{max(map(medians.__getitem__, large), default=0):.3g}, in the median of its kind"
    wanted, severity = f"a root mean square of at most {_LARGEST:g}", warning_if(same.issuperset(found))
    yield Issue(wanted, actual, names=found, severity=severity, together=True)


def _kinds(stats: Mapping[str, Extremes], codes: Collection[str]) -> dict[tuple[str, bool], list[str]]:
    """The matrices of each kind of which there are enough: by pattern, and whether they are `codes`.

    Those are compared among themselves, since they are no weights without their scales.
    """
    kinds: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for name, one in stats.items():
        usable = one.rows > 1 and one.finite and one.rms > 0 and not one.constant and not one.denormal
        if usable and not name.endswith(PARTS):
            kinds[pattern_of(name), name in codes].append(name)
    return {kind: names for kind, names in kinds.items() if len(names) >= _SIBLINGS}


@check(
    "CK209",
    "padded rows of the vocabulary are zero",
    rationale="Megatron pads the vocabulary to what its ranks can share. Other numbers there are rows of another "
    "vocabulary, or memory never written.",
    fix="Convert again. In a checkpoint saved by training, rows of the output layer may have been trained: then the "
    "warning is harmless.",
    unless=only("megatron", "an HF checkpoint has no padded vocabulary"),
)
def padding_zero(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Rows beyond vocab_size: an error in `release/`, which a converter wrote, a warning in what training saved."""
    if not subject.once(read_values).stats:
        raise Skip(UNREAD)
    expected = require_expected(subject)
    specs = subject.checkpoint.specs
    severity = warning_if(subject.megatron_files.weights.name != "release")
    for name in sorted(expected.vocab & specs.keys()):
        shape = expected.shapes[name] or ()
        rows = specs[name].shape[0] - shape[0]
        tally.compared(0)
        # What cannot be read is for CK201 to say.
        with suppress(CkptkitError):
            filled = int(subject.checkpoint.read([name])[name][shape[0] :].bool().any(dim=1).sum()) if rows > 0 else 0
            if filled:
                actual = f"{filled} of {rows} rows from row {shape[0]} on are not zero"
                yield Issue("rows of zeros beyond the vocabulary", actual, names=[name], severity=severity)


def _named(subject: Subject, is_kind: Callable[[ParamMapping], bool]) -> frozenset[str]:
    """Tensors of the mappings of a kind, by their HF and Megatron names; empty where no config says so."""
    config = usable_config(subject)
    rules = [rule for rule in rules_of(config) if is_kind(rule.mapping)] if config else []
    return frozenset(name for rule in rules for name in (*rule.hf, rule.megatron))


def _fp32_biases(subject: Subject) -> list[str]:
    """Biases that must be kept in float32."""
    return [name for name in _named(subject, lambda mapping: mapping.fp32) if "bias" in name]


@check(
    "CK210",
    "float32 biases were not rounded on the way",
    explained_by=("CK202",),
    rationale="A buffer that a training framework cast to bfloat16 and saved as float32 again has the right dtype and "
    "has lost most of its values.",
    fix="Take the biases from the release, and keep the buffer in float32 while training.",
    unless=without(_fp32_biases, "the model has no bias that must be float32"),
)
def not_coarse(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Not every number of a float32 router bias is one of bfloat16 too, which happens by chance once in 65536 for each.

    A warning, since some releases have such biases. Where the source holds the same bits there is no finding; CK205
    judges constant ones.
    """
    values, biases = subject.once(read_values), set(_fp32_biases(subject))
    looked_at = {name: one for name, one in values.stats.items() if name in biases}
    counted(tally, looked_at, f"{UNREAD}, or none of these biases is there (CK104)")
    same = values.compared.keys() - values.differences.keys()
    hint = "compare with the release: unless it is so there, it was rounded to bfloat16 and stored as float32 again"
    names = [name for name, one in looked_at.items() if one.coarse and not one.constant and name not in same]
    yield Issue("values that need float32", "every value is exact in bfloat16", hint, names=names, severity="warning")


def _tables(subject: Subject) -> frozenset[str]:
    """Tables of experts."""
    return _named(subject, lambda mapping: mapping.indices)


@check(
    "CK215",
    "tables of experts name experts",
    rationale="A table that went through bfloat16 has 384 where it had 383: engines read beyond the experts, or stop.",
    fix="Take the tables from the release, and keep whole numbers whole on the way.",
    unless=without(_tables, "the model has no table of experts"),
)
def tables_name_experts(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every number is that of an expert: from 0 to one less than there are."""
    values, tables = subject.once(read_values), _tables(subject)
    looked_at = {name: one for name, one in values.stats.items() if name in tables}
    counted(tally, looked_at, f"{UNREAD}, or none of these tables is there (CK104)")
    experts = dims_of(require_config(subject)).experts
    for name, one in looked_at.items():
        if one.low < 0 or one.high >= experts:
            yield Issue(f"numbers from 0 to {experts - 1}", f"{one.low:g} to {one.high:g}", names=[name])
