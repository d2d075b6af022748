"""CK716: the tokenizer that a launch gives to engine and trainer, held against the one stored beside the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from verify.check import Skip, Tally, Unable, check
from verify.evidence.side_files import SideFiles
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.launch import sides_of

_SPECIAL = ("eos", "pad", "bos", "unk")
_HINT = "give the HF directory of the model that the trainer's weights were converted from as --hf-checkpoint"


def _not_given(subject: Subject) -> str | None:
    if subject.launch is None or subject.launch.hf_checkpoint is None:
        return "only preflight of a launch with --hf-checkpoint looks at it"
    return (
        None
        if (subject.launch.hf_checkpoint / "config.json").exists()
        else "--hf-checkpoint is no HF directory (CK714)"
    )


@check(
    "CK716",
    "engine and trainer have one tokenizer",
    stage="launch",
    rationale="Engine and trainer take the tokenizer from --hf-checkpoint. Where the weights belong to another one, "
    "every id means another word.",
    fix="Give the HF directory of the model that --load and --ref-load were converted from as --hf-checkpoint.",
    unless=_not_given,
)
def one_tokenizer(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Token ids and merges of --hf-checkpoint against those in `hf/` beside the Megatron weights; chat templates and special tokens as a warning."""
    launch = subject.launch
    if launch is None or launch.hf_checkpoint is None:
        raise Skip("only preflight of a launch with --hf-checkpoint looks at it")
    engine = SideFiles(launch.hf_checkpoint)
    tally.compared(0)
    if not engine.has_tokenizer:
        expected = "files of a tokenizer, which engine and trainer load from --hf-checkpoint"
        yield Issue(expected, "none", "copy them from the release of the model", file=engine.root)
        return
    for root in dict.fromkeys(
        side.path.parent / "hf" for side in sides_of(launch) if side.kind == "megatron" and side.path
    ):
        trainer = SideFiles(root)
        if not trainer.has_tokenizer or engine.root.resolve() == root.resolve():
            continue
        try:
            yield from _differing(engine, trainer, tally)
        except CkptkitError as error:
            yield Issue("files that can be read", error.message, error.hint or "copy them from the release", file=root)


def _differing(engine: SideFiles, trainer: SideFiles, tally: Tally) -> Iterator[Issue]:
    where = str(trainer.root)
    for expected, actual in _vocabularies(engine, trainer, tally):
        yield Issue(expected, actual, _HINT, file=where)
    tally.compared(0, 3)
    for what, there, here in _manners(engine, trainer):
        expected, actual = f"{what} of --hf-checkpoint: {there}", f"beside the trainer's weights: {here}"
        yield Issue(
            expected,
            actual,
            "right where the weights were trained further; else take both from one release",
            file=where,
            severity="warning",
        )


def _vocabularies(engine: SideFiles, trainer: SideFiles, tally: Tally) -> Iterator[tuple[str, str]]:
    """What makes one text other ids: tokens, their ids, the merges; of a tokenizer.model alone, its bytes."""
    tally.compared(0)
    if engine.ids and trainer.ids:
        if said := _ids(engine.ids, trainer.ids):
            yield f"the {len(engine.ids)} tokens of --hf-checkpoint, with their ids", said
        elif engine.merges and trainer.merges and list(engine.merges) != list(trainer.merges):
            place = next(
                (
                    number
                    for number, pair in enumerate(zip(engine.merges, trainer.merges, strict=False))
                    if pair[0] != pair[1]
                ),
                None,
            )
            said = f"{len(trainer.merges)} merges" if place is None else f"other merges from number {place} on"
            yield f"the {len(engine.merges)} merges of --hf-checkpoint", said
    elif engine.sentencepiece and trainer.sentencepiece:
        if engine.sentencepiece != trainer.sentencepiece:
            yield "the bytes of tokenizer.model of --hf-checkpoint", "others"
    elif trainer.ids and not engine.sentencepiece:
        yield (
            f"a vocabulary in --hf-checkpoint, as the {len(trainer.ids)} tokens beside the trainer's weights",
            f"{engine.root} has none that can be read",
        )
    elif (engine.ids and trainer.sentencepiece) or (engine.sentencepiece and trainer.ids):
        raise Unable(
            f"the tokenizers of {engine.root} and {trainer.root} are stored in two formats, which cannot be compared without running them"
        )


def _ids(there: Mapping[str, int], here: Mapping[str, int]) -> str:
    moved = [token for token in there if token in here and here[token] != there[token]]
    missing, more = [token for token in there if token not in here], [token for token in here if token not in there]
    first = f"{moved[0]!r} is {here[moved[0]]} and not {there[moved[0]]}" if moved else ""
    parts = [
        f"{len(moved)} have another id beside the trainer's weights: {first}" if moved else "",
        f"{len(missing)} are missing there, such as {missing[0]!r}" if missing else "",
        f"{len(more)} are only there, such as {more[0]!r}" if more else "",
    ]
    return "; ".join(filter(None, parts))


def _manners(engine: SideFiles, trainer: SideFiles) -> Iterator[tuple[str, Any, Any]]:
    """What changes how a text is put together or shown, but no id."""
    for name in sorted(engine.templates.keys() | trainer.templates.keys()):
        if engine.templates.get(name) != trainer.templates.get(name):
            yield f"the chat template {name!r}", _length(engine, name), _length(trainer, name)
    for kind in _SPECIAL:
        if engine.special(kind) != trainer.special(kind):
            yield f"{kind}_token", engine.special(kind), trainer.special(kind)
    shared = engine.special_flags.keys() & trainer.special_flags.keys()
    if other := sorted(token for token in shared if engine.special_flags[token] != trainer.special_flags[token]):
        yield (
            f"special of {len(other)} added tokens, such as {other[0]!r}",
            engine.special_flags[other[0]],
            trainer.special_flags[other[0]],
        )


def _length(side: SideFiles, name: str) -> str:
    return (
        f"{len(side.templates[name])} characters in {side.file_of_template(name)}" if name in side.templates else "none"
    )
