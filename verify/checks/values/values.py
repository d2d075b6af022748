"""CK201, CK204 to CK211 and CK215: what the bytes tell without a source. Everything is read once, streamed.

Which tensors may be constant, so that a model before its training raises no false alarm:
- biases: every framework begins with zeros. Zeros in some layers are a warning where other layers have other values. So
  are zeros in all layers of a router's selection bias, which training moves, if most norms show that training ran.
- norm weights: training begins with ones or, in a class that multiplies by 1 + w, with zeros. Other constants are a
  warning, zeros anywhere else an error.
- other vectors: a constant that all layers share is an initial value; after training it is a warning.
- a single number: any but zero.
- matrices: never, but for a few that their class begins with (`verify/quirks`). Initialization is random, and nothing
  makes a trained matrix constant, so it is an error.
Rows of zeros inside a matrix are a warning (a hole in a file, or a dead neuron), and normal in the vocabulary's
matrices.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
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
from ckptkit.verify.core.check import Tally, check, where
from ckptkit.verify.core.issue import Issue, warning_if
from ckptkit.verify.core.report import Severity
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject
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

# Where in its file a tensor lies, in the message that says why it cannot be read.
_AT_BYTE = re.compile(r" at byte \d+(?=: )")
VOCABULARY = (
    *("embed_tokens.weight", "lm_head.weight", "word_embeddings.weight", "output_layer.weight"),
    *("embed.weight", "head.weight", "embed_tokens_per_layer.weight"),
)
# Norms by their names: `input_layernorm`, `ln_q`, `patch_ln1`.
_NORM = re.compile(r"norm|(?:^|[._])ln\d*(?:_\w+)?\.")
# The gated norm of linear attention, whose HF class multiplies by w where the model's other norms multiply by 1 + w.
_PLAIN_NORM = ".linear_attn.norm.weight"
# Ends of names of single numbers, and the infinity that leaves activations unclipped. Source: transformers,
# `Gemma4ClippableLinear`.
_UNCLIPPED = {"_min": -math.inf, "_max": math.inf}

_SHARED = "the source holds the same: compare that with the release that it was made from"
_LOST = "copy it from the release again; a hole in a file, as after an interrupted copy, reads as zeros"
_FINITE_SOURCE = "look at the source: if it is finite there, convert again"

_NONE_READ = "not run because no tensor can be read"
# What stands beside the words of quantized weights.
PARTS = (*(part for part in INT4_PARTS if part != WEIGHT_PACKED), *SCALE_ENDINGS)
_SCALES = (*PARTS, ".k_zero_point", ".v_zero_point")


def counted(tally: Tally, names: Sized, none: str = _NONE_READ, *because: str) -> None:
    """Counts tensors whose bytes CK201 or CK202 has counted. Raises CannotCheck where there are none, which CK201 says.

    `none` and `because` are the words and codes where others say it.
    """
    if not len(names):
        raise CannotCheck(none, *(because or ("CK201",)))
    tally.compared(len(names))


def require_values(subject: Subject) -> Values:
    """The values of a checkpoint. Raises CannotCheck where no tensor can be read, which CK201 says."""
    values = read_values(subject)
    if not values.stats:
        raise CannotCheck(_NONE_READ, "CK201")
    return values


@check("CK201", explained_by=("CK112", "CK117"))
def readable(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every tensor is read once; this pass also feeds the other CK2xx checks."""
    values, unreadable = read_values(subject).stats, read_values(subject).unreadable
    for stats in values.values():
        tally.compared(nbytes=stats.nbytes)
    for names in by_key((_AT_BYTE.split(reason)[0], name) for name, reason in unreadable.items()).values():
        yield Issue("bytes that can be read", _AT_BYTE.sub("", unreadable[names[0]]), names=names, together=True)


@check("CK204", explained_by=("CK124",))
def finite(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """No NaN anywhere, and no infinity but that of a bound which leaves activations unclipped."""
    values = read_values(subject).stats
    counted(tally, values)
    wrong = [name for name, one in values.items() if not one.finite]
    wrong = [name for name in wrong if not values[name].low == values[name].high == _UNCLIPPED.get(name[-4:])]
    for names, shared in _by_source(wrong, read_values(subject)):
        hint = "find the last good checkpoint of the run: the source holds the same" if shared else _FINITE_SOURCE
        yield Issue("finite values", "NaN or infinity", hint, names=names)


@check("CK205", explained_by=("CK124", "CK202"))
def not_constant(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Constants that no training makes; the module's first lines say which may be."""
    values = read_values(subject).stats
    counted(tally, values)
    verdicts: dict[tuple[Severity, str], list[str]] = defaultdict(list)
    config = config_or_none(subject) or {}
    scales = scales_in_floats(subject)
    constant: list[str] = []
    for name, stats in values.items():
        if name in scales or name.endswith(_SCALES) or not stats.finite or not stats.rows:
            continue
        spec = subject.specs.get(name)  # None of an expert that is stored with the others
        one_number = is_cache_scale(name, config) or (spec is not None and math.prod(spec.shape) == 1)
        if stats.constant:
            counts = spec is not None and spec.dtype == "int64"  # such as the batches that a norm has seen
            constant += [] if one_number and (stats.low != 0 or counts) else [name]
        elif stats.zero_rows and not name.endswith((*VOCABULARY, "bias")):
            verdicts["warning", f"{stats.zero_rows} of {stats.rows} rows are all zero"].append(name)
    initial = frozenset(_initial(subject, values, constant)) if constant else ()
    for name in constant:
        if name in initial:
            continue
        number = values[name].low
        if not name.endswith("bias") and _NORM.search(name):
            severity = warning_if(number != 0)
        else:
            severity = warning_if(_is_vector(name, values[name]))
        verdicts[severity, "all zero" if number == 0 else f"all {number:g}"].append(name)
    for (severity, actual), found in verdicts.items():
        for names, shared in _by_source(found, read_values(subject)):
            hint = _SHARED if shared else _LOST
            yield Issue("values that vary", actual, hint, names=names, severity=severity)


def _initial(subject: Subject, values: Mapping[str, Extremes], constant: Sequence[str]) -> Iterator[str]:
    """The tensors that training may begin with as a constant."""
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
            around_zero = offset and not name.endswith(_PLAIN_NORM)
            initial = number == 1 or (number == 0 and around_zero and same and untrained)
        elif _is_vector(name, values[name]):
            bias = number == 0 and name.endswith("bias") and name not in expected.fp32
            initial = same and (untrained or bias)
        else:
            initial = same and untrained and any(known.is_about(name, config) for known in filled)
        if initial:
            yield name


def _is_vector(name: str, stats: Extremes) -> bool:
    """Whether it has one axis, or is a bias: those of all experts may be stored together."""
    return stats.rows == 1 or name.endswith("bias")


def _by_source(found: Sequence[str], values: Values) -> Iterator[tuple[list[str], bool]]:
    """The tensors that a source shares, and the others; and whether it does."""
    same = values.compared.keys() - {name for name, one in values.differences.items() if one.unequal}
    yield [name for name in found if name in same], True
    yield [name for name in found if name not in same], False


@check("CK206", explained_by=("CK202",))
def distinct(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """By digest: no two experts of a layer and no two layers hold the same matrix, but those that a merge repeated.

    It is only a warning where the source holds the same bits: then the source is to be asked.
    """
    read = read_values(subject)
    values, same = read.stats, read.compared.keys() - read.differences.keys()
    counted(tally, values)
    others = (expected_of(subject) or Expected({})).indices | scales_in_floats(subject)
    matrices = (name for name, one in values.items() if one.rows > 1 and not one.constant and name not in others)
    kinds = {name: pattern_of(name) for name in matrices if not name.endswith(PARTS)}
    groups = by_key(((kind, values[name].digest), name) for name, kind in kinds.items() if kind != name)
    equal = [found for found in groups.values() if len(found) > 1]
    origins = _layer_origins(subject.config_root)
    if merged := layers_of(name for found in equal if _are_copies(found, origins) for name in found):
        tally.note(f"layers {ranges(merged)} repeat one another, as {_MERGED} says of the merge that made them")
        equal = [found for found in equal if not _are_copies(found, origins)]
    for one in explain_repeats(equal, stages_of(subject)):
        expected, text, hint = "bytes of its own for each layer and expert", one.text, one.hint
        if is_same := same.issuperset(one.names):
            text, hint = f"as in the source, {text}", "ask the author of the source whether that is intended"
        yield Issue(expected, text, hint, names=one.names, together=True, severity=warning_if(is_same))


# Of mergekit, which writes it beside the weights. Source: mergekit `config.py`, `plan.py` and `merge.py`.
_MERGED, _MAX_LAYERS = "mergekit_config.yml", 10_000


def _layer_origins(root: Path) -> Sequence[tuple[str, int]]:
    """Model and layer that each layer was copied from; none where no passthrough merge is written down."""
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
    """Whether these are one tensor of several layers, all copied from the same layer."""
    layers = layers_of(names)
    same = {name.replace(f".{layer_of(name)}.", ".#.", 1) for name in names}
    known = len(layers) == len(names) and len(same) == 1 and layers[-1] < len(origins)
    return known and len({origins[layer] for layer in layers}) == 1


@check(
    "CK211",
    applies_to=where(
        lambda here: here.is_hf and (tied := tied_head_of(here)) and tied[0] in here.hf_files.specs,
        "no output layer is stored with tied embeddings",
    ),
)
def tied_head_repeats(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """`lm_head.weight` and the embedding are the same bytes, where config.json ties them and both are stored."""
    tied = tied_head_of(subject)
    stats = read_values(subject).stats
    if tied is None or not stats.keys() >= set(tied):
        raise CannotCheck(_NONE_READ, "CK201")
    head, embedding = tied
    specs = subject.hf_files.specs
    tally.compared(nbytes=stats[head].nbytes)
    if stats[head].digest != stats[embedding].digest or specs[head].dtype != specs[embedding].dtype:
        expected = f"the bytes of {embedding}: tie_word_embeddings is true"
        yield Issue(expected, "different bytes", names=[head])


# The layers of trained models differ in size by less than 10 times; a scale lost or applied twice is 100 and more.
_FACTOR = 32.0
_SIBLINGS = 3  # fewer have no majority
# Weights of layers are below 1. FP8 codes without their scales are about 100, bytes of exponents taken for scales more.
_LARGEST = 64.0


@check("CK207")
def not_denormal(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Some number of each tensor that is not zero is at least 2**-126 (about 1.2e-38), as every weight in use is."""
    stats = read_values(subject).stats
    counted(tally, stats)
    for names in group_by_pattern(name for name, one in stats.items() if one.finite and one.denormal):
        largest = max(max(abs(stats[name].low), abs(stats[name].high)) for name in names)
        yield Issue("values of at least 1.2e-38", f"the largest is {largest:.3g}", names=names)


@check("CK208", explained_by=("CK202", "CK204", "CK205"))
def no_outliers(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The root mean square of each matrix is within 32 times the median of the same matrix in other layers and experts.

    And that median is at most 64, which no trained model comes near. It is only a warning where the source holds the
    same bits: then the source is to be asked.
    """
    values = read_values(subject)
    counted(tally, values.stats)
    kinds = _kinds(values.stats, parts_in_floats(subject))
    medians = {kind: statistics.median(values.stats[name].rms for name in names) for kind, names in kinds.items()}
    ratios = {name: values.stats[name].rms / medians[kind] for kind, names in kinds.items() for name in names}
    same = values.compared.keys() - values.differences.keys()
    wanted = f"a root mean square within {_FACTOR:g} times the median of its siblings"
    odd = [name for name, ratio in ratios.items() if not 1 / _FACTOR <= ratio <= _FACTOR]
    groups = by_key((("large" if ratios[name] > 1 else "small", warning_if(name in same)), name) for name in odd)
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
    usable = [
        name
        for name, one in stats.items()
        if one.rows > 1 and one.finite and one.rms > 0 and not (one.constant or one.denormal or name.endswith(PARTS))
    ]
    kinds = by_key(((pattern_of(name), name in codes), name) for name in usable)
    return {kind: names for kind, names in kinds.items() if len(names) >= _SIBLINGS}


@check("CK209", applies_to=where(lambda subject: subject.is_megatron, "an HF checkpoint has no padded vocabulary"))
def padding_zero(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Rows beyond vocab_size: an error in `release/`, which a converter wrote, a warning in what training saved."""
    require_values(subject)
    expected = require_expected(subject)
    specs = subject.checkpoint.specs
    severity = warning_if(subject.megatron_files.weights.name != "release")
    for name in sorted(expected.vocab & specs.keys()):
        shape = expected.shapes[name] or ()
        rows = specs[name].shape[0] - shape[0]
        tally.compared()
        # What cannot be read is for CK201 to say.
        with suppress(CkptkitError):
            filled = int(subject.checkpoint.read([name])[name][shape[0] :].bool().any(dim=1).sum()) if rows > 0 else 0
            if filled:
                actual = f"{filled} of {rows} rows from row {shape[0]} on are not zero"
                yield Issue("rows of zeros beyond the vocabulary", actual, names=[name], severity=severity)


def _named(subject: Subject, field: str) -> set[str]:
    """Tensors of mappings with this field, by their HF and Megatron names from `layers.` on; empty without a config."""
    config = config_or_none(subject)
    rules = [rule for rule in rules_of(config) if getattr(rule.mapping, field)] if config else []
    return {_inside_model(name) for rule in rules for name in (*rule.hf, rule.megatron)}


def _inside_model(name: str) -> str:
    """A name without the part before `layers.`, which releases of one model spell in several ways."""
    return name[max(0, name.find("layers.")) :]


def _fp32_biases(subject: Subject) -> set[str]:
    """Biases that must be kept in float32."""
    return {name for name in _named(subject, "fp32") if "bias" in name}


@check("CK210", explained_by=("CK202",), applies_to=where(_fp32_biases, "the model has no bias that must be float32"))
def not_coarse(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Not every number of a float32 router bias is one of bfloat16 too, which happens by chance once in 65536 for each.

    A warning, since some releases have such biases. Where the source holds the same bits there is no finding; CK205
    judges constant ones.
    """
    values, biases = read_values(subject), _fp32_biases(subject)
    looked_at = {name: one for name, one in values.stats.items() if _inside_model(name) in biases}
    counted(tally, looked_at, f"{_NONE_READ}, or none of these biases is there", "CK201", "CK104")
    same = values.compared.keys() - values.differences.keys()
    hint = "compare with the release: unless it is so there, it was rounded to bfloat16 and stored as float32 again"
    names = [name for name, one in looked_at.items() if one.coarse and not one.constant and name not in same]
    yield Issue("values that need float32", "every value is exact in bfloat16", hint, names=names, severity="warning")


@check("CK215", applies_to=where(lambda subject: _named(subject, "indices"), "the model has no table of experts"))
def tables_name_experts(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every number is that of an expert: from 0 to one less than there are."""
    values, tables = read_values(subject), _named(subject, "indices")
    looked_at = {name: one for name, one in values.stats.items() if _inside_model(name) in tables}
    counted(tally, looked_at, f"{_NONE_READ}, or none of these tables is there", "CK201", "CK104")
    experts = dims_of(require_config(subject)).experts
    for name, one in looked_at.items():
        if one.low < 0 or one.high >= experts:
            yield Issue(f"numbers from 0 to {experts - 1}", f"{one.low:g} to {one.high:g}", names=[name])
