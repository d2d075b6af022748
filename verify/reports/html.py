"""The report as one self-contained HTML page; only the filter needs a script."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from ckptkit.core.printable import printable
from ckptkit.core.specs import ranges
from ckptkit.verify.core.check import STAGE_LABELS, WITNESS_OPTIONS, all_checks
from ckptkit.verify.core.report import NOT_GIVEN, SCHEMA, CheckResult, Finding, Report, anchors
from ckptkit.verify.evidence.folding import by_key
from ckptkit.verify.reports import text as wording
from ckptkit.verify.reports.heat import OUTSIDE, expand_numbers

_SHOWN = 50  # causes
_LISTED = 20  # findings of a cause
_CODE = re.compile(r"CK\d{3}")
_OPTIONS = {"source": "--source", **{name.lower(): option for name, option in WITNESS_OPTIONS.items()}}
_OPTIONS["engine"] = "verify --engine"  # preflight has no such option
_SHOWN_S = 0.1
_ORDER = [stage for stage in STAGE_LABELS if stage != "quantization"]
_ORDER.insert(_ORDER.index("values") + 1, "quantization")
# Lower bounds of the largest error for the shades of a cell that is not wrong. Rounding, by half a step, is not shaded.
_STEPS = (0.55, 1.0, 2.0, 4.0)
_ERRORS = (0.0, 1e-4, 1e-2, 1.0)
_SHADES = ("heat-1", "heat-2", "heat-3", "heat-4")
_MEANINGS = {
    "failed": "wrong",
    "warning": "a warning names it",
    "equal": "equal to the source, bit for bit",
    "near": "rounded as its format wants",
    "read": "read, with nothing to compare with",
    "shade": "differs, the darker the more",
    "empty": "not there, or not looked at",
}
_WORST = ("failed", "warning", *reversed(_SHADES), "near", "read", "equal")
_ROWS = 60  # kinds of tensors that are shown, the worst first
_TICKS = 10
_EXPERTS_PX = (72, 220)  # minimum and maximum height of the picture of experts
Cells = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Cause:
    """Identical findings, with the findings that follow from them."""

    anchor: str  # of the first
    finding: Finding
    title: str
    text: str  # the fault in words
    same: Sequence[tuple[str, Finding]]  # with anchors, at most _LISTED
    follows: Sequence[tuple[str, str, str]]  # anchor, text and title, at most _LISTED
    more: int  # findings that are not listed


def html(report: Report) -> str:
    """The page. Its content security policy permits only its own script and style."""
    from jinja2 import Environment, StrictUndefined  # only this format needs it

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if hasattr(value, "__html__") else printable(str(value)),  # markup stays as it is
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script, causes = _asset("page.css"), _asset("page.js"), grouped_causes(report)
    targets = _targets(report, causes[:_SHOWN])
    return environment.from_string(_asset("page.html")).render(
        report=report,
        schema=SCHEMA,
        headline=wording.headline(report),
        reasons=wording.other_reasons(report),
        totals=wording.totals(report),
        seconds=sum(check.seconds for check in report.checks),
        stages=stages(report),
        map=layer_map(report.heat, targets),
        causes=causes[:_SHOWN],
        more=len(causes) - _SHOWN,
        codes={check.code: targets[anchor] for check in report.checks if (anchor := f"{check.code}-1") in targets},
        rationales={check.code: check.rationale for check in all_checks()},
        subject_of=wording.named_subject,
        duration=wording.duration,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def grouped_causes(report: Report) -> list[Cause]:
    """Identical findings together, errors first, each with the findings that follow from it."""
    named = dict(zip(anchors(report.findings), report.findings, strict=True))
    anchor_of = {id(one): anchor for anchor, one in named.items()}
    titles = wording.failure_titles(report)
    roots = sorted((one for one in named.values() if one.cause is None), key=lambda one: one.severity != "error")
    causes = []
    for group in wording.group_identical(roots):
        same = {anchor_of[id(one)]: one for one in group}
        results = ((anchor, one) for anchor, one in named.items() if one.cause in same)
        texts = ((anchor, wording.cause_of([one], report.checkpoint), one.code) for anchor, one in results)
        follows = [(anchor, text, titles.get(code, "")) for anchor, text, code in texts]
        more = max(0, len(same) - _LISTED) + max(0, len(follows) - _LISTED)
        text, title = wording.cause_of(group, report.checkpoint), titles.get(group[0].code, "")
        listed = list(same.items())[:_LISTED]
        causes.append(Cause(listed[0][0], group[0], title, text, listed, follows[:_LISTED], more))
    return causes


def _targets(report: Report, causes: Sequence[Cause]) -> dict[str, str]:
    """The target of a link to a finding, by anchor: the finding, its cause, or the number of omitted ones."""
    homes = {anchor: cause.anchor for cause in causes for anchor, _ in cause.same}
    shown = homes.keys() | {anchor for cause in causes for anchor, _, _ in cause.follows}
    return {
        anchor: anchor if anchor in shown else homes.get(one.cause or anchor, "more-findings")
        for anchor, one in zip(anchors(report.findings), report.findings, strict=True)
    }


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


@dataclass(frozen=True)
class Stage:
    """One box of the page."""

    name: str
    style: str  # CSS class
    outcome: str
    detail: str


def stages(report: Report) -> list[Stage]:
    """The boxes in the order of the checks: the source, files, values, quantization, programs, behaviour."""
    stage_of = {one.code: _name(one.stage) for one in all_checks()}
    order = ["Source", *dict.fromkeys(map(_name, _ORDER))]
    boxes = [Stage("Source", "passed", "given", Path(report.source).name)] if report.source else []
    for name in order:
        if checks := [check for check in report.checks if stage_of.get(check.code) == name]:
            codes = {check.code for check in checks}
            style, outcome = next(_outcomes(checks, [one for one in report.findings if one.code in codes], report))
            count, seconds = f"{len(checks)} check{'s' * (len(checks) > 1)}", sum(check.seconds for check in checks)
            detail = f"{count}, {wording.duration(seconds)}" if seconds >= _SHOWN_S else count
            boxes.append(Stage(name, style, outcome, detail))
    seen = {stage.name.lower() for stage in boxes}
    for name in (name for name in report.not_asked if name.lower() not in seen):
        outcome, option = NOT_GIVEN.get(name, "not asked"), _OPTIONS.get(name.lower(), "")
        boxes.append(Stage(_capital(name), "unasked", outcome, option))
    return sorted(boxes, key=lambda one: order.index(one.name) if one.name in order else len(order))


def _name(stage: str) -> str:
    return _capital("quantization" if stage == "quantization" else STAGE_LABELS[stage])


def _capital(name: str) -> str:
    return name[0].upper() + name[1:] if name != "vLLM" else name


def _outcomes(checks: Sequence[CheckResult], findings: Sequence[Finding], report: Report) -> Iterator[tuple[str, str]]:
    """CSS classes and texts of a stage, the most important first."""
    roots = [one for one in findings if one.cause is None]
    errors = sum(one.severity == "error" for one in roots)
    warnings = len(roots) - errors
    blocked = {code for reason in report.reasons for code in _CODE.findall(reason.partition(": ")[0])}
    if errors:
        yield "failed", f"✗ {errors} error{'s' * (errors > 1)}"
    if any(check.status == "failed" for check in checks):
        yield "failed", "✗ same cause"
    if any(check.code in blocked for check in checks):
        yield "skipped", "? not known"
    if all(check.status == "skipped" for check in checks):
        yield "skipped", "– not run"
    if warnings:
        yield "warning", f"! {warnings} warning{'s' * (warnings > 1)}"
    yield "passed", "✓ passed"


@dataclass(frozen=True)
class Area:
    """Cells of one colour that link to the same finding."""

    style: str  # CSS class
    path: str  # of SVG
    described: str
    link: str | None


@dataclass(frozen=True)
class Row:
    """One kind of tensor, with a summary of all its layers."""

    kind: str
    areas: Sequence[Area]
    style: str
    summary: str
    link: str | None


@dataclass(frozen=True)
class Picture:
    """Experts by layers."""

    experts: int
    height: int  # pixels
    areas: Sequence[Area]


@dataclass(frozen=True)
class LayerMap:
    """Kinds of tensors by layers."""

    layers: int  # columns
    ticks: Sequence[tuple[float, str]]  # positions in per cent and labels of layers
    grid: str  # SVG path of the lines between layers
    rows: Sequence[Row]
    outside: Sequence[Row]  # outside layers
    experts: Picture | None  # if one is wrong
    legend: Sequence[tuple[str, str]]
    more: int  # rows that are not shown


def layer_map(heat: Mapping[str, Cells], targets: Mapping[str, str]) -> LayerMap:
    """The map of a report; `targets` are those of links to findings."""
    columns = [layer for layer in heat if layer != OUTSIDE]
    kinds = list(dict.fromkeys(kind for layer in columns for kind in heat[layer]))
    rows, outside = (
        sorted((_row(kind, layers, heat, targets) for kind in some), key=lambda row: _WORST.index(row.style))
        for some, layers in ((kinds, columns), (heat.get(OUTSIDE, {}), [OUTSIDE]))
    )
    experts = _experts(columns, heat, targets)
    areas = [*chain.from_iterable(row.areas for row in (*rows, *outside)), *(experts.areas if experts else ())]
    styles = {area.style for area in areas}
    styles |= {"shade"} if styles & set(_SHADES) else set()
    styles |= {"empty"} if any(len(heat[layer]) < len(kinds) for layer in columns) else set()
    steps = (mantissa * 10**power for power in range(5) for mantissa in (1, 2, 5))
    step = next((step for step in steps if len(columns) <= step * _TICKS), 10**5)
    return LayerMap(
        len(columns),
        [(round(100 * (at + 0.5) / len(columns), 2), layer) for at, layer in enumerate(columns) if at % step == 0],
        "".join(f"M{at} 0v1" for at in range(1, len(columns))),
        rows[:_ROWS],
        outside[:_ROWS],
        experts,
        [(style, meaning) for style, meaning in _MEANINGS.items() if style in styles],
        max(0, len(rows) - _ROWS),
    )


def _row(kind: str, columns: Sequence[str], heat: Mapping[str, Cells], targets: Mapping[str, str]) -> Row:
    groups: dict[tuple[str, str | None], list[int]] = defaultdict(list)  # columns, by style and link
    for at, layer in enumerate(columns):
        if (cell := heat[layer].get(kind)) is not None:
            style = style_of(cell)
            groups[style, _link(cell, targets) if style in ("failed", "warning") else None].append(at)
    areas = []
    for (style, link), places in groups.items():
        names, cells = [columns[at] for at in places], [heat[columns[at]][kind] for at in places]
        path = "".join(f"M{first} 0h{count}v1h-{count}z" for first, count in _runs(places))
        areas.append(Area(style, path, f"{kind}, {_listed(names)}: {_describe(cells)}", link))
    worst = min((style for style, _ in groups), key=_WORST.index)
    link = next(link for style, link in groups if style == worst)
    layers = [columns[at] for (style, _), group in groups.items() for at in group if style == worst]
    return Row(kind, areas, worst, _summary(worst, layers, [heat[layer][kind] for layer in layers]), link)


def style_of(cell: Mapping[str, Any]) -> str:
    """The CSS class of a cell."""
    if cell["failed"] or cell["findings"]:
        return "failed" if cell["failed"] else "warning"
    if cell["max_steps"] is None and cell["max_error"] is None:
        return "read"
    by_steps = cell["max_steps"] is not None
    size = cell["max_steps"] if by_steps else cell["max_error"]
    level = sum(size > least for least in (_STEPS if by_steps else _ERRORS))
    return _SHADES[level - 1] if level else "near" if by_steps else "equal"


def _link(cell: Mapping[str, Any], targets: Mapping[str, str]) -> str | None:
    return next((targets[anchor] for anchor in cell["findings"] if anchor in targets), None)


def _summary(style: str, layers: Sequence[str], cells: Sequence[Mapping[str, Any]]) -> str:
    where = "" if list(layers) == [OUTSIDE] else _listed(layers)
    if style == "failed":
        return f"✗ {where or 'wrong'}"
    if style == "warning":
        return f"! {where or 'a warning'}"
    steps, error = _largest(cells, "max_steps"), _largest(cells, "max_error")
    if steps is not None:
        return f"≤ {steps:.2f} steps off"
    return "read" if error is None else f"differs by ≤ {error:.1e}" if error else "equal"


def _describe(cells: Sequence[Mapping[str, Any]]) -> str:
    steps, error = _largest(cells, "max_steps"), _largest(cells, "max_error")
    wrong = sum(cell["failed"] for cell in cells)
    findings = list(dict.fromkeys(anchor for cell in cells for anchor in cell["findings"]))
    parts = [f"{sum(cell['tensors'] for cell in cells)} tensors"]
    parts += [f"{wrong} wrong"] if wrong else []
    parts += [f"largest difference {error:.3g}"] if error is not None else []
    parts += [f"at most {steps:.3f} quantization steps off"] if steps is not None else []
    parts += [", ".join(findings[:_TICKS])] if findings else []
    return "; ".join(parts)


def _largest(cells: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return max((cell[key] for cell in cells if cell[key] is not None), default=None)


def _listed(layers: Sequence[str]) -> str:
    numbers = [int(layer) for layer in layers if layer.isdecimal()]
    names = [layer for layer in layers if not layer.isdecimal()]
    return ", ".join([*([wording.numbered("layer", ranges(numbers))] if numbers else []), *names[:_TICKS]])


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first number and the length of every run of consecutive numbers."""
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        yield run[0], len(run)


def _experts(columns: Sequence[str], heat: Mapping[str, Cells], targets: Mapping[str, str]) -> Picture | None:
    """The wrong experts of all layers, or None if no expert is wrong."""
    cells = {at: [cell for cell in heat[layer].values() if cell.get("experts")] for at, layer in enumerate(columns)}
    sizes = {at: max((cell["experts"] for cell in some), default=0) for at, some in cells.items()}
    wrong: dict[str | None, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for at, layer in enumerate(columns):
        for cell in heat[layer].values():
            if text := cell.get("failed_experts"):
                wrong[_link(cell, targets)][at].update(expand_numbers(text))
    if not wrong:
        return None
    experts = max(sizes.values())
    found = {at: map(style_of, some) for at, some in cells.items()}
    sound = {at: [style for style in some if style not in ("failed", "warning")] for at, some in found.items()}
    usual = next(iter(chain.from_iterable(sound.values())), "read")
    background: dict[str, str] = defaultdict(str)
    for at, styles in sound.items():
        if sizes[at]:
            background[min(styles, key=_WORST.index, default=usual)] += f"M{at} 0v{sizes[at]}h1v-{sizes[at]}z"
    areas = [Area(style, path, "nothing wrong was found", None) for style, path in background.items()]
    for link, layers in wrong.items():
        runs = ((at, first, count) for at in layers for first, count in _runs(sorted(layers[at])))
        path = "".join(f"M{at} {first}v{count}h1v-{count}z" for at, first, count in runs)
        groups = by_key((wording.numbered("expert", ranges(experts)), columns[at]) for at, experts in layers.items())
        texts = [f"{text} of {_listed(names)}" for text, names in groups.items()]  # `experts 6 to 11 of layer 3`
        shown = "; ".join([*texts[:_TICKS], *(["and others"] if len(texts) > _TICKS else [])])
        areas.append(Area("failed", path, shown, link))
    return Picture(experts, min(max(_EXPERTS_PX[0], 12 * experts), _EXPERTS_PX[1]), areas)
