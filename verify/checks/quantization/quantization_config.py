"""Finds what readers refuse of a `quantization_config` beside packed weights."""

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
from ckptkit.quant.formats.groups import PACKED_BITS, Group, group_of, groups_of, refusals, rounded
from ckptkit.quant.formats.modelopt import TWO_CONFIGS, differing_configs, flattened
from ckptkit.quant.formats.scheme import BITS, FORMAT, GROUP_SIZES, IN_ORDER, listed, parse
from ckptkit.quant.ignore.readers import BY_CLASS, severity_of, severity_of_all, worst
from ckptkit.quant.patterns import check_entries
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.expected import usable_config
from ckptkit.verify.evidence.packed import int4_format_of

_FORMATS = (FORMAT, "mixed-precision")
# How integers are rounded: with these values they are judged.
_JUDGED = {"symmetric": True, "num_bits": 4, "strategy": "group", "group_size": 32, "actorder": None, "zp_dtype": None}

_EXPECTED = "a quantization_config that describes the packed weights"


def config_issue(config: Mapping[str, Any], asked: Sequence[str] | None = None, engine: str = "sglang") -> Issue | None:
    """Why the readers that count cannot read the packed weights by this `quantization_config`; None when they can.

    `asked`, `engine`: as in `severity_of`. Raises CannotCheck for a scheme that is valid
    compressed-tensors and is not judged here, such as an asymmetric one.
    """
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
                raise CannotCheck(f"no decision for this quantization_config: {error.message}") from error
        return Issue(_EXPECTED, error.message, hint, file="config.json")
    if int4_format_of(config) is None:
        return Issue(_EXPECTED, "its first group spells out no weights", hint, file="config.json")
    return None


def second_config(path: Path, asked: Sequence[str] | None) -> Iterator[Issue]:
    """What hf_quant_config.json declares otherwise than config.json, or alone where transformers is asked for."""
    file, expected = path / MODELOPT_CONFIG, f"one quantization in config.json and {MODELOPT_CONFIG}"
    for differs in differing_configs(path).values():
        yield Issue(expected, differs, TWO_CONFIGS, file=file)
    if file.exists() and "transformers" in (asked or ()) and not is_quantized(read_json(path / "config.json")):
        actual = f"{MODELOPT_CONFIG} has it and config.json does not: transformers takes codes for weights"
        hint = "serve it with SGLang or vLLM, or dequantize it with `ckptkit convert`"
        yield Issue("a quantization_config in config.json, where transformers looks for it", actual, hint, file=file)


@once
def undeclared_of(subject: Subject) -> Mapping[str, str]:
    """Weights in 8-bit floats beside a scale where no config declares a quantization, and their scales, by name."""
    config = usable_config(subject) if subject.is_hf else None
    if config is None or declared_quantization(config) is not None or (subject.path / MODELOPT_CONFIG).exists():
        return {}
    specs = subject.hf_files.specs
    codes = [name for name, spec in specs.items() if spec.dtype.startswith("float8") and name.endswith(".weight")]
    return {name: scale for name in codes for scale in (f"{name}_scale_inv", f"{name}_scale") if scale in specs}


def undeclared_issue(undeclared: Mapping[str, str]) -> Issue:
    """One issue for all of them."""
    actual = (
        f"missing, but {len(undeclared)} weights are stored in 8-bit floats with scales: readers take codes for values"
    )
    hint = "restore quantization_config from the release, or dequantize the weights and remove the scales"
    return Issue(
        "quantization_config in config.json", actual, hint, names=undeclared, file="config.json", together=True
    )


@once
def in_second_format(subject: Subject) -> frozenset[str]:
    """The parts of weights in the format of hf_quant_config.json where config.json declares another method (CK303)."""
    if not subject.is_hf or usable_config(subject) is None or "quant_method" not in differing_configs(subject.path):
        return frozenset()
    floats = floats_of(flattened({}, subject.path))
    stored = floats.weights(subject.hf_files.specs) if floats else ()
    return frozenset(part for one in stored for part in (*one.needed, *one.inputs))


def refused_parts(
    config: Mapping[str, Any], asked: Sequence[str] | None = None, engine: str = "sglang"
) -> Iterator[Issue]:
    """What some readers refuse of a config that others take: an error where one of them counts."""
    try:
        found = list(refusals(config))
    except CkptkitError:
        return  # no groups, which `config_issue` judges
    for refusal in found:
        severity = severity_of_all(refusal.readers, asked, engine)
        actual = f"{' and '.join(refusal.readers)}: {refusal.what}"
        yield Issue(_EXPECTED, actual, refusal.hint, file="config.json", severity=severity)


def misread_floats(
    config: Mapping[str, Any], specs: Collection[str], asked: Sequence[str] | None = None
) -> Iterator[Issue]:
    """Why compressed-tensors and transformers do not read weights in floats by a `quantization_config`.

    `specs`: the names of the tensors. Asked of compressed-tensors' own class for its config, and of transformers.
    """
    content, hint = quantization_of(config), "restore the quantization_config of the release, or quantize again"
    expected, method = "a quantization_config that describes the stored weights", content.get("quant_method")
    if "transformers" in (asked or ()) and method is not None:
        # Imported here because it takes seconds.
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

        if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            actual = f"quant_method is {shortened(method)}, of which transformers loads no weights"
            convert = "serve it with SGLang or vLLM, or dequantize it with `ckptkit convert`"
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
    for group, stated in zip(groups, content["config_groups"].values(), strict=True):
        own = [module for module in modules if group_of(groups, module) is group]
        for actual, names in _misread_group(group, stated, own, specs):
            yield Issue(expected, actual, hint, names=names, file="config.json", severity=severity)
    for one in rounded(content):
        severity = worst(severity_of(reader, asked) for reader in one.readers)
        yield Issue(expected, one.what, one.hint, file="config.json", severity=severity)


def _misread_group(
    group: Group, stated: Mapping[str, Any], modules: Sequence[str], specs: Collection[str]
) -> Iterator[tuple[str, list[str] | None]]:
    """What compressed-tensors reads otherwise of modules that have scales, and of which tensors."""
    where = f"their config group (targets {shortened(list(group.targets))})"
    if modules and not group.weights:
        names = [f"{module}.weight_scale" for module in modules]
        yield f"{where} has no weights: compressed-tensors leaves the codes as they are stored", names
    elif modules and group.weights.get("dynamic"):
        yield f"weights of {where} are dynamic, and compressed-tensors has no scales for them", None
    elif modules:
        try:
            parts = _scales_of_activations(stated)
        except CkptkitError as error:
            yield error.message, None
            return
        for part in parts:
            if names := [name for module in modules if (name := f"{module}.{part}") not in specs]:
                yield f"missing, but {where} has static activations: readers take 1.0 or uninitialized memory", names


def _scales_of_activations(stated: Mapping[str, Any]) -> list[str]:
    """The scales that compressed-tensors makes for the activations of a Linear module, by name.

    Raises CkptkitError where it makes none for such activations.
    """
    # Imported here because they bring transformers with them, which takes seconds.
    import torch
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization

    made = torch.nn.Linear(256, 256, bias=False, device="meta")
    try:
        initialize_module_for_quantization(made, QuantizationScheme.model_validate(stated), force_zero_point=False)
    except (ValueError, TypeError, NotImplementedError) as error:
        hint = "restore the quantization_config of the release"
        raise CkptkitError(
            f"compressed-tensors refuses activations of a config group: {words_of(error)}", hint
        ) from error
    return [name for name, _ in made.named_parameters() if name.endswith(("put_scale", "put_global_scale"))]


def _are_judged(config: Mapping[str, Any]) -> bool:
    """Whether the groups are judged though they are not the usual one.

    They have 8 bits, are told apart by `targets`, or there are FP8 or scales of a cache in addition. Readers then find
    each module's group by its name (`ckptkit.quant.ignore.reading`). Raises CkptkitError for groups and entries that
    cannot be read.
    """
    content, groups = quantization_of(config), groups_of(config)
    if content.get("quant_method") != "compressed-tensors" or content.get("format") not in _FORMATS:
        return False
    check_entries(listed(content, "ignore"), "config.json: ignore")
    check_entries([target for group in groups for target in group.targets], "config.json: targets")
    is_usual = [group.targets for group in groups] == [("Linear",)] and groups[0].weights.get("num_bits") == BITS
    if is_usual and content.get("kv_cache_scheme") is None:
        return False
    if not any(group.kind == "packs" for group in groups):
        return False
    parse(content)  # last, since it imports compressed-tensors
    return all(group.targets and _is_judged(group) for group in groups)


def _in_usual_rounding(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with integers of every group as `_JUDGED`, and all else as it is."""
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
    is_usual = is_usual and not weights.get("dynamic")  # which compressed-tensors has no scales for
    return is_usual and (by_group or weights.get("strategy") == "channel")
