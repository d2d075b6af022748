"""The code blocks of README and docs/, and what runs their commands: in this process, or as a script of bash.

A mark in the line before a block says whether the tests run it: `<!-- run -->`, `<!-- not run: REASON -->`, or
`<!-- run without --OPTION: REASON -->`. A block without commands is of the kind `text`.
"""

import re
import shlex
import shutil
import subprocess
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from ckptkit.app.cli import cli
from support.processes import environment

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / "README.md", *(page for folder in ("docs", "lab/cards", "lab") for page in (ROOT / folder).glob("*.md"))]
)
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>(?:not )?run)(?: without (?P<without>--[\w-]+))?(?:: (?P<reason>.+?))? -->\n)?"
    r"^ *```(?P<kind>\w*)\n(?P<text>.*?)^ *```$",
    re.M | re.S,
)
_WRITES = ("convert", "quantize")


@dataclass(frozen=True)
class Block:
    """A block as it stands in a page. `without` is an option that the tests leave out of its commands."""

    page: str
    section: str  # the heading of the second level above it
    mark: str | None
    without: str | None
    reason: str | None
    kind: str
    text: str

    @property
    def commands(self):
        lines = (line.strip() for line in self.text.replace("\\\n", " ").splitlines())
        if self.kind == "console":
            return (line.removeprefix("$ ") for line in lines if line.startswith("$ "))
        return filter(None, lines)


def _section(before):
    titles = re.findall(r"^## (.+)$", re.sub(r"^ *```.*?^ *```$", "", before, flags=re.M | re.S), re.M)
    return titles[-1] if titles else ""


def _blocks(page):
    name, text = str(page.relative_to(ROOT)), page.read_text()
    for found in _BLOCK.finditer(text):
        yield Block(name, _section(text[: found.start()]), *found.group("mark", "without", "reason", "kind", "text"))


BLOCKS = [block for page in PAGES for block in _blocks(page)]


@dataclass(frozen=True)
class Shell:
    """Runs commands in the working directory. What `convert` and `quantize` wrote is kept in `store` and used again."""

    store: Path

    def run(self, line, without=None):
        """Runs a line as a shell would, `ckptkit` in this process. Returns its exit code and its standard output."""
        words = [word for word in shlex.split(line, comments=True) if word != without]
        if words[0] != "ckptkit":
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
            return done.returncode, done.stdout
        output = None
        if ">" in words:
            words, output = words[: words.index(">")], Path(words[-1])
        code, said = self._kept(words) if words[1] in _WRITES and "--dry-run" not in words else _in_process(words)
        if output:
            output.write_text(said)
        return code, said

    def _kept(self, words):
        """Runs a command that writes a directory, or copies what the same one wrote earlier, under any name."""
        kept, written = self.store / shlex.join(words[1:3] + words[4:]).replace("/", "|"), Path(words[3])
        if kept.exists() and not written.exists():
            shutil.copytree(kept, written)
            return 0, ""
        code, said = _in_process(words)
        if code == 0 and written.is_dir():
            shutil.copytree(written, kept)
        return code, said


def _in_process(words):
    said = StringIO()
    with redirect_stdout(said):
        try:
            code = cli.main(words[1:], standalone_mode=False)
        except SystemExit as end:
            code = end.code
    print(f"$ {shlex.join(words)}", said.getvalue(), sep="\n")
    return (code if isinstance(code, int) else 0), said.getvalue()


def bash(text, programs, **variables):
    found = environment(**variables)
    found["PATH"] = f"{programs}:{found['PATH']}"
    return subprocess.run(["bash", "-c", text], env=found, capture_output=True, text=True, check=False)
