"""The lint rules for an `ignore` list and for the other settings of a quantized checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.converters.hf_names import IN_LAYER, layer_of, name_in_layer
from ckptkit.core.specs import fold
from ckptkit.formats.hf.side_files import declared_quantization
from ckptkit.quant.engines.registry import engine_class
from ckptkit.quant.formats.groups import group_of, groups_of, is_cache_calibrated
from ckptkit.quant.formats.modelopt import TWO_CONFIGS, differing_configs
from ckptkit.quant.formats.part_names import PACKED
from ckptkit.quant.ignore.agree import (
    NOTHING_PACKED,
    OTHER_FORMAT,
    Divergence,
    is_untargeted,
    kind_of,
    reason_of,
    without_numbers,
)
from ckptkit.quant.ignore.names import forbidden
from ckptkit.quant.ignore.readers import SGLANG, TRAINERS, VLLM, refuses_own_format
from ckptkit.quant.ignore.subject import IgnoreList, LintSeverity
from ckptkit.quant.ignore.tree import UNPACKED_BY_CHOICE
from ckptkit.quant.patterns import matcher

ORDER: tuple[LintSeverity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class LintFinding:
    """One problem of an `ignore` list."""

    kind: str
    severity: LintSeverity
    message: str
    hint: str
    pattern: str | None = None  # the entry, or None if no entry covers the tensors
    tensors: tuple[str, ...] = ()  # folded names
    count: int = 0  # number of tensors
    readers: tuple[str, ...] = ()  # the affected readers


def finding(
    kind: str,
    severity: LintSeverity,
    message: str,
    hint: str,
    tensors: Sequence[str],
    readers: Iterable[str] = (),
    pattern: str | None = None,
) -> LintFinding:
    return LintFinding(kind, severity, message, hint, pattern, tuple(fold(tensors)), len(tensors), tuple(readers))


def examine(subject: IgnoreList) -> tuple[LintFinding, ...]:
    """Runs all rules and returns the findings, worst first."""
    found = (finding for rule in _RULES for finding in rule(subject))
    return tuple(sorted(found, key=lambda one: ORDER.index(one.severity)))


def _refused(subject: IgnoreList) -> Iterator[LintFinding]:
    for refusal in subject.find_refusals():
        if readers := [reader for reader in refusal.readers if reader in subject.readers]:
            severity: LintSeverity = min((subject.severities[reader] for reader in readers), key=ORDER.index)
            severity = "error" if refuses_own_format(readers, subject.asked) else severity
            yield finding("refused", severity, refusal.what, refusal.hint, [], readers)


def _nothing_packed(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds a config that declares INT4 weights although no matrix is packed, or would be by the list. Like CK302."""
    if subject.is_int4 and subject.matrices and not any(subject.packed):
        message = f"config.json declares INT4 weights but excludes all {len(subject.matrices)} matrices"
        yield finding("nothing packed", "error", message, NOTHING_PACKED, [])


_WORDS = {
    "packs": "would expect a packed weight",
    "other": "would expect another format",
    "keeps": "would expect an unpacked weight",
    "refuses": "would refuse the fused layer",
}
_SLIME = {"packs": "would pack the weight", "keeps": "would leave the weight unpacked"}


def _differences(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds readers that misjudge a tensor: `exposed` if it must never be INT4, else `disagreement`."""
    by_name = {matrix.tensor: (matrix, packs) for matrix, packs in subject.pairs}
    readers: dict[tuple[Any, ...], list[Divergence]] = {}
    for one in subject.divergences(subject.readings):
        severity = "error" if is_untargeted(one, subject.asked) else subject.severities[one.reader]
        key = (one.tensor, one.answer, one.patterns or one.covering, one.cause, severity)
        readers.setdefault(key, []).append(one)
    groups: dict[tuple[Any, ...], list[Divergence]] = {}
    for (tensor, answer, *_, severity), several in readers.items():
        matrix, packs = by_name[tensor]
        reason = matrix.reason if matrix.reason and not packs and answer == "packs" else None
        entry = matrix.entry if not packs else None
        kind = entry if subject.is_int4 else entry and without_numbers(entry)
        names = tuple(one.reader for one in several)
        groups.setdefault((answer, kind_of(several[0]), names, severity, reason, kind), []).append(several[0])
    for (answer, _, names, severity, reason, entry), several in groups.items():
        tensors = [one.tensor for one in several]
        patterns = tuple(fold(dict.fromkeys(pattern for one in several for pattern in one.patterns)))
        verb = (_SLIME if names[0] in TRAINERS else _WORDS)[answer]
        message = f"{' and '.join(names)} {verb}, {reason_of(several)}"
        message += f"; {_unpacked(subject, reason)}" if reason else ""
        is_other = all(tensor.removesuffix(".weight") in subject.others for tensor in tensors)
        hint = OTHER_FORMAT if is_other else subject.next_move(names, patterns, entry)
        kind = "exposed" if reason else "disagreement"
        yield finding(kind, severity, message, hint, tensors, names, patterns[0] if patterns else None)


def _unpacked(subject: IgnoreList, reason: str) -> str:
    """The reason why a tensor that a reader expects packed is not."""
    if reason in UNPACKED_BY_CHOICE:
        return f"stored unpacked: {reason}" if subject.stored is not None else f"no quantizer packs it: {reason}"
    return f"the weight must stay unpacked: {reason}"


def _partly(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds fused layers and routed experts that are only partly packed: engines hold each as one layer."""
    layers: dict[str, dict[bool, list[str]]] = {}
    who = [reader for reader in subject.readers if reader in (*VLLM, *SGLANG)]
    for matrix, packs in subject.pairs:
        if matrix.vllm and matrix.vllm != matrix.module:
            layers.setdefault(matrix.vllm, {}).setdefault(packs, []).append(matrix.tensor)
    names = [tensor for both in layers.values() if len(both) == 2 for tensor in both[False]]
    if names and who:
        message = "stored unpacked, but other parts of the same fused layer are packed; "
        message += "engines fuse q, k, v, or gate, up, or all experts of a layer"
        hint = "pack all parts of a layer or none: quantize again with `ckptkit quantize`"
        yield finding("partly ignored", "error", message, hint, names, who)


def _mixed(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds parts of a fused layer with other bits, groups or zero points than the other parts."""
    if not subject.is_int4:
        return
    groups, layers = groups_of(subject.config), dict[str, dict[tuple[object, ...], list[str]]]()
    for matrix, packs in subject.pairs:
        group = group_of(groups, matrix.module) if packs else None
        if group is None or not matrix.vllm or matrix.vllm == matrix.module or matrix.module.endswith(".down_proj"):
            continue
        declared = tuple(group.weights.get(key) for key in ("type", "num_bits", "group_size", "symmetric"))
        layers.setdefault(matrix.vllm, {}).setdefault(declared, []).append(matrix.tensor)
    minorities = [min(schemes.values(), key=len) for schemes in layers.values() if len(schemes) > 1]
    if tensors := [tensor for several in minorities for tensor in several]:
        message = "packed with other bits, groups or zero points (config_groups) than other parts of the same fused "
        message += "layer; engines fuse q, k, v, and gate, up"
        hint = "put all parts of a layer into one config group: quantize again with `ckptkit quantize`"
        yield finding("mixed layer", "error", message, hint, tensors, (*VLLM, "SGLang 0.5.16"))


def _forbidden(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds packed tensors that must not be packed, and the readers that have no quantized layer for them."""
    packed: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for index, (matrix, packs) in enumerate(subject.pairs):
        if packs and (reason := forbidden(matrix, subject.tree, subject.readers)):
            dense = SGLANG if subject.tree.dense_for(matrix.module) else ()
            answers = {one: subject.readings[one].answers[index] for one in subject.readers}
            readers = tuple(one for one, answer in answers.items() if answer == "keeps" or one in dense)
            tensor = matrix.module + PACKED if subject.is_int4 else matrix.tensor
            packed.setdefault((reason, readers), []).append(tensor)
    for (reason, readers), tensors in packed.items():
        if readers:
            hint = "quantize again with `ckptkit quantize`"
            yield finding("packed", "error", f"packed, but must stay unpacked: {reason}", hint, tensors, readers)


_MANY = 20  # if more entries cover nothing, only the first is shown
_NUMBERED = re.compile(r"layers\\?\.(\d+)")


def _overreach(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds entries with a layer number or module name that is also the start of another one."""
    if not subject.is_compressed:
        return
    others = [*subject.tree.others, *subject.tree.gates]
    routers = frozenset(name_in_layer(name) for name in others if layer_of(name) is not None)
    for pattern in subject.ignore:
        tensors: dict[str, None] = {}
        readers = []
        for reader in subject.readers:
            matrices = [subject.matrices[index] for index in subject.readings[reader].covering(pattern)]
            if extra := [one.tensor for one in matrices if _goes_beyond(pattern, one.module, routers)]:
                tensors |= dict.fromkeys(extra)
                readers.append(reader)
        if tensors:
            hint = "end the entry at the end of the name: `(\\.|$)` after a layer's number, "
            hint += "`(\\.weight)?$` after a module's name"
            message = f"'{pattern}' also covers modules that it does not name"
            yield finding("over-match", "warning", message, hint, list(tensors), readers, pattern)


def _goes_beyond(pattern: str, module: str, routers: frozenset[str]) -> bool:
    """Whether a module that an entry covers has a longer name than the entry means."""
    numbers = set(_NUMBERED.findall(pattern))
    if numbers and (match := IN_LAYER.match(module)) and match[2] not in numbers:
        return any(match[2].startswith(number) for number in numbers)
    if not pattern.startswith("re:"):
        plain = pattern.removesuffix(".weight").lower()
        start, after = module.lower().find(plain), module[module.lower().find(plain) + len(plain) :]
        return start >= 0 and (after[:1] not in ("", ".") or module[:start][-1:] not in ("", "."))
    matches, parent, name = matcher(pattern), module.rpartition(".")[0], name_in_layer(module)
    prefixes = (one for one in routers if name.startswith(one) and name[len(one) :][:1] not in ("", "."))
    if (router := next(prefixes, None)) is None or matches(f"{parent}.\0"):
        return False  # an entry that covers every name under this parent does so on purpose
    return bool(matches(module.removesuffix(name) + router))


def _unused(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds entries that cover nothing for any reader. An entry for a tied output layer is fine.

    It is only a note if config.json does not determine all modules. In other formats than INT4 entries must name a
    stored tensor: trainers also list norms and biases, which no reader looks up.
    """
    unused = idle(subject)
    if not subject.is_int4:
        unused = [pattern for pattern in unused if not subject.names_any(pattern)]
        if unused and subject.indexed and subject.matrices:
            message = f"{len(unused)} entries name no stored tensor, such as '{unused[0]}'"
            yield finding("unused", "note", message, "correct entries that are meant for a stored tensor", [])
        return
    for pattern in unused if len(unused) <= _MANY else unused[:1]:
        more = len(unused) - 1 if len(unused) > _MANY else 0
        covers = f"'{pattern}' and {more} more entries cover" if more else f"'{pattern}' covers"
        if subject.whole:
            hint = "remove it, or write full module names, or `re:` and a regex that matches from the start"
            message = f"{covers} no module for any reader"
            yield finding("unused", "warning", message, hint, [], subject.every_reader, pattern)
        else:
            hint = "put the release's model.safetensors.index.json next to config.json: it names all modules"
            message = f"{covers} no module known from config.json, which does not name all modules"
            yield finding("not judged", "note", message, hint, [], (), pattern)


def idle(subject: IgnoreList) -> list[str]:
    """Returns entries that cover no name of any reader and no Linear layer as transformers names it."""
    return [entry for entry in subject.idle if entry != subject.tree.head and not subject.covered_linears(entry)]


_KV_SCALES = ("k_scale", "v_scale", "kv_scale", "k_proj.output_scale", "v_proj.output_scale")


def indexer_key(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds the key weight of a DSA indexer in a format that SGLang does not dequantize.

    On CUDA, SGLang fuses this weight with one in BF16. It dequantizes FP8 in blocks by `weight_scale_inv`. MXFP8 it
    multiplies by the raw exponent bytes, and of any other format it copies the codes. Source: SGLang 0.5.16,
    `_load_fused_indexer_wk` of `deepseek_weight_loader.py`.
    """
    content, who = subject.content, [reader for reader in subject.readers if reader in SGLANG]
    in_blocks = content.get("quant_method") == "fp8" and bool(content.get("weight_block_size"))
    keys = [matrix.tensor for matrix, packs in subject.pairs if packs and matrix.module.endswith(".indexer.wk")]
    if keys and who and not in_blocks and not subject.is_int4:
        message = "quantized, but SGLang on CUDA dequantizes only block FP8 here, and would use the codes as weights"
        yield finding("packed", "error", message, "leave this weight in BF16, or quantize to fp8-block", keys, who)


def groups(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds several config_groups, of which slime reads only group_0."""
    groups = subject.content.get("config_groups") or {}
    if len(groups) > 1 and "slime" in subject.readers and subject.is_int4:
        message = f"config.json has {len(groups)} config_groups, but slime packs all layers by group_0"
        hint = "put all packed layers into one group, or do not quantize updates with slime"
        yield finding("groups", "warning", message, hint, [], ("slime",))


def fusion(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds unpacked shared experts that SGLang would merge with packed routed experts (GLM-4.5)."""
    if not subject.is_int4 or not engine_class("sglang", subject.config).joins_shared_expert:
        return
    pairs = [(matrix, packs) for matrix, packs in subject.pairs if matrix.reason is None]
    shared = [matrix.tensor for matrix, packs in pairs if ".shared_experts." in matrix.module and not packs]
    if shared and any(packs for matrix, packs in pairs if matrix.expert):
        message = "stored unpacked, but the routed experts are packed; "
        message += "on CUDA SGLang merges both by default, and then drops this weight silently"
        hint = "start SGLang with --disable-shared-experts-fusion"
        yield finding("shared expert", "note", message, hint, shared, ("SGLang 0.5.16",))


def kv_cache(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds a quantized key-value cache without stored scales."""
    content = declared_quantization(subject.config)
    declared = content.get("kv_cache_scheme") is not None or content.get("kv_cache_quant_algo")
    if not declared or not subject.leaves or any(name.endswith(_KV_SCALES) for name in subject.leaves):
        return
    if is_cache_calibrated(content) and "transformers" in subject.readers:
        message = "kv_cache_scheme is static, but no scale of the cache is stored: transformers computes with memory "
        message += "that was never written, and engines use 1.0"
        hint = "calibrate again, or set kv_cache_scheme to null"
        yield finding("cache scales", "error", message, hint, [], ["transformers"])
    else:
        message = "the config declares a quantized key-value cache, but no scale of it is stored: engines use 1.0"
        yield finding("cache scales", "note", message, "set kv_cache_scheme to null unless 1.0 is intended", [])


def two_configs(subject: IgnoreList) -> Iterator[LintFinding]:
    for differs in differing_configs(subject.path).values():
        yield finding("two configs", "error", differs, TWO_CONFIGS, [])


def not_known(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds an unknown model, for which entries cannot be compared with modules."""
    if not subject.matrices:
        model = subject.config.get("model_type")
        message = f"ckptkit does not know the Linear layers of model_type {model!r}, so it compares no entry with them"
        yield finding("not judged", "note", message, "`ckptkit inspect` shows how its tensors are stored", [])


_RULES: tuple[Callable[[IgnoreList], Iterator[LintFinding]], ...] = (
    *(_refused, _nothing_packed, _differences, _partly, _mixed, _forbidden, _overreach, _unused),
    *(indexer_key, groups, fusion, kv_cache, two_configs, not_known),
)
