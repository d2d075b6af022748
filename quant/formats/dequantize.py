"""Dequantizes a quantized release by a plan, so that tensors are read only when needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Plan, Step, View, identity
from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.formats.hf.side_files import quantization_of, without_quantization
from quant.formats.compressed import compressed_floats, compressed_format
from quant.formats.floats.release import Floats, step_of
from quant.formats.floats.stated import fp8_format, modelopt_format, mxfp4_format, mxfp8_format, quark_format
from quant.formats.release import Format, Release

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN = (*COMPUTED, "float64", "int64", "bool")
# Rounding to 4 bits moves a matrix by about a tenth of its norm; an unrelated one is more than its norm away.
_SAME = 0.25


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
            return mxfp4_format()
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


def described(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> str | None:
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
        what = f"{release.home(orphans[0])}: no quantized weight is stored beside {summarize(orphans)}"
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
