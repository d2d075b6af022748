"""What the installed transformers makes of the settings of two processors, of images, videos or sound.

As a program, `python -m verify.evidence.side.processor_classes JOB.json`, it builds both. No code of a checkpoint runs.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from verify.witnesses.process.entry import run_job
from verify.witnesses.process.exit_report import Phase, PhaseLog
from verify.witnesses.process.run import ask

PREPROCESSOR, VIDEO = "preprocessor_config.json", "video_preprocessor_config.json"
VIDEO_PART = "video_processor"
PROCESSOR = "processor"  # the part that joins the others; its class is not built, since that takes a tokenizer
# Where transformers looks for the settings of a part that processor_config.json does not have, in this order.
# Source: `get_video_processor_dict` and its like in 5.12.
FILES: Mapping[str, tuple[str, ...]] = {
    "image_processor": (PREPROCESSOR,),
    "feature_extractor": (PREPROCESSOR,),
    VIDEO_PART: (VIDEO, PREPROCESSOR),
}
_CLASSES = {
    "image_processor": "AutoImageProcessor",
    "feature_extractor": "AutoFeatureExtractor",
    VIDEO_PART: "AutoVideoProcessor",
}
_BUILDING_HERE = "building the processor"
_SCRATCH = re.compile(r"\S*ckptkit-processor-\w+")
_LIMIT_S = 180


@dataclass(frozen=True)
class SettingsJob:
    """Settings of a part on two sides, as JSON values, and the `model_type` of both, which may decide the class."""

    part: str
    here: Mapping[str, Any]
    there: Mapping[str, Any]
    models: Sequence[str]
    report: str = ""


@dataclass(frozen=True)
class Setting:
    """A value that differs once transformers has put in its defaults. `is_known`: the class has such an argument."""

    key: str
    here: Any
    there: Any
    is_known: bool


@dataclass(frozen=True)
class Built:
    """What differs between two processors, and why transformers refuses the first, where it does."""

    settings: Sequence[Setting] = ()
    refused: str = ""


def ask_transformers(job: SettingsJob) -> Built | None:
    """How the processors that transformers builds differ, or None where it is not installed or does not know them."""
    if find_spec("transformers") is None:
        return None
    answer, failed = ask(job, __name__, Built, _LIMIT_S)
    if failed.startswith(f"while {_BUILDING_HERE}: ") and "install" not in failed:
        return Built(refused=_SCRATCH.sub("this directory", failed.partition(": ")[2].partition(" (at ")[0]))
    return answer


def run(job: SettingsJob, phases: PhaseLog) -> Built:
    """Builds both processors and compares their attributes."""
    phases.enter(Phase("building the processor to compare with"))
    there = _Processor(job.part, job.there, job.models[1], job.here)
    phases.enter(Phase(_BUILDING_HERE))
    here = _Processor(job.part, job.here, job.models[0], job.there)
    both = {key: (here.value(key), there.value(key)) for key in {**there.settings, **here.settings}}
    known = here.arguments | there.arguments | (here.settings.keys() & there.settings.keys())
    return Built([Setting(key, *pair, key in known) for key, pair in both.items() if pair[0] != pair[1]])


class _Processor:
    """A processor: its settings with defaults, and the arguments of its class."""

    def __init__(self, part: str, settings: Mapping[str, Any], model: str, others: Mapping[str, Any]) -> None:
        import transformers

        made: Any = None
        if part == PROCESSOR:
            named = getattr(transformers, settings.get("processor_class") or others["processor_class"])
            parameters = inspect.signature(named.__init__).parameters
            defaults = {key: one.default for key, one in parameters.items() if one.default is not one.empty}
            values = {**defaults, **settings}
        else:
            with TemporaryDirectory(prefix="ckptkit-processor-") as scratch:
                (Path(scratch) / "config.json").write_text(json.dumps({"model_type": model}))
                (Path(scratch) / FILES[part][0]).write_text(json.dumps(settings))
                reader = getattr(transformers, _CLASSES[part])
                made = reader.from_pretrained(scratch, trust_remote_code=False, local_files_only=True)
            parameters = inspect.signature(type(made).__init__).parameters
            values = made.to_dict()
        self.settings: Mapping[str, Any] = {key: _plain(one) for key, one in values.items()}
        self.arguments = {*parameters, *getattr(getattr(made, "valid_kwargs", None), "__annotations__", ())}
        self._made = made

    def value(self, key: str) -> Any:
        """A setting, or what the class has where it is not set."""
        return self.settings.get(key, _plain(getattr(self._made, key, None)))


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


if __name__ == "__main__":
    run_job(SettingsJob, run)
