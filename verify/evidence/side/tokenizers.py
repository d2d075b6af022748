"""Compares two tokenizers by their tokens, and by texts that the installed libraries encode and decode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.verify.core.report import Severity
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.evidence import side_files
from ckptkit.verify.evidence.side.texts import TextAnswer, ask_libraries, describe_first_difference
from ckptkit.verify.evidence.side_files import TOKENIZER, TOKENIZER_CONFIG, SideDifference, SideFiles, show

SPECIAL = ("eos", "bos", "pad", "unk")
_ANOTHER = "another model's tokenizer: "
_UNREAD = frozenset(  # keys that do not affect ids and texts, or that are compared separately
    {"chat_template", "auto_map", "processor_class", "transformers_version", "name_or_path", "_commit_hash"}
    | {"backend", "is_local", "local_files_only", "model_max_length", "padding_side", "truncation_side"}
    | {"tokenizer_file", "special_tokens_map_file", "model_input_names", "use_default_system_prompt"}
)
_UNREAD_PARTS = ("version", "truncation", "padding")
_UNLIMITED = 10**18  # from this length on, transformers has no limit
# The class of transformers 5 for any tokenizer.json, which is PreTrainedTokenizerFast in transformers 4.
ONLY_NEW = "TokenizersBackend"


def tokenizer_differences(here: SideFiles, there: SideFiles, place: str) -> Iterator[SideDifference]:
    """Yields differences of ids and texts from `there`, named `place` ("in the source"): if files differ and tokens do
    not, those in texts that libraries encode and decode. Raises CkptkitError, and CannotCheck without a library.
    """
    if all(here.content(name) == there.content(name) for name in {*here.tokenizer_files, *there.tokenizer_files}):
        return
    if not (there.has_tokenizer and here.has_tokenizer):
        yield from _absent(here, there)
        return
    by_tokens = list(_tokens(here, there, place))
    yield from (by_vocabulary := [*by_tokens, *_vocabulary_files(here, there, place)])
    if by_tokens:
        return
    tokens = [token for side in (here, there) for token in side.added_tokens]
    answers, reason = ask_libraries(here.root, there.root, tokens)
    if not answers and here.reads_vocabulary != there.reads_vocabulary:
        both = f"the tokenizers of {here.root} and {there.root}"
        raise CannotCheck(f"{both} are in two formats, which only transformers can compare: {reason}")
    is_explained = bool(by_vocabulary)
    found = [one for answer in answers for one in _by_answer(answer, here, there, place, is_explained=is_explained)]
    if not answers and here.tokenizer and there.tokenizer:
        mine, its = ({**side.tokenizer, **dict.fromkeys(_UNREAD_PARTS)} for side in (here, there))
        if words := describe_first_difference(mine, its, ""):
            words = f"{words} {place}; no text was encoded: {reason}"
            found = [SideDifference(TOKENIZER, "parts of the tokenizer", words)]
    yield from (found := found or list(_different_settings(here, there, place)))
    if not answers and not found and (words := _first_setting(here, there)):
        file = here.root / TOKENIZER_CONFIG
        raise CannotCheck(f"{file}: {words} {place}, which only transformers can judge: {reason}")
    classes = [side.tokenizer_config.get("tokenizer_class") for side in (here, there)]
    if classes[0] == ONLY_NEW != classes[1]:
        words = f"tokenizer_class is {ONLY_NEW!r}, which transformers 4 does not have, but {show(classes[1])} {place}"
        yield SideDifference(TOKENIZER_CONFIG, "tokenizer_class", words, "warning")


def _by_answer(
    answer: TextAnswer, here: SideFiles, there: SideFiles, place: str, *, is_explained: bool
) -> Iterator[SideDifference]:
    """The differences in a library: ids or texts, else special tokens; and the longest text."""
    is_same = here.tokenizer_config == there.tokenizer_config
    settings = side_files.SPECIAL_TOKENS if is_same and here.json(side_files.SPECIAL_TOKENS) else TOKENIZER_CONFIG
    file = TOKENIZER if answer.library == "tokenizers" else settings
    if answer.refused:
        words = f"{answer.library} loads the other tokenizer but not this one: {answer.refused}"
        yield SideDifference(file, "tokenizer", words)
    elif answer.first and not is_explained:
        setting = answer.parts if file == TOKENIZER else _first_setting(here, there)
        words = f"in {answer.library} {answer.first} {place}"
        yield SideDifference(file, "ids of a text", f"{setting} {place}; {words}" if setting else words)
    elif answer.special and not answer.first:
        for name, (mine, its) in list(answer.special.items())[:1]:
            is_named = name.endswith("_token")
            values = (show(mine), show(its)) if is_named else (mine or "not special", its or "not special")
            words = f"{name if is_named else repr(name)} is {values[0]} but {values[1]} {place}"
            severity: Severity = "warning" if name == "pad_token" and its is None else "error"
            yield SideDifference(file, name, words, severity, count=len(answer.special), is_presentation=True)
    if answer.lengths and answer.lengths[1] < _UNLIMITED:
        lengths = ["without a limit" if one >= _UNLIMITED else str(one) for one in answer.lengths]
        words = f"model_max_length is {lengths[0]} but {lengths[1]} {place}"
        yield SideDifference(TOKENIZER_CONFIG, "model_max_length", words, "warning", is_presentation=True)


def _different_settings(here: SideFiles, there: SideFiles, place: str) -> Iterator[SideDifference]:
    """Settings with two values that give equal results in the installed libraries, but may not in other releases."""
    mine, its = here.tokenizer_config, there.tokenizer_config
    names = (*(f"{kind}_token" for kind in SPECIAL), "additional_special_tokens", "extra_special_tokens")
    skipped = {*_UNREAD, *names, "tokenizer_class"}
    pairs = ((path, pair) for path, pair in _pairs(mine, its, "") if not path.endswith(".normalized"))
    odd = {path: pair for path, pair in pairs if path.partition(".")[0] not in skipped}
    yield from side_files.setting_differences(TOKENIZER_CONFIG, odd, place, "error")
    for kind in SPECIAL:
        tokens = {text for file in side_files.SETTINGS_FILES if (text := there.special_in(file, kind))}
        for file in side_files.SETTINGS_FILES if tokens else ():
            if (text := here.special_in(file, kind)) and text not in tokens:
                words = f"{kind}_token is {text!r} but {' or '.join(map(repr, sorted(tokens)))} {place}"
                yield SideDifference(file, f"{kind}_token", words, is_presentation=True)


def _pairs(mine: Mapping[str, Any], its: Mapping[str, Any], path: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Path and values of each setting that both have and that differs."""
    for key in mine.keys() & its.keys():
        pair = mine[key], its[key]
        if all(isinstance(one, Mapping) for one in pair):
            yield from _pairs(*pair, f"{path}{key}.")
        elif pair[0] != pair[1]:
            yield f"{path}{key}", pair


def _first_setting(here: SideFiles, there: SideFiles) -> str:
    configs = (side.tokenizer_config.items() for side in (here, there))
    mine, its = ({key: one for key, one in items if key not in _UNREAD} for items in configs)
    return describe_first_difference(mine, its, "")


def _absent(here: SideFiles, there: SideFiles) -> Iterator[SideDifference]:
    side = there if there.has_tokenizer else here
    file = next((name for name in side.tokenizer_files if name not in side_files.SETTINGS_FILES), None)
    if file is None:
        return  # settings without a vocabulary are not a tokenizer
    if side is there:
        yield SideDifference(file, "tokenizer", "missing", count=max(1, len(there.ids)))
    else:
        yield SideDifference(file, "no tokenizer", "a tokenizer, which was compared with nothing", "warning")


def _tokens(here: SideFiles, there: SideFiles, place: str) -> Iterator[SideDifference]:
    if not (here.reads_vocabulary and there.reads_vocabulary):
        return
    mine, its = here.ids, there.ids
    missing = [token for token in its if token not in mine]
    moved = [token for token in its if token in mine and mine[token] != its[token]]
    added = [token for token in mine if token not in its]
    if not (missing or moved or added):
        return
    of_all = f"of the {len(its)} tokens {place} "
    parts = [
        f"{len(missing)} {of_all}are missing, such as {missing[0]!r}" if missing else "",
        f"{len(moved)} {'' if missing else of_all}have other ids ({moved[0]!r} {mine[moved[0]]}, not {its[moved[0]]})"
        if moved
        else "",
        f"{len(added)} tokens are added, such as {added[0]!r}" if added else "",
    ]
    another = _ANOTHER if 2 * (len(missing) + len(moved)) > len(its) else ""
    file = here.file_of_token((moved or added)[0]) if moved or added else there.file_of_token(missing[0])
    count = len(missing) + len(moved) + len(added)
    words = another + ", ".join(filter(None, parts))
    yield SideDifference(file, f"{len(its)} tokens with their ids", words, count=count)


def _vocabulary_files(here: SideFiles, there: SideFiles, place: str) -> Iterator[SideDifference]:
    """Compares vocabulary files that some loaders read instead of tokenizer.json; a re-saved tokenizer may differ."""
    for name in dict.fromkeys([*there.tokenizer_files, *here.tokenizer_files]):
        if name == TOKENIZER or name in side_files.SETTINGS_FILES:
            continue
        mine, its = (name in side.tokenizer_files for side in (here, there))
        is_same = here.content(name) == there.content(name)
        if mine and its and not is_same and name.endswith((".json", ".txt")):
            read = SideFiles.json if name.endswith(".json") else SideFiles.lines
            is_same = read(here, name) == read(there, name)
        if mine and its and not is_same:
            yield SideDifference(name, name, f"its content differs from the file {place}")
        elif mine and not its and (there.tokenizer or name.endswith((".json", ".txt"))):
            if not _is_of_tokenizer(name, here, there):
                yield SideDifference(name, f"no {name}", f"loaders read this file, which does not exist {place}")
        elif its and not mine and not here.tokenizer:
            yield SideDifference(name, name, "missing")


def _is_of_tokenizer(name: str, here: SideFiles, there: SideFiles) -> bool:
    """Whether a file of `here` has the tokens or merges that `there` has in another file."""
    if name == side_files.MERGES:
        return here.merges_in(name) == there.merges
    if name == side_files.VOCABULARY_LINES:
        return all(there.ids.get(token) == number for number, token in enumerate(here.lines(name)))
    if name not in (side_files.VOCABULARY, side_files.ADDED_TOKENS):
        return False
    return all(there.ids.get(token) == number for token, number in here.json(name).items())
