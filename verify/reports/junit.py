"""The report as JUnit XML: a test for each check."""

from __future__ import annotations

from xml.etree import ElementTree

from ckptkit.core.printable import printable
from ckptkit.verify.core.check import all_checks
from ckptkit.verify.core.report import CheckResult, Report
from ckptkit.verify.evidence.folding import by_key
from ckptkit.verify.reports.text import FindingGroup, describe_finding, groups, named_subject, rest

_SHOWN = 100  # findings of one code
_CLASSES = {"headers": "files", "launch": "configuration"}  # names of stages that differ here


def junit(report: Report) -> str:
    """One testsuite. A check with findings of severity error fails; one with warnings only passes and prints them."""
    root = ElementTree.Element("testsuites")
    counts = report.to_json()["counts"]
    attributes = {
        "name": "ckptkit",
        "tests": str(counts["checks"] + len(report.reasons)),
        "failures": str(counts["failed"]),
        "errors": str(len(report.reasons)),
        "skipped": str(counts["skipped"]),
        "time": f"{sum(check.seconds for check in report.checks):.3f}",
    }
    suite = ElementTree.SubElement(root, "testsuite", attributes)
    properties = ElementTree.SubElement(suite, "properties")
    for name in ("version", "checkpoint", "source", "command", "verdict"):
        value = " ".join(report.command) if name == "command" else getattr(report, name)
        if value:
            ElementTree.SubElement(properties, "property", name=name, value=_xml(value))
    by_code = by_key((group.code, group) for group in groups(report, _SHOWN))
    for check in report.checks:
        _case(suite, check, by_code.get(check.code, []))
    for reason in report.reasons:
        # A separate case for a check that was requested and could not run: CI systems show a skipped case as green.
        codes, _, why = reason.partition(": ")
        name = _xml(f"{codes} could not look")
        case = ElementTree.SubElement(suite, "testcase", classname="ckptkit.inconclusive", name=name, time="0.000")
        ElementTree.SubElement(case, "error", message=_xml(why))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _case(suite: ElementTree.Element, check: CheckResult, found: list[FindingGroup]) -> None:
    stage: str = next((one.stage for one in all_checks() if one.code == check.code), "checks")
    classname = f"ckptkit.{_CLASSES.get(stage, stage)}"
    attributes = {"classname": classname, "name": _xml(f"{check.code} {check.title}"), "time": f"{check.seconds:.3f}"}
    case = ElementTree.SubElement(suite, "testcase", attributes)
    if check.status == "skipped":
        ElementTree.SubElement(case, "skipped", message=_xml(check.reason or ""))
    errors = [group for group in found if group.severity == "error"]
    if check.status == "failed":
        count = sum(len(group.shown) + group.more for group in errors) - 1
        more = f" (and {count} more finding{'s' * (count != 1)})" if count > 0 else ""
        message = f"{describe_finding(errors[0].shown[0][1])}{more}" if errors else "a check failed"
        failure = ElementTree.SubElement(case, "failure", type=check.code, message=_xml(message))
        failure.text = _text(errors)
    if warnings := [group for group in found if group.severity == "warning"]:
        ElementTree.SubElement(case, "system-out").text = _text(warnings)


def _text(found: list[FindingGroup]) -> str:
    lines = []
    for group in found:
        for anchor, finding in group.shown:
            about = named_subject(finding)
            lines += [f"{anchor} {group.severity}" + (f": {about}" if about else "")]
            lines += [f"  file: {finding.file}"] if finding.file and finding.tensor else []
            lines += [f"  rank: {finding.rank}"] if finding.rank else []
            lines += [f"  follows from: {finding.cause}"] if finding.cause else []
            lines += [f"  expected: {finding.expected}", f"  actual: {finding.actual}", f"  next: {finding.hint}"]
        lines += [rest(group)] if group.more else []
    return "\n".join(map(_xml, lines))


def _xml(text: str) -> str:
    """Replaces characters that XML 1.0 does not permit."""
    return "".join(char if char not in "\ufffe\uffff" else "\ufffd" for char in printable(text))
