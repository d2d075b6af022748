"""CK301 to CK305: INT4 weights in compressed-tensors' pack-quantized format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.side_files import quantization_of
from converters.planner import expected_hf, rules_of
from quant.selection.spelling import spell
from verify.check import Skip, Tally, Unable, check
from verify.checks.quantization.quantization_config import Fault, config_fault
from verify.evidence.expected import PACKED, config_of, is_quantized, packed_parts, usable_config
from verify.evidence.folding import by_pattern
from verify.evidence.packed import (
    Format,
    bound_in_steps,
    format_of,
    grid_of,
    is_searched,
    packed_names,
    scale_off,
    worst_steps,
)
from verify.evidence.subject import Subject
from verify.evidence.values import in_hf_space
from verify.report import Finding

_NEVER = {
    "embedding.word_embeddings.weight": "the token embedding",
    "output_layer.weight": "the output layer",
    "mlp.router.weight": "the router",
    "shared_experts.gate_weight": "the shared expert's gate",
}


def not_quantized(subject: Subject) -> str | None:
    """Quantization is of HF checkpoints with a quantization_config."""
    if subject.kind == "megatron":
        return "Megatron holds no INT4 weights"
    config = usable_config(subject)
    return None if config is None or is_quantized(config) else "config.json has no quantization_config"


def _quantized(subject: Subject) -> tuple[Mapping[str, Any], Mapping[str, TensorSpec], Format]:
    """Config, specs and format. Raises Skip with the reason where there is nothing quantized to look at."""
    if (reason := not_quantized(subject)) is not None:
        raise Skip(reason)
    config = config_of(subject)
    form = format_of(config)
    if form is None:
        raise Skip("quantization_config describes no packed integer weights, which is all that is checked here")
    return config, subject.checkpoint.specs, form


def packed_weights(subject: Subject) -> tuple[Mapping[str, Any], Mapping[str, TensorSpec], Format]:
    """As `_quantized`, and raises Skip where nothing at all is packed, which CK302 judges."""
    config, specs, form = _quantized(subject)
    if not any(packed_names(specs)):
        raise Skip("nothing is packed (CK302)")
    return config, specs, form


def never_packed(config: Mapping[str, Any]) -> dict[str, str]:
    """Modules that no reader expects packed, and what each is: routers, embedding, head, norms."""
    found = {}
    for rule in rules_of(config):
        what = next((what for suffix, what in _NEVER.items() if rule.megatron.endswith(suffix)), None)
        for name in rule.hf:
            if what is not None or "norm" in name.split(".")[-2]:
                found[name.removesuffix(".weight")] = what or "a norm"
    return found


@check(
    "CK301",
    "no router, embedding, norm or head is packed",
    rationale="Engines build these unquantized, do not know the name weight_packed there and skip it: the router stays zero, the server answers garbage.",
    fix="Add the named module to `ignore` in a spelling that every reader understands, and quantize again with `ckptkit quantize`.",
    unless=not_quantized,
)
def nothing_forbidden(subject: Subject, tally: Tally) -> Iterator[Finding]:
    """The most common failure first: a name-only quantizer cannot tell a router from a Linear."""
    config, specs, _ = _quantized(subject)
    forbidden = never_packed(config)
    wrong: dict[str, list[str]] = defaultdict(list)
    for module, what in forbidden.items():
        tally.compared(0)
        if module + PACKED in specs and not _targeted(module, config):
            wrong[what].append(module)
    for what, found in wrong.items():
        for text, names in by_pattern(found):
            hint = f"quantize again with '{spell(names[0])}' in ignore, which every reader takes alike"
            yield Finding(
                "CK301", f"{what} unquantized", "packed as INT4", hint, text + PACKED, len(names), str(subject.path)
            )


def _targeted(module: str, config: Mapping[str, Any]) -> bool:
    """Whether a config group names the output layer itself, which is the one way to ask for it packed."""
    groups = quantization_of(config)["config_groups"].values()
    return module == "lm_head" and any(
        module in (group.get("targets") or []) for group in groups if isinstance(group, dict)
    )


@check(
    "CK302",
    "exactly the modules that a reader expects are packed",
    rationale="A module that the reader builds quantized but finds unpacked keeps whatever was in memory, and so does the reverse.",
    fix="Quantize again from the release with `ckptkit quantize`, which writes an ignore list that every reader takes alike.",
    unless=not_quantized,
)
def expected_packed(subject: Subject, tally: Tally) -> Iterator[Finding]:
    """The packed set on disk against what each reader of `ignore` looks for; what CK301 names is not said twice.

    What the readers that count would load or send wrongly is an error (`quant.selection.readers.severity_of`). Where the files are as these read
    the list, and only others take it otherwise, that is a warning with the portable spelling.
    """
    if (reason := not_quantized(subject)) is not None:
        raise Skip(reason)
    config, specs, where = config_of(subject), subject.checkpoint.specs, str(subject.path)
    packed = set(packed_names(specs))
    for _ in packed:
        tally.compared(0)
    if (fault := config_fault(config)) is not None:
        if not packed:
            raise _nothing_packed(config, fault)
        yield Finding("CK302", fault.expected, fault.actual, fault.hint, file=str(subject.path / "config.json"))
        return
    # Imported here because it brings transformers with it, which takes seconds that checks of plain checkpoints do not need.
    from verify.checks.quantization.agreement import agreement

    try:
        found = agreement(specs, config, subject.readers, subject.updated)
    except CkptkitError as error:
        raise Unable(f"no decision for this quantization_config: {error.message}") from error
    for _ in range(found.looked_at - len(packed)):
        tally.compared(0)
    for fault in found.faults:
        yield Finding(
            "CK302",
            fault.expected,
            fault.actual,
            fault.hint,
            file=str(subject.path / "config.json"),
            severity=fault.severity,
        )
    said = {module for module in never_packed(config) if not _targeted(module, config)}
    for text, names in by_pattern(sorted(found.forbidden.keys() - said)):
        expected, hint = f"unquantized: {found.forbidden[names[0]]}", "quantize again with `ckptkit quantize`"
        yield Finding("CK302", expected, "packed as INT4", hint, text + PACKED, len(names), where)
    for text, names in by_pattern(found.unwanted):
        hint = "take it out of ignore, or quantize again"
        yield Finding("CK302", "unquantized, by config.json", "packed as INT4", hint, text + PACKED, len(names), where)
    for text, names in by_pattern(found.missing):
        hint = "add it to ignore, or quantize again; if nothing is packed, remove quantization_config"
        yield Finding(
            "CK302", "packed as INT4, by config.json", "unquantized", hint, f"{text}.weight", len(names), where
        )


def _nothing_packed(config: Mapping[str, Any], fault: Fault) -> Skip:
    """Releases in FP8 and MXFP4 pack nothing; of a format that is not known here nobody can say what should be packed."""
    from quant.formats.dequantize import format_of as stored_format

    try:
        stored_format(config)
    except CkptkitError as error:
        return Unable(f"no decision for this quantization_config: {error.message}")
    return Skip(f"nothing is packed, and what quantization_config says is not checked here: {fault.actual}")


@check(
    "CK303",
    "packed weights, scales and shapes fit the config",
    rationale="A scale for another group size or a word too few shifts every weight of a row against its scale.",
    fix="Quantize again; make group_size in quantization_config the one that was used.",
    unless=not_quantized,
)
def parts_fit(subject: Subject, tally: Tally) -> Iterator[Finding]:
    """Shape and dtype of every part: packed int32 [rows, columns x bits / 32], scale [rows, groups], shape int64 [2]."""
    config, specs, form = packed_weights(subject)
    shapes = expected_hf(config)
    wrong: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in packed_names(specs):
        shape = shapes.get(f"{module}.weight")
        if shape is None or len(shape) != 2:
            continue
        for part, (want_shape, dtypes) in _wanted(form, shape, module).items():
            spec = specs.get(f"{module}.{part}")
            if spec is None or part not in packed_parts(config):
                continue
            tally.compared(0)
            if spec.shape != want_shape or spec.dtype not in dtypes:
                actual = f"{list(spec.shape)} {spec.dtype}"
                wrong[f"{list(want_shape)} {' or '.join(dtypes)}", actual].append(spec.name)
    for (expected, actual), found in wrong.items():
        for text, names in by_pattern(found):
            group = "one scale a row" if form.group is None else f"group_size {form.group}"
            hint = f"config.json says {form.bits} bits, {group}: quantize again, or correct it"
            yield Finding("CK303", expected, actual, hint, text, len(names), str(subject.path))


def _wanted(form: Format, shape: tuple[int, ...], module: str) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and permitted dtypes of each part of a [rows, columns] weight. Source: compressed-tensors `pack_quantized/base.py`.

    Zero points of routed experts may be stored as SGLang reads them (`quant.formats.zero_points`).
    """
    rows, columns = shape
    groups = form.groups(columns)
    turned = form.sglang_experts and ".experts." in module
    return {
        "weight_packed": ((rows, form.words(columns)), ("int32",)),
        "weight_scale": ((rows, groups), ("bfloat16", "float16", "float32")),
        "weight_shape": ((2,), ("int64", "int32")),
        "weight_zero_point": ((groups, form.words(rows)) if turned else (form.words(rows), groups), ("int32",)),
        "weight_g_idx": ((columns,), ("int32",)),
    }


@check(
    "CK304",
    "scales are finite and not zero, and weight_shape is true",
    rationale="A scale of zero silences a group of weights, one of NaN poisons it; decompressors take the row length from weight_shape.",
    fix="Quantize again from the release.",
    unless=not_quantized,
)
def scales_sane(subject: Subject, tally: Tally) -> Iterator[Finding]:
    """Reads every scale and weight_shape, which are a small part of the checkpoint."""
    config, _, _ = packed_weights(subject)
    shapes = expected_hf(config)
    wrong: dict[tuple[str, str], list[str]] = defaultdict(list)
    for scale in subject.scales:
        tally.compared(scale.nbytes)
        want, name = shapes.get(f"{scale.module}.weight"), f"{scale.module}.weight_scale"
        if want is not None and scale.shape is not None and scale.shape != want:
            wrong[str(list(want)), str(list(scale.shape))].append(f"{scale.module}.weight_shape")
        if scale.not_finite:
            wrong["finite scales", "NaN or infinity"].append(name)
        elif scale.not_positive:
            wrong["scales above zero", f"{scale.not_positive} of {scale.values} are zero or negative"].append(name)
    for (expected, actual), names in wrong.items():
        for text, group in by_pattern(names):
            yield Finding(
                "CK304", expected, actual, "quantize again from the release", text, len(group), str(subject.path)
            )


def _not_compared(subject: Subject) -> str | None:
    return not_quantized(subject) or (None if subject.source_path else "no --source was given")


@check(
    "CK305",
    "dequantized weights are within half a step of the source",
    rationale="Nibbles in another order, scales of another tensor or a wrong zero point give weights that look like weights and are not.",
    fix="Quantize again from the source. GPTQ and AWQ round by other criteria, so their outputs do not pass this check.",
    unless=_not_compared,
)
def near_source(subject: Subject, tally: Tally) -> Iterator[Finding]:
    """Every packed weight, unpacked by compressed-tensors, against the source; `packed.py` derives the bound."""
    config, specs, form = packed_weights(subject)
    if subject.source is None:
        raise Skip("no --source was given")
    if is_quantized(subject.source.config):
        raise Skip("the source is quantized itself; CK202 compares the two bit for bit")
    source = in_hf_space(subject.source, subject.source_path or subject.path)
    shapes, grid = expected_hf(config), grid_of(config)
    modules = {module for module in packed_names(specs) if _fits(module, specs, config, form, shapes)}
    wrong: dict[str, tuple[float, float]] = {}
    coarse: dict[str, float] = {}
    for group in source.groups:
        names = [name for name in group if name.removesuffix(".weight") in modules]
        for name, original in source.read(names).items() if names else ():
            # A source of another size is another model, which CK702 says.
            if tuple(original.shape) != shapes[name]:
                continue
            module = name.removesuffix(".weight")
            parts = subject.checkpoint.read([f"{module}.{part}" for part in packed_parts(config)])
            tally.compared(sum(tensor.nbytes for tensor in parts.values()))
            steps = worst_steps(parts, module, form, original)
            limit = bound_in_steps(parts[f"{module}.weight_scale"].dtype, form.symmetric, is_searched(config))
            subject.rounding[name] = steps, limit
            if not steps <= limit:
                wrong[name] = steps, limit
            elif grid and (off := scale_off(parts[f"{module}.weight_scale"], original, form, grid)):
                coarse[name] = off
    for text, found in by_pattern(wrong):
        worst = max(found, key=lambda name: wrong[name][0])
        steps, limit = wrong[worst]
        hint = "quantize again from this source"
        yield Finding(
            "CK305",
            f"at most {limit:.3f} steps",
            f"{steps:.3g} steps in {worst}",
            hint,
            text,
            len(found),
            str(subject.path),
        )
    for text, found in by_pattern(coarse):
        expected, actual = (
            f"scales of the {grid} grid, as config.json says",
            f"up to {max(coarse[name] for name in found):.0%} off",
        )
        yield Finding(
            "CK305",
            expected,
            actual,
            "quantize again, or correct observer_kwargs",
            f"{text}_scale",
            len(found),
            str(subject.path),
        )


def _fits(
    module: str,
    specs: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    form: Format,
    shapes: Mapping[str, tuple[int, ...]],
) -> bool:
    """Whether all parts are there with the right shapes; where not, CK104 or CK303 has said so."""
    shape = shapes.get(f"{module}.weight")
    if shape is None or len(shape) != 2:
        return False
    wanted = _wanted(form, shape, module)
    found = [(specs.get(f"{module}.{part}"), wanted[part]) for part in packed_parts(config)]
    return all(spec is not None and spec.shape == want and spec.dtype in dtypes for spec, (want, dtypes) in found)
