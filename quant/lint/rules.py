"""The lint rules for an `ignore` list, and the findings that they report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckptkit.core.specs import fold
from ckptkit.formats.hf.side_files import quantization_of
from converters.hf_names import IN_LAYER, layer_of, tail
from converters.registry import FAMILIES
from quant.formats.groups import refusals
from quant.formats.part_names import PACKED
from quant.lint.subject import IgnoreList
from quant.patterns.entries import matcher
from quant.selection.portable import OTHER_FORMAT, quoted
from quant.selection.readers import RULES, VLLM, worst

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class LintFinding:
    """One thing that is wrong with an `ignore` list."""

    kind: str
    severity: Severity
    message: str
    hint: str
    pattern: str | None = None  # the entry; None: no entry covers the tensors
    tensors: tuple[str, ...] = ()  # folded names
    count: int = 0  # of tensors
    readers: tuple[str, ...] = ()  # those concerned


def examine(subject: IgnoreList) -> tuple[LintFinding, ...]:
    """Returns everything that is wrong, worst first."""
    order = ("error", "warning", "note")
    found = [
        *_refused(subject),
        *_differences(subject),
        *_partly(subject),
        *_forbidden(subject),
        *_overreach(subject),
        *_unused(subject),
        *_groups(subject),
        *_fusion(subject),
    ]
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))


def _finding(
    kind: str,
    severity: Severity,
    message: str,
    hint: str,
    tensors: Sequence[str],
    readers: Iterable[str] = (),
    pattern: str | None = None,
) -> LintFinding:
    return LintFinding(kind, severity, message, hint, pattern, tuple(fold(tensors)), len(tensors), tuple(readers))


def _refused(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds what readers refuse of the config as a whole."""
    for refusal in refusals(subject.config):
        who = [reader for reader in refusal.readers if reader in subject.readers]
        if who:
            severity = worst(subject.severities[reader] for reader in who)
            yield _finding("refused", severity, refusal.what, refusal.hint, [], who)


_WORDS = {
    "packs": "would look for it packed",
    "other": "would look for it in another format",
    "keeps": "would look for it unpacked",
    "refuses": "would refuse the fused layer",
}
_NO_TARGET = "add a pattern of its name to `targets` of its config group; engines also ask for fused names (qkv_proj)"
_SLIME = {"packs": "would pack it", "keeps": "would leave it unpacked"}


def _differences(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds readers that misjudge a tensor: `exposed` where it must never be INT4, else `disagreement`."""
    by_name = {matrix.tensor: (matrix, packs) for matrix, packs in zip(subject.matrices, subject.packed, strict=True)}
    readers: dict[tuple[str, str, tuple[str, ...], Severity], list[str]] = {}
    for one in subject.divergences(subject.readings):
        readers.setdefault((one.tensor, one.answer, one.patterns, subject.severities[one.reader]), []).append(
            one.reader
        )
    groups: dict[tuple[Any, ...], list[str]] = {}
    for (tensor, answer, patterns, severity), who in readers.items():
        matrix, packs = by_name[tensor]
        reason = matrix.reason if matrix.reason and not packs and answer == "packs" else None
        groups.setdefault(
            (answer, patterns, tuple(who), severity, reason, matrix.entry if not packs else None), []
        ).append(tensor)
    for (answer, patterns, who, severity, reason, entry), tensors in groups.items():
        why = f"because of how it reads {quoted(patterns)}" if patterns else "because no entry covers it"
        if not patterns and entry is None and subject.by_name:
            why = "because no entry of `targets` names it"
        message = f"{' and '.join(who)} {(_SLIME if who == ('slime',) else _WORDS)[answer]}, {why}" + (
            f"; it must not be: {reason}" if reason else ""
        )
        other = all(tensor.removesuffix(".weight") in subject.others for tensor in tensors)
        hint = (
            OTHER_FORMAT
            if other
            else f"use '{entry}'"
            if entry
            else f"replace {quoted(patterns)} by entries that spare it"
            if patterns
            else _NO_TARGET
            if subject.by_name
            else "quantize again"
        )
        yield _finding(
            "exposed" if reason else "disagreement",
            severity,
            message,
            hint,
            tensors,
            who,
            patterns[0] if patterns else None,
        )


def _partly(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds fused layers, and layers' routed experts, that are only partly packed: engines hold each as one."""
    layers: dict[str, list[int]] = {}
    for index, matrix in enumerate(subject.matrices):
        if matrix.vllm and matrix.vllm != matrix.module:
            layers.setdefault(matrix.vllm, []).append(index)
    mixed = [
        index
        for indices in layers.values()
        if len({subject.packed[index] for index in indices}) == 2
        for index in indices
        if not subject.packed[index]
    ]
    if mixed:
        message = (
            "unpacked, while other parts of the same fused layer are packed; "
            "engines hold q, k, v or gate, up or the experts of a layer in one"
        )
        names = [subject.matrices[index].tensor for index in mixed]
        yield _finding(
            "partly ignored",
            "error",
            message,
            "pack all parts of a layer or none: quantize again with `ckptkit quantize`",
            names,
            (*VLLM, "SGLang 0.5.16"),
        )


def _forbidden(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds packed tensors that must not be packed."""
    reasons: dict[str, list[str]] = {}
    for matrix, packs in zip(subject.matrices, subject.packed, strict=True):
        if packs and matrix.reason:
            reasons.setdefault(matrix.reason, []).append(matrix.module + PACKED)
    for reason, tensors in reasons.items():
        yield _finding(
            "packed",
            "error",
            f"packed, and must not be: {reason}",
            "quantize again with `ckptkit quantize`",
            tensors,
            ("SGLang 0.5.16",),
        )


_NUMBERED = re.compile(r"layers\\?\.(\d+)")


def _overreach(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds entries that cover more than they name: a layer number or a module name that is the start of another."""
    routers = frozenset(
        tail(name) for name in [*subject.tree.others, *subject.tree.gates] if layer_of(name) is not None
    )
    for pattern in subject.ignore:
        swallowed: dict[str, list[str]] = {}
        for reader, reading in subject.readings.items():
            for index in reading.covering(pattern):
                matrix = subject.matrices[index]
                if _goes_beyond(pattern, matrix.module, routers):
                    swallowed.setdefault(matrix.tensor, []).append(reader)
        if swallowed:
            who = [reader for reader in RULES if any(reader in several for several in swallowed.values())]
            hint = (
                "end the entry where the name ends: "
                "`(\\.|$)` after a layer's number, `(\\.weight)?$` after a module's name"
            )
            message = f"'{pattern}' also covers what it does not name"
            yield _finding("over-match", "warning", message, hint, list(swallowed), who, pattern)


def _goes_beyond(pattern: str, module: str, routers: frozenset[str]) -> bool:
    """Whether a module that an entry covers is longer than what the entry names."""
    numbers = set(_NUMBERED.findall(pattern))
    if numbers and (match := IN_LAYER.match(module)) and match[2] not in numbers:
        return any(match[2].startswith(number) for number in numbers)
    if not pattern.startswith("re:"):
        plain = pattern.removesuffix(".weight").lower()
        start, after = module.lower().find(plain), module[module.lower().find(plain) + len(plain) :]
        return start >= 0 and (after[:1] not in ("", ".") or module[:start][-1:] not in ("", "."))
    match_whole, parent = matcher(pattern), module.rpartition(".")[0]
    short = next(
        (
            router
            for router in routers
            if tail(module).startswith(router) and tail(module)[len(router) :][:1] not in ("", ".")
        ),
        None,
    )
    # An entry that covers any name under this parent is meant to.
    return (
        short is not None
        and not match_whole(f"{parent}.\0")
        and bool(match_whole(module.removesuffix(tail(module)) + short))
    )


def _unused(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds entries that cover nothing for any reader. An entry for a tied output layer is fine.

    Where config.json alone does not tell all modules, the entry may be about an unknown one, so it is only a note.
    """
    for pattern in idle(subject):
        if subject.whole:
            hint = "remove it, or correct it: whole module names, or `re:` and a regex that matches from the start"
            yield _finding("unused", "warning", f"'{pattern}' covers nothing for any reader", hint, [], RULES, pattern)
        else:
            hint = "put the release's model.safetensors.index.json beside config.json, which names all of them"
            yield _finding(
                "not judged",
                "note",
                f"'{pattern}' covers no module that config.json alone tells of, which is not all",
                hint,
                [],
                (),
                pattern,
            )


def idle(subject: IgnoreList) -> list[str]:
    """Returns entries that cover nothing, by any reader's names or by transformers' names of the Linear layers."""
    unread = (
        pattern
        for pattern in subject.ignore
        if not any(reading.covers[pattern] for reading in subject.readings.values())
    )
    return [pattern for pattern in unread if pattern != subject.tree.head and not subject.spelled(pattern)]


def _groups(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds several config_groups, of which slime reads only group_0."""
    groups = quantization_of(subject.config)["config_groups"]
    if len(groups) > 1 and "slime" in subject.readers:
        message = f"{len(groups)} config_groups; slime reads group_0 alone and packs everything by it"
        yield _finding(
            "groups",
            "warning",
            message,
            "give all packed layers one group, or do not quantize updates with slime",
            [],
            ("slime",),
        )


def _fusion(subject: IgnoreList) -> Iterator[LintFinding]:
    """Finds unpacked shared experts that SGLang would join with packed routed experts (GLM-4.5)."""
    if not FAMILIES[str(subject.config.get("model_type"))].engine("sglang").joins_shared_expert:
        return
    both = [
        (matrix, packs) for matrix, packs in zip(subject.matrices, subject.packed, strict=True) if matrix.reason is None
    ]
    shared = [matrix.tensor for matrix, packs in both if ".shared_experts." in matrix.module and not packs]
    if shared and any(packs for matrix, packs in both if matrix.expert):
        message = (
            "unpacked, beside packed routed experts; "
            "SGLang joins the two on CUDA unless started with an option against it, and then drops it silently"
        )
        yield _finding(
            "shared expert",
            "note",
            message,
            "start SGLang with --disable-shared-experts-fusion",
            shared,
            ("SGLang 0.5.16",),
        )
