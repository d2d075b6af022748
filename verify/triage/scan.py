"""Reads logs line by line, in bounded memory, and collects where each symptom appears."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from verify.triage.symptom import LEADS, NEAR, TABLE, JobPhase, Served, Symptom, metric_symptoms

_PIECE = 1 << 16  # bytes of a line that are looked at together
_OVERLAP = 512  # bytes of a piece that the next one repeats, so that no message is cut in two
_SHOWN = 300  # characters of a line
_PLACES = 3  # lines of a symptom
_ANSI = re.compile(rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\))")
_LOADED = re.compile(
    r"successfully loaded checkpoint from .{1,300}|Load checkpoint from HuggingFace model into Megatron .{1,300}"
)

# Frames and requests of a weight update, and frames of an engine's start.
_UPDATING = (
    *("update_weights_from_", "update_weight_from_", "update_weights_via_", "update_parameter_in_bucket"),
    *(
        "broadcast_parameter",
        ", in update_weight",
        ", in _update_weight",
        ", in receive_weights",
        ", in reload_weights",
    ),
)
_UPDATE = re.compile(
    r"\b_?(?:(?:update|receive|reload)_weights?\w{0,60}|update_parameter_in_bucket|broadcast_parameter)"
)
_STARTING = (", in load_model", ", in initialize_model", ", in get_model")
# Which engine a line is of: the last that it names.
_ENGINE = re.compile(r"vllm[/_]|vLLM|VllmWorker|EngineCore|Worker_TP|sglang[/_]|SGLang")
_SERVED = re.compile(r"(?:\bmodel_path=|LLM engine .{0,200}\bmodel=)'([^'\s]{1,400})'")
_TP = re.compile(r"\b(?:tp_size|tensor_parallel_size)=(\d{1,4})\b")
_NEEDLES = [(needle, symptom) for symptom in TABLE for needle in symptom.needles]
_NEAR = [(fragment, symptom) for symptom in TABLE for fragment in symptom.near]
_FRAGMENTS = {fragment for fragment, _ in (*_NEEDLES, *_NEAR)}
_MORE = (*_UPDATING, *_STARTING, "model_path='", " LLM engine ", "loaded checkpoint", "into Megatron")
# Most lines have none of these, and are looked at once.
_TELLING = re.compile("|".join(map(re.escape, sorted({*_FRAGMENTS, *LEADS, *_MORE}))))


@dataclass(frozen=True)
class Place:
    """A line of a log."""

    file: str  # as the user named it
    line: int  # from 1
    text: str  # its beginning

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass
class Found:
    """What was found in logs so far."""

    lines: int = 0
    counts: dict[Symptom, int] = field(default_factory=dict)  # lines of each symptom
    places: dict[Symptom, list[Place]] = field(default_factory=dict)  # the first of them
    loaded: list[Place] = field(default_factory=list)  # lines that name what was loaded
    served: set[Served] = field(default_factory=set)  # what engines serve
    _phase: JobPhase = field(default_factory=JobPhase)
    _update: int = -NEAR  # the last line of an update
    _near: dict[Symptom, int] = field(default_factory=dict)
    _last: dict[Symptom, tuple[str, int]] = field(default_factory=dict)

    def add(self, symptom: Symptom, place: Place) -> None:
        """Counts a line that has a symptom. Pieces of a line overlap, so it may come twice in a row."""
        places = self.places.setdefault(symptom, [])
        if self._last.get(symptom) == (place.file, place.line):
            return
        self._last[symptom] = place.file, place.line
        self.counts[symptom] = self.counts.get(symptom, 0) + 1
        if len(places) < _PLACES:
            places.append(place)

    def scan(self, log: BinaryIO, name: str) -> None:
        """Reads a log to its end. Lines of any length are looked at piece by piece."""
        self._near.clear()
        self._phase, self._update = JobPhase(), -NEAR
        for number, text, is_start in _pieces(log):
            self.lines += is_start
            if _TELLING.search(text):
                self._look(text, name, number)

    def _look(self, text: str, name: str, number: int) -> None:
        for fragment, symptom in _NEAR:
            if fragment in text:
                self._near[symptom] = number
        self._follow(text, number)
        for symptom in _symptoms_of(text, number, self._near):
            symptom = self._phase.of(symptom) if symptom.loads else symptom
            self.add(symptom, Place(name, number, _beginning(text, symptom)))
        if len(self.loaded) < _PLACES and (match := _LOADED.search(text)) is not None:
            self.loaded.append(Place(name, number, match[0].strip()))

    def _follow(self, text: str, number: int) -> None:
        """Keeps which engine the lines are of, whether it is being updated, and what it serves."""
        engines, update = _ENGINE.findall(text), self._phase.update
        engine = ("vLLM" if engines[-1] not in ("sglang/", "sglang_", "SGLang") else "SGLang") if engines else ""
        if any(fragment in text for fragment in _UPDATING) and (found := _UPDATE.search(text)):
            update, self._update = found[0], number
        elif number - self._update >= NEAR or any(fragment in text for fragment in _STARTING):
            update = ""
        self._phase = JobPhase(engine or self._phase.engine, update)
        if (path := _SERVED.search(text)) and len(self.served) < _PLACES:
            ranks = _TP.search(text)
            self.served.add(Served(path[1], ranks[1] if ranks else ""))


def _symptoms_of(text: str, number: int, near: dict[Symptom, int]) -> list[Symptom]:
    for needle, symptom in _NEEDLES:
        if needle in text and symptom.matches(text) and (not symptom.near or number - near.get(symptom, -NEAR) < NEAR):
            return [symptom]
    return metric_symptoms(text)


def _beginning(text: str, symptom: Symptom) -> str:
    """The part of a line to show: its beginning, or what is around the message in a long one."""
    text = text.strip()
    if len(text) <= _SHOWN:
        return text
    at = min((text.find(needle) for needle in symptom.needles if needle in text), default=0)
    start = max(0, at - _SHOWN // 3)
    return ("..." if start else "") + text[start : start + _SHOWN] + "..."


def _pieces(log: BinaryIO) -> Iterator[tuple[int, str, bool]]:
    """Yields a line's number, its text without colours (a long one in overlapping pieces), and whether it begins it."""
    number, before = 0, b""
    while piece := log.readline(_PIECE):
        number += not before
        text = _ANSI.sub(b"", before + piece).decode(errors="replace")
        # At the end of the log a line may lack its break, without which nobody knows that a number is whole.
        yield number, text if len(piece) == _PIECE else text.rstrip("\n") + "\n", not before
        before = b"" if piece.endswith(b"\n") else piece[-_OVERLAP:]
