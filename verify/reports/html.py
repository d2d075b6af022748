"""The report as one HTML page that needs nothing else: no network, no fonts, and no script but for the filter."""

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
from ckptkit.verify.core.check import LOOKS_AT, WITNESSES, all_checks
from ckptkit.verify.core.report import NOT_GIVEN, SCHEMA, CheckResult, Finding, Report, anchors
from ckptkit.verify.evidence.folding import by_key
from ckptkit.verify.reports.heat import OUTSIDE, expand_numbers
from ckptkit.verify.reports.text import (
    cause_of,
    duration,
    failure_titles,
    group_identical,
    headline,
    named_subject,
    numbered,
    other_reasons,
    totals,
)

_SHOWN = 50  # causes
_LISTED = 20  # findings below one


@dataclass(frozen=True)
class Cause:
    """Findings that say the same, by the first of them, and those that follow from them; with their anchors.

    `text` is what is wrong in words. Of many findings the first are listed; `more` says how many are not.
    """

    anchor: str
    finding: Finding
    title: str
    text: str
    same: Sequence[tuple[str, Finding]]
    follows: Sequence[tuple[str, str, str]]
    more: int


def html(report: Report) -> str:
    """The page: the cause, the stages, the map of layers, findings with fix and cause, facts, checks.

    Its content security policy lets no script or style run but its own.
    """
    from jinja2 import Environment, StrictUndefined  # only this format needs it

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if hasattr(value, "__html__") else printable(str(value)),  # markup stays as it is
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script, found = _asset("page.css"), _asset("page.js"), grouped_causes(report)
    targets = _targets(report, found)
    return environment.from_string(_asset("page.html")).render(
        report=report,
        schema=SCHEMA,
        headline=headline(report),
        reasons=other_reasons(report),
        totals=totals(report),
        seconds=sum(check.seconds for check in report.checks),
        stages=stages(report),
        map=layer_map(report.heat, targets),
        causes=found[:_SHOWN],
        more=len(found) - _SHOWN,
        codes={check.code: targets[anchor] for check in report.checks if (anchor := f"{check.code}-1") in targets},
        rationales={check.code: check.rationale for check in all_checks()},
        subject_of=named_subject,
        duration=duration,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def grouped_causes(report: Report) -> list[Cause]:
    """What is wrong, errors first: findings that say the same together, and below each what follows from it."""
    named = dict(zip(anchors(report.findings), report.findings, strict=True))
    anchor_of = {id(one): anchor for anchor, one in named.items()}
    titles = failure_titles(report)
    roots = sorted((one for one in named.values() if one.cause is None), key=lambda one: one.severity != "error")
    found = []
    for group in group_identical(roots):
        same = [(anchor_of[id(one)], one) for one in group]
        own = {anchor for anchor, _ in same}
        follows = [(anchor, one) for anchor, one in named.items() if one.cause in own]
        words = [(anchor, cause_of([one], report.checkpoint), titles.get(one.code, "")) for anchor, one in follows]
        more = max(0, len(same) - _LISTED) + max(0, len(words) - _LISTED)
        text, title = cause_of(group, report.checkpoint), titles.get(group[0].code, "")
        found.append(Cause(same[0][0], group[0], title, text, same[:_LISTED], words[:_LISTED], more))
    return found


def _targets(report: Report, found: Sequence[Cause]) -> dict[str, str]:
    """Where a link to a finding leads, by anchor: to itself, to its cause, or to where the rest is counted."""
    shown = {anchor for cause in found[:_SHOWN] for anchor, _ in cause.same}
    shown |= {anchor for cause in found[:_SHOWN] for anchor, _, _ in cause.follows}
    homes = {anchor: cause.anchor for cause in found[:_SHOWN] for anchor, _ in cause.same}
    targets = {}
    for anchor, one in zip(anchors(report.findings), report.findings, strict=True):
        home = homes.get(one.cause or anchor, "more-findings")
        targets[anchor] = anchor if anchor in shown else home
    return targets


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


_CODE = re.compile(r"CK\d{3}")
_OPTIONS = {"source": "--source", **{name.lower(): option for name, option in WITNESSES.items()}}
_OPTIONS["engine"] = "verify --engine"  # of the reports of preflight, which has no such option
_SHOWN_S = 0.1


_ORDER = [stage for stage in LOOKS_AT if stage != "quantization"]
_ORDER.insert(_ORDER.index("values") + 1, "quantization")


@dataclass(frozen=True)
class Stage:
    """One box: its name, its CSS class, how it ended, and a detail in a few words."""

    name: str
    style: str
    outcome: str
    detail: str


def stages(report: Report) -> list[Stage]:
    """The boxes in the order in which weights pass: the source, files, values, quantization, programs, behaviour."""
    stage_of = {one.code: _name(one.stage) for one in all_checks()}
    order = list(dict.fromkeys(map(_name, _ORDER)))
    found: list[Stage] = []
    if report.source:
        found.append(Stage("Source", "passed", "given", Path(report.source).name))
    for name in order:
        if checks := [check for check in report.checks if stage_of.get(check.code) == name]:
            codes = {check.code for check in checks}
            style, outcome = next(_outcomes(checks, [one for one in report.findings if one.code in codes], report))
            count, seconds = f"{len(checks)} check{'s' * (len(checks) > 1)}", sum(check.seconds for check in checks)
            detail = f"{count}, {duration(seconds)}" if seconds >= _SHOWN_S else count
            found.append(Stage(name, style, outcome, detail))
    seen = {stage.name.lower() for stage in found}
    left = [
        Stage(_capital(name), "unasked", NOT_GIVEN.get(name, "not asked"), _OPTIONS.get(name.lower(), ""))
        for name in report.not_asked
        if name.lower() not in seen
    ]
    places = ["Source", *order]
    return sorted((*found, *left), key=lambda one: places.index(one.name) if one.name in places else len(places))


def _name(stage: str) -> str:
    return _capital("quantization" if stage == "quantization" else LOOKS_AT[stage])


def _capital(name: str) -> str:
    return name[0].upper() + name[1:] if name != "vLLM" else name


def _outcomes(checks: Sequence[CheckResult], findings: Sequence[Finding], report: Report) -> Iterator[tuple[str, str]]:
    """How it ended, the most important first."""
    own = [one for one in findings if one.cause is None]
    errors = sum(one.severity == "error" for one in own)
    warnings = len(own) - errors
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


# Shades of a cell that is not wrong, by its largest error: what each begins above, whatever the other cells are. Half a
# quantization step is what rounding does, and no difference from the source is none, so neither is shaded.
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
_EXPERTS_PX = (72, 220)  # the least and the largest height of the picture of experts

Cells = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Area:
    """Cells of one colour that lead to the same finding: CSS class, SVG path, description, link."""

    style: str
    path: str
    described: str
    link: str | None


@dataclass(frozen=True)
class Row:
    """One kind of tensor: its areas, and what is to say of all its layers."""

    kind: str
    areas: Sequence[Area]
    style: str
    summary: str
    link: str | None


@dataclass(frozen=True)
class Picture:
    """Experts by layers; `height` is in pixels."""

    experts: int
    height: int
    areas: Sequence[Area]


@dataclass(frozen=True)
class LayerMap:
    """Rows over `layers` columns, the rows of what lies outside layers, experts where one is wrong, and the legend.

    `ticks` are labels of layers and where they stand, in per cent; `grid` is the path of the lines between layers.
    """

    layers: int
    ticks: Sequence[tuple[float, str]]
    grid: str
    rows: Sequence[Row]
    outside: Sequence[Row]
    experts: Picture | None
    legend: Sequence[tuple[str, str]]
    more: int


def layer_map(heat: Mapping[str, Cells], targets: Mapping[str, str]) -> LayerMap:
    """The map of a report; `targets` says where a link to a finding leads."""
    columns = [layer for layer in heat if layer != OUTSIDE]
    kinds = list(dict.fromkeys(kind for layer in columns for kind in heat[layer]))
    rows = sorted((_row(kind, columns, heat, targets) for kind in kinds), key=lambda row: _WORST.index(row.style))
    outside = [_row(kind, [OUTSIDE], heat, targets) for kind in heat.get(OUTSIDE, {})]
    outside.sort(key=lambda row: _WORST.index(row.style))
    experts = _experts(columns, heat, targets)
    areas = [*chain.from_iterable(row.areas for row in (*rows, *outside)), *(experts.areas if experts else ())]
    styles = {area.style for area in areas}
    styles |= {"shade"} if styles & set(_SHADES) else set()
    styles |= {"empty"} if any(len(cells) < len(kinds) for layer, cells in heat.items() if layer != OUTSIDE) else set()
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
    found: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    for at, layer in enumerate(columns):
        if (cell := heat[layer].get(kind)) is not None:
            style = style_of(cell)
            found[style, _link(cell, targets) if style in ("failed", "warning") else None].append(at)
    areas = []
    for (style, link), places in found.items():
        names, cells = [columns[at] for at in places], [heat[columns[at]][kind] for at in places]
        path = "".join(f"M{first} 0h{count}v1h-{count}z" for first, count in _runs(places))
        areas.append(Area(style, path, f"{kind}, {_named(names)}: {_described(cells)}", link))
    worst = min((style for style, _ in found), key=_WORST.index)
    (_, link), places = next(item for item in found.items() if item[0][0] == worst)
    several = [at for (style, _), group in found.items() for at in group if style == worst]
    cells = [heat[columns[at]][kind] for at in several]
    return Row(kind, areas, worst, _summary(worst, [columns[at] for at in several], cells), link)


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
    where = "" if list(layers) == [OUTSIDE] else _named(layers)
    if style == "failed":
        return f"✗ {where or 'wrong'}"
    if style == "warning":
        return f"! {where or 'a warning'}"
    steps, error = _largest(cells, "max_steps"), _largest(cells, "max_error")
    if steps is not None:
        return f"≤ {steps:.2f} steps off"
    return "read" if error is None else f"differs by ≤ {error:.1e}" if error else "equal"


def _described(cells: Sequence[Mapping[str, Any]]) -> str:
    """All that is known of some cells, for those who point at them or have them read out."""
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


def _named(layers: Sequence[str]) -> str:
    numbers = [int(layer) for layer in layers if layer.isdecimal()]
    others = [layer for layer in layers if not layer.isdecimal()]
    return ", ".join([*([numbered("layer", ranges(numbers))] if numbers else []), *others[:_TICKS]])


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the length of every run of numbers in a row."""
    for _, group in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
        run = [place for _, place in group]
        yield run[0], len(run)


def _experts(columns: Sequence[str], heat: Mapping[str, Cells], targets: Mapping[str, str]) -> Picture | None:
    """Which experts of which layers are wrong, over what is known of the others; None where none is wrong."""
    cells = {at: [cell for cell in heat[layer].values() if cell.get("experts")] for at, layer in enumerate(columns)}
    sizes = {at: max((cell["experts"] for cell in found), default=0) for at, found in cells.items()}
    wrong: dict[str | None, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for at, layer in enumerate(columns):
        for cell in heat[layer].values():
            if text := cell.get("failed_experts"):
                wrong[_link(cell, targets)][at].update(expand_numbers(text))
    if not wrong:
        return None
    experts = max(sizes.values())
    sound = {
        at: [style for style in map(style_of, found) if style not in ("failed", "warning")]
        for at, found in cells.items()
    }
    usual = next(iter(chain.from_iterable(sound.values())), "read")
    around: dict[str, str] = defaultdict(str)
    for at, styles in sound.items():
        if sizes[at]:
            around[min(styles, key=_WORST.index, default=usual)] += f"M{at} 0v{sizes[at]}h1v-{sizes[at]}z"
    areas = [Area(style, path, "nothing wrong was found", None) for style, path in around.items()]
    for link, layers in wrong.items():
        runs = ((at, first, count) for at in layers for first, count in _runs(sorted(layers[at])))
        path = "".join(f"M{at} {first}v{count}h1v-{count}z" for at, first, count in runs)
        areas.append(Area("failed", path, "; ".join(_experts_of(layers, columns)), link))
    return Picture(experts, min(max(_EXPERTS_PX[0], 12 * experts), _EXPERTS_PX[1]), areas)


def _experts_of(layers: Mapping[int, set[int]], columns: Sequence[str]) -> Iterator[str]:
    """`experts 6 to 11 of layers 3 and 5`, at most so many as a person reads."""
    alike = by_key((numbered("expert", ranges(experts)), columns[at]) for at, experts in layers.items())
    for text, names in list(alike.items())[:_TICKS]:
        yield f"{text} of {_named(names)}"
    if len(alike) > _TICKS:
        yield "and others"
