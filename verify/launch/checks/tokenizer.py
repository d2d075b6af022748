"""CK716: the tokenizer that a launch gives to engine and trainer, against the one beside the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from verify.check import Skip, Tally, Unable, check
from verify.evidence.side_files import SideFiles
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.checks.engine import engine_of, job_of, unless_skipped
from verify.launch.options.argv import last, options_of

# With these SGLang takes and gives token ids; options of slime and miles, and SGLang's own.
_SKIPPED = ("--sglang-skip-tokenizer-init", "--skip-tokenizer-init")
_SPECIAL = ("eos", "pad", "bos", "unk")
_HINT = "give the HF directory of the model that the trainer's weights were converted from as --hf-checkpoint"


def _engine(subject: Subject) -> SideFiles:
    """The files of --hf-checkpoint. Raises Skip where it is not an HF directory."""
    root = engine_of(subject)
    if not (root / "config.json").exists():
        raise Skip("--hf-checkpoint is not an HF directory (CK714)")
    return SideFiles(root)


@check(
    "CK716",
    "engine and trainer have one tokenizer",
    stage="launch",
    rationale=(
        "Engine and trainer take the tokenizer from --hf-checkpoint. "
        "Where the weights belong to another one, every id means another word."
    ),
    fix="Give the HF directory of the model that --load and --ref-load were converted from as --hf-checkpoint.",
    unless=unless_skipped(_engine),
)
def one_tokenizer(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Token ids and merges of --hf-checkpoint against those in `hf/` beside the Megatron weights.

    Other chat templates and special tokens are a warning.
    """
    engine = _engine(subject)
    tally.compared(0)
    if not engine.has_tokenizer:
        yield _none(subject, engine)
        return
    for root in dict.fromkeys(
        side.path.parent / "hf" for side in job_of(subject).sides if side.is_megatron and side.path
    ):
        trainer = SideFiles(root)
        if not trainer.has_tokenizer or engine.root.resolve() == root.resolve():
            continue
        try:
            yield from _differing(engine, trainer, tally)
        except CkptkitError as error:
            hint = error.hint or "copy them from the release"
            yield Issue("files that can be read", error.message, hint, file=root)


def _none(subject: Subject, engine: SideFiles) -> Issue:
    """An error, or a warning where the engine is started without one: only slime's own rollout loads it then.

    Source: slime `rollout/sglang_rollout.py` `GenerateState`; a rollout function of the user may do without.
    """
    words = job_of(subject).text.words
    expected, hint = (
        "files of a tokenizer, which engine and trainer load from --hf-checkpoint",
        "copy the tokenizer files from the release",
    )
    if (given := last(options_of(words), *_SKIPPED)) is None:
        return Issue(expected, "no tokenizer file", f"{hint} of the model", file=engine.root)
    actual = f"no tokenizer file, and {given.name} spares the engine alone"
    hint += ", unless the launch has a rollout function of its own that takes and gives token ids"
    return Issue(expected, actual, hint, file=engine.root, severity="warning")


def _differing(engine: SideFiles, trainer: SideFiles, tally: Tally) -> Iterator[Issue]:
    where = str(trainer.root)
    for expected, actual in _vocabularies(engine, trainer, tally):
        yield Issue(expected, actual, _HINT, file=where)
    tally.compared(0, 3)
    hint = "right where the weights were trained further; else take both from one release"
    for what, there, here in _presentation(engine, trainer):
        expected, actual = f"{what} of --hf-checkpoint: {there}", f"beside the trainer's weights: {here}"
        yield Issue(expected, actual, hint, file=where, severity="warning")


def _vocabularies(engine: SideFiles, trainer: SideFiles, tally: Tally) -> Iterator[tuple[str, str]]:
    """What gives a text other ids: tokens, their ids, the merges; of a tokenizer.model alone, its bytes."""
    tally.compared(0)
    if engine.ids and trainer.ids:
        if difference := _ids(engine.ids, trainer.ids):
            yield f"the {len(engine.ids)} tokens of --hf-checkpoint, with their ids", difference
        elif engine.merges and trainer.merges and list(engine.merges) != list(trainer.merges):
            pairs = enumerate(zip(engine.merges, trainer.merges, strict=False))
            first = next((number for number, (there, here) in pairs if there != here), None)
            difference = f"{len(trainer.merges)} merges" if first is None else f"other merges from number {first} on"
            yield f"the {len(engine.merges)} merges of --hf-checkpoint", difference
    elif engine.sentencepiece and trainer.sentencepiece:
        if engine.sentencepiece != trainer.sentencepiece:
            yield "the bytes of tokenizer.model of --hf-checkpoint", "others"
    elif trainer.ids and not engine.sentencepiece:
        expected = f"a vocabulary in --hf-checkpoint, as the {len(trainer.ids)} tokens beside the trainer's weights"
        yield expected, f"{engine.root} has none that can be read"
    elif (engine.ids and trainer.sentencepiece) or (engine.sentencepiece and trainer.ids):
        both = f"the tokenizers of {engine.root} and {trainer.root}"
        raise Unable(f"{both} are stored in two formats, which cannot be compared without running them")


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


def _presentation(engine: SideFiles, trainer: SideFiles) -> Iterator[tuple[str, Any, Any]]:
    """What differs in how a text is put together or shown, but in no id."""
    for name in sorted(engine.templates.keys() | trainer.templates.keys()):
        if engine.templates.get(name) != trainer.templates.get(name):
            yield f"the chat template {name!r}", _length(engine, name), _length(trainer, name)
    for kind in _SPECIAL:
        if engine.special(kind) != trainer.special(kind):
            yield f"{kind}_token", engine.special(kind), trainer.special(kind)
    shared = engine.special_flags.keys() & trainer.special_flags.keys()
    if other := sorted(token for token in shared if engine.special_flags[token] != trainer.special_flags[token]):
        there, here = (side.special_flags[other[0]] for side in (engine, trainer))
        yield f"special of {len(other)} added tokens, such as {other[0]!r}", there, here


def _length(side: SideFiles, name: str) -> str:
    text = side.templates.get(name)
    return "none" if text is None else f"{len(text)} characters in {side.file_of_template(name)}"
