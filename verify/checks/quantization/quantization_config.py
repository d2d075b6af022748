"""Finds the parts of a `quantization_config` that readers refuse or misread."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError, words_of
from ckptkit.core.printable import shortened
from ckptkit.formats.hf.reader import MODELOPT_CONFIG, read_json
from ckptkit.formats.hf.side_files import declared_quantization, is_quantized, quantization_of
from ckptkit.quant.formats.compressed import stated_scheme
from ckptkit.quant.formats.dequantize import floats_of
from ckptkit.quant.formats.groups import (
    PACKED_BITS,
    Group,
    find_refusals,
    find_rounded_activations,
    group_of,
    groups_of,
)
from ckptkit.quant.formats.modelopt import TWO_CONFIGS, differing_configs, unify_configs
from ckptkit.quant.formats.scheme import BITS, FORMAT, GROUP_SIZES, IN_ORDER, get_list, parse
from ckptkit.quant.ignore.readers import BY_CLASS, severity_of, severity_of_all, worst
from ckptkit.quant.patterns import check_entries
from ckptkit.verify.core.check import CannotCheck, Issue, Subject, once
from ckptkit.verify.evidence.expected import config_or_none
from ckptkit.verify.evidence.packed import int4_format_of

_FORMATS = (FORMAT, "mixed-precision")
# A rounding of integers that is judged.
_JUDGED = {"symmetric": True, "num_bits": 4, "strategy": "group", "group_size": 32, "actorder": None, "zp_dtype": None}
_EXPECTED = "a quantization_config that describes the packed weights"


def config_issue(config: Mapping[str, Any], asked: Sequence[str] | None = None, engine: str = "sglang") -> Issue | None:
    """Why readers that count (`severity_of`) misread the packed weights, or None. Raises CannotCheck if not judged."""
    content = quantization_of(config)
    hint = "restore the quantization_config of the release, or quantize again with `ckptkit quantize`"
    if not isinstance(content, Mapping) or not content:
        return Issue(_EXPECTED, f"quantization_config is {content!r:.80}", hint, file="config.json")
    if refused := next((issue for issue in refused_parts(config, asked, engine) if issue.severity == "error"), None):
        return refused
    try:
        stated_scheme(config)
    except CkptkitError as error:
        with suppress(CkptkitError):
            if _are_judged(config):
                return None
            if int4_format_of(config) is not None and parse(content):
                rounded_usually = _in_usual_rounding(config)
                if not _are_judged(rounded_usually):
                    stated_scheme(rounded_usually)
                raise CannotCheck(f"this quantization_config could not be checked: {error.message}") from error
        return Issue(_EXPECTED, error.message, hint, file="config.json")
    unspecified = "the first config group has no `weights`"
    return None if int4_format_of(config) is not None else Issue(_EXPECTED, unspecified, hint, file="config.json")


def second_config(path: Path, asked: Sequence[str] | None) -> Iterator[Issue]:
    """Differences between hf_quant_config.json and config.json; the latter must have one for transformers."""
    file, expected = path / MODELOPT_CONFIG, f"equal quantization settings in config.json and {MODELOPT_CONFIG}"
    for differs in differing_configs(path).values():
        yield Issue(expected, differs, TWO_CONFIGS, file=file)
    if file.exists() and "transformers" in (asked or ()) and not is_quantized(read_json(path / "config.json")):
        actual = f"only {MODELOPT_CONFIG} has the settings, so transformers reads codes as weights"
        hint = "serve the model with SGLang or vLLM, or dequantize it with `ckptkit convert`"
        yield Issue("quantization_config in config.json, which transformers reads", actual, hint, file=file)


@once
def undeclared_of(subject: Subject) -> Mapping[str, str]:
    """Weights in 8-bit floats and their scales by name, if no config declares a quantization."""
    config = config_or_none(subject) if subject.kind == "hf" else None
    if config is None or declared_quantization(config) is not None or (subject.path / MODELOPT_CONFIG).exists():
        return {}
    specs = subject.hf_files.specs
    codes = [name for name, spec in specs.items() if spec.dtype.startswith("float8") and name.endswith(".weight")]
    return {name: scale for name in codes for scale in (f"{name}_scale_inv", f"{name}_scale") if scale in specs}


@once
def in_second_format(subject: Subject) -> frozenset[str]:
    """The parts of weights in the format of hf_quant_config.json if config.json declares another method (CK303)."""
    if subject.kind != "hf" or config_or_none(subject) is None or "quant_method" not in differing_configs(subject.path):
        return frozenset()
    floats = floats_of(unify_configs({}, subject.path))
    stored = floats.weights(subject.hf_files.specs) if floats else ()
    return frozenset(part for one in stored for part in (*one.needed, *one.inputs))


def refused_parts(
    config: Mapping[str, Any], asked: Sequence[str] | None = None, engine: str = "sglang"
) -> Iterator[Issue]:
    """Parts that some readers refuse: an error if one of them counts."""
    refused = []
    with suppress(CkptkitError):  # no groups, which `config_issue` judges
        refused = list(find_refusals(config))
    for refusal in refused:
        severity = severity_of_all(refusal.readers, asked, engine)
        actual = f"{' and '.join(refusal.readers)}: {refusal.what}"
        yield Issue(_EXPECTED, actual, refusal.hint, file="config.json", severity=severity)


def misread_floats(
    config: Mapping[str, Any], specs: Collection[str], asked: Sequence[str] | None = None
) -> Iterator[Issue]:
    """Why compressed-tensors and transformers misread weights in floats with these names, by their own code."""
    content, hint = quantization_of(config), "restore the quantization_config of the release, or quantize again"
    expected, method = "a quantization_config that describes the stored weights", content.get("quant_method")
    if "transformers" in (asked or ()) and method is not None:
        # Imported here because it takes seconds.
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

        if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            actual = f"quant_method is {shortened(method)}, which transformers does not support"
            convert = "serve the model with SGLang or vLLM, or dequantize it with `ckptkit convert`"
            yield Issue(expected, actual, convert, file="config.json")
    if method != "compressed-tensors":
        return
    severity = severity_of_all(BY_CLASS, asked)
    try:
        parse(content)
    except CkptkitError as error:
        yield Issue(expected, error.message, hint, file="config.json", severity=severity)
        return
    groups = groups_of(config)
    modules = [name.removesuffix(".weight_scale") for name in specs if name.endswith(".weight_scale")]
    for group, raw in zip(groups, content["config_groups"].values(), strict=True):
        members = [module for module in modules if group_of(groups, module) is group]
        for actual, names in _misread_group(group, raw, members, specs) if members else ():
            yield Issue(expected, actual, hint, names=names, file="config.json", severity=severity)
    for one in find_rounded_activations(content):
        severity = worst(severity_of(reader, asked) for reader in one.readers)
        yield Issue(expected, one.what, one.hint, file="config.json", severity=severity)


def _misread_group(
    group: Group, raw: Mapping[str, Any], modules: Sequence[str], specs: Collection[str]
) -> Iterator[tuple[str, list[str] | None]]:
    """Faults in a group of modules with scales, by compressed-tensors, and the tensors concerned."""
    where = f"their config group (targets {shortened(list(group.targets))})"
    if not group.weights:
        names = [f"{module}.weight_scale" for module in modules]
        yield f"{where} has no `weights`, so compressed-tensors does not dequantize the codes", names
    elif group.weights.get("dynamic"):
        yield f"{where} has dynamic weights, for which compressed-tensors has no scales", None
    else:
        try:
            parts = _activation_scales(raw)
        except CkptkitError as error:
            yield error.message, None
            return
        for part in parts:
            if names := [name for module in modules if (name := f"{module}.{part}") not in specs]:
                yield f"missing, but {where} has static activations: readers use 1.0 or uninitialized memory", names


def _activation_scales(group: Mapping[str, Any]) -> list[str]:
    """The scales that compressed-tensors builds for activations. Raises CkptkitError if it refuses them."""
    # Imported here because they import transformers, which takes seconds.
    import torch
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization

    module = torch.nn.Linear(256, 256, bias=False, device="meta")
    try:
        initialize_module_for_quantization(module, QuantizationScheme.model_validate(group), force_zero_point=False)
    except (ValueError, TypeError, NotImplementedError) as error:
        problem = f"compressed-tensors refuses activations of a config group: {words_of(error)}"
        raise CkptkitError(problem, "restore the quantization_config of the release") from error
    return [name for name, _ in module.named_parameters() if name.endswith(("put_scale", "put_global_scale"))]


def _are_judged(config: Mapping[str, Any]) -> bool:
    """Whether unusual groups are judged: 8 bits, `targets`, FP8 or cache scales. Raises CkptkitError if unreadable."""
    content, groups = quantization_of(config), groups_of(config)
    if content.get("quant_method") != "compressed-tensors" or content.get("format") not in _FORMATS:
        return False
    check_entries(get_list(content, "ignore"), "config.json: ignore")
    check_entries([target for group in groups for target in group.targets], "config.json: targets")
    is_usual = [group.targets for group in groups] == [("Linear",)] and groups[0].weights.get("num_bits") == BITS
    if (is_usual and content.get("kv_cache_scheme") is None) or not any(group.kind == "packs" for group in groups):
        return False
    parse(content)  # last, since it imports compressed-tensors
    return all(group.targets and _is_judged(group) for group in groups)


def _in_usual_rounding(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with the rounding `_JUDGED` for the integers of every group."""
    content = quantization_of(config)
    groups = {
        name: {**group, "weights": {**weights, **_JUDGED}}
        if (weights := group.get("weights")) and weights.get("type", "int") == "int"
        else group
        for name, group in content["config_groups"].items()
    }
    return {**config, "quantization_config": {**content, "config_groups": groups}}


def _is_judged(group: Group) -> bool:
    weights = group.weights
    if group.kind == "other":
        return weights.get("type") == "float" and weights.get("num_bits") == 8
    by_group = weights.get("strategy") in (None, "group") and weights.get("group_size") in GROUP_SIZES
    is_usual = weights.get("num_bits") in PACKED_BITS and weights.get("actorder") in IN_ORDER
    is_usual = is_usual and not weights.get("dynamic")  # compressed-tensors has no scales for these
    return is_usual and (by_group or weights.get("strategy") == "channel")
