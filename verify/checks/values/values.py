"""CK201, CK204 to CK211 and CK215: checks of the bytes that need no source. Everything is read once, streamed.

Tensors that may be constant in a sound model, also before training:
- biases: zeros. If other layers have other values it is a warning, as for all layers of a router's selection bias,
  which training changes, in a trained model (by its norms).
- norm weights: ones or, if the class multiplies by 1 + w, zeros. Other constants are a warning, other zeros an error.
- other vectors: a constant that all layers share; after training it is a warning.
- a single number: any but zero.
- matrices: only a few that their class initializes so (`verify/quirks`); in all other ones it is an error.
Rows of zeros inside a matrix are a warning (a hole in a file, or a dead neuron), except in the vocabulary's matrices.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from pathlib import Path

from ckptkit.converters.planner import dims_of, rules_of
from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import ranges
from ckptkit.formats import yaml_text
from ckptkit.quant.formats.floats.layout import SCALE_ENDINGS
from ckptkit.quant.formats.part_names import INT4_PARTS, WEIGHT_PACKED
from ckptkit.storage.regular import read_regular
from ckptkit.verify.core.check import CannotCheck, CheckResult, Issue, Severity, Subject, check, only_if, warning_if
from ckptkit.verify.evidence.expected import (
    Expected,
    config_or_none,
    expected_of,
    is_cache_scale,
    require_config,
    require_expected,
    tied_head_of,
)
from ckptkit.verify.evidence.extremes import Extremes
from ckptkit.verify.evidence.floats.stored import parts_in_floats, scales_in_floats
from ckptkit.verify.evidence.folding import by_key, group_by_pattern, layer_of, layers_of, pattern_of
from ckptkit.verify.evidence.moved import explain_repeats, stages_of
from ckptkit.verify.evidence.reading import Values, read_values
from ckptkit.verify.quirks import quirks

# The position in the file, in the message of a tensor that cannot be read.
_AT_BYTE = re.compile(r" at byte \d+(?=: )")
VOCABULARY = (
    *("embed_tokens.weight", "lm_head.weight", "word_embeddings.weight", "output_layer.weight"),
    *("embed.weight", "head.weight", "embed_tokens_per_layer.weight"),
)
_NORM = re.compile(r"norm|(?:^|[._])ln\d*(?:_\w+)?\.")  # `input_layernorm`, `ln_q`, `patch_ln1`
# The gated norm of linear attention: its HF class multiplies by w, the model's other norms by 1 + w.
_PLAIN_NORM = ".linear_attn.norm.weight"
# Endings of single numbers, and the infinities that clip nothing. Source: transformers, `Gemma4ClippableLinear`.
_UNCLIPPED = {"_min": -math.inf, "_max": math.inf}
_NONE_READ = "not run because no tensor can be read"
# Parts of quantized weights in addition to the codes.
PARTS = (*(part for part in INT4_PARTS if part != WEIGHT_PACKED), *SCALE_ENDINGS)
_SCALES = (*PARTS, ".k_zero_point", ".v_zero_point")
# mergekit writes it next to the weights. Source: mergekit `config.py`, `plan.py` and `merge.py`.
_MERGED, _MAX_LAYERS = "mergekit_config.yml", 10_000
_has_tables = only_if(lambda subject: _with_field(subject, "indices"), "the model has no table of experts")


def require_some(result: CheckResult, names: Sized, reason: str = _NONE_READ, *because: str) -> None:
    """Counts tensors, without their bytes. Raises CannotCheck without any, reported by CK201 or `because`."""
    if not len(names):
        raise CannotCheck(reason, *(because or ("CK201",)))
    result.compared(len(names))


def require_values(subject: Subject) -> Values:
    """The values of a checkpoint. Raises CannotCheck if no tensor can be read, which CK201 reports."""
    values = read_values(subject)
    if not values.stats:
        raise CannotCheck(_NONE_READ, "CK201")
    return values


@check("CK201", explained_by=("CK112", "CK117"))
def readable(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every tensor can be read. This pass also feeds the other CK2xx checks."""
    values, unreadable = read_values(subject).stats, read_values(subject).unreadable
    for stats in values.values():
        result.compared(nbytes=stats.nbytes)
    for names in by_key((_AT_BYTE.split(reason)[0], name) for name, reason in unreadable.items()).values():
        yield Issue("bytes that can be read", _AT_BYTE.sub("", unreadable[names[0]]), names=names, as_one=True)


@check("CK204", explained_by=("CK124",))
def finite(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """No NaN anywhere, and no infinity except bounds that clip no activations."""
    values = read_values(subject).stats
    require_some(result, values)
    wrong = [name for name, one in values.items() if not one.finite]
    wrong = [name for name in wrong if not values[name].low == values[name].high == _UNCLIPPED.get(name[-4:])]
    for names, is_shared in _split_by_source(wrong, read_values(subject)):
        hint = "convert again if the source is finite there"
        hint = "take the last good checkpoint of the run: the source has the same" if is_shared else hint
        yield Issue("finite values", "NaN or infinity", hint, names=names)


@check("CK205", explained_by=("CK124", "CK202"))
def not_constant(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Constants that training does not give; the module's docstring lists the exceptions."""
    values = read_values(subject).stats
    require_some(result, values)
    verdicts: dict[tuple[Severity, str], list[str]] = defaultdict(list)
    config = config_or_none(subject) or {}
    scales = scales_in_floats(subject)
    constant: list[str] = []
    for name, stats in values.items():
        if name in scales or name.endswith(_SCALES) or not stats.finite or not stats.rows:
            continue
        spec = subject.specs.get(name)  # None for an expert of a fused tensor
        one_number = is_cache_scale(name, config) or (spec is not None and math.prod(spec.shape) == 1)
        if stats.constant:
            counts = spec is not None and spec.dtype == "int64"  # for example batches in a norm
            constant += [] if one_number and (stats.low != 0 or counts) else [name]
        elif stats.zero_rows and not name.endswith((*VOCABULARY, "bias")):
            verdicts["warning", f"{stats.zero_rows} of {stats.rows} rows are all zero"].append(name)
    initial = frozenset(_initial(subject, values, constant)) if constant else ()
    for name in constant:
        if name in initial:
            continue
        number, is_norm = values[name].low, not name.endswith("bias") and _NORM.search(name)
        severity = warning_if(number != 0 if is_norm else _is_vector(name, values[name]))
        verdicts[severity, "all zero" if number == 0 else f"all {number:g}"].append(name)
    for (severity, actual), group in verdicts.items():
        for names, is_shared in _split_by_source(group, read_values(subject)):
            hint = "copy it from the release again: the hole that an interrupted copy leaves in a file reads as zeros"
            hint = "compare the source, which has the same, with its release" if is_shared else hint
            yield Issue("different values", actual, hint, names=names, severity=severity)


def _initial(subject: Subject, values: Mapping[str, Extremes], constant: Sequence[str]) -> Iterator[str]:
    """Those of the constant tensors that may have their initial values."""
    config = config_or_none(subject) or {}
    expected = expected_of(subject) or Expected({})
    norms = [stats.constant for name, stats in values.items() if _NORM.search(name)]
    untrained = 2 * sum(norms) > len(norms)
    varied = {pattern_of(name) for name, stats in values.items() if not stats.constant}
    filled = quirks("transformers", "constant")
    offset = bool(config) and dims_of(config).norm_offset
    for name in constant:
        number, same = values[name].low, pattern_of(name) not in varied
        if not name.endswith("bias") and _NORM.search(name):
            initial = number == 1 or (number == 0 and offset and not name.endswith(_PLAIN_NORM) and same and untrained)
        elif _is_vector(name, values[name]):
            initial = same and (untrained or (number == 0 and name.endswith("bias") and name not in expected.fp32))
        else:
            initial = same and untrained and any(known.is_about(name, config) for known in filled)
        if initial:
            yield name


def _is_vector(name: str, stats: Extremes) -> bool:
    """Whether the tensor has one axis, or is a bias, perhaps of all experts."""
    return stats.rows == 1 or name.endswith("bias")


def _split_by_source(names: Sequence[str], values: Values) -> Iterator[tuple[list[str], bool]]:
    """The tensors that are equal in the source, and True; those that are not, and False."""
    same = values.compared.keys() - {name for name, one in values.differences.items() if one.unequal}
    yield [name for name in names if name in same], True
    yield [name for name in names if name not in same], False


@check("CK206", explained_by=("CK202",))
def distinct(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """No two experts or layers have the same matrix, except copies by a merge; a warning if the source has them."""
    read = read_values(subject)
    values, same = read.stats, read.compared.keys() - read.differences.keys()
    require_some(result, values)
    excluded = (expected_of(subject) or Expected({})).indices | scales_in_floats(subject)
    matrices = (name for name, one in values.items() if one.rows > 1 and not one.constant and name not in excluded)
    kinds = {name: pattern_of(name) for name in matrices if not name.endswith(PARTS)}
    groups = by_key(((kind, values[name].digest), name) for name, kind in kinds.items() if kind != name)
    equal = [names for names in groups.values() if len(names) > 1]
    origins = _layer_origins(subject.config_root)
    if merged := layers_of(name for names in equal if _are_copies(names, origins) for name in names):
        result.note(f"layers {ranges(merged)} are copies of one another, which the merge in {_MERGED} made")
        equal = [names for names in equal if not _are_copies(names, origins)]
    for one in explain_repeats(equal, stages_of(subject)):
        text, hint = one.text, one.hint
        if is_same := same.issuperset(one.names):
            text, hint = f"as in the source, {text}", "ask the author of the source whether this is intended"
        severity = warning_if(is_same)
        yield Issue("different bytes in each layer and expert", text, hint, one.names, severity=severity, as_one=True)


def _layer_origins(root: Path) -> Sequence[tuple[str, int]]:
    """The model and layer that each layer is a copy of; empty without a passthrough merge."""
    origins: list[tuple[str, int]] = []
    try:
        content = yaml_text.values(yaml_text.parse(read_regular(root / _MERGED, yaml_text.MAX_BYTES).decode()))
        for one in content["slices"] if content["merge_method"] == "passthrough" else ():
            (source,) = one["sources"]
            first, end = source["layer_range"]
            if first < 0 or end > _MAX_LAYERS or len(origins) > _MAX_LAYERS:
                return ()
            origins += [(str(source["model"]), layer) for layer in range(first, end)]
    except (OSError, ValueError, TypeError, LookupError):
        return ()
    return origins


def _are_copies(names: Sequence[str], origins: Sequence[tuple[str, int]]) -> bool:
    """Whether these are one tensor in several layers, all copies of the same layer."""
    layers = layers_of(names)
    same = {name.replace(f".{layer_of(name)}.", ".#.", 1) for name in names}
    known = len(layers) == len(names) and len(same) == 1 and layers[-1] < len(origins)
    return known and len({origins[layer] for layer in layers}) == 1


def _has_tied_head(subject: Subject) -> bool:
    tied = tied_head_of(subject) if subject.kind == "hf" else None
    return tied is not None and tied[0] in subject.hf_files.specs


@check("CK211", applies_to=only_if(_has_tied_head, "no tied output layer is stored"))
def tied_head_repeats(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """`lm_head.weight` repeats the bytes of the embedding if config.json ties them."""
    tied = tied_head_of(subject)
    stats = read_values(subject).stats
    if tied is None or not stats.keys() >= set(tied):
        raise CannotCheck(_NONE_READ, "CK201")
    head, embedding = tied
    specs = subject.hf_files.specs
    result.compared(nbytes=stats[head].nbytes)
    if stats[head].digest != stats[embedding].digest or specs[head].dtype != specs[embedding].dtype:
        yield Issue(f"the bytes of {embedding}, since tie_word_embeddings is true", "different bytes", names=[head])


# Layers of trained models differ in size by less than 10 times; a lost or repeated scale gives 100 and more.
_FACTOR = 32.0
_SIBLINGS = 3  # fewer have no majority
# Weights of layers are below 1. FP8 codes without scales are about 100, and exponents read as numbers are larger.
_LARGEST = 64.0


@check("CK207")
def not_denormal(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The largest number of each nonzero tensor is at least 2**-126 (about 1.2e-38), as in all used weights."""
    stats = read_values(subject).stats
    require_some(result, stats)
    for names in group_by_pattern(name for name, one in stats.items() if one.finite and one.denormal):
        largest = max(max(abs(stats[name].low), abs(stats[name].high)) for name in names)
        yield Issue("a largest number of at least 1.2e-38", f"the largest number is {largest:.3g}", names=names)


@check("CK208", explained_by=("CK202", "CK204", "CK205"))
def no_outliers(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The root mean square of each matrix is within 32 times the median of the same matrix in other layers and experts.

    The median is at most 64, far above any trained model. It is a warning if the source has the same bits.
    """
    values = read_values(subject)
    require_some(result, values.stats)
    usable = [
        name
        for name, one in values.stats.items()
        if one.rows > 1 and one.finite and one.rms > 0 and not (one.constant or one.denormal or name.endswith(PARTS))
    ]
    codes = parts_in_floats(subject)
    kinds = by_key(((pattern_of(name), name in codes), name) for name in usable)
    kinds = {kind: names for kind, names in kinds.items() if len(names) >= _SIBLINGS}
    medians = {kind: statistics.median(values.stats[name].rms for name in names) for kind, names in kinds.items()}
    ratios = {name: values.stats[name].rms / medians[kind] for kind, names in kinds.items() for name in names}
    same = values.compared.keys() - values.differences.keys()
    expected = f"a root mean square within {_FACTOR:g} times the median of other layers and experts"
    odd = [name for name, ratio in ratios.items() if not 1 / _FACTOR <= ratio <= _FACTOR]
    groups = by_key((("large" if ratios[name] > 1 else "small", warning_if(name in same)), name) for name in odd)
    for (way, severity), group in groups.items():
        for names in group_by_pattern(group):
            worst = max(names, key=lambda name: abs(math.log(ratios[name])))
            times = ratios[worst] if way == "large" else 1 / ratios[worst]
            actual = f"{worst} is {times:.3g} times too {way} (root mean square {values.stats[worst].rms:.3g})"
            yield Issue(expected, actual, names=names, severity=severity)
    # Kinds with a median above that of any trained model have one cause; codes and tables are no weights.
    plain = [kind for kind, size in medians.items() if size > _LARGEST and not kind[1]]
    specs = {kind: subject.specs.get(kinds[kind][0]) for kind in plain}
    large = [kind for kind, spec in specs.items() if spec is None or spec.dtype in COMPUTED]
    names = [name for kind in large for name in kinds[kind]]
    actual = f"a root mean square of {max(map(medians.__getitem__, large), default=0):.3g}, the median of its kind"
    expected, severity = f"a root mean square of at most {_LARGEST:g}", warning_if(same.issuperset(names))
    yield Issue(expected, actual, names=names, severity=severity, as_one=True)


@check(
    "CK209", applies_to=only_if(lambda subject: subject.kind == "megatron", "HF checkpoints have no padded vocabulary")
)
def padding_zero(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Rows beyond vocab_size: an error in a converter's `release/`, a warning in a training checkpoint."""
    require_values(subject)
    expected = require_expected(subject)
    specs = subject.checkpoint.specs
    severity = warning_if(subject.megatron_files.weights.name != "release")
    for name in sorted(expected.vocab & specs.keys()):
        shape = expected.shapes[name] or ()
        rows = specs[name].shape[0] - shape[0]
        result.compared()
        with suppress(CkptkitError):  # CK201 reports a tensor that cannot be read
            if rows > 0 and (filled := int(subject.checkpoint.read([name])[name][shape[0] :].bool().any(dim=1).sum())):
                actual = f"{filled} of {rows} padded rows, from row {shape[0]} on, are not zero"
                yield Issue("zeros in rows that pad the vocabulary", actual, names=[name], severity=severity)


def _with_field(subject: Subject, field: str) -> set[str]:
    """HF and Megatron names, from `layers.` on, of the tensors that have this field in the family's mapping."""
    config = config_or_none(subject)
    rules = [rule for rule in rules_of(config) if getattr(rule.mapping, field)] if config else []
    return {_inside_model(name) for rule in rules for name in (*rule.hf, rule.megatron)}


def _inside_model(name: str) -> str:
    """The name without its beginning before `layers.`, which differs between releases."""
    return name[max(0, name.find("layers.")) :]


def _fp32_biases(subject: Subject) -> set[str]:
    return {name for name in _with_field(subject, "fp32") if "bias" in name}


@check("CK210", explained_by=("CK202",), applies_to=only_if(_fp32_biases, "the model has no bias that must be float32"))
def not_coarse(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """A float32 router bias has numbers that are not exact in bfloat16; a warning unless the source has the same."""
    values, names = read_values(subject), _fp32_biases(subject)
    biases = {name: one for name, one in values.stats.items() if _inside_model(name) in names}
    require_some(result, biases, f"{_NONE_READ}, or the biases are missing", "CK201", "CK104")
    same = values.compared.keys() - values.differences.keys()
    hint = "compare with the release: if it has other values, they were rounded to bfloat16 and stored as float32"
    coarse = [name for name, one in biases.items() if one.coarse and not one.constant and name not in same]
    yield Issue("values that need float32", "every value fits bfloat16", hint, names=coarse, severity="warning")


@check("CK215", applies_to=_has_tables)
def tables_name_experts(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every number is that of an expert, from 0 to the number of experts - 1."""
    names, experts = _with_field(subject, "indices"), dims_of(require_config(subject)).experts
    tables = {name: one for name, one in read_values(subject).stats.items() if _inside_model(name) in names}
    require_some(result, tables, f"{_NONE_READ}, or the tables are missing", "CK201", "CK104")
    for name, one in tables.items():
        if one.low < 0 or one.high >= experts:
            yield Issue(f"numbers from 0 to {experts - 1}", f"numbers from {one.low:g} to {one.high:g}", names=[name])
