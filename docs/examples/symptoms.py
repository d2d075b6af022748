"""`make symptoms`: writes docs/symptoms.md from `verify/triage/symptoms.toml`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from textwrap import fill

from ckptkit.verify.triage.symptom import PHASES, TABLE, Symptom, page_symptoms

PAGE = Path(__file__).parents[1] / "symptoms.md"
_BEGIN = """\
# From a symptom to a command
The debugging guides of slime and miles say what goes wrong in a training job. This page lists what in them is about
checkpoints, weights or loading: what you see, what may be the cause, the command that detects it, the [hook](jobs.md)
that does so while a job runs, and the checks that fail then. `ckptkit triage LOG` finds those that leave a line in a
log. The test named last shows the detection. `make symptoms` writes this page from `verify/triage/symptoms.toml`, as
`triage` and `explain` read it.

HF is the directory of `--hf-checkpoint`, CKPT a checkpoint in either format, RELEASE what it was made from. `verify
--source` and `diff` compare two checkpoints of any formats. With vLLM write `--against-vllm` for `--against-sglang`.
"""
_LINES = """\
## Other lines of a log
What `ckptkit triage LOG` names besides, by a part of the line.
"""
_UNKNOWN = """\
## Errors that are not known
Of an error that is none of these `ckptkit triage` names what the job was doing, by the frames of the traceback.
"""
_END = """\
## Not about the checkpoint
A collective operation that timed out, a Ray actor that died, an illegal memory access, a damaged cache of torch's
compiler, and memory that runs out in the second step of a colocated job (`--sglang-mem-fraction-static`) are no
defects of weights. `ckptkit triage` says so, and lists first what stood in the log before them.

Public threads of which nothing is in a file are in [reports-not-rebuilt.md](../lab/reports-not-rebuilt.md), each with
the reason: most are updates of a live engine (for [`WeightSyncCheck`](jobs.md#weight-updates)) or a trainer's own
code.
"""


def _item(text: str) -> str:
    return fill(f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _quoted(needles: tuple[str, ...]) -> str:
    texts = map(str.strip, needles)
    return ", ".join(f"`` {text} ``" if "`" in text else f"`{text}`" for text in texts)


def _section(symptom: Symptom) -> str:
    """The section of a symptom that has a number."""
    title = symptom.title
    if re.match(r"[a-z]+ ", title):
        title = title[0].upper() + title[1:]
    tests = ", ".join(f"`{test}`" for test in symptom.tests)
    items = {
        "Causes": symptom.meaning,
        "Command": f"`{symptom.command}`",
        "In the job": symptom.job,
        "In a log": _quoted(symptom.needles),
        "Checks": ", ".join(symptom.codes) or "none: it is not a defect of a checkpoint",
        "Test": tests,
    }
    lines = [_item(f"{label}: {text}") for label, text in items.items() if text]
    return "\n".join([f"### {symptom.number}. {title}", *lines, ""])


def _cells(*texts: str) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def _parts() -> Iterator[str]:
    yield _BEGIN
    for section, several in groupby(page_symptoms(), lambda symptom: symptom.section):
        yield "\n".join([f"## {section}", *map(_section, several)])
    rows = [
        _cells(_quoted(one.needles), one.title, re.sub("^ckptkit.*", r"`\g<0>`", one.command))
        for one in TABLE
        if one.needles and not one.number
    ]
    yield "\n".join([_LINES, "| in the line | what it is | command |", "| --- | --- | --- |", *rows, ""])
    rows = [_cells(phase.during, _quoted(phase.frames[:3]), f"`{phase.command}`") for phase in PHASES]
    yield "\n".join([_UNKNOWN, "| an error | frames with, for example | command |", "| --- | --- | --- |", *rows, ""])
    yield _END


def page() -> str:
    """The page as it should be."""
    return "\n".join(_parts())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
