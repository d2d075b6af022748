"""CK706 to CK708, CK720, CK732: compares the files next to the weights with one another, the weights, the source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from os.path import lexists
from pathlib import Path
from typing import Any

from ckptkit.converters.config.values import language_part
from ckptkit.converters.planner import dims_of
from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.formats.detect import locate
from ckptkit.verify.core.check import CannotCheck, Issue, NotApplicable, Subject, Tally, check, only_if, warning_if
from ckptkit.verify.evidence.expected import is_of_no_family, require_config
from ckptkit.verify.evidence.side.compare import side_differences
from ckptkit.verify.evidence.side.texts import TextJob, ask_library
from ckptkit.verify.evidence.side.tokenizers import ONLY_NEW
from ckptkit.verify.evidence.side_files import GENERATION, TOKENIZER, TOKENIZER_CONFIG, SideFiles


def side_of(subject: Subject) -> SideFiles:
    """The files beside the weights; for Megatron those of the HF directory that belongs to it."""
    if subject.is_hf:
        return SideFiles(subject.path)
    with suppress(CkptkitError):
        return SideFiles(subject.hf_path) if subject.hf_path else SideFiles.of(subject.location)
    return SideFiles(subject.path / "hf", subject.path)


def source_side(subject: Subject) -> SideFiles:
    """The files beside the source's weights.

    Raises NotApplicable where no source was given, CkptkitError where it is none.
    """
    if subject.source_path is None:
        raise NotApplicable("no --source was given")
    return SideFiles.of(locate(subject.source_path))


def unreadable(subject: Subject, side: SideFiles, expected: str, error: CkptkitError) -> Issue:
    """A file that cannot be read.

    Raises CannotCheck for a link that leads nowhere, which CK102 reports of an HF directory.
    """
    links = subject.hf_files.dangling if subject.is_hf and side.root == subject.path else ()
    if any(f"{side.root / name}:" in error.message for name in links):
        raise CannotCheck("not run because links lead nowhere", "CK102")
    return Issue(expected, error.message, error.hint or "copy it from the release", file=side.root)


def _has_vocabulary(subject: Subject) -> None:
    with suppress(CkptkitError):  # a file that cannot be read is for the check to say
        if not side_of(subject).has_vocabulary:
            raise NotApplicable("there is no tokenizer with readable token ids")


@check("CK706", preflight=True, applies_to=_has_vocabulary)
def ids_have_rows(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The largest id of every tokenizer file against `vocab_size` (CK105: that of the embedding); one id a token."""
    side, rows = side_of(subject), _rows_of(subject)
    try:
        vocabularies = side.vocabularies
    except CkptkitError as error:
        yield unreadable(subject, side, "a tokenizer that can be read", error)
        return
    if not vocabularies:
        tally.compared()
        yield Issue("a vocabulary", "the tokenizer's files hold no token", file=side.root)
    for file, ids in vocabularies.items():
        tally.compared()
        token, largest = max(ids.items(), key=lambda item: item[1])
        if largest >= rows:
            beyond = sum(number >= rows for number in ids.values())
            actual = f"{token!r} has id {largest}; ids without a row: {beyond}"
            yield Issue(f"ids below {rows}, the rows of the embedding", actual, file=side.root / file)
        other = next((token for token, number in ids.items() if side.ids[token] != number), None)
        if other is not None:
            actual = f"{other!r} has id {ids[other]}, and {side.ids[other]} in another file"
            yield Issue("one id for a token", actual, file=side.root / file)


def _source_has_files(subject: Subject) -> None:
    with suppress(CkptkitError):
        there = source_side(subject)
        if there.root == side_of(subject).root:
            raise NotApplicable("the files next to the weights are those of the source")
        if not there.root.is_dir():
            raise NotApplicable("the source has no files next to its weights")


@check("CK708", needs=("source",), preflight=True, applies_to=_source_has_files)
def side_files_carried(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every file that loaders read, besides config.json (CK702) and the files of a quantizer.

    A tokenizer is compared by its tokens and, where a file differs, by what the installed tokenizers and transformers
    make of texts; a chat template by what transformers renders; generation_config.json by what it changes; code by its
    bytes.
    """
    here, there = side_of(subject), source_side(subject)
    tally.compared()
    try:
        for one in side_differences(here, there, "in the source"):
            copied = one.source or (one.file if (there.root / one.file).exists() else None)
            hint = f"copy {copied} from {there.root}" if copied else f"remove it, or compare it with {there.root}"
            hint += f", and remove {one.what} from {one.file}" if copied not in (None, one.file) else ""
            what = f"the {one.what} of the source"
            yield Issue(what, one.words, hint, file=here.root / one.file, severity=one.severity, count=one.count)
    except CkptkitError as error:
        yield unreadable(subject, here, "files that can be read", error)


@check("CK720", applies_to=only_if(lambda subject: subject.is_hf, "Megatron loads no tokenizer from its checkpoint"))
def tokenizer_there(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Any file with the words of a tokenizer; without one an error where the source has one, else a warning.

    `--against-sglang` and `--engine` start SGLang without a tokenizer, so they need none.
    """
    tally.compared()
    if side_of(subject).has_tokenizer:
        return
    there = source_side(subject) if subject.source_path else None
    known = there is not None and there.has_tokenizer
    hint = f"copy the tokenizer files from {there.root}" if there and known else ""
    expected, severity = "a tokenizer, which engines load from here", warning_if(not known)
    yield Issue(expected, "no tokenizer file", hint, severity=severity)


# Starts of names of classes that build their own parts around the vocabulary, and whether these are of bytes.
# Source: transformers 5.12, `__init__` of each.
_OF_BYTES = {"Llama": False, "XLMRoberta": False, "T5": False, "Qwen2": True, "GPT2": True, "Roberta": True}


def _class_may_differ(subject: Subject) -> None:
    """It takes seconds to hold transformers' class to tokenizer.json, so only where it may differ."""
    side = side_of(subject)
    if not subject.is_hf or not lexists(side.root / TOKENIZER):
        raise NotApplicable(f"there is no {TOKENIZER} next to the weights")
    with suppress(CkptkitError):
        name = str(side.tokenizer_config.get("tokenizer_class") or "")
        if "AutoTokenizer" in str(side.tokenizer_config.get("auto_map")):
            raise NotApplicable("the class of the tokenizer is code of the checkpoint, which is not run")
        if name in ("PreTrainedTokenizerFast", ONLY_NEW):
            raise NotApplicable(f"{name} takes {TOKENIZER} as it is")
        of_bytes = next((of_bytes for start, of_bytes in _OF_BYTES.items() if name.startswith(start)), None)
        stated = [side.tokenizer.get(part) for part in ("pre_tokenizer", "decoder")]
        if of_bytes is not None and of_bytes != ("ByteLevel" in json.dumps(stated)):
            return
    if "transformers" not in subject.against and not is_of_no_family(subject):
        raise NotApplicable("--against-transformers was not given")


@check("CK732", applies_to=_class_may_differ)
def class_takes_tokenizer(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The ids of texts by AutoTokenizer against those by tokenizers of the same directory, without the ids around them.

    It is a warning where the source has the same files.
    """
    side = side_of(subject)
    answer, reason = ask_library(TextJob("transformers", str(side.root), str(side.root), ()))
    if answer is None or answer.refused:  # because of config.json too, which CK541 judges
        raise CannotCheck(reason if answer is None else f"transformers does not load the tokenizer: {answer.refused}")
    tally.compared(answer.texts)
    stated = side.tokenizer_config.get("tokenizer_class")
    name = (
        f"tokenizer_class {stated!r}"
        if stated
        else f"no tokenizer_class, under model_type {side.config.get('model_type')!r}"
    )
    there = source_side(subject) if subject.source_path else None
    is_same = there is not None and all(
        there.content(file) == side.content(file) for file in (TOKENIZER, TOKENIZER_CONFIG)
    )
    if answer.ids:
        expected, actual = f"a class that takes {TOKENIZER} as it is", f"{name}: {answer.ids} in {TOKENIZER}"
        yield Issue(expected, actual, file=side.root / TOKENIZER_CONFIG, severity=warning_if(is_same))


_KINDS = ("eos", "pad", "bos")


def _stated_twice(subject: Subject) -> None:
    side = side_of(subject)
    if not (side.root / "config.json").exists():
        raise NotApplicable("there is no config.json next to it")
    with suppress(CkptkitError):
        tokens = side.has_vocabulary and any(map(side.special, _KINDS))
        if not tokens and not lexists(side.root / GENERATION):
            raise NotApplicable("only config.json says which tokens are special")


def _rows_of(subject: Subject) -> int:
    """The rows of the embedding, by config.json.

    Raises NotApplicable as `require_config`, and where no size is stated.
    """
    if not (subject.is_hf and is_of_no_family(subject)):
        return dims_of(require_config(subject)).vocab
    if not isinstance(size := language_part(subject.hf_files.config).get("vocab_size"), int):
        raise NotApplicable("config.json states no vocab_size")
    return size


@check("CK707", preflight=True, applies_to=_stated_twice)
def special_tokens_agree(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Ids of the end, padding and begin tokens: inside the vocabulary, and the same wherever two files state one.

    Several ends are usual in generation_config.json, so the ends of two files need only have one in common. With a
    source, whether each of its ends that the chat template writes is one here.
    """
    side, rows = side_of(subject), dims_of(require_config(subject)).vocab
    try:
        stated = {kind: dict(_stated(side, kind)) for kind in _KINDS}
        texts = {kind: text for kind in _KINDS if (text := side.special(kind)) is not None}
        unknown = {kind: text for kind, text in texts.items() if side.ids and text not in side.ids}
    except CkptkitError as error:
        yield unreadable(subject, side, "files that can be read", error)
        return
    hint = "take config.json, generation_config.json and the tokenizer from one release"
    for kind, by_file in stated.items():
        sound = dict(by_file)
        for file, numbers in by_file.items():
            tally.compared()
            unused = {-1} if kind == "pad" else set()
            if strange := sorted(number for number in numbers - unused if not 0 <= number < rows):
                del sound[file]
                expected = f"{kind}_token_id below {rows}, the rows of the embedding"
                yield Issue(expected, f"{kind}_token_id {strange[0]}", hint, file=side.root / file)
        # A file that is known to be wrong has no vote on the others.
        yield from _disagreements(kind, sound, side.root, hint, _written(side, sound) if kind == "eos" else set())
    # Engines refuse ids that are not whole numbers, or never meet them.
    pairs = ((kind, *pair) for kind in _KINDS for pair in _stated_values(side, kind))
    for kind, file, value in ((kind, file, one) for kind, file, several in pairs for one in several):
        if type(value) is not int:
            tally.compared()
            actual = f"{kind}_token_id {shortened(value)}"
            yield Issue(f"{kind}_token_id as a whole number", actual, hint, file=side.root / file)
    where = side.root / TOKENIZER_CONFIG
    for kind, text in unknown.items():
        yield Issue(f"{kind}_token in the vocabulary", f"{text!r} is not in it", hint, file=where)
    with suppress(CkptkitError):  # a source that cannot be read is for CK708
        yield from _lost_ends(side, source_side(subject)) if subject.source_path else ()
    if not any(stated.values()):
        tally.compared()  # three files were looked at, and none of them names a special token


def _lost_ends(side: SideFiles, there: SideFiles) -> Iterator[Issue]:
    """Ends of the source that the chat template writes in both, as at the end of a turn, and that end nothing here."""
    ends, texts = _ends(side), {number: text for text, number in there.ids.items()}
    for number in sorted(_ends(there) - ends):
        text = texts.get(number)
        if ends and text and all(any(text in one for one in both.templates.values()) for both in (side, there)):
            expected = f"{text!r}, which the chat template writes, among the ends of an answer, as in the source"
            hint = "take tokenizer_config.json and generation_config.json from the source"
            yield Issue(
                expected, f"ends at {_listed(ends)}", hint, file=side.root / TOKENIZER_CONFIG, severity="warning"
            )


def _ends(side: SideFiles) -> set[int]:
    """The ids that end an answer in vLLM, which reads the ends of config.json only without a generation_config."""
    stated = dict(_stated(side, "eos"))
    return set().union(*(ids for file, ids in stated.items() if file != "config.json" or GENERATION not in stated))


def _stated(side: SideFiles, kind: str) -> Iterator[tuple[str, set[int]]]:
    """The ids that each file states."""
    for file, values in _stated_values(side, kind):
        numbers = {number for number in values if type(number) is int}
        if numbers:
            yield file, numbers
    token = side.special(kind)
    if token is not None and token in side.ids:
        yield TOKENIZER_CONFIG, {side.ids[token]}


def _stated_values(side: SideFiles, kind: str) -> Iterator[tuple[str, list[Any]]]:
    """What config and generation_config have as ids of a token, without null."""
    text = side.config.get("text_config")
    inner = text.get(f"{kind}_token_id") if isinstance(text, Mapping) else None
    for file, value in (
        ("config.json", side.config.get(f"{kind}_token_id", inner)),
        (GENERATION, side.generation.get(f"{kind}_token_id")),
    ):
        yield file, [one for one in (value if isinstance(value, list) else [value]) if one is not None]


def _written(side: SideFiles, by_file: Mapping[str, set[int]]) -> set[int]:
    """The ids that files state whose token a chat template writes, as at the end of a turn."""
    texts = {number: text for text, number in side.ids.items()}
    stated = {number: texts[number] for numbers in by_file.values() for number in numbers if texts.get(number)}
    return {number for number, text in stated.items() if any(text in one for one in side.templates.values())}


def _disagreements(
    kind: str, by_file: Mapping[str, set[int]], root: Path, hint: str, written: set[int]
) -> Iterator[Issue]:
    """Files whose ids have nothing in common with those of the others: the one that is outvoted, or all where none is.

    Where only the outvoted file has one of `written`, which a chat template writes, that one is right.
    An engine ends at any id of config and generation_config. Some releases have a tokenizer that ends texts and a
    generation_config that ends turns, so a tokenizer of another opinion is only a warning.
    """
    groups = _agreeing(by_file)
    if len(groups) < 2:
        return
    servers = {"config.json", GENERATION}
    apart = servers <= by_file.keys() and not any(servers <= set(group) for group in groups)
    severity = warning_if(kind != "eos" or not apart)
    (odd, *more), most = groups[0], groups[-1]
    if len(most) > 1 and not more:
        if written & by_file[odd] and not written & set().union(*(by_file[file] for file in most)):
            expected = f"{kind}_token_id {_listed(written)}, which the chat template writes, as in {odd}"
            file = GENERATION if GENERATION in most else most[0]
            yield Issue(expected, _listed(by_file[file]), hint, file=root / file, severity=severity)
            return
        usual = _listed(set().union(*(by_file[file] for file in most)))
        expected = f"{kind}_token_id {usual}, as in {' and '.join(most)}"
        yield Issue(expected, _listed(by_file[odd]), hint, file=root / odd, severity=severity)
        return
    actual = ", ".join(f"{_listed(numbers)} in {file}" for file, numbers in by_file.items())
    yield Issue(f"one {kind}_token_id in all files", actual, hint, file=root, severity=severity)


def _agreeing(by_file: Mapping[str, set[int]]) -> list[list[str]]:
    """The files in groups, each file with an id of another one of its group; the smallest group first."""
    groups: list[tuple[list[str], set[int]]] = []
    for file, numbers in by_file.items():
        joined = [group for group in groups if group[1] & numbers]
        merged = ([*(name for names, _ in joined for name in names), file], numbers.union(*(ids for _, ids in joined)))
        groups = [*(group for group in groups if group not in joined), merged]
    return sorted((names for names, _ in groups), key=len)


def _listed(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))
