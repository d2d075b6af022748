"""Text that the formats for people share: the verdict in one sentence, and findings by code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit.core.printable import printable
from ckptkit.core.progress import size
from ckptkit.core.specs import ranges
from ckptkit.verify.core.report import Finding, Report, anchors, split_reason
from ckptkit.verify.evidence.folding import by_key, layers_of

# The common beginning of the expected and the actual value: `rms_norm_eps = `.
_SAME_START = re.compile(r"(\w[\w. ]*? = |shape (?=\[)|(?=\[)).*\n\1", re.DOTALL)
_VALUE = re.compile(r"(?:[\w .]+ = )?\d+")  # not clear without the expected value
_SUBJECTLESS = re.compile(r"(?:none|nothing|neither|missing|not|it|its|they|an empty)\b")  # a fault without a subject
_LISTED = 5  # numbers and ranges of layers that are listed
_LENGTH = 200  # characters of a cause
_IN_LAYERS = re.compile(r"(?P<home>(?:\w+\.)*?)(?P<mtp>mtp_)?layers\.(?P<layers>\d+|\{[\d.,]+\})\.(?P<tail>.+)")
_EXPERTS = re.compile(r"\bexperts\.(?:experts\.)?(\d+|\{[\d.,]+\})\.")
_CONTAINERS = re.compile(r"^(?:model|language_model|decoder|self_attn|self_attention|mlp|attn|ffn|block_sparse_moe)\.")
_NUMBERS = re.compile(r"\{(\d+(?:\.\.\d+)?(?:,\d+(?:\.\.\d+)?)*)\}")
_NAMED = re.compile(r" in (?:\w+\.){2,}\w+|^(?:\w+\.){2,}\w+ is (?=\S+ times)")  # the tensor of numbers
_ROUTER = ("gate", "router")
_VERDICTS = ("PASSED", "FAILED", "INCONCLUSIVE")
_PLAIN = ("missing", "different")  # actual values that are clear without the expected one


@dataclass(frozen=True)
class FindingGroup:
    """The findings of one code and severity."""

    code: str
    title: str
    severity: str
    shown: Sequence[tuple[str, Finding]]  # the first, with anchors
    more: int  # findings that are not shown


def groups(report: Report, limit: int) -> list[FindingGroup]:
    """All findings with anchors by code, at most `limit` of each: errors first, findings with a cause last."""
    named = zip(anchors(report.findings), report.findings, strict=True)
    by_kind = by_key(((one[1].cause is not None, one[1].severity, one[1].code), one) for one in named)
    titles = failure_titles(report)
    ordered = sorted(by_kind.items(), key=lambda item: (item[0][0], item[0][1] != "error"))
    return [
        FindingGroup(code, titles.get(code, ""), severity, group[:limit], max(0, len(group) - limit))
        for (_, severity, code), group in ordered
    ]


def failure_titles(report: Report) -> dict[str, str]:
    """The title of a failed check, by code."""
    return {check.code: check.failed or check.title for check in report.checks}


def rest(group: FindingGroup) -> str:
    """A note on the findings that are not shown."""
    return f"and {group.more} more {group.code} findings, all of them in the JSON report (--report FILE.json)"


def named_subject(finding: Finding) -> str:
    """The tensors of a finding with their number, else its file, else an empty text."""
    if finding.tensor:
        return finding.tensor + (f" ({finding.count} tensors)" if finding.count > 1 else "")
    return finding.file or ""


def duration(seconds: float) -> str:
    """A time as people read it: `0.4 s`, `2 min 12 s`, `1 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest_s} s"
    return f"{minutes} min {rest_s} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def totals(report: Report) -> str:
    """The numbers of checks by status, and of comparisons."""
    counts = report.to_json()["counts"]
    checks = ", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "skipped"))
    compared = f"{counts['tensors_compared']} comparisons, {size(counts['bytes_compared'])}"
    return f"{counts['checks']} checks: {checks}; {compared}"


def describe_fault(expected: str, actual: str) -> str:
    """The actual value, with the expected one if it is not clear without."""
    if match := _SAME_START.match(f"{expected}\n{actual}"):
        return f"{actual} instead of {expected.removeprefix(match[1])}"
    return f"{actual}, expected {expected}" if _VALUE.fullmatch(actual) and " " in expected else actual


def describe_finding(finding: Finding) -> str:
    """A finding in one line: its subject and the fault; of several kinds of tensors only their number and layers."""
    if finding.tensor and ", " in finding.tensor:
        layers = [] if "layer" in finding.actual else layers_of(finding.names)
        where = f"layer{'s' * (len(layers) > 1)} {ranges(layers).strip('{}')}, " if layers else ""
        return f"{finding.actual} ({where}{finding.count} tensors)"
    wrong = describe_fault(finding.expected, finding.actual)
    about = named_subject(finding) or (finding.expected if _SUBJECTLESS.match(wrong) else "")
    return f"{about}: {wrong}" if about else wrong


def headline(report: Report) -> str:
    """The first cause and the number of other errors; else the missing results, or the number of passed checks."""
    errors = [one for one in report.findings if one.severity == "error" and one.cause is None]
    if errors:
        first = group_identical(errors)[0]
        text = cause_of(first, report.checkpoint) + _more(len(errors) - len(first), "error")
        file = first[0].file
        return _sentence(text, Path(file).name if file and not first[0].tensor else None)
    if report.status == "failed":
        return "A check failed."
    if report.status == "inconclusive":
        reason, codes = split_reason(report.reasons[0])
        if more := _more(len(report.reasons) - 1, "reason"):
            return _sentence(f"Not everything was checked: {_shortened(reason)}{more}")
        return _sentence(f"Not everything was checked: {reason.rstrip('.')}{f' ({codes})' if codes else ''}")
    warned = f", with {report.warnings} warning{'s' * (report.warnings > 1)} to read" if report.warnings else ""
    passed = sum(check.status == "passed" for check in report.checks)
    checks = f"{'1 check' if passed == 1 else f'All {passed} checks'} passed{warned}"
    if report.is_uncompared:
        return f"{checks} without a release: exchanged layers or another rotary base are not seen without --source."
    return f"{checks}."


def other_reasons(report: Report) -> Sequence[str]:
    """The reasons of an inconclusive report that the headline does not contain."""
    return () if report.status == "inconclusive" and len(report.reasons) == 1 else report.reasons


def group_identical(findings: Sequence[Finding]) -> list[list[Finding]]:
    """The findings in order, with those together that differ in tensor or file only."""
    keys = ((one.code, one.severity, one.cause, one.expected, one.actual, one.hint) for one in findings)
    return list(by_key(zip(keys, findings, strict=True)).values())


def cause_of(findings: Sequence[Finding], checkpoint: str = "") -> str:
    """Describes identical findings without names of tensors: `router of layers 4 and 5: all zero`."""
    first = findings[0]
    wrong, where = _fault(first, checkpoint), _subject(findings, checkpoint)
    if not where and _SUBJECTLESS.match(wrong):
        where = first.expected if first.file is None else Path(first.file).absolute().name
        wrong = first.actual if first.file is None else wrong
    return _shortened(wrong if not where or where in wrong else f"{where}: {wrong}")


def _fault(finding: Finding, checkpoint: str) -> str:
    expected, wrong = finding.expected, finding.actual
    for root in (checkpoint, str(Path(checkpoint).absolute())) if checkpoint else ():
        wrong = re.sub(rf"(?<![\w./-]){re.escape(root)}/", "", wrong)
    if finding.tensor:
        wrong = _NAMED.sub("", wrong)
    if (words := describe_fault(expected, wrong)) != wrong:
        return words
    if len(wrong.split()) > 1 or wrong in _PLAIN:
        return wrong
    return f"{wrong} instead of {expected}" if len(expected.split()) == 1 else f"{wrong}, expected {expected}"


def _subject(findings: Sequence[Finding], checkpoint: str) -> str:
    """The subject of identical findings, or empty if the fault names it."""
    first = findings[0]
    if not first.tensor:
        return "" if is_about_checkpoint(first, checkpoint) else Path(str(first.file)).name
    if names_its_file(first):
        return ""
    if len(findings) == 1 and ", " not in first.tensor:
        return _tensor(first.tensor)
    layers = layers_of(name for one in findings for name in one.names)
    where = numbered("layer", ranges(layers)) if layers else ""
    if len(findings) > 1:
        count = f"{sum(one.count for one in findings)} tensors"
        return f"{count} of {where}" if where else count
    return "" if "layer" in first.actual or "tensors" in first.actual else where or f"{first.count} tensors"


def is_about_checkpoint(finding: Finding, checkpoint: str) -> bool:
    """Whether a finding is about the checkpoint, not a file in it."""
    return not finding.file or Path(finding.file).absolute() == Path(checkpoint).absolute()


def names_its_file(finding: Finding) -> bool:
    """Whether the fault begins with the path of the file and needs no other subject."""
    return bool(finding.file) and finding.actual.startswith("/".join(Path(str(finding.file)).parts[-2:]))


def _tensor(name: str) -> str:
    match = _IN_LAYERS.fullmatch(name)
    tail = match["tail"] if match else name
    experts = _EXPERTS.search(tail)
    module, _, leaf = (_EXPERTS.sub("", tail) if experts else tail).rpartition(".")
    while _CONTAINERS.match(module):
        module = _CONTAINERS.sub("", module)
    text = "router" if module in _ROUTER and match and not experts else module or leaf
    if leaf == "*":
        return numbered("MTP layer" if match and "mtp" in name else "layer", match["layers"]) if match else name
    if module and leaf != "weight":
        text = f"{leaf} of {text}"
    if experts:
        text += f" of {numbered('expert', experts[1])}"
    if match:
        kind = "MTP layer" if match["mtp"] or "mtp." in match["home"] else "layer"
        text += f" {'in' if experts else 'of'} {numbered(kind, match['layers'])}"
    return text


def numbered(word: str, numbers: str) -> str:
    """`layer 3`, or `layers 70 and 80`; `numbers` are folded as in names (`{70,80}`)."""
    return f"{word}{'s' * (not numbers.isdigit())} {_in_words(numbers.strip('{}'))}"


def _in_words(numbers: str) -> str:
    parts = [part.partition("..") for part in numbers.split(",")]
    if len(parts) == 1 and parts[0][2] and int(parts[0][2]) == int(parts[0][0]) + 1:
        return f"{parts[0][0]} and {parts[0][2]}"
    words = [f"{first} to {last}" if last else first for first, _, last in parts]
    if len(words) > _LISTED:
        return f"{words[0]}, {words[1]} and so on to {parts[-1][2] or parts[-1][0]}"
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def _more(count: int, word: str) -> str:
    return f", and {count} more {word}{'s' * (count > 1)}" if count > 0 else ""


def _shortened(text: str) -> str:
    """One line of at most _LENGTH characters, without braces around numbers."""
    line = " ".join(text.split()).rstrip(".")
    if len(line) > _LENGTH:  # before the numbers of a name become words, so that no name is cut
        line = f"{line[:_LENGTH].rpartition(' ')[0] or line[:_LENGTH]} …"
    return _NUMBERS.sub(lambda found: _in_words(found[1]), line)


def _sentence(text: str, file: str | None = None) -> str:
    """The text with a full stop, and a capital unless it begins with a name, such as that of `file`."""
    first = text.split(" ", 1)[0].rstrip(":")
    if first.startswith(_VERDICTS):  # a tensor of that name
        text = f"'{text.replace(first, first + chr(39), 1)}"
    text = text[:1].upper() + text[1:] if first.isalpha() and first.islower() and first != file else text
    return printable(f"{text}.")
