"""A public bug report: its row in lab/reports.md, and the case that rebuilds it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "lab" / "reports.md"
SOURCE = "RELEASE"  # what a case calls the release that its checkpoint was made from

# Changes a case in place: a directory with `CKPT`, or with the launch `SCRIPT` and what it names.
Change = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """What the command of a report runs on.

    `start`: the sound checkpoint at `CKPT`, a label of `mutations.starts`, with its release at `RELEASE`; where it ends
    with `/`, that alone is there. `prepare` completes the sound case, `damage` makes the report of it. `twin`: the
    command on the sound case, where it is another; then there may be no damage. `names` are all in one finding.
    """

    start: str = ""
    names: tuple[str, ...] = ()
    damage: Change | None = None
    prepare: Change | None = None
    twin: str = ""


@dataclass(frozen=True)
class Report:
    """One row of lab/reports.md.

    `verdict` is the first word of its heading. found: by the command, with the code `result`. named: ckptkit does not
    judge the format or model, and names it. sound: the checkpoint is right and one reader was wrong; nothing may be
    found in it. missed: it should be found and is not.
    """

    thread: str
    url: str
    month: str
    what: str
    command: str
    result: str
    verdict: str
    case: Case

    @property
    def code(self):
        """The code that must be found; none where nothing is to be found, and `result` says why."""
        return self.result if self.verdict == "found" else ""

    @property
    def key(self):
        return self.thread.replace("/", "-")


def read(cases):
    """The rows of the document with their cases. Raises KeyError for a row without a case."""
    verdict = ""
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            verdict = re.split(r"\W", line[3:])[0].lower()
        if match := re.fullmatch(r"\| \[(.+?)\]\((.+?)\) \| (.+?) \| (.+?) \| `(.+?)` \| (.+?) \|", line):
            cells = (cell.replace("\\|", "|") for cell in match.groups())
            yield Report(*cells, verdict, cases[match[1]])
