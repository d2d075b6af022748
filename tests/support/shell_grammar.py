"""Bash scripts made by `shell_grammar.txt`, what real bash gives to their trainer, and how our words compare."""

import re
import subprocess
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.shell.read import read_script
from ckptkit.verify.launch.words import UnresolvedWord
from support.grammar import text_of

# Commands whose result only running tells: where they end a script, we give what a trainer gets if they do not.
_ASKS = re.compile(r"/nosuch|-d /|more\.sh|-v |=~|< b|uname|cut|grep|wait|unset -f")
_UNSET = re.compile(rb"unbound variable|parameter null or not set")
_TRAINER = """#!/bin/sh
[ "$1" = train.py ] || exit 0
shift
printf '%s\\0' START "$@" >> "$OUT"
"""
ARGUMENTS = ("--tp", "2 3", "b")
FILES = {
    "more.sh": 'MORE=$1\nA=$A.more\nL+=("$#")\n[ "$A" != b.more ] || return 1\n',
    "other.sh": 'python3 train.py --other "$1" ${A:-unset}\n',
}


def script(number):
    return text_of(Path(__file__).with_suffix(".txt"), number, {"statement": ":"})


class Bash:
    """A directory with the files that the scripts use, in which bash runs them with a stand-in for Python."""

    def __init__(self, folder):
        self.folder, self.out, self.run, self.last = folder, folder / "out", folder / "run.sh", folder / "last"
        for name, text in FILES.items():
            (folder / name).write_text(text)
        (folder / "bin").mkdir()
        (folder / "bin" / "python3").write_text(_TRAINER)
        (folder / "bin" / "python3").chmod(0o755)
        self.environment = {"HOME": "/home/me", "PATH": f"{folder}/bin:/usr/bin:/bin", "FUNCNEST": "15"}

    def words(self, text):
        """The words of each start of the trainer, the last command of the script, and what it said of errors.

        None for a script without an end.
        """
        self.run.write_text(f"trap 'printf %s \"$BASH_COMMAND\" > {self.last}' EXIT\n{text}")
        self.out.write_bytes(b"")
        self.last.write_text("")
        command = ["bash", self.run.name, *ARGUMENTS]
        environment = {**self.environment, "OUT": str(self.out)}
        try:
            how = {"env": environment, "cwd": self.folder, "capture_output": True, "stdin": subprocess.DEVNULL}
            done = subprocess.run(command, **how, timeout=5, check=False)
        except subprocess.TimeoutExpired:
            return None, "", b""
        self.run.write_text(text)
        starts = self.out.read_bytes().decode(errors="replace").split("START\0")[1:]
        return [start.split("\0")[:-1] for start in starts], self.last.read_text(errors="replace"), done.stderr

    def compared(self, text):
        """`equal`, `unresolved`, `ended` or, where we say anything that bash does not, `differ: ...`."""
        wanted, last, errors = self.words(text)
        if wanted is None:
            return "endless"
        try:
            read = read_script(Path(self.run.name), arguments=ARGUMENTS, environment=self.environment)
        except CkptkitError as error:
            return "ended" if not wanted else f"differ: bash gives {wanted}, not: {error}"
        outcome = _judged(wanted, read)
        if outcome.startswith("differ") and not wanted:
            return "assumed" if _ASKS.search(text) or _UNSET.search(errors) else f"{outcome}; {last} ends it"
        return outcome


def _judged(wanted, read):
    known = not any(isinstance(word, UnresolvedWord) for word in read.words)
    if not read.unresolved and known and wanted == [[word.text for word in read.words]]:
        return "equal"
    if read.unresolved or (not known and len(wanted) == 1 and _fits(read.words, wanted[0])):
        return "unresolved"
    return f"differ: bash gives {wanted}, not {[word.text for word in read.words]}"


def _fits(words, wanted):
    """Whether these are the words, where one that is not known may be any number of words."""
    if not words:
        return not wanted
    if isinstance(words[0], UnresolvedWord):
        return any(_fits(words[1:], wanted[skipped:]) for skipped in range(len(wanted) + 1))
    return bool(wanted) and words[0].text == wanted[0] and _fits(words[1:], wanted[1:])
