"""Compares settings of processors (images, videos, sound), built as a program; no code of a checkpoint runs."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckptkit.verify.evidence.side_files import PROCESSOR_CONFIG, SideDifference, SideFiles, setting_differences
from ckptkit.verify.witnesses.process.exit_report import ExitReport, Phase, run_job
from ckptkit.verify.witnesses.runner import ask

PREPROCESSOR, VIDEO = "preprocessor_config.json", "video_preprocessor_config.json"
VIDEO_PART = "video_processor"
PROCESSOR = "processor"  # combines the other parts; it is not built, since its class needs a tokenizer
# Files of a part that processor_config.json lacks, in the order in which transformers reads them. Source:
# `get_video_processor_dict` and similar functions of 5.12.
FILES: Mapping[str, tuple[str, ...]] = {
    "image_processor": (PREPROCESSOR,),
    "feature_extractor": (PREPROCESSOR,),
    VIDEO_PART: (VIDEO, PREPROCESSOR),
}
_BUILDING_HERE = Phase("building the processor")
_SCRATCH = re.compile(r"\S*ckptkit-processor-\w+")
_LIMIT_S = 180
_NESTED = {  # parts by the key of processor_config.json that transformers 5 saves them under
    "image_processor": "image_processor",
    "feature_extractor": "feature_extractor",
    "audio_processor": "feature_extractor",
    "video_processor": "video_processor",
}
_UNREAD = ("transformers_version", "processor_class", "chat_template", "auto_map", "_processor_class")
_TYPES = ("image_processor_type", "feature_extractor_type", "video_processor_type", "processor_class")


@dataclass(frozen=True)
class _Settings:
    """The settings of one part in one file. Releases of transformers read different files."""

    part: str
    file: str
    values: Mapping[str, Any]

    @property
    def read(self) -> Mapping[str, Any]:
        """The settings that a processor reads; transformers 5 has no classes with the ending `Fast`."""
        plain = {key: value for key, value in self.values.items() if key not in _UNREAD}
        return {key: one.removesuffix("Fast") if isinstance(one, str) else one for key, one in plain.items()}


def processor_differences(here: SideFiles, there: SideFiles, place: str) -> Iterator[SideDifference]:
    """Compares settings of processors, with the defaults of transformers if keys differ."""
    mine, its = _stored(here), _stored(there)
    pairs = {(one.part, one.file): (one, _counterpart(one, its)) for one in mine}
    compared = {(one.file, other.file, other.part) for one, other in pairs.values() if other is not None}
    for one, other in pairs.values():
        yield from _compare(here, there, one, other, place)
    for other in its:
        counterpart = _counterpart(other, mine)
        if counterpart is None and other.read:
            yield SideDifference(other.file, "settings of a processor", "missing")
        elif counterpart is not None and (counterpart.file, other.file, other.part) not in compared:
            yield from _compare(here, there, counterpart, other, place)


def _stored(side: SideFiles) -> list[_Settings]:
    config = side.json(PROCESSOR_CONFIG)
    nested = ((part, config.get(key)) for key, part in _NESTED.items())
    settings = [_Settings(part, PROCESSOR_CONFIG, one) for part, one in nested if isinstance(one, Mapping)]
    for file, part in ((PREPROCESSOR, "image_processor"), (VIDEO, "video_processor")):
        if content := side.json(file):
            is_sound = "feature_extractor_type" in content and "image_processor_type" not in content
            settings.append(_Settings("feature_extractor" if is_sound else part, file, content))
    rest = {key: value for key, value in config.items() if key not in _NESTED}
    return [one for one in settings if one.read] + ([_Settings(PROCESSOR, PROCESSOR_CONFIG, rest)] if config else [])


def _counterpart(one: _Settings, others: Sequence[_Settings]) -> _Settings | None:
    """The settings of the other side that the reader of `one` would read."""
    by_place = {(other.part, other.file): other for other in others}
    if one.part == PROCESSOR:
        return by_place.get((PROCESSOR, PROCESSOR_CONFIG))
    files = {other.file: other for other in others if other.part != PROCESSOR and other.file != PROCESSOR_CONFIG}
    first = [] if one.file == PROCESSOR_CONFIG else [files.get(one.file)]
    candidates = [*first, by_place.get((one.part, PROCESSOR_CONFIG)), *map(files.get, FILES[one.part])]
    return next(filter(None, candidates), None)


def _compare(
    here: SideFiles, there: SideFiles, one: _Settings, other: _Settings | None, place: str
) -> Iterator[SideDifference]:
    values, others = one.read, {} if other is None else other.read
    if values == others:
        return
    # preprocessor_config.json may contain several parts: the file of the other side tells which one is meant.
    part = other.part if other is not None and one.file == PREPROCESSOR != other.file else one.part
    built = _build(here, there, part, one, other)
    is_absent = other is None or ((one.part == VIDEO_PART) != (other.part == VIDEO_PART))
    if built is not None and built.refused:
        words = f"transformers refuses the settings: {built.refused}"
        yield SideDifference(one.file, "settings that transformers accepts", words)
    elif is_absent and (built is None or other is None):
        if other is not None and other.part == VIDEO_PART and (built is None or built.settings):
            yield SideDifference(other.file, "settings of a processor", "missing")
        elif built is None or built.settings:
            words = f"loaders read this file, which does not exist {place}"
            yield SideDifference(one.file, "no settings of a processor", words)
    else:
        yield from _describe(one.file, built, values, others, place)


def _build(here: SideFiles, there: SideFiles, part: str, one: _Settings, other: _Settings | None) -> Built | None:
    """How the processors that transformers builds differ, or None if it is not installed or cannot build them."""
    sides = [one.read, {} if other is None else other.read]
    if part == PROCESSOR:
        names = [side.json(PROCESSOR_CONFIG).get("processor_class") for side in (here, there)]
        sides = [{**side, "processor_class": name} for side, name in zip(sides, names, strict=True)]
    if (other is None and part != PROCESSOR) or not any(side.get(key) for side in sides for key in _TYPES):
        return None
    models = [str(side.config.get("model_type", "")) for side in (here, there)]
    if find_spec("transformers") is None:
        return None
    answer = ask(SettingsJob(part, sides[0], sides[1], models), __name__, Built, _LIMIT_S)
    if (failure := answer.failure) and failure.phase == _BUILDING_HERE and "install" not in failure.message:
        return Built(refused=_SCRATCH.sub("this directory", failure.message.partition(" (at ")[0]))
    return answer.report


def _describe(
    file: str, built: Built | None, values: Mapping[str, Any], others: Mapping[str, Any], place: str
) -> Iterator[SideDifference]:
    """The keys that differ: an error, or a warning if only one side has the key and no known class reads it."""
    if built is None:
        pairs = {key: (values.get(key), others.get(key)) for key in {**others, **values}}
        known: Set[str] = set()
    else:
        pairs = {one.key: (one.here, one.there) for one in built.settings if one.key not in _UNREAD}
        known = {one.key for one in built.settings if one.is_known}
    odd = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    error = {key for key in odd if key in known or (key in values and key in others)}
    yield from setting_differences(file, {key: pair for key, pair in odd.items() if key in error}, place, "error")
    yield from setting_differences(file, {key: pair for key, pair in odd.items() if key not in error}, place, "warning")


@dataclass(frozen=True)
class SettingsJob:
    """Settings of a part on two sides, and the `model_type` of both, which may decide the class."""

    part: str
    here: Mapping[str, Any]
    there: Mapping[str, Any]
    models: Sequence[str]
    report: str = ""


@dataclass(frozen=True)
class Setting:
    """A value that differs with the defaults of transformers. `is_known`: the class has such an argument."""

    key: str
    here: Any
    there: Any
    is_known: bool


@dataclass(frozen=True)
class Built:
    """The differences between two processors, or the reason why transformers refuses the first."""

    settings: Sequence[Setting] = ()
    refused: str = ""


def run(job: SettingsJob, phases: ExitReport) -> Built:
    """Builds both processors and compares their attributes."""
    phases.enter(Phase("building the processor to compare with"))
    there = _Processor(job.part, job.there, job.models[1], job.here)
    phases.enter(_BUILDING_HERE)
    here = _Processor(job.part, job.here, job.models[0], job.there)
    both = {key: (here.value(key), there.value(key)) for key in {**there.settings, **here.settings}}
    known = here.arguments | there.arguments | (here.settings.keys() & there.settings.keys())
    return Built([Setting(key, *pair, key in known) for key, pair in both.items() if pair[0] != pair[1]])


class _Processor:
    """A processor: its settings with defaults, and the arguments of its class."""

    def __init__(self, part: str, settings: Mapping[str, Any], model: str, others: Mapping[str, Any]) -> None:
        import transformers

        built: Any = None
        if part == PROCESSOR:
            named = getattr(transformers, settings.get("processor_class") or others["processor_class"])
            parameters = inspect.signature(named.__init__).parameters
            defaults = {key: one.default for key, one in parameters.items() if one.default is not one.empty}
            values = {**defaults, **settings}
        else:
            with TemporaryDirectory(prefix="ckptkit-processor-") as scratch:
                (Path(scratch) / "config.json").write_text(json.dumps({"model_type": model}))
                (Path(scratch) / FILES[part][0]).write_text(json.dumps(settings))
                reader = getattr(transformers, f"Auto{part.title().replace('_', '')}")
                built = reader.from_pretrained(scratch, trust_remote_code=False, local_files_only=True)
            parameters = inspect.signature(type(built).__init__).parameters
            values = built.to_dict()
        self.settings: Mapping[str, Any] = {key: _plain(one) for key, one in values.items()}
        self.arguments = {*parameters, *getattr(getattr(built, "valid_kwargs", None), "__annotations__", ())}
        self._built = built

    def value(self, key: str) -> Any:
        """A setting, or the class attribute if it is not set."""
        return self.settings.get(key, _plain(getattr(self._built, key, None)))


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


if __name__ == "__main__":
    run_job(SettingsJob, run)
