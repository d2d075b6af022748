"""The part of CK301, CK303, CK304, CK306 and CK308 for weights in 8-bit and 4-bit floats."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from ckptkit.converters.hf_names import FUSED
from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec, fold
from ckptkit.formats.hf.side_files import quantization_of
from ckptkit.quant.formats.floats.layout import E4M3
from ckptkit.quant.formats.part_names import INT4_ENDINGS
from ckptkit.quant.formats.release import StoredWeight, wrong_scale
from ckptkit.quant.ignore.agree import describe_divergences
from ckptkit.quant.ignore.readers import named_in_lists, refuses_own_format
from ckptkit.quant.ignore.subject import open_subject
from ckptkit.verify.checks.headers.files import names_of
from ckptkit.verify.checks.quantization.quantization_config import misread_floats
from ckptkit.verify.core.check import CannotCheck, CheckResult, Issue, Subject, warning_if
from ckptkit.verify.evidence.expected import config_or_none
from ckptkit.verify.evidence.extremes import same_bytes
from ckptkit.verify.evidence.floats.stored import FloatScales, float_scales_of, stored_floats_of
from ckptkit.verify.evidence.folding import by_key, group_by_pattern
from ckptkit.verify.quirks import quirk

_AGAIN = "quantize again from the release, or copy the file again if it is an intact release"
_PLAIN = (*COMPUTED, "float64", "int64", "int32", "bool")
_FEW = 200  # one in this many groups of NVFP4 may be too small for a scale
_APART = 1e3  # the largest ratio of a layer's activation scales


def stores_floats(subject: Subject) -> bool:
    """Whether weights are stored in floats of 8 or 4 bits, in a supported format."""
    return bool(stored_floats_of(subject)[1])


def format_name(stored: StoredWeight) -> str:
    """The name of the format: FP8, MXFP8, MXFP4, NVFP4."""
    return stored.layout.words.partition(" ")[0]


def forbidden_floats(subject: Subject, forbidden: Mapping[str, str], result: CheckResult) -> Iterator[Issue]:
    """Weights of `forbidden` modules, by name with a description, that are stored in floats of 8 or 4 bits."""
    floats, weights = stored_floats_of(subject)
    hint = "take the weight in BF16 from the release: no engine has a quantized one"
    for stored in weights:
        result.compared()
        module = stored.name.removesuffix(".weight")
        is_declared = module == "lm_head" and floats and floats.of_module and floats.of_module(module) is not None
        if module in forbidden and not is_declared:
            names = [stored.codes.name]
            yield Issue(f"{forbidden[module]} unquantized", f"stored in {format_name(stored)}", hint, names=names)


def float_parts(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every weight has all parts, with their shapes and dtypes, and no further ones. CK104 checks the index."""
    floats, weights = stored_floats_of(subject)
    assert floats is not None  # there are such weights
    specs, files = subject.hf_files.specs, subject.hf_files
    listed = {*names_of(subject, listed=True), *(files.index or {})}
    used: set[str] = set()
    for stored in weights:
        result.compared()
        used |= {*stored.needed, *stored.inputs}
        yield from _wrong_parts(stored, subject, listed)
        # Another format than config.json declares for this module, if it declares several.
        layout = None if floats.of_module is None else floats.of_module(stored.name.removesuffix(".weight"))
        if layout is not None and layout.words != stored.layout.words:
            hint = f"{_AGAIN}: engines build the format of config.json and load these codes into it"
            expected = f"{layout.words}, as config.json declares for this module"
            yield Issue(expected, stored.layout.words, hint, names=[stored.codes.name])
    yield from _missing_inputs(weights, listed)
    if config_or_none(subject) is None:  # otherwise CK104 knows which names belong
        orphans = [name for name in specs if name.endswith(floats.parts) and name not in used]
        yield Issue("a scale with its quantized weight", "the weight is missing", _AGAIN, names=orphans)
    endings, excluded = (*floats.parts, *INT4_ENDINGS), named_in_lists(quantization_of(files.config), specs)
    odd = [name for name, spec in specs.items() if spec.dtype not in _PLAIN and not name.endswith(endings)]
    odd = [name for name in odd if name not in used]
    hint = "restore config.json: it belongs to other weights or declares another format"
    for name in odd:
        if name.removesuffix(".weight") not in excluded:
            yield Issue(f"a dtype of {floats.words}", specs[name].dtype, hint, names=[name])
    hint = "store these weights in BF16, or remove them from the list: readers treat their codes as values"
    by_dtype = by_key((specs[name].dtype, name) for name in odd if name.removesuffix(".weight") in excluded)
    for dtype, names in by_dtype.items():
        yield Issue("BF16, as config.json lists them as unquantized", dtype, hint, names=names, as_one=True)


def _wrong_parts(stored: StoredWeight, subject: Subject, listed: Collection[str]) -> Iterator[Issue]:
    specs, codes = subject.hf_files.specs, [stored.codes.name]
    if stored.shape is None:
        yield Issue("codes with two or more axes", f"shape {list(stored.codes.shape)}", _AGAIN, names=codes)
        return
    silent = "SGLang and vLLM silently multiply by uninitialized memory, or by 1.0"
    for name, what in ((stored.scale, "a scale"), (stored.second, "the tensor's scale")):
        if name is None:
            continue
        if name not in specs:
            if name not in listed:
                actual = f"{format_name(stored)} weights without {what}"
                yield Issue(f"a {name.rpartition('.')[2]}", actual, f"{_AGAIN}; {silent}", names=codes)
            continue
        spec, expected, hint = specs[name], None, _AGAIN
        if name == stored.scale:
            if (shape := wrong_scale(stored, specs)) is not None:
                expected, hint = f"{shape}, as in {stored.layout.words}", _scale_hint(stored, spec, stored.shape)
        elif spec.shape not in ((), (1,), stored.shape[:-2]) or spec.dtype != "float32":
            expected = "[] float32"
        if expected is not None:
            yield Issue(expected, f"{list(spec.shape)} {spec.dtype}", hint, names=[name])


def _scale_hint(stored: StoredWeight, scale: TensorSpec, shape: tuple[int, ...]) -> str:
    """The hint for a scale with another shape or dtype."""
    layout = stored.layout
    if layout.number == E4M3 and scale.dtype == "uint8":
        restore = "restore scale_fmt or quant_method from the release"
        return f"{restore}: without it engines read exponents as numbers, such as the byte 119 as 119.0"
    if layout.number != E4M3 and scale.shape == layout.grid((*shape[:-1], shape[-1] // 2)):
        return f"{_AGAIN}: this shape fits the packed bytes, not the weights"
    return f"{_AGAIN}: the block or group size of config.json is not that of the weights, or the shard is old"


def _missing_inputs(weights: list[StoredWeight], listed: Collection[str]) -> Iterator[Issue]:
    """Weights without their input scale: engines leave ModelOpt's for NVFP4 uninitialized, others are 1.0."""
    needing = [stored for stored in weights if stored.layout.needs_input and stored.inputs]
    lacking = [stored for stored in needing if not any(name in listed for name in stored.inputs)]
    if not lacking:
        return
    scale = lacking[0].inputs[0].rpartition(".")[2]
    unset = [known.message for engine in ("sglang", "vllm") if (known := quirk(engine, "input-scale-unset"))]
    hint = f"{_AGAIN}: without {scale} {' and '.join(unset)} read uninitialized memory" if unset else _AGAIN
    if format_name(lacking[0]) == "NVFP4":
        hint += f"; {known.message}" if (known := quirk("sglang", "input-scale-one")) else ""
        hint += "; if only weights are quantized, declare quant_algo W4A16_NVFP4, or no input_activations"
    expected = f"{scale} for every weight, since activations are quantized too"
    actual = f"{len(lacking)} of {len(needing)} weights have no {scale}"
    yield Issue(expected, actual, hint, names=[stored.codes.name for stored in lacking])


def float_scales(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Scales are finite, positive unless the weights are zero, and in the format of `scale_fmt`."""
    content = quantization_of(subject.hf_files.config)
    is_ue8m0 = isinstance(content, Mapping) and content.get("scale_fmt") == "ue8m0"
    for one in float_scales_of(subject):
        result.compared(nbytes=one.nbytes)
        yield from _wrong_scales(one, is_ue8m0)
    yield from _odd_inputs(subject)
    yield from _repeated_scales(subject)


def _wrong_scales(one: FloatScales, is_ue8m0: bool) -> Iterator[Issue]:
    stored, names = one.stored, [one.stored.scale]
    if one.not_finite:
        yield Issue("finite scales", f"{one.not_finite} of {one.values} are NaN or infinity", names=names)
    elif one.above:
        limit = f"scales of at most 2^{stored.layout.max_exponent - 127}"
        yield Issue(limit, f"{one.above} of {one.values} are larger and make weights infinite in BF16", names=names)
    elif one.negative:
        yield Issue("scales above zero", f"{one.negative} of {one.values} are negative", names=names)
    elif one.zero_scale_blocks and (stored.layout.second == "" or one.zero_scale_blocks * _FEW > one.values):
        actual = f"scales are zero for {one.zero_scale_blocks} blocks whose codes are not"
        yield Issue("scales above zero", actual, names=names)
    elif is_ue8m0 and one.unrounded and not stored.layout.second:
        actual = f"{one.unrounded} of {one.values} are not powers of two, but SGLang rounds activations as if they were"
        yield Issue("powers of two, since config.json has scale_fmt ue8m0", actual, names=names)
    single = {} if stored.second is None or one.second is None else {stored.second: one.second}
    for name, value in (single | one.inputs).items():
        if not (math.isfinite(value) and value > 0):
            yield Issue("a finite scale above zero", f"{value:g}", names=[name])


def _odd_inputs(subject: Subject) -> Iterator[Issue]:
    """Scales of activations that were never measured, or differ widely within a kind."""
    values = {
        name: value
        for one in float_scales_of(subject)
        for name, value in one.inputs.items()
        if math.isfinite(value) and value > 0 and one.stored.layout.needs_input
    }
    if values and set(values.values()) == {1.0}:
        hint = "calibrate, or serve with a kernel that quantizes only weights: engines clip activations by these scales"
        yield Issue("calibrated activation scales", "every scale is 1.0", hint, names=values, severity="warning")
        return
    for names in group_by_pattern(values):
        low, high = min(values[name] for name in names), max(values[name] for name in names)
        if high > low * _APART and len(names) > 1:
            expected = f"activation scales of one kind within a factor of {_APART:g}"
            hint = "calibrate again with more samples: experts without samples keep their initial scale"
            yield Issue(expected, f"from {low:.3g} to {high:.3g}", hint, names=names, severity="warning")


def _repeated_scales(subject: Subject) -> Iterator[Issue]:
    """Equal scales of two weights with different codes, for example after half an update."""
    for several in by_key((one.digest, one) for one in float_scales_of(subject) if one.digest).values():
        if not several[1:]:
            continue
        names = [one.stored.codes.name for one in several]
        first, *others = (subject.checkpoint.read([name])[name] for name in names)
        if not all(same_bytes(first, other) for other in others):  # CK206 judges equal codes
            names = [one.stored.scale for one in several]
            actual = f"the weights have equal scales (all {several[0].values}), but different codes"
            yield Issue("different scales for different weights", actual, names=names, as_one=True)


def float_pairs(subject: Subject, fused_of: Mapping[str, str], result: CheckResult) -> Iterator[Issue]:
    """The parts of a layer that engines fuse (`fused_of`: by projection) have one format, and one tensor's scale."""
    _, weights = stored_floats_of(subject)
    plain = [name.removesuffix(".weight") for name in subject.hf_files.specs if name.endswith(".weight")]
    formats = {stored.name.removesuffix(".weight"): stored.layout.words for stored in weights}
    formats |= {module: "" for module in plain if module not in formats}
    parts = ((module, *module.rpartition(".")[::2]) for module in formats)
    layers = by_key(((parent, fused_of[leaf]), module) for module, parent, leaf in parts if leaf in fused_of)
    # A fused layer that is stored as one tensor cannot differ.
    result.compared(sum(module.rpartition(".")[2] in FUSED for module in formats))
    for modules in layers.values():
        found = {formats[module] for module in modules}
        result.compared(len(modules))
        usual = max(found, key=lambda words: (sum(formats[module] == words for module in modules), words))
        expected = f"{usual or 'unquantized'}, like the other projections of the fused layer"
        for module in modules:
            if formats[module] != usual:
                yield Issue(expected, formats[module] or "unquantized", names=[f"{module}.weight"])
    yield from _unequal_scales(subject, layers, result)


def _unequal_scales(
    subject: Subject, layers: Mapping[tuple[str, str], list[str]], result: CheckResult
) -> Iterator[Issue]:
    """Scales of tensors that a kernel multiplies by one scale, but that differ."""
    if not any(stored.second for stored in stored_floats_of(subject)[1]):
        return
    scales = {one.stored.name.removesuffix(".weight"): one for one in float_scales_of(subject)}
    worst, wrong = 1.0, list[str]()
    for modules in layers.values():
        found = {module: one.second for module in modules if (one := scales.get(module)) and one.second}
        result.compared(len(found))
        if len(set(found.values())) > 1:
            wrong += [str(scales[module].stored.second) for module in found]
            sizes = [abs(value) for value in found.values()]
            worst = max(worst, max(sizes) / min(sizes))
    actual = f"the scales differ by up to {worst:.3g} times; vLLM uses the first or the largest for all"
    hint = "quantize again with a tool that gives q, k and v one scale, and gate and up one"
    yield Issue("equal global scales for q, k and v, and for gate and up", actual, hint, names=wrong)


def float_lists(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The findings of `ckptkit lint` for the engine or `--reader`. Raises CannotCheck for an unknown model."""
    where, config = "config.json", config_or_none(subject)
    misread = list(misread_floats(config, subject.hf_files.specs, subject.readers)) if config else []
    yield from misread
    if any(issue.severity == "error" for issue in misread):
        return
    readers = subject.readers or (("vllm",) if subject.engine == "vllm" else None)
    try:
        usual, _ = open_subject(subject.path)
    except CkptkitError as error:
        raise CannotCheck(f"the lists of unquantized modules could not be checked: {error.message}") from error
    try:
        found = open_subject(subject.path, readers)[0] if readers else usual
    except CkptkitError as error:
        raise CannotCheck(error.message, "CK302") from error
    if not found.matrices:
        raise CannotCheck("ckptkit does not know which modules of this model are Linear layers", "CK302")
    result.compared(len(found.matrices))
    expected = "a list of unquantized modules that every reader matches to the stored formats"
    counting = {reader for reader in found.readers if found.severities[reader] == "error"}
    differing = [one for one in found.divergences(found.readings) if one.reader in counting]
    floats, in_floats = stored_floats_of(subject)
    if floats is not None and not in_floats:
        quantized = {matrix.tensor for matrix, packed in zip(found.matrices, found.packed, strict=True) if packed}
        quantized |= {one.tensor for one in differing if one.answer == "packs"}
        stored = [spec for name, spec in subject.hf_files.specs.items() if name in quantized]
        if stored and all(spec.dtype in COMPUTED for spec in stored):
            # A job that sends quantized weights replaces them.
            severity = warning_if(subject.updated is not False)
            hint = "remove quantization_config from config.json, or quantize: engines cast these numbers to codes"
            actual = f"all {len(stored)} of these weights are unquantized and have no scales"
            yield Issue(f"{floats.words}, as config.json declares", actual, hint, file=where, severity=severity)
        return
    for refusal in found.find_refusals():
        is_certain = refuses_own_format(refusal.readers, subject.readers)
        if refusing := [reader for reader in refusal.readers if is_certain or reader in counting]:
            yield Issue(expected, f"{' and '.join(refusing)}: {refusal.what}", refusal.hint, file=where)
    for reader, divergences in by_key((one.reader, one) for one in differing).items():
        patterns = fold(dict.fromkeys(pattern for one in divergences for pattern in one.patterns))
        unlisted = next((one.tensor.removesuffix(".weight") for one in divergences if one.answer == "packs"), None)
        hint = found.next_move([reader], patterns[:3], next(iter(patterns), unlisted))
        yield Issue(expected, "; ".join(describe_divergences(divergences)), hint, file=where)
