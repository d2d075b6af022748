"""CK706 to CK708, CK720, CK732: the files next to the weights against each other, the weights and the source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from os.path import lexists
from typing import Any

from ckptkit.converters.config.values import language_part
from ckptkit.converters.planner import dims_of
from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.formats.detect import locate
from ckptkit.verify.core.check import CannotCheck, Issue, NotApplicable, Subject, check, only_if, warning_if
from ckptkit.verify.core.report import CheckResult
from ckptkit.verify.evidence.expected import is_of_no_family, require_config
from ckptkit.verify.evidence.side.compare import side_differences
from ckptkit.verify.evidence.side.texts import TextJob, ask_library
from ckptkit.verify.evidence.side.tokenizers import ONLY_NEW
from ckptkit.verify.evidence.side_files import GENERATION, TOKENIZER, TOKENIZER_CONFIG, SideFiles

_KINDS = ("eos", "pad", "bos")
# Beginnings of the names of classes that build their own pre-tokenizer and decoder, and whether these are of bytes.
# Source: transformers 5.12, `__init__` of each.
_OF_BYTES = {"Llama": False, "XLMRoberta": False, "T5": False, "Qwen2": True, "GPT2": True, "Roberta": True}


def side_of(subject: Subject) -> SideFiles:
    """The files next to the weights; for Megatron, those of its HF directory."""
    if subject.kind == "hf":
        return SideFiles(subject.path)
    with suppress(CkptkitError):
        return SideFiles(subject.hf_path) if subject.hf_path else SideFiles.of(subject.location)
    return SideFiles(subject.path / "hf", subject.path)


def source_side(subject: Subject) -> SideFiles:
    """The files next to the source's weights. Raises NotApplicable without a source, CkptkitError if it is invalid."""
    if subject.source_path is None:
        raise NotApplicable("--source was not given")
    return SideFiles.of(locate(subject.source_path))


def _unreadable(subject: Subject, side: SideFiles, expected: str, error: CkptkitError) -> Issue:
    """The issue for a file that cannot be read. Raises CannotCheck for a broken link, which CK102 reports."""
    links = subject.hf_files.dangling if subject.kind == "hf" and side.root == subject.path else ()
    if any(f"{side.root / name}:" in error.message for name in links):
        raise CannotCheck("not run because a link has no target", "CK102")
    return Issue(expected, error.message, error.hint or "copy it from the release", file=side.root)


def _has_vocabulary(subject: Subject) -> None:
    with suppress(CkptkitError):  # the check reports a file that cannot be read
        if not side_of(subject).has_vocabulary:
            raise NotApplicable("no tokenizer file has readable token ids")


@check("CK706", preflight=True, applies_to=_has_vocabulary)
def ids_have_rows(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The largest id of every tokenizer file is below `vocab_size` (CK105 checks the embedding); one id per token."""
    side = side_of(subject)
    if subject.kind == "hf" and is_of_no_family(subject):
        rows = language_part(subject.hf_files.config).get("vocab_size")
        if not isinstance(rows, int):
            raise NotApplicable("config.json has no vocab_size")
    else:
        rows = dims_of(require_config(subject)).vocab
    try:
        vocabularies = side.vocabularies
    except CkptkitError as error:
        yield _unreadable(subject, side, "a tokenizer that can be read", error)
        return
    if not vocabularies:
        result.compared()
        yield Issue("tokenizer files with a vocabulary", "the tokenizer files contain no token", file=side.root)
    for file, ids in vocabularies.items():
        result.compared()
        token, largest = max(ids.items(), key=lambda item: item[1])
        if largest >= rows:
            actual = f"{token!r} has id {largest}; ids without a row: {sum(number >= rows for number in ids.values())}"
            yield Issue(f"ids below {rows}, the number of rows of the embedding", actual, file=side.root / file)
        other = next((token for token, number in ids.items() if side.ids[token] != number), None)
        if other is not None:
            actual = f"{other!r} has id {ids[other]} here, but {side.ids[other]} in another file"
            yield Issue("the same id for a token in all files", actual, file=side.root / file)


def _source_has_files(subject: Subject) -> None:
    with suppress(CkptkitError):
        source = source_side(subject)
        if source.root == side_of(subject).root:
            raise NotApplicable("the files next to the weights are those of the source")
        if not source.root.is_dir():
            raise NotApplicable("the source has no files next to its weights")


@check("CK708", needs=("source",), preflight=True, applies_to=_source_has_files)
def side_files_carried(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every file that loaders read, except config.json (CK702) and the files of a quantizer.

    Tokenizers are compared by tokens and, if a file differs, by encoding texts with tokenizers and transformers; chat
    templates by rendering them; generation_config.json by its effect; code by its bytes.
    """
    side, source = side_of(subject), source_side(subject)
    result.compared()
    try:
        for one in side_differences(side, source, "in the source"):
            copied = one.source or (one.file if (source.root / one.file).exists() else None)
            hint = f"copy {copied} from {source.root}" if copied else f"remove it, or compare it with {source.root}"
            hint += f", and remove {one.what} from {one.file}" if copied not in (None, one.file) else ""
            what = f"{one.what}, as in the source"
            yield Issue(what, one.words, hint, file=side.root / one.file, severity=one.severity, count=one.count)
    except CkptkitError as error:
        yield _unreadable(subject, side, "files that can be read", error)


@check(
    "CK720", applies_to=only_if(lambda subject: subject.kind == "hf", "Megatron loads no tokenizer from its checkpoint")
)
def tokenizer_there(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """A tokenizer file; a missing one is an error if the source has it, else a warning."""
    result.compared()
    if not side_of(subject).has_tokenizer:
        source = source_side(subject) if subject.source_path else None
        hint = f"copy the tokenizer files from {source.root}" if source and source.has_tokenizer else ""
        expected, severity = "tokenizer files, which engines load from this directory", warning_if(not hint)
        yield Issue(expected, "the directory has no tokenizer file", hint, severity=severity)


def _class_may_differ(subject: Subject) -> None:
    """Selects tokenizers that transformers' class may read differently, since the comparison takes seconds."""
    side = side_of(subject)
    if subject.kind != "hf" or not lexists(side.root / TOKENIZER):
        raise NotApplicable(f"no {TOKENIZER} is next to the weights")
    with suppress(CkptkitError):
        name = str(side.tokenizer_config.get("tokenizer_class") or "")
        if "AutoTokenizer" in str(side.tokenizer_config.get("auto_map")):
            raise NotApplicable("the tokenizer's class is code of the checkpoint, which ckptkit does not run")
        if name in ("PreTrainedTokenizerFast", ONLY_NEW):
            raise NotApplicable(f"{name} uses {TOKENIZER} without changes")
        of_bytes = next((of_bytes for start, of_bytes in _OF_BYTES.items() if name.startswith(start)), None)
        parts = [side.tokenizer.get(part) for part in ("pre_tokenizer", "decoder")]
        if of_bytes is not None and of_bytes != ("ByteLevel" in json.dumps(parts)):
            return
    if "transformers" not in subject.against and not is_of_no_family(subject):
        raise NotApplicable("--against-transformers was not given")


@check("CK732", applies_to=_class_may_differ)
def class_takes_tokenizer(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The ids of texts by AutoTokenizer are those by tokenizers; a warning if the source has the same files."""
    side = side_of(subject)
    answer, reason = ask_library(TextJob("transformers", str(side.root), str(side.root), ()))
    if answer is None or answer.refused:  # also because of config.json, which CK541 judges
        raise CannotCheck(reason if answer is None else f"transformers does not load the tokenizer: {answer.refused}")
    result.compared(answer.texts)
    if declared := side.tokenizer_config.get("tokenizer_class"):
        name = f"tokenizer_class {declared!r}"
    else:
        name = f"no tokenizer_class, under model_type {side.config.get('model_type')!r}"
    source, files = source_side(subject) if subject.source_path else None, (TOKENIZER, TOKENIZER_CONFIG)
    is_same = source is not None and all(source.content(file) == side.content(file) for file in files)
    if answer.ids:
        expected, actual = f"a class that uses {TOKENIZER} without changes", f"{name}: {answer.ids} in {TOKENIZER}"
        yield Issue(expected, actual, file=side.root / TOKENIZER_CONFIG, severity=warning_if(is_same))


def _has_two_files(subject: Subject) -> None:
    side = side_of(subject)
    if not (side.root / "config.json").exists():
        raise NotApplicable("config.json is missing")
    with suppress(CkptkitError):
        if not (side.has_vocabulary and any(map(side.special, _KINDS))) and not lexists(side.root / GENERATION):
            raise NotApplicable("only config.json defines special tokens")


@check("CK707", preflight=True, applies_to=_has_two_files)
def special_tokens_agree(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Ids of the end, padding and begin tokens are in the vocabulary, and the same in all files.

    generation_config.json often has several ends, so two files need only one in common. The source's ends that the
    chat template writes must be ends here too.
    """
    side, rows = side_of(subject), dims_of(require_config(subject)).vocab
    try:
        declared = {kind: dict(_token_ids(side, kind)) for kind in _KINDS}
        texts = {kind: text for kind in _KINDS if (text := side.special(kind)) is not None}
        unknown = {kind: text for kind, text in texts.items() if side.ids and text not in side.ids}
    except CkptkitError as error:
        yield _unreadable(subject, side, "files that can be read", error)
        return
    hint = "take config.json, generation_config.json and the tokenizer from one release"
    for kind, by_file in declared.items():
        sound = dict(by_file)
        for file, numbers in by_file.items():
            result.compared()
            unused = {-1} if kind == "pad" else set()
            if strange := sorted(number for number in numbers - unused if not 0 <= number < rows):
                del sound[file]
                expected = f"{kind}_token_id below {rows}, the number of rows of the embedding"
                yield Issue(expected, f"{kind}_token_id {strange[0]}", hint, file=side.root / file)
        # A faulty file has no vote.
        yield from _disagreements(kind, sound, side, hint)
    # Engines refuse ids that are not integers, or never generate them.
    raw = ((f"{kind}_token_id", *pair) for kind in _KINDS for pair in _raw_ids(side, kind))
    for key, file, value in ((key, file, value) for key, file, values in raw for value in values):
        if type(value) is not int:
            result.compared()
            yield Issue(f"a whole number as {key}", f"{key} {shortened(value)}", hint, file=side.root / file)
    where = side.root / TOKENIZER_CONFIG
    for kind, text in unknown.items():
        yield Issue(f"a {kind}_token of the vocabulary", f"{text!r} is not in the vocabulary", hint, file=where)
    with suppress(CkptkitError):  # CK708 reports a source that cannot be read
        yield from _lost_ends(side, source_side(subject)) if subject.source_path else ()
    if not any(declared.values()):
        result.compared()  # three files were read, and none of them has a special token


def _lost_ends(side: SideFiles, source: SideFiles) -> Iterator[Issue]:
    """Ends of the source that the chat templates of both write, for example after a turn, and that are no ends here."""
    ends, texts = _ends(side), {number: text for text, number in source.ids.items()}
    for number in sorted(_ends(source) - ends):
        text = texts.get(number)
        if ends and text and all(_writes(both, text) for both in (side, source)):
            expected = f"eos_token_id with {text!r}, which the chat template writes, as in the source"
            hint, file = "take tokenizer_config.json and generation_config.json from the source", TOKENIZER_CONFIG
            yield Issue(expected, f"eos_token_id {_listed(ends)}", hint, file=side.root / file, severity="warning")


def _writes(side: SideFiles, text: str) -> bool:
    return any(text in template for template in side.templates.values())


def _ends(side: SideFiles) -> set[int]:
    """The ids that end an answer in vLLM, which ignores those of config.json if generation_config.json has one."""
    by_file = dict(_token_ids(side, "eos"))
    return set().union(*(ids for file, ids in by_file.items() if file != "config.json" or GENERATION not in by_file))


def _token_ids(side: SideFiles, kind: str) -> Iterator[tuple[str, set[int]]]:
    """The ids of a special token in each file."""
    for file, values in _raw_ids(side, kind):
        if numbers := {number for number in values if type(number) is int}:
            yield file, numbers
    token = side.special(kind)
    if token is not None and token in side.ids:
        yield TOKENIZER_CONFIG, {side.ids[token]}


def _raw_ids(side: SideFiles, kind: str) -> Iterator[tuple[str, list[Any]]]:
    """The values for the ids of a special token in config and generation_config, without null."""
    key, text = f"{kind}_token_id", side.config.get("text_config")
    inner = text.get(key) if isinstance(text, Mapping) else None
    for file, value in (("config.json", side.config.get(key, inner)), (GENERATION, side.generation.get(key))):
        yield file, [one for one in (value if isinstance(value, list) else [value]) if one is not None]


def _disagreements(kind: str, by_file: Mapping[str, set[int]], side: SideFiles, hint: str) -> Iterator[Issue]:
    """Files that have no id in common: the one that is outvoted, or all without a majority.

    If only the outvoted file has an end that a chat template writes, it is right. Engines end at any id of config and
    generation_config. Some releases have a tokenizer that ends texts and a generation_config that ends turns, so a
    deviating tokenizer is only a warning.
    """
    groups, root = _group_files(by_file), side.root
    if len(groups) < 2:
        return
    servers = {"config.json", GENERATION}
    is_split = servers <= by_file.keys() and not any(servers <= set(group) for group in groups)
    severity = warning_if(kind != "eos" or not is_split)
    (odd, *more), most = groups[0], groups[-1]
    if len(most) < 2 or more:
        actual = ", ".join(f"{_listed(numbers)} in {file}" for file, numbers in by_file.items())
        yield Issue(f"the same {kind}_token_id in all files", actual, hint, file=root, severity=severity)
        return
    usual = set().union(*(by_file[file] for file in most))
    texts = {number: text for text, number in side.ids.items()} if kind == "eos" else {}
    written = {number for number in usual | by_file[odd] if (text := texts.get(number)) and _writes(side, text)}
    if written & by_file[odd] and not written & usual:
        expected = f"{kind}_token_id {_listed(written)}, which the chat template writes, as in {odd}"
        file = GENERATION if GENERATION in most else most[0]
        yield Issue(expected, _listed(by_file[file]), hint, file=root / file, severity=severity)
        return
    expected = f"{kind}_token_id {_listed(usual)}, as in {' and '.join(most)}"
    yield Issue(expected, _listed(by_file[odd]), hint, file=root / odd, severity=severity)


def _group_files(by_file: Mapping[str, set[int]]) -> list[list[str]]:
    """Groups of files with an id in common, the smallest group first."""
    groups: list[tuple[list[str], set[int]]] = []
    for file, numbers in by_file.items():
        joined = [group for group in groups if group[1] & numbers]
        merged = ([*(name for names, _ in joined for name in names), file], numbers.union(*(ids for _, ids in joined)))
        groups = [*(group for group in groups if group not in joined), merged]
    return sorted((names for names, _ in groups), key=len)


def _listed(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))
