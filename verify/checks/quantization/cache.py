"""Finds scales of a quantized key-value cache that are only partly stored."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from converters.hf_names import layer_of
from converters.planner import dims_of
from verify.check import Tally
from verify.evidence.expected import usable_config
from verify.evidence.folding import group_by_pattern
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.report import Severity

# As compressed-tensors and ModelOpt name them.
_SCALE = re.compile(r"(.+\.self_attn)\.(?:([kv])_proj\.(?:[kv]|output)|([kv]))_scale")
_SEVERITY: Mapping[str, Severity] = {"k": "error", "v": "warning"}  # by what is not stored
_HINT = "calibrate again, or store neither and take the cache's scheme out of quantization_config"


def cache_scales(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Both scales of a layer's cache, in every layer or in none.

    vLLM 0.26 takes a lone k_scale for both, does not start with a lone v_scale, and takes 1.0 where a layer has none
    (`kv_cache.py`).
    """
    found: dict[str, set[str]] = defaultdict(set)
    attention: set[str] = set()
    for name in subject.hf_files.specs:
        if match := _SCALE.fullmatch(name):
            tally.compared(0)
            found[match[1]].add(match[2] or match[3])
        elif ".self_attn.k_proj." in name:
            attention.add(name.partition(".k_proj.")[0])
    for lost, there in ("kv", "vk"):
        names = [f"{module}.{there}_scale" for module, kinds in found.items() if lost not in kinds]
        actual, severity = f"{lost}_scale is not stored", _SEVERITY[lost]
        yield Issue("scales of keys and of values", actual, _HINT, names, subject.path, severity=severity)
    config = usable_config(subject)
    if not found or config is None:
        return
    layers = dims_of(config).layers
    for group in group_by_pattern(sorted(attention)):
        lacking = [name for name in group if name not in found and (layer_of(name) or 0) < layers]
        if len(lacking) < len(group) and not found.keys().isdisjoint(group):
            actual = f"none in {len(lacking)} of {len(group)} layers: engines take 1.0"
            yield Issue("scales of each layer's cache", actual, _HINT, lacking, subject.path, severity="warning")
