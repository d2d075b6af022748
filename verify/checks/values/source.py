"""CK202, CK203 and CK216: values and dtypes against the source, or against the release that training started from.

Training (CK216, `--trained`) changes a row of a matrix by less than its length, and a vector in any way. It changes
router biases and statistics of batch norms, which are buffers, but not:
- integers, such as tables of token ids, except counters of batch norms and codes of quantized weights.
- rotary frequencies (`inv_freq`), which follow from config.json.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from statistics import median

from ckptkit.converters.adapter import Adapter
from ckptkit.core.dtypes import COMPUTED, ITEMSIZE
from ckptkit.core.specs import summarize
from ckptkit.quant.formats.part_names import PACKED, packed_in
from ckptkit.verify.checks.values.values import PARTS, VOCABULARY, require_some, require_values
from ckptkit.verify.core.check import CheckResult, Issue, Subject, check, only_if, warning_if
from ckptkit.verify.evidence.compare import TensorDiff
from ckptkit.verify.evidence.expected import (
    Expected,
    config_or_none,
    expected_of,
    fp32_names,
    is_cache_scale,
    is_quantized,
    tied_head_of,
)
from ckptkit.verify.evidence.extremes import Extremes, digest_of, same_bytes
from ckptkit.verify.evidence.floats.rounding import float_weights
from ckptkit.verify.evidence.folding import by_key, group_by_pattern, layer_of, layers_of, pattern_of
from ckptkit.verify.evidence.moved import explain_moves, stages_of
from ckptkit.verify.evidence.packed import int4_format_of
from ckptkit.verify.evidence.reading import Values, as_hf_view, read_values, source_as_hf

_FLOATS = frozenset({*COMPUTED, "float64"})
# The share of tensors, and of their kinds, that differ from another model; and the number of kinds of one block.
_MOST, _FEW = 0.9, 3
# The share of a matrix's rows that training may replace; in the vocabulary, those of unused tokens.
_NEW_ROWS, _NEW_WORDS = 0.05, 0.5
_SAVE_AGAIN = "save or convert again"
_WHY_NOT = "with --trained, values may differ from the source's (CK216)"
values_kept = only_if(lambda subject: not subject.options.trained, _WHY_NOT)
_was_trained = only_if(lambda subject: subject.options.trained, "without --trained, values must be equal (CK202)")


@check("CK202", needs=("source",), explained_by=("CK124", "CK204", "CK205", "CK702"), applies_to=values_kept)
def values_of_source(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every value, with both sides as HF and the source cast to this dtype. CK305 judges newly quantized weights."""
    values, wrong = _compared(subject, result)
    yield from names_of_one_side(subject)
    for issue in list(other_places(subject, wrong)):
        yield issue
        for name in issue.names or ():
            del wrong[name]
    yield from _differing(subject, wrong, values)


def _compared(subject: Subject, result: CheckResult) -> tuple[Values, dict[str, TensorDiff]]:
    """All values, and the differences that CK305 does not judge. Raises as `require_values`."""
    values = require_values(subject)
    for nbytes in values.compared.values():
        result.compared(nbytes=nbytes)
    judged = float_weights(subject).judged
    return values, {name: one for name, one in values.differences.items() if one.unequal and name not in judged}


def names_of_one_side(subject: Subject) -> Iterator[Issue]:
    """Tensors of only one side, except those that other checks judge."""
    values = read_values(subject)
    quantized, floats = _judged_by_steps(subject), float_weights(subject)
    config = config_or_none(subject) or {}
    dropped = _repeated_head(subject) | {name for name in values.only_here if is_cache_scale(name, config)}
    packed = {name for name in values.only_here if name.endswith((PACKED, *PARTS))}
    packed = {name for name in packed if f"{name.rpartition('.')[0]}.weight" in quantized}
    extra = [name for name in values.only_here if name not in dropped | floats.parts | packed]
    lost = [name for name in values.only_source if name not in dropped | floats.judged | quantized]
    for names, others in _renamed(subject, lost, extra, values):
        actual = f"missing; {summarize(others)}, which the source does not have, has its values"
        hint = "rename it as in the source: programs find no tensor under another name"
        yield Issue("each tensor of the source", actual, hint, names=names, also_affected=others)
        lost = [name for name in lost if name not in names]
        extra = [name for name in extra if name not in others]
    yield Issue("each tensor of the source", "missing", names=lost)
    hint = "pass the release that has these tensors as --source, or convert again from this source"
    yield Issue("only tensors of the source", "the source has no tensor of this name", hint, names=extra)


def other_places(subject: Subject, wrong: Mapping[str, TensorDiff]) -> Iterator[Issue]:
    """Tensors of `wrong` with the bits of another tensor of the source, grouped by the mistake that explains them."""
    judged = float_weights(subject).judged | _judged_by_steps(subject)
    for moved in explain_moves({name: _origin_of(subject, name) for name in wrong}, stages_of(subject)):
        expected = f"each {'layer' if moved.is_layers else 'tensor'}'s own values"
        layers = set(layers_of(moved.names)) if moved.is_layers else set()
        packed = [name for name in judged if layer_of(name) in layers]
        yield Issue(expected, moved.text, moved.hint, names=moved.names, as_one=True, also_affected=packed)


def _renamed(
    subject: Subject, lost: Sequence[str], extra: Sequence[str], values: Values
) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Kinds of tensors with equal values under other names in the source; constant ones must be the only kind."""
    left = [names for names in group_by_pattern(extra) if all(name in values.stats for name in names)]
    if not left or not lost:
        return
    stats, source = values.stats, source_as_hf(subject, subject.checkpoint.specs)
    here = {name: spec.shape for name, spec in as_hf_view(subject.checkpoint, subject.path, source.specs).specs.items()}
    for names in group_by_pattern(lost):
        shapes = [source.specs[name].shape for name in names]
        alike = [one for one in left if len(one) == len(names) and [here[name] for name in one] == shapes]
        digests = [digest_of(source.read([name])[name]) for name in names] if alike else []
        same = [one for one in alike if [stats[name].digest for name in one] == digests]
        if same and (len(same) == 1 or not all(stats[name].constant for name in same[0])):
            yield names, same[0]
            left.remove(same[0])


def _differing(subject: Subject, wrong: Mapping[str, TensorDiff], values: Values) -> Iterator[Issue]:
    """Tensors with neither the expected values nor those of another tensor."""
    hint = "convert again from the source, or pass the source of this checkpoint as --source"
    expected = "the bits of the source" if subject.adapter is None else "the bits of the base with the merged adapter"
    share = f"{len(wrong)} of {len(values.compared)} tensors differ"
    if subject.adapter is None and _is_trained(wrong, values):
        hint = "add --trained if this checkpoint was trained from the source; else convert again from the source"
        yield Issue(expected, f"{share}, each by little, as after training", hint, names=wrong, as_one=True)
        return
    kinds, wrong_kinds = ({pattern_of(name) for name in names} for names in (values.compared, wrong))
    # No mistake in a mapping makes nearly all tensors of nearly all kinds differ.
    if len(wrong) > _MOST * len(values.compared) and len(wrong_kinds) > max(_FEW, _MOST * len(kinds)):
        yield Issue(expected, f"{share}, so this is another model", hint, names=wrong, as_one=True)
        return
    for broken in (True, False):
        for names in group_by_pattern(name for name in wrong if _is_broken(values.stats[name]) == broken):
            if subject.adapter is not None:
                yield from _against_adapter(subject, subject.adapter, {name: wrong[name] for name in names}, values)
                continue
            worst, actual = _describe_worst(names, wrong, values)
            turned = None if broken else _transposed(subject, worst)
            if turned is not None:
                actual = f"{turned} of the source is transposed ({actual})"
            exchange = "exchange the last two axes, as in the source"
            yield Issue(expected, actual, hint if turned is None else exchange, names=names)


def _transposed(subject: Subject, name: str) -> str | None:
    """The stored tensor with `name` or with its values that is transposed in the source."""
    here, source = subject.checkpoint, source_as_hf(subject, subject.checkpoint.specs)
    if name not in here.specs and subject.source is not None:
        source = subject.source
    for other, spec in here.specs.items():
        is_it = other == name or (name not in here.specs and layer_of(other) == layer_of(name))
        if not is_it or len(spec.shape) < 2 or other not in source.specs:
            continue
        if (*spec.shape[:-2], spec.shape[-1], spec.shape[-2]) == tuple(source.specs[other].shape):
            stored, original = here.read([other])[other], source.read([other])[other]
            if same_bytes(stored, original.to(stored.dtype).transpose(-1, -2).contiguous()):
                return other
    return None


def _against_adapter(
    subject: Subject, adapter: Adapter, wrong: Mapping[str, TensorDiff], values: Values
) -> Iterator[Issue]:
    """Tensors that differ from base and adapter merged: the missing sum, and whether anything was added."""
    here, base = (as_hf_view(one, subject.path) for one in (subject.checkpoint, adapter.base))
    groups: dict[tuple[bool, float | None], list[str]] = defaultdict(list)
    for name in wrong:
        pair = adapter.pair_of(name)
        both = name in here.specs and name in base.specs
        is_base = both and same_bytes(here.read([name])[name], base.read([name])[name])
        groups[is_base, None if pair is None else pair.scale].append(name)
    for (is_base, scale), names in groups.items():
        _, actual = _describe_worst(names, wrong, values)
        actual = f"the bits of the base, so the adapter is not merged ({actual})" if is_base else actual
        merge = "merge the adapter: `ckptkit convert BASE DST --merge ADAPTER`"
        hint = merge if is_base else f"{merge}; or pass the adapter that was merged as --adapter"
        if scale is not None:
            pairs = {pair.module: pair for name in names if (pair := adapter.pair_of(name)) is not None}
            is_dora = any(pair.magnitude is not None for pair in pairs.values())
            expected = f"the base's weight plus {scale:g} x lora_B lora_A of {summarize(pairs)}"
            expected += ", then scaled to lora_magnitude_vector (use_dora)" if is_dora else ""
        elif saved := [adapter.saved[name].name for name in names if name in adapter.saved]:
            expected = f"the values of the adapter's tensor {summarize(saved)}"
        else:
            expected = "the bits of the base, since the adapter does not change this weight"
            hint = "pass the base that the adapter was merged into as --source"
        yield Issue(expected, actual, hint, names=names)


def _is_trained(wrong: Mapping[str, TensorDiff], values: Values) -> bool:
    """Whether most matrices of most kinds differ, each by as little as after training."""
    matrices = [name for name, one in values.stats.items() if one.rows > 1 and name in values.compared]
    moved = [name for name in matrices if name in wrong]
    kinds, moved_kinds = ({pattern_of(name) for name in names} for names in (matrices, moved))
    is_most = 2 * len(moved) > len(matrices) and len(moved_kinds) > max(_FEW, len(kinds) / 2)
    broken = any(_is_broken(values.stats[name]) for name in wrong)
    return is_most and not broken and all(one.same_shape and not one.unlike for one in wrong.values())


def _is_broken(stats: Extremes) -> bool:
    """Whether CK204 or CK205 reports it."""
    return stats.constant or not stats.finite


def _judged_by_steps(subject: Subject) -> Set[str]:
    """Weights of the source that are packed here, so that CK305 judges their rounding."""
    if subject.kind == "megatron" or subject.source is None or is_quantized(subject.source.config):
        return frozenset()
    if int4_format_of(subject.checkpoint.config) is None:
        return frozenset()
    return {f"{module}.weight" for module in packed_in(subject.checkpoint.specs)} & {*read_values(subject).only_source}


def _repeated_head(subject: Subject) -> frozenset[str]:
    """The tied output layer if only one side stores it: the source's must repeat the embedding, CK211 judges ours."""
    tied, values, source = tied_head_of(subject), read_values(subject), subject.source
    if tied is None or source is None or tied[0] not in (*values.only_here, *values.only_source):
        return frozenset()
    if tied[0] in values.only_source:
        stored = source.read(tied)
        if not same_bytes(stored[tied[0]], stored[tied[1]]):
            return frozenset()
    return frozenset(tied[:1])


def _origin_of(subject: Subject, name: str) -> str | None:
    """The other source tensor with the values of this one, if any."""
    values = read_values(subject)
    stats, same_shape = values.stats[name], values.differences[name].same_shape
    origin = None if _is_broken(stats) or not same_shape else values.source_names.get(stats.digest)
    return None if origin == name else origin


def _describe_worst(names: Sequence[str], wrong: Mapping[str, TensorDiff], values: Values) -> tuple[str, str]:
    """The tensor with the largest difference, and a description of that."""
    worst = max(names, key=lambda name: wrong[name].largest)
    difference, stats, where = wrong[worst], values.stats[worst], f" in {worst}" if len(names) > 1 else ""
    if not difference.same_shape:
        return worst, f"shape {list(difference.actual.shape)}, but {list(difference.source.shape)} in the source"
    rows = f", {difference.rows}" if difference.rows else ""
    by = f"by up to {difference.largest:.3g}" if stats.finite else "with NaN or infinity among them"
    constant = f"all {stats.low:g}: ".replace("all 0:", "all zero:") if stats.constant else ""
    if difference.shift and not stats.constant:
        more = "more" if difference.shift > 0 else "less"
        norms = "like a norm that multiplies by w instead of 1 + w, or the reverse"
        return worst, f"each element is 1 {more} than the source's{where}, {norms}"
    return worst, f"{constant}{difference.unequal} of {difference.elements} elements differ{where}{rows}, {by}"


@check("CK203", needs=("source",))
def dtypes_kept(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Each change of dtype: an error for an illegal one and for rounded fp32 state, else a warning."""
    values, quantized = read_values(subject), float_weights(subject).judged
    require_some(result, values.compared, "not run because no tensor was compared with the source (CK201, CK202)")
    fp32 = fp32_names(config_or_none(subject))
    changed = by_key(
        ((one.source.dtype, one.actual.dtype, name in fp32), name)
        for name, one in values.differences.items()
        if one.source.dtype != one.actual.dtype and name not in quantized
    )
    for (before, after, is_state), group in changed.items():
        # Only floats of at least 16 bits may change, and fp32 state only to a wider one.
        is_legal = {before, after} <= _FLOATS and not (is_state and ITEMSIZE[after] < ITEMSIZE[before])
        for names in group_by_pattern(group):
            lost = ", {} distinct values became {} in {}".format(*values.differences[names[0]].distinct, names[0])
            yield Issue(before, after + lost * (is_state and not is_legal), names=names, severity=warning_if(is_legal))


@check("CK216", needs=("source",), explained_by=("CK124", "CK204", "CK205", "CK702"), applies_to=_was_trained)
def moved_by_training(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Names and shapes are the source's, and values moved by little. Unmoved tensors are a note, or all a warning."""
    values, differing = _compared(subject, result)
    yield from names_of_one_side(subject)
    for name, one in differing.items():
        if not one.same_shape:
            yield Issue(f"shape {list(one.source.shape)}", f"shape {list(one.actual.shape)}", names=[name])
    moved = list(other_places(subject, differing))
    yield from moved
    placed = {name for one in moved for name in one.names or ()}
    left = {name: one for name, one in differing.items() if name not in placed and one.same_shape}
    indices = (expected_of(subject) or Expected({})).indices
    has_codes = is_quantized(config_or_none(subject) or {})
    names = [
        name
        for name, one in left.items()
        if name in indices
        or name.endswith("inv_freq")
        or not (has_codes or name.endswith("num_batches_tracked") or one.source.dtype in _FLOATS)
    ]
    hint = f"{_SAVE_AGAIN}, with the release's values of this tensor"
    yield Issue("the source's values, since training does not change them", "other values", hint, names=names)
    yield from _unlike(left, values)
    floats = [name for name, one in values.stats.items() if name in values.compared and one.rms and not one.constant]
    still = [name for name in floats if name not in values.differences or not values.differences[name].unequal]
    if still and len(still) < len(floats):
        result.note(f"training did not change {len(still)} of {len(floats)} tensors: {summarize(still)}")
    elif still:
        actual = f"all {len(still)} tensors have the source's bits, so nothing was trained"
        hint = "pass the checkpoint that training wrote, or leave out --trained"
        yield Issue("values that training changed", actual, hint, severity="warning")


def _unlike(differing: Mapping[str, TensorDiff], values: Values) -> Iterator[Issue]:
    """Matrices with rows that differ more from the source's than by training."""
    shares = {
        name: one.unlike / max(1, stats.rows)
        for name, one in differing.items()
        if (stats := values.stats[name]).finite and not stats.constant and stats.rows > 1
    }
    limits = {name: _NEW_WORDS if name.endswith(VOCABULARY) else _NEW_ROWS for name in shares}
    odd = {name: share for name, share in shares.items() if share > limits[name]}
    if not odd:
        return
    expected = "rows near the source's, since training changes them little"
    if median(shares.values()) > _NEW_ROWS:
        actual = f"{len(odd)} of {len(shares)} changed matrices have nothing in common with the source's"
        hint = "pass the release that training started from as --source"
        yield Issue(expected, f"{actual}, so this is another model", hint, names=odd, as_one=True)
        return
    hint = f"{_SAVE_AGAIN}: the values belong to another tensor, are in another order, or are newly initialized"
    for names in group_by_pattern(odd):
        worst = max(names, key=lambda name: odd[name])
        one, where = differing[worst], f" of {worst}" if len(names) > 1 else ""
        rows = f"{one.unlike} of {values.stats[worst].rows} rows{where}"
        rows += f" ({one.unlike_rows})" if one.unlike_rows else ""
        yield Issue(expected, f"{rows} have little in common with the source's", hint, names=names)
