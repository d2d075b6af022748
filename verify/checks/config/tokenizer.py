"""CK706, CK708 and CK720: compares the files next to the weights with the weights and with the source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import locate
from converters.planner import dims_of
from verify.check import Skip, Tally, check, only
from verify.evidence.expected import require_config
from verify.evidence.side.compare import side_differences
from verify.evidence.side_files import SideFiles
from verify.evidence.subject import Subject
from verify.issue import Issue, warning_if


def side_of(subject: Subject) -> SideFiles:
    """The files beside the weights; for Megatron those of the HF directory that belongs to it."""
    if subject.is_hf:
        return SideFiles(subject.path)
    with suppress(CkptkitError):
        return SideFiles(subject.hf_path) if subject.hf_path else SideFiles.of(subject.location)
    return SideFiles(subject.path / "hf", subject.path)


def source_side(subject: Subject) -> SideFiles:
    """The files beside the source's weights. Raises Skip where no source was given, CkptkitError where it is none."""
    if subject.source_path is None:
        raise Skip("no --source was given")
    return SideFiles.of(locate(subject.source_path))


def unreadable(subject: Subject, side: SideFiles, expected: str, error: CkptkitError) -> Issue:
    """A file that cannot be read. Raises Skip for a link that leads nowhere, which CK102 reports of an HF directory."""
    links = subject.hf_files.dangling if subject.is_hf and side.root == subject.path else ()
    if any(f"{side.root / name}:" in error.message for name in links):
        raise Skip("not run because links lead nowhere (CK102)")
    return Issue(expected, error.message, error.hint or "copy it from the release", file=side.root)


def _no_vocabulary(side: SideFiles) -> str | None:
    with suppress(CkptkitError):  # a file that cannot be read is for the check to say
        return None if side.has_vocabulary else "there is no tokenizer whose token ids can be read"
    return None


@check(
    "CK706",
    "every token id has a row in the embedding",
    stage="configuration",
    preflight=True,
    rationale="A vocabulary cut to another tokenizer's size has no row for the last tokens; looking one up reads "
    "memory that is not the embedding's.",
    fix="Take the tokenizer of the release that the weights come from; vocab_size must be the number of rows, not of "
    "tokens.",
    unless=lambda subject: _no_vocabulary(side_of(subject)),
)
def ids_have_rows(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The largest id of every tokenizer file against `vocab_size` (CK105: that of the embedding); one id a token."""
    side, rows = side_of(subject), dims_of(require_config(subject)).vocab
    try:
        vocabularies = side.vocabularies
    except CkptkitError as error:
        yield unreadable(subject, side, "a tokenizer that can be read", error)
        return
    hint = "take tokenizer and config.json from the release of these weights"
    if not vocabularies:
        tally.compared(0)
        yield Issue("a vocabulary", "the tokenizer's files hold no token", hint, file=side.root)
    for file, ids in vocabularies.items():
        tally.compared(0)
        token, largest = max(ids.items(), key=lambda item: item[1])
        if largest >= rows:
            beyond = sum(number >= rows for number in ids.values())
            actual = f"{token!r} has id {largest}; ids without a row: {beyond}"
            yield Issue(f"ids below {rows}, the rows of the embedding", actual, hint, file=side.root / file)
        other = next((token for token, number in ids.items() if side.ids[token] != number), None)
        if other is not None:
            actual = f"{other!r} has id {ids[other]}, and {side.ids[other]} in another file"
            yield Issue("one id for a token", actual, hint, file=side.root / file)


def _nothing_to_carry(subject: Subject) -> str | None:
    if subject.source_path is None:
        return None
    with suppress(CkptkitError):
        there = source_side(subject)
        if there.root == side_of(subject).root:
            return "the files next to the weights are those of the source"
        return None if there.root.is_dir() else "the source has no files next to its weights"
    return None


@check(
    "CK708",
    "tokenizer, chat template, generation settings and code are those of the source",
    stage="configuration",
    needs=("source",),
    preflight=True,
    rationale="Without its template a server answers with a default one, or not at all; with another tokenizer every "
    "id means another word. Trainers run the Python files of a checkpoint with trust_remote_code.",
    fix="Copy the files that are named from the source, and remove those that the source does not have.",
    unless=_nothing_to_carry,
)
def side_files_carried(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every file that loaders read, besides config.json (CK702) and the files of a quantizer.

    A tokenizer is compared by the ids of its tokens, its merges and scores, and its parts and settings by value; where
    these differ, the installed tokenizers and transformers are asked for the ids of texts. A chat template is compared
    by its text, generation_config.json by what it changes, code by its bytes.
    """
    here, there = side_of(subject), source_side(subject)
    tally.compared(0)
    try:
        for one in side_differences(here, there, "in the source"):
            copied = (there.root / one.file).exists()
            hint = f"copy {one.file} from {there.root}" if copied else f"remove it, or compare it with {there.root}"
            what = f"the {one.what} of the source"
            yield Issue(what, one.words, hint, file=here.root / one.file, severity=one.severity, count=one.count)
    except CkptkitError as error:
        yield unreadable(subject, here, "files that can be read", error)


@check(
    "CK720",
    "a tokenizer lies beside the weights",
    stage="configuration",
    rationale="An engine loads the tokenizer from the directory of the weights; without one it does not start, or it "
    "knows no words. tokenizer_config.json alone is not a tokenizer.",
    fix="Copy the tokenizer files of the release into this directory, or start the engine with `--skip-tokenizer-init` "
    "and send it token ids.",
    unless=only("hf", "Megatron loads no tokenizer from its checkpoint"),
)
def tokenizer_there(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Any file with the words of a tokenizer; without one an error where the source has one, else a warning.

    `--against-sglang` and `--engine` start SGLang without a tokenizer, so they need none.
    """
    tally.compared(0)
    if side_of(subject).has_tokenizer:
        return
    there = source_side(subject) if subject.source_path else None
    known = there is not None and there.has_tokenizer
    hint = f"copy the tokenizer files from {there.root}" if there and known else ""
    expected, severity = "a tokenizer, which engines load from here", warning_if(not known)
    yield Issue(expected, "no tokenizer file", hint, severity=severity)
