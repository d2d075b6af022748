"""Reads logs line by line, in bounded memory, and collects the places of each symptom."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from ckptkit.verify.triage.symptom import NEAR, PHASES, START, TABLE, UPDATE, JobPhase, Served, Symptom, metric_symptoms

_PIECE = 1 << 16  # bytes of a long line that are searched at once
_OVERLAP = 512  # bytes of a piece that the next one repeats, so that no message is cut in two
_SHOWN = 300  # characters of a line
_PLACES = 3  # lines of a symptom
_ANSI = re.compile(rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\))")
_LOADED = re.compile(
    r"successfully loaded checkpoint from .{1,300}|Load checkpoint from HuggingFace model into Megatron .{1,300}"
)
_UPDATE = re.compile(UPDATE.name or "")
_FRAME = re.compile(r'File "[^"]{1,400}", line \d{1,7}, in ')
# The last line of a traceback, after prefixes of clusters and loggers.
_ERROR = re.compile(r"(?:^|[])]:? )(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Za-z_]\w{0,60}(?:Error|Exception)(?:: |:?\s*$)")
_ENGINE = re.compile(r"vllm[/_]|vLLM|VllmWorker|EngineCore|Worker_TP|sglang[/_]|SGLang")  # the last in a line counts
_SERVED = re.compile(r"(?:\bmodel_path=|LLM engine .{0,200}\bmodel=)'([^'\s]{1,400})'")
_TP = re.compile(r"\b(?:tp_size|tensor_parallel_size)=(\d{1,4})\b")
_NEEDLES = [(needle, symptom) for symptom in TABLE for needle in symptom.needles]
_NEAR = [(fragment, symptom) for symptom in TABLE for fragment in symptom.near]
_FRAGMENTS = {fragment for fragment, _ in (*_NEEDLES, *_NEAR)}
_FRAMES = [frame for phase in PHASES for frame in phase.frames]
_METRICS = ("step ", "rollout ", "step:", "grad norm:", "loss:")  # one of these is in a line with metrics
_ERRORS = ("Error", "Exception", "Traceback (")
_MORE = (*_FRAMES, *_ERRORS, "model_path='", " LLM engine ", "loaded checkpoint", "into Megatron")
# Most lines have none of these and are searched once.
_TELLING = re.compile("|".join(map(re.escape, sorted({*_FRAGMENTS, *_METRICS, *_MORE}))))


@dataclass(frozen=True)
class Place:
    """A line of a log."""

    file: str  # as the user gave it
    line: int  # from 1
    text: str  # its beginning

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass
class Found:
    """The results of all logs so far."""

    lines: int = 0
    counts: dict[Symptom, int] = field(default_factory=dict)  # lines of each symptom
    places: dict[Symptom, list[Place]] = field(default_factory=dict)  # the first of these lines
    loaded: list[Place] = field(default_factory=list)  # lines that name a loaded checkpoint
    served: set[Served] = field(default_factory=set)  # directories that engines serve
    engines: set[str] = field(default_factory=set)
    _engine: str = ""  # of the current line
    _update: str = ""  # the function of the current weight update
    _updated: int = -NEAR  # the last line of an update
    _frames: dict[JobPhase, int] = field(default_factory=dict)  # the last frame of each phase, in this traceback
    _cause: int = -NEAR  # the last line with a known cause
    _near: dict[Symptom, int] = field(default_factory=dict)
    _last: dict[Symptom, tuple[str, int]] = field(default_factory=dict)

    def add(self, symptom: Symptom, place: Place) -> None:
        """Counts a line with a symptom once, even if it is in two overlapping pieces."""
        places = self.places.setdefault(symptom, [])
        if self._last.get(symptom) == (place.file, place.line):
            return
        self._last[symptom] = place.file, place.line
        self.counts[symptom] = self.counts.get(symptom, 0) + 1
        if len(places) < _PLACES:
            places.append(place)

    def scan(self, log: BinaryIO, name: str) -> None:
        """Reads a log to its end, long lines in pieces."""
        self._near.clear()
        self._frames.clear()
        self._engine, self._update, self._updated, self._cause = "", "", -NEAR, -NEAR
        for number, text, is_start in _pieces(log):
            self.lines += is_start
            if _TELLING.search(text):
                self._look(text, name, number)

    def _look(self, text: str, name: str, number: int) -> None:
        for fragment, symptom in _NEAR:
            if fragment in text:
                self._near[symptom] = number
        self._follow(text, number)
        found = _symptoms_of(text, number, self._near)
        if any(not symptom.effect for symptom in found):
            self._cause = number
        for symptom in found or self._unknown(text, number):
            if symptom.loads:
                symptom = UPDATE.of(symptom, self._update) if self._update else symptom
            if symptom.loads or not found:
                symptom = symptom.for_vllm() if self._engine == "vLLM" else symptom
            self.add(symptom, Place(name, number, _beginning(text, symptom)))
        if len(self.loaded) < _PLACES and (match := _LOADED.search(text)) is not None:
            self.loaded.append(Place(name, number, match[0].strip()))

    def _follow(self, text: str, number: int) -> None:
        """Follows the engine of the lines, its weight updates and the directory that it serves."""
        if engines := _ENGINE.findall(text):
            self._engine = "SGLang" if engines[-1] in ("sglang/", "sglang_", "SGLang") else "vLLM"
            self.engines.add(self._engine)
        if UPDATE.has(text) and (found := _UPDATE.search(text)):
            self._update, self._updated = found[0], number
        elif number - self._updated >= NEAR or START.has(text):
            self._update = ""
        if "Traceback (" in text:
            self._frames.clear()
        if _FRAME.search(text):
            self._frames |= {phase: number for phase in PHASES if phase.has(text)}
        if (path := _SERVED.search(text)) and len(self.served) < _PLACES:
            ranks = _TP.search(text)
            self.served.add(Served(path[1], ranks[1] if ranks else ""))

    def _unknown(self, text: str, number: int) -> list[Symptom]:
        """The error of the phase by the frames of a traceback; empty near a known cause."""
        if number - self._cause < NEAR or not _ERROR.search(text):
            return []
        phases = [phase for phase in PHASES if number - self._frames.get(phase, -NEAR) < NEAR]
        self._frames.clear()
        if UPDATE in phases and not self._update:  # a start came after it
            phases.remove(UPDATE)
        return [phases[0].error(self._update)] if phases else []


def _symptoms_of(text: str, number: int, near: dict[Symptom, int]) -> list[Symptom]:
    for needle, symptom in _NEEDLES:
        if needle in text and symptom.matches(text) and (not symptom.near or number - near.get(symptom, -NEAR) < NEAR):
            return [symptom]
    return metric_symptoms(text)


def _beginning(text: str, symptom: Symptom) -> str:
    """The beginning of a line, or the part around the message of a long one."""
    text = text.strip()
    if len(text) <= _SHOWN:
        return text
    at = min((text.find(needle) for needle in symptom.needles if needle in text), default=0)
    start = max(0, at - _SHOWN // 3)
    return ("..." if start else "") + text[start : start + _SHOWN] + "..."


def _pieces(log: BinaryIO) -> Iterator[tuple[int, str, bool]]:
    """Yields number, text without colours and whether it begins the line; a long line in overlapping pieces."""
    number, before = 0, b""
    while piece := log.readline(_PIECE):
        number += not before
        text = _ANSI.sub(b"", before + piece).decode(errors="replace")
        # The last line may lack its break, which ends a number.
        yield number, text if len(piece) == _PIECE else text.rstrip("\n") + "\n", not before
        before = b"" if piece.endswith(b"\n") else piece[-_OVERLAP:]
