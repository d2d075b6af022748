"""The paths of a launch: those that preflight is given, else those that the launch's own words name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.hub_cache import hub_model
from verify.launch.launch import Launch
from verify.launch.options.argv import Option, last, options_of
from verify.launch.words import LaunchText, Word


@dataclass
class _Options:
    """The options of a launch, and a note for each that an option of preflight contradicts."""

    options: Sequence[Option]
    notes: list[str] = field(default_factory=list)

    def last(self, name: str) -> Word | None:
        """The value of an option; None where it is not given, or could not be told."""
        option = last(self.options, name)
        return option.value if option and option.known else None

    def path(self, option: str, given: Path | None = None) -> Path | None:
        """A path; one that preflight was given counts before that of the words."""
        said = self.last(option)
        if given is None:
            return Path(said.text) if said else None
        if said and Path(said.text).absolute() != given.absolute():
            self.notes.append(f"{option} {given} was looked at, although {said.place} says {said.text}")
        return given

    def step(self, option: str, given: int | None = None) -> int | None:
        """An iteration. Raises CkptkitError where the words give none."""
        said = self.last(option)
        if said is not None and not (said.text.isdecimal() and len(said.text) < 10):
            raise CkptkitError(f"{said.place}: {option} {said.text} is no number", "give the iteration as a number")
        if given is None:
            return int(said.text) if said else None
        if said and int(said.text) != given:
            self.notes.append(f"{option} {given} was looked at, although {said.place} says {said.text}")
        return given


def launch_of(
    text: LaunchText,
    hf_checkpoint: Path | None,
    load: Path | None,
    ref_load: Path | None,
    ckpt_step: int | None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Launch, list[str]]:
    """The launch that these options and words are, and notes on options that contradict the words.

    `environment` holds the variables that its job sees.
    """
    words = _Options(options_of(text.words))
    hf = words.path("--hf-checkpoint", hf_checkpoint)
    word = words.last("--hf-checkpoint")
    # `./org/model` is a path, and Path forgets that.
    name = str(hf_checkpoint) if hf_checkpoint else word.text if word else ""
    hub = hub_model(name, environment or {})
    launch = Launch(
        hub.path if hub else hf,
        words.path("--load", load),
        words.path("--ref-load", ref_load),
        words.step("--ckpt-step", ckpt_step),
        text,
        words.step("--ref-ckpt-step"),
        words.path("--critic-load"),
        words.path("--opd-teacher-load"),
        words.step("--opd-teacher-ckpt-step"),
        hub=hub,
    )
    return launch, words.notes
