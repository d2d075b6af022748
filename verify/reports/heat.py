"""The heat map of a report: tensors compared, largest error and findings, for each layer and kind of tensor."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptkit.core.specs import ranges
from ckptkit.verify.core.report import Finding, anchors

if TYPE_CHECKING:
    from ckptkit.verify.evidence.reading import Values

# MTP layers are numbered from 0 again. At most four digits: an untrusted name may claim a billion layers.
_LAYER = re.compile(
    r"(?P<mtp>mtp\.|model\.mtp_)?(?:model\.|language_model\.|decoder\.)*"
    r"(?:(?<=^mtp\.)|layers\.)(?P<layer>[0-9]{1,4})\.(?P<tail>.+)"
)
_NUMBERS = re.compile(r"\.\d+(?=\.|$)")
_LEAF = re.compile(r"\.(?:weight\w*|\w*bias)$")
_PACKED_PART = re.compile(r"\.weight_\w+$")
_CONTAINERS = ("model.", "language_model.", "decoder.", "self_attn.", "self_attention.", "mlp.", "attn.", "ffn.")
_EXPERT = re.compile(r"\.experts\.(?:experts\.)?(\d{1,5})\.")
_EXTRA_STATE = "._extra_state"  # Megatron's objects without weights
_LINKS = 10  # findings of a cell
OUTSIDE = "outside layers"
CellKey = tuple[str, str]  # layer and kind
Heat = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Measured:
    """The largest error of a tensor, absolute or in quantization steps, and whether the tensor is wrong."""

    error: float | None = None
    steps: float | None = None
    failed: bool = False


@dataclass
class _Cell:
    names: set[str] = field(default_factory=set)
    error: float | None = None
    steps: float | None = None
    wrong: set[str] = field(default_factory=set)
    blamed: bool = False
    findings: list[str] = field(default_factory=list)
    experts: set[int] = field(default_factory=set)
    wrong_experts: set[int] = field(default_factory=set)

    def add(self, name: str, one: Measured) -> None:
        self.names.add(name)
        self.error = _larger(self.error, one.error)
        self.steps = _larger(self.steps, one.steps)
        if one.failed:
            self.wrong.add(name)
        self.add_expert(name, one.failed)

    def add_expert(self, name: str, wrong: bool) -> None:
        if match := _EXPERT.search(name):
            (self.wrong_experts if wrong else self.experts).add(int(match[1]))

    def link(self, anchor: str, finding: Finding) -> None:
        self.blamed |= finding.severity == "error"
        if len(self.findings) < _LINKS:
            self.findings.append(anchor)

    def to_json(self) -> dict[str, Any]:
        cell: dict[str, Any] = {
            "tensors": len(self.names),
            "max_error": self.error,
            "max_steps": self.steps,
            "failed": max(len(self.wrong), int(self.blamed)),
            "findings": self.findings,
        }
        if experts := self.experts | self.wrong_experts:
            wrong = ranges(self.wrong_experts) if self.wrong_experts else None
            cell |= {"experts": 1 + max(experts), "failed_experts": wrong}
        return cell


def measured_values(
    values: Values, rounded: Collection[str] = (), *, is_trained: bool = False
) -> Iterator[tuple[str, Measured]]:
    """Yields the outcome of CK2xx for each tensor. CK305 judges `rounded` weights; trained values may differ."""
    for name in values.unreadable:
        yield name, Measured(failed=True)
    for name, stats in values.stats.items():
        difference = None if name in rounded else values.differences.get(name)
        error = difference.largest if difference else 0.0 if name in values.compared and name not in rounded else None
        is_wrong = difference is not None and difference.unequal > 0 and not is_trained
        yield name, Measured(error, failed=not stats.finite or is_wrong)


def heat_map(measured: Iterable[tuple[str, Measured]], findings: Sequence[Finding]) -> Heat:
    """Layer -> kind -> `{tensors, max_error, max_steps, failed, findings}`, as in the report; layers in order.

    `findings` are anchors (`CK202-1`), at most 10 a cell. A packed weight counts once. `failed` counts wrong tensors,
    at least 1 with an error. Cells of experts also have `experts`, their number, and `failed_experts`, the wrong ones.
    """
    cells: dict[CellKey, _Cell] = defaultdict(_Cell)
    for name, one in measured:
        cells[_cell_of(name)].add(_PACKED_PART.sub(".weight", name), one)
    for anchor, finding in zip(anchors(findings), findings, strict=True):
        for key in sorted({_cell_of(name) for name in finding.names if _EXTRA_STATE not in name}):
            cells[key].link(anchor, finding)
        for name in finding.names | finding.also_affected if finding.severity == "error" else ():
            if (cell := cells.get(_cell_of(name))) is not None:
                cell.add_expert(name, wrong=True)
    heat: Heat = defaultdict(dict)
    for layer, kind in sorted(cells, key=lambda key: _order(key[0])):
        heat[layer][kind] = cells[layer, kind].to_json()
    return dict(heat)


def _cell_of(name: str) -> CellKey:
    if (match := _LAYER.match(name)) is None:
        return OUTSIDE, _kind(name)
    return f"{'mtp ' if match['mtp'] else ''}{int(match['layer'])}", _kind(match["tail"])


def _kind(tail: str) -> str:
    """`self_attn.q_proj.weight` -> `q_proj`, `mlp.experts.3.up_proj.weight` -> `experts.up_proj`; norms -> `norms`."""
    kind = _NUMBERS.sub("", tail)
    if "norm" in kind.removesuffix(".weight").rpartition(".")[2]:
        return "norms"
    kind = _LEAF.sub("", kind)
    while container := next((one for one in _CONTAINERS if kind.startswith(one)), None):
        kind = kind.removeprefix(container)
    return kind


def expand_numbers(text: str) -> list[int]:
    """The numbers of `{0..3,7}`, or of a bare `5`."""
    parts = (part.partition("..") for part in text.strip("{}").split(","))
    return [number for first, _, last in parts for number in range(int(first), int(last or first) + 1)]


def _order(layer: str) -> tuple[int, int]:
    if layer == OUTSIDE:
        return 2, 0
    return (1, int(layer.removeprefix("mtp "))) if layer.startswith("mtp ") else (0, int(layer))


def _larger(one: float | None, other: float | None) -> float | None:
    """The larger of two; JSON has no numbers that are not finite."""
    sizes = [value for value in (one, other) if value is not None and math.isfinite(value)]
    return max(sizes, default=None)
