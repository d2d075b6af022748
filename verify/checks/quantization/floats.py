"""What CK301, CK303, CK304, CK306 and CK308 find of weights in 8-bit and 4-bit floats, in every format that is read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ckptkit.core.dtypes import COMPUTED
from ckptkit.formats.hf.side_files import quantization_of
from converters.hf_names import FUSED
from quant.formats.floats.layout import E4M3
from quant.formats.part_names import INT4_ENDINGS
from quant.formats.release import Floats, StoredWeight, wrong_scale
from verify.check import Tally
from verify.checks.headers.files import names_of
from verify.evidence.expected import usable_config
from verify.evidence.extremes import same_bytes
from verify.evidence.floats.stored import FloatScales, float_scales_of, stored_floats_of
from verify.evidence.folding import group_by_pattern
from verify.evidence.subject import Subject
from verify.issue import Issue

_AGAIN = "quantize again from the release, or copy the file again if the release is sound"
_PLAIN = (*COMPUTED, "float64", "int64", "int32", "bool")
_FEW = 200  # of so many groups of NVFP4, one may be too small for a scale
# How far apart the scales of one layer's activations may be.
_APART = 1e3


def has_floats(subject: Subject) -> bool:
    """Whether weights are stored in floats of 8 or 4 bits, in a format that is read."""
    found = subject.once(stored_floats_of)
    return found is not None and bool(found[1])


def _stored(subject: Subject) -> tuple[Floats, list[StoredWeight]]:
    found = subject.once(stored_floats_of)
    return found if found is not None else (Floats(()), [])


def short(stored: StoredWeight) -> str:
    """The name of its format: FP8, MXFP8, MXFP4, NVFP4."""
    return stored.layout.words.partition(" ")[0]


def forbidden_floats(subject: Subject, forbidden: Mapping[str, str], tally: Tally) -> Iterator[Issue]:
    """Weights of `forbidden` modules (and what each is) that are stored in floats of 8 or 4 bits."""
    floats, weights = _stored(subject)
    wrong: dict[tuple[str, str], list[str]] = defaultdict(list)
    for stored in weights:
        tally.compared(0)
        module = stored.name.removesuffix(".weight")
        asked = module == "lm_head" and floats.of_module is not None and floats.of_module(module) is not None
        if module in forbidden and not asked:
            wrong[forbidden[module], short(stored)].append(stored.codes.name)
    for (what, form), names in wrong.items():
        hint = "take it in BF16 from the release; no engine has a quantized one"
        yield Issue(f"{what} unquantized", f"stored in {form}", hint, names=names, file=subject.path)


@dataclass(frozen=True)
class _Wrong:
    """What part should be how, what is there instead, and the next move."""

    expected: str
    actual: str
    hint: str


def float_parts(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every part of each weight by headers: there, of its shape and dtype; and no part without a weight.

    A name that the index lists and no shard holds is CK104's.
    """
    floats, weights = _stored(subject)
    specs, files = subject.hf_files.specs, subject.hf_files
    listed = {*names_of(subject, listed=True), *(files.index or {})}
    wrong: dict[_Wrong, list[str]] = defaultdict(list)
    taken: set[str] = set()
    for stored in weights:
        tally.compared(0)
        taken |= {*stored.needed, *stored.inputs}
        for name, one in (*_wrong_parts(stored, subject, listed), *_otherwise_stated(stored, floats)):
            wrong[one].append(name)
    for one, names in wrong.items():
        yield Issue(one.expected, one.actual, one.hint, names=names, file=subject.path)
    yield from _missing_inputs(subject, weights, listed)
    if usable_config(subject) is None:  # otherwise CK104 knows which names belong
        orphans = [name for name in specs if name.endswith(floats.parts) and name not in taken]
        yield Issue("a quantized weight beside its scale", "no such weight", _AGAIN, names=orphans, file=subject.path)
    others: dict[str, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        if spec.dtype not in _PLAIN and name not in taken and not name.endswith((*floats.parts, *INT4_ENDINGS)):
            others[spec.dtype].append(name)
    for dtype, names in others.items():
        hint = "config.json belongs to other weights, or states another format: restore it"
        yield Issue(f"codes or scales of {floats.words}", dtype, hint, names=names, file=subject.path)


def _wrong_parts(stored: StoredWeight, subject: Subject, listed: Collection[str]) -> Iterator[tuple[str, _Wrong]]:
    specs, form = subject.hf_files.specs, short(stored)
    if stored.shape is None:
        yield stored.codes.name, _Wrong("codes of a matrix", str(list(stored.codes.shape)), _AGAIN)
        return
    without = f"{form} weights without"
    silent = "engines do not notice: SGLang and vLLM multiply by what the parameter held, 1.0 or memory nobody wrote"
    if stored.scale not in specs:
        if stored.scale not in listed:
            ending = stored.scale.rpartition(".")[2]
            yield stored.codes.name, _Wrong(f"{ending} beside it", f"{without} a scale", f"{_AGAIN}; {silent}")
    elif (expected := wrong_scale(stored, specs)) is not None:
        spec = specs[stored.scale]
        yield (
            stored.scale,
            _Wrong(
                f"{expected}, by {stored.layout.words}",
                f"{list(spec.shape)} {spec.dtype}",
                _scale_hint(stored, subject),
            ),
        )
    if stored.second is None:
        return
    if stored.second not in specs:
        if stored.second not in listed:
            ending = stored.second.rpartition(".")[2]
            yield (
                stored.codes.name,
                _Wrong(f"{ending} beside it", f"{without} the tensor's scale", f"{_AGAIN}; {silent}"),
            )
        return
    spec = specs[stored.second]
    if spec.shape not in ((), (1,), stored.shape[:-2]) or spec.dtype != "float32":
        yield stored.second, _Wrong("[] float32", f"{list(spec.shape)} {spec.dtype}", _AGAIN)


def _otherwise_stated(stored: StoredWeight, floats: Floats) -> Iterator[tuple[str, _Wrong]]:
    """A weight in another format than config.json states for its own module, where it states several."""
    stated = None if floats.of_module is None else floats.of_module(stored.name.removesuffix(".weight"))
    if stated is not None and stated.words != stored.layout.words:
        hint = f"engines build the module by config.json, and load codes of another format into it: {_AGAIN}"
        yield (
            stored.codes.name,
            _Wrong(f"{stated.words}, as config.json says of this module", stored.layout.words, hint),
        )


def _scale_hint(stored: StoredWeight, subject: Subject) -> str:
    """What to do about a scale of another shape or dtype."""
    spec, shape = subject.hf_files.specs[stored.scale], stored.shape
    assert shape is not None  # its scale has been looked at
    layout = stored.layout
    if layout.number == E4M3 and spec.dtype == "uint8":
        return "config.json does not say that these are exponents, so engines would read the byte 119 as 119.0: " + (
            "restore scale_fmt or quant_method from the release"
        )
    packed = (*shape[:-1], shape[-1] // 2)
    if layout.number != E4M3 and spec.shape == layout.grid(packed):
        return f"this is the shape for the packed bytes, not the weights: {_AGAIN}"
    return f"config.json states another block or group size than the weights have, or the shard is stale: {_AGAIN}"


def _missing_inputs(subject: Subject, weights: list[StoredWeight], listed: Collection[str]) -> Iterator[Issue]:
    """Weights without the scale of their activations, where the format has one.

    An error whoever reads: SGLang 0.5.16 and vLLM allocate ModelOpt's for NVFP4 without a value. SGLang 0.5.23 begins
    with 1.0, and kernels of weights alone do not read them. Source: `modelopt_quant.py` and `modelopt.py`.
    """
    needing = [stored for stored in weights if stored.layout.needs_input and stored.inputs]
    lacking = [stored for stored in needing if not any(name in listed for name in stored.inputs)]
    if not lacking:
        return
    ending = lacking[0].inputs[0].rpartition(".")[2]
    some = f"{len(lacking)} of {len(needing)} such weights lack it" if len(lacking) < len(needing) else "none is stored"
    hint = f"SGLang 0.5.16 and vLLM then read memory that nobody wrote: {_AGAIN}"
    if short(lacking[0]) == "NVFP4":
        hint += "; SGLang 0.5.23 takes 1.0, and Marlin's kernels need none; for weights alone, state quant_algo "
        hint += "W4A16_NVFP4, or in compressed-tensors' config no activations"
    yield Issue(
        f"{ending} beside every weight of a format that quantizes activations",
        some,
        hint,
        names=[stored.codes.name for stored in lacking],
        file=subject.path,
    )


def float_scales(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Scales are finite, above zero where weights are not zero, and as `scale_fmt` says."""
    wrong: dict[tuple[str, str], list[str]] = defaultdict(list)
    content = quantization_of(subject.hf_files.config)
    labelled = isinstance(content, Mapping) and content.get("scale_fmt") == "ue8m0"
    for one in subject.once(float_scales_of):
        tally.compared(one.nbytes)
        for name, expected, actual in _wrong_scales(one, labelled):
            wrong[expected, actual].append(name)
    for (expected, actual), names in wrong.items():
        yield Issue(expected, actual, "quantize again from the release", names=names, file=subject.path)
    yield from _odd_inputs(subject)
    yield from _repeated(subject)


def _wrong_scales(one: FloatScales, labelled: bool) -> Iterator[tuple[str, str, str]]:
    """Name, expectation and what is there instead."""
    stored = one.stored
    if one.not_finite:
        yield stored.scale, "finite scales", f"NaN or infinity: {one.not_finite} of {one.values}"
    elif one.above:
        limit = f"powers of two of at most 2^{stored.layout.max_exponent - 127}"
        yield stored.scale, limit, f"{one.above} of {one.values} are larger, and make weights infinite in BF16"
    elif one.negative:
        yield stored.scale, "scales above zero", f"{one.negative} of {one.values} are negative"
    elif one.silenced and (stored.layout.second == "" or one.silenced * _FEW > one.values):
        yield stored.scale, "scales above zero", f"zero for {one.silenced} blocks whose codes are not zero"
    elif labelled and one.unrounded and not stored.layout.second:
        yield (
            stored.scale,
            "powers of two, as scale_fmt ue8m0 in config.json says",
            f"{one.unrounded} of {one.values} are other numbers; SGLang rounds activations by that label",
        )
    if stored.second is not None and one.second is not None and not (math.isfinite(one.second) and one.second > 0):
        yield stored.second, "a finite scale above zero", f"{one.second:g}"
    for name, value in one.inputs.items():
        if not (math.isfinite(value) and value > 0):
            yield name, "a finite scale above zero", f"{value:g}"


def _odd_inputs(subject: Subject) -> Iterator[Issue]:
    """Scales of activations that were never measured, or of one kind far apart."""
    values = {
        name: value
        for one in subject.once(float_scales_of)
        for name, value in one.inputs.items()
        if math.isfinite(value) and value > 0 and one.stored.layout.needs_input
    }
    if values and set(values.values()) == {1.0}:
        expected, actual = "scales of activations that were measured", "1.0 everywhere"
        hint = "engines clip activations by them: calibrate, or serve with a kernel of weights alone"
        names = list(values)
        yield Issue(expected, actual, hint, names=names, file=subject.path, severity="warning")
        return
    for names in group_by_pattern(values):
        low, high = min(values[name] for name in names), max(values[name] for name in names)
        if high > low * _APART and len(names) > 1:
            expected = f"activation scales of one kind within a factor of {_APART:g}"
            hint = "calibrate again with more samples: experts that saw none keep a scale of their own"
            actual = f"from {low:.3g} to {high:.3g}"
            yield Issue(expected, actual, hint, names=names, file=subject.path, severity="warning")


def _repeated(subject: Subject) -> Iterator[Issue]:
    """Scales of many values that two weights have in common: one of them has another's, as after half an update."""
    same: dict[bytes, list[FloatScales]] = defaultdict(list)
    for one in subject.once(float_scales_of):
        if one.digest:
            same[one.digest].append(one)
    for several in same.values():
        codes = [one.stored.codes.name for one in several]
        if len(several) > 1 and not _equal(subject, codes):
            names = [one.stored.scale for one in several]
            yield Issue(
                "scales of its own for each weight",
                f"the same {several[0].values} scales beside other codes",
                "one of these weights has the scales of another: quantize again from the release",
                names=names,
                together=True,
                file=subject.path,
            )


def _equal(subject: Subject, names: list[str]) -> bool:
    """Whether these tensors hold the same bytes, which CK206 judges."""
    read = [subject.checkpoint.read([name])[name] for name in names]
    return all(same_bytes(read[0], one) for one in read[1:])


def float_pairs(subject: Subject, fused_of: Mapping[str, str], tally: Tally) -> Iterator[Issue]:
    """Parts of a layer that engines fuse (`fused_of`: by projection) are in one format, with one tensor's scale."""
    _, weights = _stored(subject)
    formats = {stored.name.removesuffix(".weight"): stored.layout.words for stored in weights}
    layers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in subject.hf_files.specs:
        module = name.removesuffix(".weight") if name.endswith(".weight") else ""
        if module:
            formats.setdefault(module, "")
    for module in formats:
        parent, _, projection = module.rpartition(".")
        if projection in fused_of:
            layers[parent, fused_of[projection]].append(module)
    # A layer that is stored in one piece is alike in itself.
    tally.compared(0, sum(module.rpartition(".")[2] in FUSED for module in formats))
    odd: dict[tuple[str, str], list[str]] = defaultdict(list)
    for modules in layers.values():
        found = {formats[module] for module in modules}
        tally.compared(0, len(modules))
        if len(found) > 1:
            usual = max(found, key=lambda words: (sum(formats[module] == words for module in modules), words))
            for module in modules:
                if formats[module] != usual:
                    odd[usual, formats[module]].append(module)
    for (usual, words), modules in odd.items():
        expected = f"{usual or 'unquantized'}, as the parts that engines hold in one with it"
        names = [f"{module}.weight" for module in modules]
        hint = "quantize again, so that all parts of a layer are stored alike"
        yield Issue(expected, words or "unquantized", hint, names=names, file=subject.path)
    yield from _unequal(subject, layers, tally)


def _unequal(subject: Subject, layers: Mapping[tuple[str, str], list[str]], tally: Tally) -> Iterator[Issue]:
    """Scales of whole tensors that differ where a kernel takes one for all parts of a layer."""
    if not any(stored.second for stored in _stored(subject)[1]):
        return
    scales = {one.stored.name.removesuffix(".weight"): one for one in subject.once(float_scales_of)}
    worst, wrong = 1.0, list[str]()
    for modules in layers.values():
        found = {module: one.second for module in modules if (one := scales.get(module)) and one.second}
        tally.compared(0, len(found))
        if len(set(found.values())) > 1:
            wrong += [str(scales[module].stored.second) for module in found]
            sizes = [abs(value) for value in found.values()]
            worst = max(worst, max(sizes) / min(sizes))
    if wrong:
        expected = "one scale for the parts of a layer that a kernel multiplies by one"
        actual = f"parts of a layer differ, by up to {worst:.3g} times; vLLM takes the first or the largest for all"
        hint = "quantize again with a tool that shares the scale of gate and up, and of q, k and v"
        yield Issue(expected, actual, hint, names=wrong, file=subject.path)
