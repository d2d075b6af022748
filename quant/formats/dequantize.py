"""Detects formats of quantized weights by config.json, and dequantizes a release by a plan.

Tensors are read only when needed. `ckptkit.quant.formats.compressed` reads compressed-tensors' formats.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Plan, Step, View, identity
from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.formats.hf.side_files import quantization_of, without_quantization
from ckptkit.quant.formats.compressed import compressed_floats, compressed_format
from ckptkit.quant.formats.floats.layout import (
    MXFP4_BYTES,
    MXFP4_EXPERTS,
    Block,
    Layout,
    fp8,
    modelopt_fp8,
    modelopt_nvfp4,
    mxfp4,
    mxfp8,
    quark_fp8,
    quark_nvfp4,
)
from ckptkit.quant.formats.packing import PackedInt4
from ckptkit.quant.formats.part_names import FP8_SCALE
from ckptkit.quant.formats.release import Floats, Release, step_of

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN = (*COMPUTED, "float64", "int64", "bool")
# Rounding to 4 bits moves a matrix by about a tenth of its norm; an unrelated one is more than its norm away.
_SAME = 0.25

# How a release stores its quantized weights. Both have `words`, a short description; `parts`, endings that only parts
# of quantized weights have; `unused`, endings of tensors that quantize activations; `steps`, which dequantize the
# weights and have the main tensor as first input.
Format = PackedInt4 | Floats


def dequantized(
    source: Checkpoint, where: str, copies: Mapping[str, str] | None = None, kept: Collection[str] = ()
) -> View:
    """Returns the plain weights of a quantized checkpoint, with the names and config of the unquantized model.

    Floats become bfloat16, INT4 the dtype of its scales; other tensors and weights in `kept` are untouched. `copies`
    maps tensors to those they repeat: if only the copy is quantized, it gets the values of the original. Raises
    CkptkitError, naming tensor and file, for an unknown format and for parts that are missing, left over or do not fit.
    Scales that are not finite raise when they are read.
    """
    release = Release.of(source, where)
    form = format_of(source.config)
    made: dict[str, Step] = {}
    kept_parts: set[str] = set()
    for step in form.steps(release):
        if step.outputs[0].name in kept:
            kept_parts.update(step.inputs)
        else:
            made[step.inputs[0]] = step
    parts = {name for step in made.values() for name in step.inputs}
    dropped = frozenset(name for name in release.specs if name not in parts and name.endswith(form.unused))
    left = [spec for name, spec in release.specs.items() if name not in parts and name not in dropped]
    _check_left(release, form, [spec for spec in left if spec.name not in kept_parts])
    first_input = {step.outputs[0].name: name for name, step in made.items()}
    for copy, original in (copies or {}).items():
        if copy in first_input and original in release.specs and original not in first_input:
            made[first_input[copy]] = _copy_step(release, made[first_input[copy]], release.specs[original])
    steps = made | {spec.name: identity(spec) for spec in left}
    ordered = tuple(steps[name] for name in release.specs if name in steps)
    return View(source, Plan(ordered, release.specs, dropped, where, without_quantization(source.config)))


def format_of(config: Mapping[str, Any]) -> Format:
    """Returns the format in a config.json. Raises CkptkitError, naming method or key, for an unsupported one."""
    content = quantization_of(config)
    if not isinstance(content, Mapping):
        message = f"config.json: quantization_config is {content!r:.80}, not an object"
        raise CkptkitError(message, "restore config.json from the release")
    match content.get("quant_method"):
        case "fp8":
            return fp8_format(content, config)
        case "mxfp8":
            return mxfp8_format(content)
        case "mxfp4":
            return Floats((MXFP4_EXPERTS,))  # gpt-oss
        case "modelopt":
            return modelopt_format(content)
        case "quark":
            return quark_format(content)
        case "compressed-tensors":
            return compressed_format(content)
    hint = "start from the unquantized release, or from fp8, mxfp8, mxfp4, modelopt, quark or compressed-tensors"
    what = f"config.json: quantization method {content.get('quant_method')!r} is not supported"
    raise CkptkitError(what, hint, code="unsupported")


def same_format(left: Format, right: Format) -> bool:
    """Whether two checkpoints store weights in the same spellings of the same formats."""
    if isinstance(left, Floats) and isinstance(right, Floats):
        return left.layouts == right.layouts
    return left == right


def sound_steps(checkpoint: Checkpoint) -> Iterator[Step]:
    """Yields the steps of weights with fitting parts; of INT4 up to the first unfitting one. Raises as `format_of`."""
    release, form = Release.of(checkpoint, "the checkpoint"), format_of(checkpoint.config)
    if not isinstance(form, Floats):
        with suppress(CkptkitError):
            yield from form.steps(release)
        return
    for stored in form.weights(release.specs):
        with suppress(CkptkitError):
            yield step_of(release, stored)


def floats_of(config: Mapping[str, Any]) -> Floats | None:
    """Returns the formats of floats, or None, without importing compressed-tensors. Raises as `format_of`."""
    content = quantization_of(config)
    if isinstance(content, Mapping) and content.get("quant_method") == "compressed-tensors":
        return compressed_floats(content)
    form = format_of(config) if content is not None else None
    return form if isinstance(form, Floats) else None


def describe_format(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> str | None:
    """Describes the quantization of a checkpoint and the number of quantized tensors in one line, or None."""
    if quantization_of(config) is None:
        return None
    try:
        form = format_of(config)
        count = sum(1 for _ in form.steps(Release("the checkpoint", specs, {})))
    except CkptkitError as error:
        return f"ckptkit cannot dequantize it: {error.message}"
    counts = Counter({form.words: count})
    if isinstance(form, Floats) and len(form.layouts) > 1:
        counts = Counter(stored.layout.words for stored in form.weights(specs)) or counts
    text = " and ".join(f"{words}: {number} tensors" for words, number in counts.items())
    return f"{text}; `ckptkit convert` dequantizes them"


def _check_left(release: Release, form: Format, left: Sequence[TensorSpec]) -> None:
    """Raises CkptkitError unless the tensors that no step takes are plain weights."""
    if orphans := [spec.name for spec in left if spec.name.endswith(form.parts)]:
        what = f"{release.location(orphans[0])}: {summarize(orphans)} is stored without its quantized weight"
        raise CkptkitError(what, "compare the names with the release's index: a shard is missing or stale")
    for spec in left:
        if spec.dtype not in _PLAIN:
            hint = "restore config.json from the release: it declares another format than the weights have"
            raise release.refused(spec.name, f"is neither a plain weight nor a part of {form.words}", hint)


def _copy_step(release: Release, step: Step, original: TensorSpec) -> Step:
    """Returns a step that replaces a quantized copy by its original, after checking that it is a copy."""
    (output,) = step.outputs
    if output.shape != original.shape:
        hint = "compare both with the release: this model cannot be converted"
        raise release.refused(output.name, f"should be a copy of {original}, but has another shape", hint)

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        (copy,) = step.run(tensors[:-1])
        right = tensors[-1].float()
        if not float((copy.float() - right).norm()) <= _SAME * float(right.norm()):
            hint = "compare both with the release: Megatron has one tensor for both, so one would be lost"
            raise release.refused(output.name, f"should be a quantized copy of {original.name}, but differs", hint)
        return [tensors[-1]]

    outputs = (TensorSpec(output.name, original.shape, original.dtype),)
    return Step((*step.inputs, original.name), outputs, run, step.label)


_WILD = re.compile(r"[*?\[]")
_MAX_PATTERNS = 10_000
_FMTS = (None, "e4m3", "float8_e4m3fn")
_SCALE_FMTS = (None, "float", "ue8m0")
_RESTORE = "restore config.json from the release"
_START = "start from the unquantized release"
_V4 = "deepseek_v4"
_MODELOPT = "MIXED_PRECISION, NVFP4, W4A16_NVFP4, MXFP4, MXFP8, FP8, FP8_PB_WO and FP8_PER_CHANNEL_PER_TOKEN"
_MODELOPT_LAYOUTS = {
    "MXFP4": mxfp4(packed=False),
    "MXFP8": mxfp8(FP8_SCALE),
    "FP8": modelopt_fp8((None, None), static=True),
    "FP8_PB_WO": modelopt_fp8((128, 128)),
    "FP8_PER_CHANNEL_PER_TOKEN": modelopt_fp8((1, None)),
}


def fp8_format(content: Mapping[str, Any], config: Mapping[str, Any]) -> Floats:
    """Returns the format of quant_method "fp8" in `config`. Raises CkptkitError for unknown values."""
    _check_fmt("FP8", content)
    size = _block(content)
    exponents, static = content.get("scale_fmt") == "ue8m0", content.get("activation_scheme") == "static"
    layouts = [fp8(size, exponents=exponents, static=static)]
    is_v4 = str(config.get("model_type")).startswith(_V4)
    experts = config.get("expert_dtype", "fp4" if is_v4 else None)
    if experts == "fp4" or content.get("store_dtype") == "mxfp4" or content.get("routed_experts_quant_method"):
        layouts.append(MXFP4_BYTES)
    nvfp4 = content.get("moe_quant_algo") == "NVFP4"
    if nvfp4:
        layouts.append(modelopt_nvfp4(_group(content)))
    if is_v4 and size == (32, 32):  # V4.1
        layouts.append(fp8((128, 128), exponents=exponents, only=".wo_a"))
    declared = {"fp4": MXFP4_BYTES, "fp8": layouts[0]}.get(str(config.get("expert_dtype")))
    if not is_v4 or declared is None or nvfp4:
        return Floats(tuple(layouts))
    # `expert_dtype` is only for routed experts.
    return Floats(tuple(layouts), lambda module: declared if ".experts." in module else None)


def mxfp8_format(content: Mapping[str, Any]) -> Floats:
    """Returns the format of quant_method "mxfp8" (miles, MiniMax-M3). Raises CkptkitError for other blocks than 32."""
    _check_fmt("MXFP8", content)
    if content.get("weight_block_size") is not None and _block(content) != (1, 32):
        message = f"config.json: MXFP8 with weight_block_size {content['weight_block_size']!r} is not supported"
        raise CkptkitError(message, "restore weight_block_size: MXFP8 requires [1, 32]", code="unsupported")
    return Floats((mxfp8(),))


def _check_fmt(format_name: str, content: Mapping[str, Any]) -> None:
    for key, known in (("fmt", _FMTS), ("scale_fmt", _SCALE_FMTS)):
        if content.get(key) not in known:
            message = f"config.json: {format_name} with {key} {content.get(key)!r} is not supported"
            raise CkptkitError(message, f"ckptkit reads {' and '.join(filter(None, known))}", code="unsupported")


def _block(content: Mapping[str, Any]) -> Block:
    match content.get("weight_block_size"):
        case None:
            return None, None
        case [rows, columns] if all(type(size) is int and size > 0 for size in (rows, columns)):
            return rows, columns
    message = f"config.json: weight_block_size is {content['weight_block_size']!r}, not two positive numbers"
    raise CkptkitError(message, _RESTORE)


def _group(content: Mapping[str, Any]) -> int:
    size = content.get("group_size")
    if size is None:
        return 16
    if type(size) is not int or size <= 0 or size % 2:
        raise CkptkitError(f"config.json: group_size is {size!r}, not an even number above zero", _RESTORE)
    return size


def modelopt_format(content: Mapping[str, Any]) -> Floats:
    """Returns the format of quant_method "modelopt", flat or nested as in hf_quant_config.json.

    Raises CkptkitError for an algorithm that is not read. Source: vLLM `quantization/modelopt.py`.
    """
    nested = content.get("quantization")
    inner = nested if isinstance(nested, Mapping) else content
    algorithm = str(inner.get("quant_algo") or "").upper()
    cache = inner.get("kv_cache_quant_algo") is not None or content.get("kv_cache_scheme") is not None
    if algorithm != "MIXED_PRECISION":
        return Floats((_modelopt_layout(algorithm, inner),), cache=cache)
    modules = inner.get("quantized_layers")
    if not isinstance(modules, Mapping) or not all(isinstance(one, Mapping) for one in modules.values()):
        raise CkptkitError(f"config.json: quantized_layers is {modules!r:.80}, not an object of modules", _RESTORE)
    of_module = {name: _modelopt_layout(str(one.get("quant_algo") or "").upper(), one) for name, one in modules.items()}
    return Floats(tuple(dict.fromkeys(of_module.values())), _nearest(of_module), cache)


def _modelopt_layout(algorithm: str, inner: Mapping[str, Any]) -> Layout:
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        return modelopt_nvfp4(_group(inner), static=algorithm == "NVFP4" and not _weights_only(inner))
    if (layout := _MODELOPT_LAYOUTS.get(algorithm)) is not None:
        return layout
    raise CkptkitError(
        f"config.json: quantization method 'modelopt' with quant_algo {inner.get('quant_algo')!r} is not supported",
        f"ckptkit reads {_MODELOPT}: {_START}",
        code="unsupported",
    )


def _weights_only(inner: Mapping[str, Any]) -> bool:
    """Whether there are config_groups and none of them quantizes activations, which vLLM treats as W4A16."""
    groups = inner.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return False
    return not any(isinstance(one, Mapping) and one.get("input_activations") for one in groups.values())


def _nearest(of_module: Mapping[str, Layout]) -> Callable[[str], Layout | None]:
    """Returns a function that finds a module's layout under its name or that of its nearest listed parent."""

    def find(module: str) -> Layout | None:
        while module and module not in of_module:
            module = module.rpartition(".")[0]
        return of_module.get(module)

    return find


def quark_format(content: Mapping[str, Any]) -> Floats:
    """Returns the format of quant_method "quark". Raises CkptkitError for a weight scheme that is not read.

    A module's scheme is that of the first pattern that matches its name, then that of its class in the engine, which is
    not known here. Source: `_find_matched_config` of SGLang and vLLM.
    """
    usual = _quark_layout(content.get("global_quant_config"))
    of_pattern, of_class = (
        {name: _quark_layout(one) for name, one in _quark_object(content, key).items()}
        for key in ("layer_quant_config", "layer_type_quant_config")
    )
    layouts = tuple(dict.fromkeys(filter(None, (usual, *of_pattern.values(), *of_class.values()))))
    if not layouts:
        raise CkptkitError("config.json: quantization_config of quark quantizes no weights", _RESTORE)

    positions = {pattern: position for position, pattern in enumerate(of_pattern)}
    globs = [pattern for pattern in of_pattern if _WILD.search(pattern)]
    if len(globs) > _MAX_PATTERNS:
        message = f"config.json: layer_quant_config has {len(globs)} patterns, but at most {_MAX_PATTERNS:,} are read"
        raise CkptkitError(message, "use one pattern for a larger part of the model")

    def of_module(module: str) -> Layout | None:
        matching = next((pattern for pattern in globs if fnmatchcase(module, pattern)), None)
        first = min((one for one in (module, matching) if one in positions), key=positions.__getitem__, default=None)
        return (None if of_class else usual) if first is None else of_pattern[first]

    return Floats(layouts, of_module, content.get("kv_cache_quant_config") is not None)


def _quark_object(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, Mapping):
        raise CkptkitError(f"config.json: {key} is {value!r:.80}, not an object", _RESTORE)
    return value


def _quark_layout(group: Any) -> Layout | None:
    weight = group.get("weight") if isinstance(group, Mapping) else None
    if weight is None:
        return None
    inputs = group.get("input_tensors")
    static = isinstance(inputs, Mapping) and inputs.get("is_dynamic") is False
    match weight:
        case [
            {"dtype": "fp4", "qscheme": "per_group", "group_size": 16},
            {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
        ]:
            return quark_nvfp4()
        case {"dtype": "fp4", "qscheme": "per_group", "group_size": 32} if weight.get("scale_format", "e8m0") == "e8m0":
            return mxfp4(packed=False)
        case {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}:
            return quark_fp8((None, None), static=static)
        case {"dtype": "fp8_e4m3", "qscheme": "per_channel"}:
            return quark_fp8((1, None), static=static)
        case {"dtype": "fp8_e4m3", "qscheme": "per_block"}:
            size = weight.get("block_size") or [128, 128]
            return quark_fp8(_block({"weight_block_size": size}), static=static)
    brief = {key: weight.get(key) for key in ("dtype", "qscheme")} if isinstance(weight, Mapping) else weight
    message = f"config.json: quantization method 'quark' with weights of {brief!r:.120} is not supported"
    raise CkptkitError(message, f"ckptkit reads fp4 in groups of 32, NVFP4 and fp8_e4m3: {_START}", code="unsupported")
