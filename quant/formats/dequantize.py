"""Tells formats of quantized weights apart by config.json, and dequantizes a release by a plan.

Tensors are read only when needed. compressed-tensors' formats are read by `ckptkit.quant.formats.compressed`.
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

# How a release stores its quantized weights. Of each: `words`, the format in a few words; `parts`, endings of
# tensor names that only make sense beside a quantized weight; `unused`, endings of tensors that quantize activations,
# which plain weights do not need; `steps`, what dequantizes each weight, its main tensor being the first input.
Format = PackedInt4 | Floats


def dequantized(
    source: Checkpoint, where: str, copies: Mapping[str, str] | None = None, kept: Collection[str] = ()
) -> View:
    """Returns the plain weights of a quantized checkpoint, with the names and config of the unquantized model.

    Floats become bfloat16, INT4 the dtype of its scales; other tensors are untouched. `copies` maps tensors to
    those they repeat: where only the copy is quantized, it gets the values of the original. Weights of these names are
    `kept` as they are stored. Raises CkptkitError, naming tensor and file, for an unknown format and for parts that are
    missing, left over or do not fit. Scales that are not finite raise when they are read.
    """
    release = Release.of(source, where)
    form = format_of(source.config)
    found = list(form.steps(release))
    made = {step.inputs[0]: step for step in found if step.outputs[0].name not in kept}
    taken = {name for step in made.values() for name in step.inputs}
    left = [spec for name, spec in release.specs.items() if name not in taken and not name.endswith(form.unused)]
    of_kept = {name for step in found if step.outputs[0].name in kept for name in step.inputs}
    _check_left(release, form, [spec for spec in left if spec.name not in of_kept])
    first_input = {step.outputs[0].name: name for name, step in made.items()}
    for copy, original in (copies or {}).items():
        if copy in first_input and original in release.specs and original not in first_input:
            made[first_input[copy]] = _copy_step(release, made[first_input[copy]], release.specs[original])
    steps = {step.inputs[0]: step for step in (*made.values(), *map(identity, left))}
    ordered = tuple(steps[name] for name in release.specs if name in steps)
    dropped = frozenset(name for name in release.specs if name not in taken and name.endswith(form.unused))
    return View(source, Plan(ordered, release.specs, dropped, where, without_quantization(source.config)))


def format_of(config: Mapping[str, Any]) -> Format:
    """Returns the format in a config.json. Raises CkptkitError, naming method or key, for what is not supported."""
    content = quantization_of(config)
    if not isinstance(content, Mapping):
        raise CkptkitError(
            f"config.json: quantization_config is {content!r:.80}, not an object",
            "restore config.json from the release",
        )
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
    hint = "ckptkit reads fp8, mxfp8, mxfp4, modelopt, quark and compressed-tensors: start from the unquantized release"
    what = f"config.json: quantization method {content.get('quant_method')!r} is not supported"
    raise CkptkitError(what, hint, code="unsupported")


def same_format(left: Format, right: Format) -> bool:
    """Whether two checkpoints store weights in the same spellings of the same formats."""
    if isinstance(left, Floats) and isinstance(right, Floats):
        return left.layouts == right.layouts
    return left == right


def sound_steps(checkpoint: Checkpoint) -> Iterator[Step]:
    """Yields what dequantizes each weight whose parts fit; of INT4 up to the first one whose parts do not.

    Raises CkptkitError as `format_of`.
    """
    release, form = Release.of(checkpoint, "the checkpoint"), format_of(checkpoint.config)
    if not isinstance(form, Floats):
        with suppress(CkptkitError):
            yield from form.steps(release)
        return
    for stored in form.weights(release.specs):
        with suppress(CkptkitError):
            yield step_of(release, stored)


def floats_of(config: Mapping[str, Any]) -> Floats | None:
    """Returns the formats of weights in 8-bit and 4-bit floats, beside which others may stand; None without any.

    Imports no compressed-tensors. Raises CkptkitError as `format_of`.
    """
    content = quantization_of(config)
    if isinstance(content, Mapping) and content.get("quant_method") == "compressed-tensors":
        return compressed_floats(content)
    form = format_of(config) if content is not None else None
    return form if isinstance(form, Floats) else None


def describe_format(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> str | None:
    """Describes in one line how a checkpoint is quantized, and how many tensors; None when it is not quantized."""
    if quantization_of(config) is None:
        return None
    try:
        form = format_of(config)
        count = sum(1 for _ in form.steps(Release("the checkpoint", specs, {})))
    except CkptkitError as error:
        return f"not to be dequantized here: {error.message}"
    text = f"{form.words}: {count} tensors"
    if isinstance(form, Floats) and len(form.layouts) > 1:
        several = Counter(stored.layout.words for stored in form.weights(specs))
        text = " and ".join(f"{words}: {number} tensors" for words, number in several.items()) or text
    return f"{text}; `ckptkit convert` dequantizes them"


def _check_left(release: Release, form: Format, left: Sequence[TensorSpec]) -> None:
    """Raises CkptkitError unless the tensors that no step takes are plain weights."""
    if orphans := [spec.name for spec in left if spec.name.endswith(form.parts)]:
        what = f"{release.location(orphans[0])}: no quantized weight is stored with {summarize(orphans)}"
        raise CkptkitError(what, "a shard is missing or stale: compare the names with the release's index")
    for spec in left:
        if spec.dtype not in _PLAIN:
            raise release.refused(
                spec.name,
                f"is not a part of {form.words}",
                "config.json belongs to other weights, or states another format: restore it",
            )


def _copy_step(release: Release, step: Step, original: TensorSpec) -> Step:
    """Returns a step that replaces a quantized copy by its original, after checking that it is a copy."""
    (output,) = step.outputs
    if output.shape != original.shape:
        raise release.refused(
            output.name,
            f"is meant to be a copy of {original}",
            "the release holds another model: it cannot be converted",
        )

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        (copy,) = step.run(tensors[:-1])
        right = tensors[-1].float()
        if not float((copy.float() - right).norm()) <= _SAME * float(right.norm()):
            hint = (
                "Megatron holds one tensor for both, so that one of them would be lost; compare both with the release"
            )
            raise release.refused(output.name, f"is not the quantized copy of {original.name} that it should be", hint)
        return [tensors[-1]]

    return Step(
        (*step.inputs, original.name), (TensorSpec(output.name, original.shape, original.dtype),), run, step.label
    )


_WILD = re.compile(r"[*?\[]")
_MAX_PATTERNS = 10_000
_FMTS = (None, "e4m3", "float8_e4m3fn")
_SCALE_FMTS = (None, "float", "ue8m0")
_RESTORE = "restore config.json from the release"
_START = "start from the unquantized release"
_V4 = "deepseek_v4"
_MODELOPT = "MIXED_PRECISION, NVFP4, W4A16_NVFP4, MXFP4, MXFP8, FP8, FP8_PB_WO and FP8_PER_CHANNEL_PER_TOKEN"


def fp8_format(content: Mapping[str, Any], config: Mapping[str, Any]) -> Floats:
    """Returns the format of quant_method "fp8"; `config` is the whole config.json, for DeepSeek-V4's experts.

    Raises CkptkitError for unknown values.
    """
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
    stated = {"fp4": MXFP4_BYTES, "fp8": layouts[0]}.get(str(config.get("expert_dtype")))
    # Of other modules than routed experts `expert_dtype` says nothing.
    by_module = is_v4 and stated and not nvfp4
    return Floats(tuple(layouts), (lambda module: stated if ".experts." in module else None) if by_module else None)


def mxfp8_format(content: Mapping[str, Any]) -> Floats:
    """Returns the format of quant_method "mxfp8" (miles, MiniMax-M3). Raises CkptkitError for other blocks than 32."""
    _check_fmt("MXFP8", content)
    if content.get("weight_block_size") is not None and _block(content) != (1, 32):
        raise CkptkitError(
            f"config.json: MXFP8 with weight_block_size {content['weight_block_size']!r} is not supported",
            "MXFP8 has a scale for each 1 x 32 weights",
            code="unsupported",
        )
    return Floats((mxfp8(),))


def _check_fmt(what: str, content: Mapping[str, Any]) -> None:
    for key, known in (("fmt", _FMTS), ("scale_fmt", _SCALE_FMTS)):
        if content.get(key) not in known:
            raise CkptkitError(
                f"config.json: {what} with {key} {content.get(key)!r} is not supported",
                f"known: {', '.join(filter(None, known))}",
                code="unsupported",
            )


def _block(content: Mapping[str, Any]) -> Block:
    block = content.get("weight_block_size")
    if block is None:
        return None, None
    if not (
        isinstance(block, (list, tuple)) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ):
        raise CkptkitError(f"config.json: weight_block_size is {block!r}, not two positive numbers", _RESTORE)
    return block[0], block[1]


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
    match algorithm:
        case "NVFP4":
            return modelopt_nvfp4(_group(inner), static=not _weights_only(inner))
        case "W4A16_NVFP4":
            return modelopt_nvfp4(_group(inner), static=False)
        case "MXFP4":
            return mxfp4(packed=False)
        case "MXFP8":
            return mxfp8(FP8_SCALE)
        case "FP8":
            return modelopt_fp8((None, None), static=True)
        case "FP8_PB_WO":
            return modelopt_fp8((128, 128))
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return modelopt_fp8((1, None))
    raise CkptkitError(
        f"config.json: quantization method 'modelopt' with quant_algo {inner.get('quant_algo')!r} is not supported",
        f"ckptkit reads {_MODELOPT}: {_START}",
        code="unsupported",
    )


def _weights_only(inner: Mapping[str, Any]) -> bool:
    """Whether config_groups are there and none of them quantizes activations, which vLLM takes for W4A16."""
    groups = inner.get("config_groups")
    several = list(groups.values()) if isinstance(groups, Mapping) else []
    return bool(several) and not any(isinstance(one, Mapping) and one.get("input_activations") for one in several)


def _nearest(of_module: Mapping[str, Layout]) -> Callable[[str], Layout | None]:
    """Finds a module's layout under its own name or that of a module that holds it."""

    def found(module: str) -> Layout | None:
        while module and module not in of_module:
            module = module.rpartition(".")[0]
        return of_module.get(module)

    return found


def quark_format(content: Mapping[str, Any]) -> Floats:
    """Returns the format of quant_method "quark". Raises CkptkitError for a weight scheme that is not read.

    A module's own scheme is that of the first pattern that matches its name, then that of its class in the engine,
    which no name tells. Source: `_find_matched_config` of SGLang and vLLM.
    """
    usual = _quark_layout(content.get("global_quant_config"))
    of_pattern, of_class = (
        {name: _quark_layout(one) for name, one in _quark_object(content, key).items()}
        for key in ("layer_quant_config", "layer_type_quant_config")
    )
    every = (usual, *of_pattern.values(), *of_class.values())
    layouts = tuple(dict.fromkeys(layout for layout in every if layout is not None))
    if not layouts:
        raise CkptkitError("config.json: quark quantizes no weights", _RESTORE)

    places = {pattern: place for place, pattern in enumerate(of_pattern)}
    globs = [pattern for pattern in of_pattern if _WILD.search(pattern)]
    if len(globs) > _MAX_PATTERNS:
        what = f"{len(globs)} patterns, and at most {_MAX_PATTERNS:,} are read"
        raise CkptkitError(f"config.json: layer_quant_config has {what}", "name whole parts of the model with one each")

    def of_module(module: str) -> Layout | None:
        found = next((pattern for pattern in globs if fnmatchcase(module, pattern)), None)
        first = min((one for one in (module, found) if one in places), key=places.__getitem__, default=None)
        return (None if of_class else usual) if first is None else of_pattern[first]

    return Floats(layouts, of_module, content.get("kv_cache_quant_config") is not None)


def _quark_object(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = content.get(key) or {}
    if not isinstance(found, Mapping):
        raise CkptkitError(f"config.json: {key} is {found!r:.80}, not an object", _RESTORE)
    return found


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
        case {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, **more} if (
            more.get("scale_format", "e8m0") == "e8m0"
        ):
            return mxfp4(packed=False)
        case {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}:
            return quark_fp8((None, None), static=static)
        case {"dtype": "fp8_e4m3", "qscheme": "per_channel"}:
            return quark_fp8((1, None), static=static)
        case {"dtype": "fp8_e4m3", "qscheme": "per_block"}:
            size = weight.get("block_size") or [128, 128]
            return quark_fp8(_block({"weight_block_size": size}), static=static)
    what = {key: weight.get(key) for key in ("dtype", "qscheme")} if isinstance(weight, Mapping) else weight
    raise CkptkitError(
        f"config.json: quantization method 'quark' with weights of {what!r:.120} is not supported",
        f"ckptkit reads fp4 in groups of 32, NVFP4 and fp8_e4m3: {_START}",
        code="unsupported",
    )
