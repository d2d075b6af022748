"""CK707: compares the special tokens of config, generation_config and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from os.path import lexists  # a link to nothing is a file that cannot be read
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from converters.planner import dims_of
from verify.check import Tally, check
from verify.checks.config.tokenizer import side_of, source_side, unreadable
from verify.evidence.expected import require_config
from verify.evidence.side_files import GENERATION, TOKENIZER_CONFIG, SideFiles
from verify.evidence.subject import Subject
from verify.issue import Issue, warning_if

_KINDS = ("eos", "pad", "bos")


def _one_place_only(subject: Subject) -> str | None:
    side = side_of(subject)
    if not (side.root / "config.json").exists():
        return "there is no config.json beside it"
    with suppress(CkptkitError):
        tokens = side.has_vocabulary and any(map(side.special, _KINDS))
        return None if tokens or lexists(side.root / GENERATION) else "only config.json says which tokens are special"
    return None


@check(
    "CK707",
    "config, generation_config and tokenizer agree on the special tokens",
    stage="configuration",
    preflight=True,
    rationale="Trainer and server stop at different tokens: answers run on to the length limit, or end too soon, and "
    "rewards are given for it.",
    fix="Make eos_token_id in config.json and generation_config.json that of the tokenizer's eos_token, as in the "
    "release.",
    unless=_one_place_only,
)
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
            tally.compared(0)
            unused = {-1} if kind == "pad" else set()
            if strange := sorted(number for number in numbers - unused if not 0 <= number < rows):
                del sound[file]
                expected = f"{kind}_token_id below {rows}, the rows of the embedding"
                yield Issue(expected, f"{kind}_token_id {strange[0]}", hint, file=side.root / file)
        # A file that is known to be wrong has no vote on the others.
        yield from _disagreements(kind, sound, side.root, hint)
    for kind, file, value in _unread(side):
        tally.compared(0)
        yield Issue(f"{kind}_token_id as a whole number", f"{kind}_token_id {value}", hint, file=side.root / file)
    where = side.root / TOKENIZER_CONFIG
    for kind, text in unknown.items():
        yield Issue(f"{kind}_token in the vocabulary", f"{text!r} is not in it", hint, file=where)
    with suppress(CkptkitError):  # a source that cannot be read is for CK708
        yield from _lost_ends(side, source_side(subject)) if subject.source_path else ()
    if not any(stated.values()):
        tally.compared(0)  # three files were looked at, and none of them names a special token


def _lost_ends(side: SideFiles, there: SideFiles) -> Iterator[Issue]:
    """Ends of the source that the chat template writes in both, as at the end of a turn, and that end nothing here."""
    ends, texts = _ends(side), {number: text for text, number in there.ids.items()}
    for number in sorted(_ends(there) - ends):
        text = texts.get(number)
        if ends and text and all(any(text in one for one in both.templates.values()) for both in (side, there)):
            expected = f"{text!r}, which the chat template writes, among the ends of an answer, as in the source"
            hint = "take tokenizer_config.json and generation_config.json from the source"
            yield Issue(expected, f"ends at {_text(ends)}", hint, file=side.root / TOKENIZER_CONFIG, severity="warning")


def _ends(side: SideFiles) -> set[int]:
    """The ids that end an answer in vLLM, which reads the ends of config.json only without a generation_config."""
    stated = dict(_stated(side, "eos"))
    return set().union(*(ids for file, ids in stated.items() if file != "config.json" or GENERATION not in stated))


def _stated(side: SideFiles, kind: str) -> Iterator[tuple[str, set[int]]]:
    """The ids that each file states."""
    for file, values in _values(side, kind):
        numbers = {number for number in values if type(number) is int}
        if numbers:
            yield file, numbers
    token = side.special(kind)
    if token is not None and token in side.ids:
        yield TOKENIZER_CONFIG, {side.ids[token]}


def _values(side: SideFiles, kind: str) -> Iterator[tuple[str, list[Any]]]:
    """What config and generation_config have as ids of a token, without null."""
    text = side.config.get("text_config")
    inner = text.get(f"{kind}_token_id") if isinstance(text, Mapping) else None
    for file, value in (
        ("config.json", side.config.get(f"{kind}_token_id", inner)),
        (GENERATION, side.generation.get(f"{kind}_token_id")),
    ):
        yield file, [one for one in (value if isinstance(value, list) else [value]) if one is not None]


def _unread(side: SideFiles) -> Iterator[tuple[str, str, str]]:
    """Kind, file and value of ids that are not whole numbers, which engines refuse or never meet."""
    for kind in _KINDS:
        for file, values in _values(side, kind):
            yield from ((kind, file, shortened(one)) for one in values if type(one) is not int)


def _disagreements(kind: str, by_file: Mapping[str, set[int]], root: Path, hint: str) -> Iterator[Issue]:
    """Files whose ids have nothing in common with those of the others: the one that is outvoted, or all where none is.

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
        usual = _text(set().union(*(by_file[file] for file in most)))
        expected = f"{kind}_token_id {usual}, as in {' and '.join(most)}"
        yield Issue(expected, _text(by_file[odd]), hint, file=root / odd, severity=severity)
        return
    actual = ", ".join(f"{_text(numbers)} in {file}" for file, numbers in by_file.items())
    yield Issue(f"one {kind}_token_id in all files", actual, hint, file=root, severity=severity)


def _agreeing(by_file: Mapping[str, set[int]]) -> list[list[str]]:
    """The files in groups, each file with an id of another one of its group; the smallest group first."""
    groups: list[tuple[list[str], set[int]]] = []
    for file, numbers in by_file.items():
        joined = [group for group in groups if group[1] & numbers]
        merged = ([*(name for names, _ in joined for name in names), file], numbers.union(*(ids for _, ids in joined)))
        groups = [*(group for group in groups if group not in joined), merged]
    return sorted((names for names, _ in groups), key=len)


def _text(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))
