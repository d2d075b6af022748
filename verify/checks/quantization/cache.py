"""Finds scales of a quantized key-value cache that are missing, or stored otherwise than config.json declares."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.converters.hf_names import layer_of
from ckptkit.converters.planner import dims_of
from ckptkit.core.errors import CkptkitError, words_of
from ckptkit.core.printable import shortened
from ckptkit.formats.hf.side_files import declared_quantization
from ckptkit.quant.formats.groups import is_cache_calibrated
from ckptkit.quant.ignore.readers import BY_CLASS, severity_of_all, worst
from ckptkit.verify.core.check import Tally
from ckptkit.verify.core.issue import Issue, warning_if
from ckptkit.verify.core.report import Severity
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.expected import config_or_none
from ckptkit.verify.evidence.folding import group_by_pattern

# As compressed-tensors, ModelOpt and AutoFP8 name them.
_SCALE = re.compile(r"(.+\.self_attn)\.(?:([kv])_proj\.(?:[kv]|output)|([kv])|(kv))_scale")
_ATTENTION = re.compile(r"(.+\.self_attn)\.(?:k_proj|qkv_proj|kv_b_proj)\..+")
_SEVERITY: Mapping[str, Severity] = {"k": "error", "v": "warning"}  # by what is not stored
_HINT = "calibrate again, or store neither and take the cache's scheme out of quantization_config"


def cache_scales(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Both scales of a layer's cache, in every layer or in none; compressed-tensors' static scheme requires them.

    vLLM 0.26 takes a lone k_scale for both, does not start with a lone v_scale, and takes 1.0 where a layer has none
    (`kv_cache.py`). transformers 5.12 then computes with memory that nobody wrote.
    """
    found: dict[str, set[str]] = defaultdict(set)
    attention: set[str] = set()
    for name in subject.hf_files.specs:
        if match := _SCALE.fullmatch(name):
            tally.compared()
            found[match[1]].update(match[2] or match[3] or "kv")
        elif match := _ATTENTION.fullmatch(name):
            attention.add(match[1])
    config = config_or_none(subject)
    content = declared_quantization(config or {})
    calibrated = config is not None and is_cache_calibrated(content)
    own = severity_of_all(BY_CLASS, subject.readers) if calibrated else "warning"  # transformers alone misreads it
    for lost, there in ("kv", "vk"):
        names = [f"{module}.{there}_scale" for module, kinds in found.items() if lost not in kinds]
        severity = worst((own, _SEVERITY[lost]))
        actual = f"{lost}_scale is not stored"
        yield Issue("scales of keys and of values", actual, _HINT, names=names, severity=severity)
    if config is None or not (found or calibrated):
        return
    layers = dims_of(config).layers
    attention = {name for name in attention if (layer_of(name) or 0) < layers and f"{name}.A_log" not in subject.specs}
    for group in group_by_pattern(sorted(attention)):
        lacking = [name for name in group if name not in found]
        if calibrated or (len(lacking) < len(group) and not found.keys().isdisjoint(group)):
            silent = "transformers computes with memory that was never written, and engines use 1.0"
            actual = f"none in {len(lacking)} of {len(group)} layers: {silent if calibrated else 'engines take 1.0'}"
            expected = "scales of each layer's cache" + calibrated * ", as the static kv_cache_scheme requires"
            yield Issue(expected, actual, _HINT, names=lacking, severity=own)
    if calibrated:
        several = [module for module in sorted(attention) if found.get(module, set()) >= {"k", "v"}]
        yield from _as_compressed_tensors(subject, content["kv_cache_scheme"], config, several, tally)


def _as_compressed_tensors(
    subject: Subject, scheme: Mapping[str, Any], config: Mapping[str, Any], attention: list[str], tally: Tally
) -> Iterator[Issue]:
    """The tensors that compressed-tensors itself makes for this scheme, in layers that have scales, with their shapes.

    Of names that only engines read, `k_proj.output_scale` and the like, it is an error where transformers is asked for.
    """
    own = severity_of_all(BY_CLASS, subject.readers)
    try:
        parts = _parts(scheme, config)
    except CkptkitError as error:
        expected = "a kv_cache_scheme that compressed-tensors takes"
        yield Issue(expected, error.message, _HINT, file="config.json", severity=own)
        return
    declared = f"by kv_cache_scheme in config.json (strategy {shortened(scheme.get('strategy', 'tensor'))})"
    silent, asked = (
        "transformers computes with memory that was never written",
        "transformers" in (subject.readers or ()),
    )
    for module in attention:
        for part, shape in parts.items():
            tally.compared()
            name, severity = f"{module}.{part}", own
            spec = subject.hf_files.specs.get(name)
            if spec is None and part.endswith("scale"):
                actual, severity = f"stored under another name: {silent}", warning_if(not asked)
                yield Issue(f"{part}, {declared}", actual, _HINT, names=[name], severity=severity)
            elif spec is None:
                yield Issue(f"{part}, {declared}", f"not stored: {silent}", _HINT, names=[name], severity=severity)
            elif spec.shape != shape and not math.prod(shape) == math.prod(spec.shape) == 1:  # readers take [] for [1]
                expected, actual = f"{list(shape)}, {declared}", f"{list(spec.shape)}"
                yield Issue(expected, actual, _HINT, names=[name], severity=severity)


def _parts(scheme: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of a layer's cache, from compressed-tensors itself.

    Raises CkptkitError where it refuses the scheme.
    """
    # Imported here because they bring transformers with them, which takes seconds.
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.initialize import initialize_qparams

    dims = dims_of(config)
    made = torch.nn.Linear(1, 1, bias=False, device="meta")
    try:
        arguments = QuantizationArgs.model_validate(dict(scheme))
        for kind in "kv":
            observed = (dims.groups, None, dims.head_dim)
            initialize_qparams(made, kind, arguments, observed, torch.bfloat16, force_zero_point=False)
    except (ValueError, TypeError, KeyError, AssertionError, NotImplementedError) as error:
        strategy = shortened(scheme.get("strategy"))
        refused = f"strategy {strategy} has no scales that can be stored" if isinstance(error, TypeError) else ""
        raise CkptkitError(f"kv_cache_scheme: {refused or words_of(error)}") from error
    return {name: tuple(one.shape) for name, one in made.named_parameters() if name != "weight"}
