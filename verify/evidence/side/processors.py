"""Compares settings of the processors of images, videos and sound, wherever a release of transformers saves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from verify.evidence.side.difference import Difference, show
from verify.evidence.side.processor_classes import (
    FILES,
    PREPROCESSOR,
    PROCESSOR,
    VIDEO,
    VIDEO_PART,
    Built,
    SettingsJob,
    ask_transformers,
)
from verify.evidence.side_files import PROCESSOR_CONFIG, SideFiles
from verify.report import Severity

# Parts by the key of processor_config.json that transformers 5 saves them under.
_NESTED = {
    "image_processor": "image_processor",
    "feature_extractor": "feature_extractor",
    "audio_processor": "feature_extractor",
    "video_processor": "video_processor",
}
_UNREAD = ("transformers_version", "processor_class", "chat_template", "auto_map", "_processor_class")
_TYPES = ("image_processor_type", "feature_extractor_type", "video_processor_type", "processor_class")


@dataclass(frozen=True)
class _Settings:
    """The settings of one part in one file. Releases of transformers differ in which file they read."""

    part: str
    file: str
    values: Mapping[str, Any]

    @property
    def read(self) -> Mapping[str, Any]:
        """Those that a processor reads; transformers 5 has no classes with the ending `Fast`."""
        plain = {key: value for key, value in self.values.items() if key not in _UNREAD}
        return {key: one.removesuffix("Fast") if isinstance(one, str) else one for key, one in plain.items()}


def processor_differences(here: SideFiles, there: SideFiles, place: str) -> Iterator[Difference]:
    """Settings of `here` that a reader takes otherwise than those of `there`.

    Releases write out more or fewer defaults, so transformers builds both where keys differ. Where it does not know the
    class, a key that only one side has is a warning.
    """
    mine, its = _stored(here), _stored(there)
    pairs = {(one.part, one.file): (one, _counterpart(one, its)) for one in mine}
    done = {(one.file, other.file, other.part) for one, other in pairs.values() if other is not None}
    for one, other in pairs.values():
        yield from _compare(here, there, one, other, place)
    for other in its:
        found = _counterpart(other, mine)
        if found is None and other.read:
            yield Difference(other.file, "settings of a processor", "missing")
        elif found is not None and (found.file, other.file, other.part) not in done:
            yield from _compare(here, there, found, other, place)


def _stored(side: SideFiles) -> list[_Settings]:
    own = side.json(PROCESSOR_CONFIG)
    nested = ((part, own.get(key)) for key, part in _NESTED.items())
    found = [_Settings(part, PROCESSOR_CONFIG, one) for part, one in nested if isinstance(one, Mapping)]
    for file, part in ((PREPROCESSOR, "image_processor"), (VIDEO, "video_processor")):
        if content := side.json(file):
            is_sound = "feature_extractor_type" in content and "image_processor_type" not in content
            found.append(_Settings("feature_extractor" if is_sound else part, file, content))
    rest = {key: value for key, value in own.items() if key not in _NESTED}
    return [one for one in found if one.read] + ([_Settings(PROCESSOR, PROCESSOR_CONFIG, rest)] if own else [])


def _counterpart(one: _Settings, others: Sequence[_Settings]) -> _Settings | None:
    """What the reader of `one` reads on the other side: the same place, or where it looks next."""
    places = {(other.part, other.file): other for other in others}
    if one.part == PROCESSOR:
        return places.get((PROCESSOR, PROCESSOR_CONFIG))
    files = {other.file: other for other in others if other.part != PROCESSOR and other.file != PROCESSOR_CONFIG}
    nested = places.get((one.part, PROCESSOR_CONFIG))
    stored = [files[file] for file in FILES[one.part] if file in files]
    candidates = [nested, *stored] if one.file == PROCESSOR_CONFIG else [files.get(one.file), nested, *stored]
    return next((other for other in candidates if other is not None), None)


def _compare(
    here: SideFiles, there: SideFiles, one: _Settings, other: _Settings | None, place: str
) -> Iterator[Difference]:
    values, others = one.read, {} if other is None else other.read
    if values == others:
        return
    # What both read from preprocessor_config.json is one part; a part of its own tells what the other is read as.
    part = other.part if other is not None and one.file == PREPROCESSOR != other.file else one.part
    built = _build(here, there, part, one, other)
    is_absent = other is None or ((one.part == VIDEO_PART) != (other.part == VIDEO_PART))
    if built is not None and built.refused:
        yield Difference(one.file, "settings that transformers accepts", f"transformers refuses them: {built.refused}")
    elif is_absent and (built is None or other is None):
        if built is None or built.settings:
            yield _absent(one, other, place)
    else:
        yield from _describe(one.file, built, values, others, place)


def _build(here: SideFiles, there: SideFiles, part: str, one: _Settings, other: _Settings | None) -> Built | None:
    """What transformers makes of both, or None where no class is named, or one that it does not have."""
    sides = [one.read, {} if other is None else other.read]
    if part == PROCESSOR:
        names = [side.json(PROCESSOR_CONFIG).get("processor_class") for side in (here, there)]
        sides = [{**side, "processor_class": name} for side, name in zip(sides, names, strict=True)]
    if (other is None and part != PROCESSOR) or not any(side.get(key) for side in sides for key in _TYPES):
        return None
    models = [str(side.config.get("model_type", "")) for side in (here, there)]
    return ask_transformers(SettingsJob(part, sides[0], sides[1], models))


def _absent(one: _Settings, other: _Settings | None, place: str) -> Difference:
    if other is not None and other.part == VIDEO_PART:
        return Difference(other.file, "settings of a processor", "missing")
    words = f"there is no such file {place}, and loaders read it"
    return Difference(one.file, "no settings of a processor", words)


def _describe(
    file: str, built: Built | None, values: Mapping[str, Any], others: Mapping[str, Any], place: str
) -> Iterator[Difference]:
    """The keys that differ: an error, or a warning for one that only one side has and no class is known to read."""
    if built is None:
        pairs = {key: (values.get(key), others.get(key)) for key in {**others, **values}}
        known: Set[str] = set()
    else:
        pairs = {one.key: (one.here, one.there) for one in built.settings if one.key not in _UNREAD}
        known = {one.key for one in built.settings if one.is_known}
    odd = [key for key, pair in pairs.items() if pair[0] != pair[1]]
    error = [key for key in odd if key in known or (key in values and key in others)]
    for keys in (error, [key for key in odd if key not in error]):
        severity: Severity = "error" if keys is error else "warning"
        if keys:
            listed = [f"{key} is {show(pairs[key][0])} but {show(pairs[key][1])} {place}" for key in keys[:5]]
            more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
            yield Difference(file, ", ".join(keys[:5]), "; ".join(listed) + more, severity, count=len(keys))
