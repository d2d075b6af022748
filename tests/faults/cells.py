"""The matrix of faults: every cell is a run of a verb that meets a fault in a phase, and what must come of it."""

import errno
import signal
from dataclasses import dataclass
from itertools import product

from faults.runs import Injection, Surroundings

WRITING = ("convert to Megatron", "convert to HF", "quantize")
NOTHING, RESUMABLE, WHOLE, ASIDE = "nothing", "resumable", "whole", "whole as .partial"
KEPT, REFUSED, FOUND = "as it was", "refused", "a finding"
FULL = "disk full"
_ALWAYS = 1 << 30


@dataclass(frozen=True)
class Cell:
    """`outcome`: what is there afterwards. `code`: the exit code; `said`: words of the message.

    `changes`: the fault changes files of the source, so the run gets a copy.
    """

    fault: str
    verb: str
    phase: str
    outcome: str
    code: int
    said: str = ""
    injection: Injection | None = None
    given: Surroundings | None = None
    changes: bool = False

    def __str__(self):
        return f"{self.fault}, {self.verb}, {self.phase}"


_PARTIAL = "*/out.partial"
_WEIGHTS = f"{_PARTIAL}/*.tmp"  # a file of weights has another name until it is whole; so have records of the journal
# Phases of a run that writes: the call that is met in it, and which of them.
_WRITES = {
    "lock": Injection("write", f"{_PARTIAL}.lock"),
    "side files": Injection("write", f"{_PARTIAL}/*config.json"),
    "first weights": Injection("write", _WEIGHTS),
    "later weights": Injection("write", _WEIGHTS, first=20),
    "journal": Injection("write", f"{_PARTIAL}/.ckptkit/*safetensors*.tmp"),
    "index": Injection("write", f"{_PARTIAL}/*model.safetensors.index.json"),
    "manifest": Injection("write", f"{_PARTIAL}/.ckptkit.json.*"),
}
_MEGATRON_WRITES = {
    "journal": Injection("write", f"{_PARTIAL}/.ckptkit/*distcp*.tmp"),
    "metadata": Injection("write", f"{_PARTIAL}/*/.metadata"),
}
_EARLY = {"lock", "side files", "first weights"}
_OF_SIGNAL = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM", signal.SIGKILL: ""}


def _writes(verb):
    if verb != "convert to Megatron":
        return _WRITES
    return {phase: one for phase, one in _WRITES.items() if phase != "index"} | _MEGATRON_WRITES


def _with(one, action, value=0, times=_ALWAYS):
    return Injection(one.call, one.pattern, action, value, one.first, times)


def _source(verb):
    """A file that is read when others are finished; of Megatron all, which are read in one batch before any is."""
    return "*/release/*.distcp" if verb == "convert to HF" else "*/hf/model-00030-of-00031.safetensors"


def _writing():
    for verb in WRITING:
        phases = _writes(verb)
        for phase, one in phases.items():
            if verb == "quantize" and phase not in ("later weights", "manifest"):
                continue  # as for convert, and each run is slower
            outcome = NOTHING if phase in _EARLY or phase == "journal" else RESUMABLE
            yield Cell(FULL, verb, phase, outcome, 2, "No space left", _with(one, "error", errno.ENOSPC))
            if phase in ("first weights", "later weights", "manifest"):
                yield Cell("write fails", verb, phase, outcome, 2, "Input/output", _with(one, "error", errno.EIO))
        yield from _ended(verb, phases)
        yield from _publishing(verb)
        yield from _of_source(verb)


def _ended(verb, phases):
    """A kill in every phase; signals that can be caught before there are weights, and among them."""
    for phase in (one for one in phases if one != "lock"):
        met = _with(phases[phase], "signal", signal.SIGKILL, 1)
        yield Cell("SIGKILL", verb, phase, RESUMABLE, -9, "", met)
    for number, phase in product((signal.SIGINT, signal.SIGTERM), ("side files", "later weights")):
        left, met = NOTHING if phase in _EARLY else RESUMABLE, _with(phases[phase], "signal", number, 1)
        yield Cell(number.name, verb, phase, left, 128 + number, _OF_SIGNAL[number], met)
    for number, said in _OF_SIGNAL.items():
        after = Injection("rename", _PARTIAL, "signal", number, 1, 1)
        code, left = (-9, RESUMABLE) if number == signal.SIGKILL else (128 + number, WHOLE)
        yield Cell(number.name, verb, "publish", left, code, said, after)
    last = Injection("unlink", f"{_PARTIAL}.lock", "signal", signal.SIGKILL, 1, 1)
    yield Cell("SIGKILL", verb, "end", WHOLE, -9, "", last)


def _publishing(verb):
    weights = "*.distcp" if verb == "convert to Megatron" else "*.safetensors"
    flush = Injection("fsync", f"{_PARTIAL}/{weights}", "error", errno.EIO, 4)
    yield Cell("flush fails", verb, "weights", RESUMABLE, 2, "Input/output", flush)
    flush = Injection("fsync", _PARTIAL, "error", errno.EIO)
    yield Cell("flush fails", verb, "directory", RESUMABLE, 2, "Input/output", flush)
    for fault, number, said in (
        ("rename fails", errno.EXDEV, "cross-device"),
        ("permission lost", errno.EACCES, "Permission denied"),
    ):
        yield Cell(fault, verb, "publish", ASIDE, 2, said, Injection("rename", _PARTIAL, "error", number))
    made = Injection("mkdir", _PARTIAL, "error", errno.EACCES)
    yield Cell("permission lost", verb, "directory", NOTHING, 2, "Permission denied", made)
    made = Injection("create", f"{_PARTIAL}/*.tmp", "error", errno.EACCES, 20)
    yield Cell("permission lost", verb, "later weights", RESUMABLE, 2, "Permission denied", made)
    made = Injection("create", f"{_PARTIAL}/*.tmp", "error", errno.EMFILE, 20)
    yield Cell("no file descriptors", verb, "later weights", RESUMABLE, 2, "Too many open files", made)


def _of_source(verb):
    source = _source(verb)
    # The header of an HF file is read first, for the plan and for the manifest, which takes two opens.
    again, then = (10, 10) if verb == "convert to HF" else (3, 3)
    read = Injection("read", source, "error", errno.EIO, then)
    left = NOTHING if verb == "convert to HF" else RESUMABLE
    yield Cell("read fails", verb, "weights", left, 2, "Input/output", read)
    side = Injection("read", "*config.json", "error", errno.EIO)
    yield Cell("read fails", verb, "config", NOTHING, 2, "Input/output", side)
    opened = Injection("open", source, "error", errno.EACCES, again)
    yield Cell("permission lost", verb, "source", left, 2, "Permission denied", opened)
    for action, fault in (
        ("truncate", "source truncated"),
        ("remove", "source deleted"),
        ("rewrite", "source rewritten"),
    ):
        call, first = ("open", again) if action == "remove" else ("read", then)
        change = Injection(call, source, action, 0, first, 1)
        yield Cell(fault, verb, "weights", NOTHING, 2, "changed while it was read", change, changes=True)


def _surroundings():
    nobody = Surroundings(nobody=True, env={"HOME": "/", "XDG_CACHE_HOME": "/", "TMPDIR": "/"})
    for verb in (*WRITING, "verify", "preflight", "lint --fix"):
        yield Cell("nobody, HOME and TMPDIR read-only", verb, "all of it", WHOLE, 0, given=nobody)
        yield Cell("clock jumps", verb, "all of it", WHOLE, 0, given=Surroundings(clock_s=10**8))
    for verb in ("diff", "manifest"):
        met = Injection("open", "*/release/*.distcp", "error", errno.EMFILE, 5)
        yield Cell("no file descriptors", verb, "weights", REFUSED, 2, "Too many open files", met)
    few = Surroundings(files=8)  # what has come until they run out is not said here
    yield Cell("no file descriptors", "convert to Megatron", "start", RESUMABLE, 2, "Too many open files", given=few)


READING = ("verify", "diff", "inspect", "manifest", "preflight")
_OF_OUTPUT = (
    (FULL, "write", errno.ENOSPC, "No space left"),
    ("write fails", "write", errno.EIO, "Input/output"),
    ("flush fails", "fsync", errno.EIO, "Input/output"),
    ("permission lost", "create", errno.EACCES, "Permission denied"),
    ("rename fails", "rename", errno.EXDEV, "cross-device"),
)


def _reading():
    for verb in READING:
        index = "*/config.json"
        read = Injection("read", index, "error", errno.EIO)
        outcome, code = (FOUND, 1) if verb in ("verify", "preflight") else (REFUSED, 2)
        yield Cell("read fails", verb, "config", outcome, code, "Input/output", read)
        opened = Injection("open", index, "error", errno.EACCES)
        yield Cell("permission lost", verb, "config", outcome, code, "Permission denied", opened)
    for verb in ("verify", "diff", "manifest"):
        weights = "*/release/*.distcp"
        read = Injection("read", weights, "error", errno.EIO, 5)
        outcome, code = (FOUND, 1) if verb == "verify" else (REFUSED, 2)
        yield Cell("read fails", verb, "weights", outcome, code, "Input/output", read)
        for action, fault in (("truncate", "source truncated"), ("remove", "source deleted")):
            change = Injection("read" if action == "truncate" else "open", weights, action, 0, 5, 1)
            yield Cell(fault, verb, "weights", REFUSED, 2, "changed while it was read", change, changes=True)
        change = Injection("read", weights, "rewrite", 0, 20, 1)
        yield Cell("source rewritten", verb, "weights", REFUSED, 2, "changed while it was read", change, changes=True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            code, words = (-9 if number == signal.SIGKILL else 128 + number), _OF_SIGNAL[number]
            met = Injection("read", weights, "signal", number, 5, 1)
            yield Cell(number.name, verb, "weights", REFUSED, code, words, met)
    outputs = {"verify": "*/.report.json.*", "manifest": "*/.made.json.*", "lint --fix": "*/.config.json.*"}
    for verb, pattern in outputs.items():
        for fault, call, number, said in _OF_OUTPUT:
            yield Cell(fault, verb, "output", KEPT, 2, said, Injection(call, pattern, "error", number))
        met = Injection("rename", pattern, "signal", signal.SIGKILL, 1, 1)
        yield Cell("SIGKILL", verb, "output", KEPT, -9, "", met)
    original = Injection("write", "*/.config.json.orig.*", "error", errno.ENOSPC)
    yield Cell(FULL, "lint --fix", "copy of the original", KEPT, 2, "No space left", original)
    config = "*/int4/config.json"
    read = Injection("read", config, "error", errno.EIO)
    yield Cell("read fails", "lint --fix", "config", REFUSED, 2, "Input/output", read)
    opened = Injection("open", config, "error", errno.EACCES)
    yield Cell("permission lost", "lint --fix", "config", REFUSED, 2, "Permission denied", opened)
    log = Injection("read", "*/log", "error", errno.EIO)
    yield Cell("read fails", "triage", "log", REFUSED, 2, "Input/output", log)
    opened = Injection("open", "*/log", "error", errno.EACCES)
    yield Cell("permission lost", "triage", "log", REFUSED, 2, "Permission denied", opened)


def _streams():
    verbs = ("convert to Megatron", "verify", "diff", "inspect", "manifest", "lint --fix", "preflight", "triage")
    for verb, (fault, stdout, code, said) in product(
        verbs,
        (
            ("standard output full", "/dev/full", 2, "standard output: No space left"),
            ("standard output broken", "broken", 0, ""),
            ("standard output closed", "closed", 0, ""),
        ),
    ):
        yield Cell(fault, verb, "end", WHOLE, code, said, given=Surroundings(stdout))


CELLS = [*_writing(), *_reading(), *_surroundings(), *_streams()]
