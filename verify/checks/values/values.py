"""CK201 and CK204 to CK206: what the bytes tell without a source. Everything is read once, streamed.

Which tensors may be constant, so that a model before its training raises no false alarm:
- biases: every framework begins with zeros. Zeros in some layers are a warning where other layers have other values. So
  are zeros in all layers of a router's selection bias, which training moves, if most norms show that training ran.
- norm weights: training begins with ones or, in a class that multiplies by 1 + w, with zeros. Other constants are a
  warning, zeros anywhere else an error.
- other vectors: a constant that all layers share is an initial value; after training it is a warning.
- a single number: any but zero.
- matrices: never, but for a few that their class begins with (`_FILLED`). Initialization is random, and nothing makes a
  trained matrix constant, so it is an error.
Rows of zeros inside a matrix are a warning (a hole in a file, or a dead neuron), and normal in the vocabulary's
matrices.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path

from ckptkit.core.specs import ranges
from ckptkit.formats import yaml_text
from ckptkit.storage.regular import read_regular
from converters.planner import dims_of
from quant.formats.floats.layout import SCALE_ENDINGS
from quant.formats.part_names import INT4_PARTS, WEIGHT_PACKED
from verify.check import Skip, Tally, check, without
from verify.evidence.expected import Expected, expected_of, is_cache_scale, tied_head_of, usable_config
from verify.evidence.extremes import Extremes
from verify.evidence.floats.stored import scales_in_floats
from verify.evidence.folding import layer_of, layers_of, pattern_of
from verify.evidence.moved import repeated, stages_of
from verify.evidence.reading import Values, read_values
from verify.evidence.subject import Subject
from verify.issue import Issue, warning_if
from verify.report import Severity

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
# Matrices that a class begins with as a constant, by the start of its model_type. Source: transformers 5.12, their
# `_init_weights`, and `Ernie4_5_MoeTopKRouter`.
_FILLED: Mapping[str, tuple[str, ...]] = {
    "deepseek_v4": (".tid2eid", ".ape"),
    "ernie4_5_moe": (".mlp.gate.weight",),
    "gemma3": (".mm_input_projection_weight",),
    "gemma4": (".position_embedding_table",),
}
# Ends of names of single numbers, and the infinity that leaves activations unclipped. Source: transformers,
# `Gemma4ClippableLinear`.
_UNCLIPPED = {"_min": -math.inf, "_max": math.inf}

_SHARED = "the source holds the same: compare that with the release that it was made from"
_LOST = "copy it from the release again; a hole in a file, as after an interrupted copy, reads as zeros"
_FINITE_SOURCE = "look at the source: if it is finite there, convert again"

UNREAD = "not run because no tensor can be read (CK201)"
# What stands beside the words of quantized weights.
PARTS = (*(part for part in INT4_PARTS if part != WEIGHT_PACKED), *SCALE_ENDINGS)
_SCALES = (*PARTS, ".k_zero_point", ".v_zero_point")


def counted(tally: Tally, names: Sized, none: str) -> None:
    """Counts tensors whose bytes CK201 or CK202 has counted. Raises Skip, saying `none`, where there are none."""
    if not len(names):
        raise Skip(none)
    tally.tensors += len(names)


@check(
    "CK201",
    "every tensor can be read",
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
        yield Issue("bytes that can be read", _AT_BYTE.sub("", unreadable[names[0]]), names=names, together=True)


@check(
    "CK204",
    "every value is finite",
    explained_by=("CK124",),
    rationale="One NaN or infinity in a weight makes every token after it NaN.",
    fix="Find the last good checkpoint of the run; or copy the file again, if the source is finite.",
)
def finite(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """No NaN anywhere, and no infinity but that of a bound which leaves activations unclipped."""
    values = subject.once(read_values).stats
    counted(tally, values, UNREAD)
    wrong = [name for name, one in values.items() if not one.finite]
    wrong = [name for name in wrong if not values[name].low == values[name].high == _UNCLIPPED.get(name[-4:])]
    for names, shared in _by_source(wrong, subject.once(read_values)):
        hint = "find the last good checkpoint of the run: the source holds the same" if shared else _FINITE_SOURCE
        yield Issue("finite values", "NaN or infinity", hint, names=names)


@check(
    "CK205",
    "no tensor is all zero or constant",
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
        for names, shared in _by_source(found, subject.once(read_values)):
            hint = _SHARED if shared else _LOST
            yield Issue("values that vary", actual, hint, names=names, severity=severity)


def _initial(subject: Subject, values: Mapping[str, Extremes], constant: Sequence[str]) -> Iterator[str]:
    """The tensors that training may begin with as a constant."""
    config = usable_config(subject) or {}
    expected = subject.once(expected_of) or Expected({})
    norms = [stats.constant for name, stats in values.items() if _NORM.search(name)]
    untrained = 2 * sum(norms) > len(norms)
    varied = {pattern_of(name) for name, stats in values.items() if not stats.constant}
    filled = next((ends for kind, ends in _FILLED.items() if str(config.get("model_type")).startswith(kind)), ())
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
            initial = same and untrained and name.endswith(filled)
        if initial:
            yield name


def _is_vector(name: str, stats: Extremes) -> bool:
    """Whether it has one axis, or is a bias: those of all experts may be stored together."""
    return stats.rows == 1 or name.endswith("bias")


def _differs(values: Values, name: str) -> bool:
    difference = values.differences.get(name)
    return difference is not None and difference.unequal > 0


def _by_source(found: Sequence[str], values: Values) -> Iterator[tuple[list[str], bool]]:
    """The tensors that a source shares, and the others; and whether it does."""
    shared = {name: None for name in found if name in values.compared and not _differs(values, name)}
    own = [name for name in found if name not in shared]
    if shared:
        yield list(shared), True
    if own:
        yield own, False


@check(
    "CK206",
    "experts and layers differ from one another",
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
    origins = _layer_origins(subject.config_root)
    if merged := layers_of(name for found in equal if _are_copies(found, origins) for name in found):
        tally.note(f"layers {ranges(merged)} repeat one another, as {_MERGED} says of the merge that made them")
        equal = [found for found in equal if not _are_copies(found, origins)]
    for one in repeated(equal, subject.once(stages_of)):
        expected, text, hint = "bytes of its own for each layer and expert", one.text, one.hint
        if is_same := same.issuperset(one.names):
            text, hint = f"as in the source, {text}", "ask whoever made the source whether that is meant"
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


def _second_head(subject: Subject) -> bool:
    """Whether an output layer is stored besides the embedding that it is tied to."""
    tied = tied_head_of(subject) if subject.is_hf else None
    return tied is not None and tied[0] in subject.hf_files.specs


@check(
    "CK211",
    "a tied output layer repeats the embedding",
    rationale="Where tie_word_embeddings is true, Megatron and most engines use the embedding and never read lm_head; "
    "some readers load both as they are.",
    fix="Compare with the release. Set tie_word_embeddings to false for a model with an output layer of its own; "
    "restore the tensor that is stale otherwise.",
    unless=without(_second_head, "no output layer is stored beside tied embeddings"),
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
        expected = f"the bytes of {embedding}: tie_word_embeddings is true"
        yield Issue(expected, "different bytes", names=[head])
