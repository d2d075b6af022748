"""CK730: what a multimodal class has beside its language model is stored."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.core.errors import CkptkitError
from converters.passthrough import lost_towers
from converters.registry import family_of
from verify.check import Skip, Tally, check
from verify.checks.headers.files import names_of, only_hf
from verify.evidence.expected import spelling_of, stated_config_of
from verify.evidence.subject import Subject
from verify.issue import Issue


def _no_tower(subject: Subject) -> str | None:
    if (reason := only_hf(subject)) is not None:
        return reason
    try:
        config = subject.once(stated_config_of)
        towers = family_of(config).towers(config)
    except (CkptkitError, Skip):
        return "there is no usable config.json (CK101)"
    return None if towers else "the class of config.json is a language model alone"


@check(
    "CK730",
    "the vision tower that the class has is stored",
    stage="headers",
    rationale="Engines and transformers build the vision tower of a ...ForConditionalGeneration class whatever is "
    "stored, and leave it random: answers to images are garbage, with HTTP 200.",
    fix="Export with `ckptkit convert --hf RELEASE`, where RELEASE has its weights: the tower is taken from there. For "
    "text alone, take a class and config of the language model alone, where the family has one.",
    unless=_no_tower,
)
def towers_stored(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """A tensor of each part (tower, projector), and every Linear layer of each numbered block of a tower."""
    config = subject.once(stated_config_of)
    names = {**names_of(subject), **(subject.hf_files.index or {})}
    tally.compared(0, len(names))
    if (spelling := subject.once(spelling_of)) and any(name.startswith(spelling.towers) for name in names):
        raise Skip(f"not run because the tower is stored under {spelling.towers[0]}* (CK104)")
    if lost := lost_towers(config, names):
        name = family_of(config).class_of(config)
        yield Issue(
            f"stored, since SGLang, vLLM and transformers build it for {name}",
            "in no shard",
            "copy these tensors from the release (`ckptkit convert` takes them from --hf); loading leaves them random",
            names=lost,
            file=subject.path,
        )
