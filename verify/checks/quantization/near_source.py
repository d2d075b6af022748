"""CK305: quantized weights, dequantized, are as near their plain source as rounding to their format leaves them."""

from __future__ import annotations

from collections.abc import Iterator

from quant.formats.part_names import SCALE
from verify.check import Skip, Tally, Unable, check
from verify.checks.quantization.int4 import not_quantized, packed_weights
from verify.checks.values.source import may_differ
from verify.evidence.expected import is_quantized
from verify.evidence.floats.rounding import float_rounding_of, float_weights
from verify.evidence.folding import group_by_pattern
from verify.evidence.packed import int4_format_of
from verify.evidence.rounding import grid_of, is_gptq, rounding_of
from verify.evidence.subject import Subject
from verify.issue import Issue

_HINT = "quantize again from this source"


@check(
    "CK305",
    "dequantized weights are within half a step of the source, those of GPTQ near it",
    stage="quantization",
    needs=("source",),
    explained_by=("CK202", "CK204", "CK205", "CK304"),
    rationale="Nibbles in another order, scales of another tensor or a wrong zero point give weights that look like "
    "weights and are not. In FP8 and MXFP4 half a step is half the distance between the format's numbers around a "
    "weight.",
    fix=(
        "Quantize again from the source. GPTQ is known by `actorder` in config.json, and its rows are only compared by "
        "their norm. AWQ changes weights before it rounds them, so its output does not pass this check."
    ),
    unless=lambda subject: may_differ(subject) or not_quantized(subject),
)
def near_source(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every quantized weight against the source; `verify.evidence.rounding` and `floats.rounding` derive the bounds."""
    if subject.source is None:
        raise Skip("no --source was given")
    plain = not is_quantized(subject.source.config)
    packed = subject.is_megatron or int4_format_of(subject.checkpoint.config) is not None
    yield from _floats(subject, tally) if plain and not packed else _packed(subject, tally)


def _floats(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Compares weights in floats."""
    stored, specs = subject.once(float_weights), subject.checkpoint.specs
    if stored.unread is not None:
        raise Unable(f"no decision for this quantization_config: {stored.unread}")
    if not stored.judged and not stored.broken:
        raise Skip("nothing is stored in floats of 8 or 4 bits that the source has")
    rounding = subject.once(float_rounding_of)
    tally.compared(sum(specs[name].nbytes for name in stored.parts), len(rounding))
    for name, reason in stored.broken.items():
        yield Issue("codes and scales that fit", reason, _HINT, names=[name])
    wrong = {name: one for name, one in rounding.items() if one.wrong}
    for found in group_by_pattern(wrong):
        worst = max(found, key=lambda name: wrong[name].times)
        one = wrong[worst]
        where = f"{worst}, {one.rows}," if one.rows else worst
        actual = f"{one.wrong} of {one.numel} elements of {where} are further off, by up to {one.times:.3g} times that"
        yield Issue(f"within half a step of {stored.words}", actual, _HINT, names=found)
    # FP8 that repeats MXFP4 but for numbers that its scales do not reach.
    changed = {name: one for name, one in rounding.items() if one.changed and not one.wrong}
    for names in group_by_pattern(changed):
        several = [changed[name] for name in names]
        count, zeros = sum(one.changed for one in several), sum(one.zeroed for one in several)
        expected = "the numbers of the MXFP4 source, which FP8 with powers of two as scales can hold"
        actual = f"not lossless: {count} of {sum(one.numel for one in several)} elements are rounded, {zeros} of them "
        actual += f"to 0; the first of {names[0]}, {several[0].first}"
        hint = "exponents in a block spread by more than 14: dequantize to BF16 or quantize to mxfp8, which are exact"
        yield Issue(expected, actual, hint, names=names, severity="warning")


def _packed(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Compares INT4."""
    config, _, _ = packed_weights(subject)
    if subject.source is None or is_quantized(subject.source.config):
        raise Skip("the source is quantized itself; CK202 compares the two bit for bit")
    rounding, grid = subject.once(rounding_of), grid_of(config)
    if is_gptq(config):
        tally.note(
            "CK305: GPTQ rounded these weights, so a row may be off by half its norm; smaller faults do not show"
        )
    for one in rounding.values():
        tally.compared(one.nbytes)
    wrong = {name: one for name, one in rounding.items() if one.failed}
    coarse = {name: one.scale_off for name, one in rounding.items() if one.scale_off and not one.failed}
    for found in group_by_pattern(wrong):
        worst = max(found, key=lambda name: (wrong[name].distance or 0.0, wrong[name].steps))
        expected, actual = wrong[worst].words
        yield Issue(expected, f"{actual} in {worst}", _HINT, names=found)
    for found in group_by_pattern(coarse):
        expected = f"scales of the {grid} grid, as config.json says"
        actual = f"up to {max(coarse[name] for name in found):.0%} off"
        scales = [name.removesuffix(".weight") + SCALE for name in found]
        yield Issue(expected, actual, "quantize again, or correct observer_kwargs", names=scales)
