"""Checks the scales of a quantized key-value cache against config.json."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from ckptkit.converters.hf_names import layer_of
from ckptkit.converters.planner import dims_of
from ckptkit.core.errors import CkptkitError, words_of
from ckptkit.core.printable import shortened
from ckptkit.formats.hf.side_files import stated_quantization
from ckptkit.quant.formats.groups import is_cache_calibrated
from ckptkit.quant.ignore.readers import BY_CLASS, severity_of_all, worst
from ckptkit.verify.core.check import Issue, Severity, Subject, Tally, warning_if
from ckptkit.verify.evidence.expected import usable_config
from ckptkit.verify.evidence.folding import group_by_pattern

# The names in compressed-tensors, ModelOpt and AutoFP8.
_SCALE = re.compile(r"(.+\.self_attn)\.(?:([kv])_proj\.(?:[kv]|output)|([kv])|(kv))_scale")
_ATTENTION = re.compile(r"(.+\.self_attn)\.(?:k_proj|qkv_proj|kv_b_proj)\..+")
_SEVERITY: Mapping[str, Severity] = {"k": "error", "v": "warning"}  # if this scale is missing
_HINT = "calibrate again, or store neither and take the cache's scheme out of quantization_config"
_SILENT = "transformers computes with uninitialized memory"


def cache_scales(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every layer has both scales of its cache, or no layer has any; compressed-tensors' static scheme requires them.

    vLLM 0.26 uses a single k_scale for both, does not start with a single v_scale, and uses 1.0 in a layer without any
    (`kv_cache.py`). transformers 5.12 then computes with uninitialized memory.
    """
    scales: dict[str, set[str]] = defaultdict(set)
    attention: set[str] = set()
    for name in subject.hf_files.specs:
        if match := _SCALE.fullmatch(name):
            tally.compared()
            scales[match[1]].update(match[2] or match[3] or "kv")
        elif match := _ATTENTION.fullmatch(name):
            attention.add(match[1])
    config = usable_config(subject)
    content = stated_quantization(config or {})
    calibrated = config is not None and is_cache_calibrated(content)
    severity = severity_of_all(BY_CLASS, subject.readers) if calibrated else "warning"  # only transformers misreads it
    for lost, stored in ("kv", "vk"):
        names = [f"{module}.{stored}_scale" for module, kinds in scales.items() if lost not in kinds]
        expected, actual = "scales of keys and of values", f"{lost}_scale is not stored"
        yield Issue(expected, actual, _HINT, names=names, severity=worst((severity, _SEVERITY[lost])))
    if config is None or not (scales or calibrated):
        return
    layers = dims_of(config).layers
    attention = {name for name in attention if (layer_of(name) or 0) < layers and f"{name}.A_log" not in subject.specs}
    for group in group_by_pattern(sorted(attention)):
        lacking = [name for name in group if name not in scales]
        if calibrated or (len(lacking) < len(group) and not scales.keys().isdisjoint(group)):
            effect = f"{_SILENT}, and engines use 1.0" if calibrated else "engines use 1.0"
            actual = f"none in {len(lacking)} of {len(group)} layers: {effect}"
            expected = "scales of each layer's cache" + calibrated * ", as the static kv_cache_scheme requires"
            yield Issue(expected, actual, _HINT, names=lacking, severity=severity)
    if calibrated:
        modules = [module for module in sorted(attention) if scales.get(module, set()) >= {"k", "v"}]
        yield from _against_scheme(subject, content["kv_cache_scheme"], config, modules, tally)


def _against_scheme(
    subject: Subject, scheme: Mapping[str, Any], config: Mapping[str, Any], attention: list[str], tally: Tally
) -> Iterator[Issue]:
    """Compares layers that have scales with the tensors that compressed-tensors builds for this scheme.

    A name that only engines read, such as `k_proj.output_scale`, is an error if transformers is a reader.
    """
    severity = severity_of_all(BY_CLASS, subject.readers)
    try:
        parts = _expected_parts(scheme, config)
    except CkptkitError as error:
        expected = "a kv_cache_scheme that compressed-tensors accepts"
        yield Issue(expected, error.message, _HINT, file="config.json", severity=severity)
        return
    declared = f"by kv_cache_scheme in config.json (strategy {shortened(scheme.get('strategy', 'tensor'))})"
    renamed = "stored under another name", warning_if("transformers" not in (subject.readers or ()))
    for module, (part, shape) in product(attention, parts.items()):
        tally.compared()
        name = f"{module}.{part}"
        spec = subject.hf_files.specs.get(name)
        if spec is None:
            actual, its_severity = renamed if part.endswith("scale") else ("not stored", severity)
            yield Issue(f"{part}, {declared}", f"{actual}: {_SILENT}", _HINT, names=[name], severity=its_severity)
        elif spec.shape != shape and not math.prod(shape) == math.prod(spec.shape) == 1:  # readers take [] for [1]
            actual = f"{list(spec.shape)}"
            yield Issue(f"{list(shape)}, {declared}", actual, _HINT, names=[name], severity=severity)


def _expected_parts(scheme: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a layer's cache. Raises CkptkitError if compressed-tensors refuses it."""
    # Imported here because they import transformers, which takes seconds.
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.initialize import initialize_qparams

    dims = dims_of(config)
    module = torch.nn.Linear(1, 1, bias=False, device="meta")
    try:
        arguments, shape = QuantizationArgs.model_validate(dict(scheme)), (dims.groups, None, dims.head_dim)
        for kind in "kv":
            initialize_qparams(module, kind, arguments, shape, torch.bfloat16, force_zero_point=False)
    except (ValueError, TypeError, KeyError, AssertionError, NotImplementedError) as error:
        strategy = shortened(scheme.get("strategy"))
        refused = f"strategy {strategy} has no scales that can be stored" if isinstance(error, TypeError) else ""
        raise CkptkitError(f"kv_cache_scheme: {refused or words_of(error)}") from error
    return {name: tuple(one.shape) for name, one in module.named_parameters() if name != "weight"}
