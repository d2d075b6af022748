"""Compares two tokenizers: by the values in their files and, where those differ, by what libraries make of texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verify.evidence.side.difference import Difference, show
from verify.evidence.side.texts import Answer, ask_libraries
from verify.evidence.side.tokenizer_parts import (
    PARTS,
    describe_leaf,
    first_difference,
    parts_of,
    scores_of,
    strings_in,
)
from verify.evidence.side_files import (
    ADDED_TOKENS,
    MERGES,
    SETTINGS_FILES,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCABULARY,
    VOCABULARY_LINES,
    SideFiles,
    flags_in,
)
from verify.report import Severity
from verify.skip import Unable

_ANOTHER = "another model's tokenizer: "
SPECIAL = ("eos", "bos", "pad", "unk")
# Keys of tokenizer_config.json that change ids or text in some release of transformers.
_SETTINGS = (
    *("tokenizer_class", "add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "split_special_tokens"),
    *("clean_up_tokenization_spaces", "spaces_between_special_tokens", "do_lower_case", "do_basic_tokenize"),
    *("strip_accents", "tokenize_chinese_chars", "keep_accents", "remove_space", "sp_model_kwargs", "errors"),
    *("from_slow", "fix_mistral_regex"),
)
# Keys that no id and no text depends on, or that are compared by themselves.
_UNREAD = frozenset(
    {"chat_template", "auto_map", "processor_class", "transformers_version", "name_or_path", "_commit_hash"}
    | {"backend", "is_local", "local_files_only", "model_max_length", "padding_side", "truncation_side"}
    | {"tokenizer_file", "special_tokens_map_file", "model_input_names", "use_default_system_prompt"}
)


@dataclass(frozen=True)
class _Candidate:
    """Values that differ, which may change an id or a text."""

    difference: Difference
    library: str  # whose answer tells
    strings: tuple[str, ...] = ()  # texts that may show it
    is_default: bool = False  # one side may only write out a default of the other
    unasked: Severity | None = "error"  # where no library answers; None: no difference
    unseen: Severity = "warning"  # where no text shows it


def tokenizer_differences(here: SideFiles, there: SideFiles, place: str) -> Iterator[Difference]:
    """What gives a text other ids, or ids another text, in `here` than in `there`, named `place` ("in the source").

    Libraries are asked only where values differ that need not change any id. Where they find no text that shows it,
    the difference is a warning. Raises CkptkitError for files that cannot be read, and Unable for two formats that no
    library reads.
    """
    files = {*here.tokenizer_files, *there.tokenizer_files}
    if all(here.content(name) == there.content(name) for name in files):
        return
    if not (there.has_tokenizer and here.has_tokenizer):
        yield from _absent(here, there)
        return
    by_value = [*_tokens(here, there, place), *_order(here, there, place), *_vocabulary_files(here, there, place)]
    yield from by_value
    if any(one.words.startswith(_ANOTHER) for one in by_value):
        return
    candidates = [
        *_parts(here, there, place),
        *_flags(here, there, place),
        *_special(here, there, place),
        *_settings(here, there, place),
    ]
    is_one_format = here.reads_vocabulary == there.reads_vocabulary
    if candidates or not is_one_format or (not by_value and _rest(here) != _rest(there)):
        strings = [text for one in candidates for text in one.strings]
        tokens = [token for side in (here, there) for token in side.added_tokens]
        answers, reason = ask_libraries(here.root, there.root, [*strings, *tokens])
        yield from _judge(candidates, answers, reason, place, is_explained=bool(by_value))
        if not is_one_format and not answers:
            both = f"the tokenizers of {here.root} and {there.root}"
            raise Unable(f"{both} are stored in two formats, which only transformers could compare: {reason}")


def _absent(here: SideFiles, there: SideFiles) -> Iterator[Difference]:
    """A tokenizer that only one side has."""
    side = there if there.has_tokenizer else here
    file = next((name for name in side.tokenizer_files if name not in SETTINGS_FILES), None)
    if file is None:
        return  # settings alone are not a tokenizer
    if side is there:
        yield Difference(file, "tokenizer", "missing", count=max(1, len(there.ids)))
    else:
        yield Difference(file, "no tokenizer", "a tokenizer, and none to compare it with", "warning")


def _tokens(here: SideFiles, there: SideFiles, place: str) -> Iterator[Difference]:
    """Tokens and their ids, where both sides have a file with all of them."""
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
        f"{len(missing)} {of_all}are not in it, such as {missing[0]!r}" if missing else "",
        f"{len(moved)} {'' if missing else of_all}have other ids ({moved[0]!r} {mine[moved[0]]}, not {its[moved[0]]})"
        if moved
        else "",
        f"{len(added)} are only in it, such as {added[0]!r}" if added else "",
    ]
    another = _ANOTHER if 2 * (len(missing) + len(moved)) > len(its) else ""
    file = here.file_of_token((moved or added)[0]) if moved or added else there.file_of_token(missing[0])
    count = len(missing) + len(moved) + len(added)
    yield Difference(file, f"{len(its)} tokens with their ids", another + ", ".join(filter(None, parts)), count=count)


def _order(here: SideFiles, there: SideFiles, place: str) -> Iterator[Difference]:
    """Merges of a BPE model in their order, and scores of a Unigram model."""
    mine, its = here.merges, there.merges
    both = here.reads_vocabulary and there.reads_vocabulary
    if both and mine != its and ((mine and its) or (here.tokenizer and there.tokenizer)):
        at = next((at for at, pair in enumerate(zip(mine, its, strict=False)) if pair[0] != pair[1]), None)
        first = f"merge {at} is {_merge(mine[at])} but {_merge(its[at])} {place}" if at is not None else ""
        lengths = f"{len(mine)} merges but {len(its)} {place}" if len(mine) != len(its) else ""
        file = TOKENIZER if here.tokenizer else MERGES
        yield Difference(file, f"{len(its)} merges", "; ".join(filter(None, (lengths, first))))
    scores, others = scores_of(here.tokenizer), scores_of(there.tokenizer)
    if odd := [token for token in scores.keys() & others.keys() if scores[token] != others[token]]:
        first = min(odd)
        words = f"scores of {len(odd)} tokens: {first!r} is {scores[first]} but {others[first]} {place}"
        yield Difference(TOKENIZER, "scores of the tokens", words, count=len(odd))


def _merge(pair: Sequence[str]) -> str:
    return repr(" ".join(pair))


def _vocabulary_files(here: SideFiles, there: SideFiles, place: str) -> Iterator[Difference]:
    """Files with a vocabulary besides tokenizer.json, which some loaders read instead of it.

    A re-saved tokenizer may lack them, or gain one with the tokens and merges of its tokenizer.json.
    """
    for name in dict.fromkeys([*there.tokenizer_files, *here.tokenizer_files]):
        if name == TOKENIZER or name in SETTINGS_FILES:
            continue
        mine, its = (name in side.tokenizer_files for side in (here, there))
        if mine and its and not _same_vocabulary(name, here, there):
            yield Difference(name, name, f"its content is not that of the file {place}")
        elif mine and not its and (there.tokenizer or name.endswith((".json", ".txt"))):
            if not _is_of_tokenizer(name, here, there):
                yield Difference(name, f"no {name}", f"there is no such file {place}, and loaders read it")
        elif its and not mine and not here.tokenizer:
            yield Difference(name, name, "missing")


def _same_vocabulary(name: str, here: SideFiles, there: SideFiles) -> bool:
    if here.content(name) == there.content(name):
        return True
    if name.endswith(".json"):
        return here.json(name) == there.json(name)
    return name.endswith(".txt") and here.lines(name) == there.lines(name)


def _is_of_tokenizer(name: str, here: SideFiles, there: SideFiles) -> bool:
    """Whether a file of `here` has the tokens or merges that `there` has in another file."""
    if name == MERGES:
        return here.merges_in(name) == there.merges
    if name == VOCABULARY_LINES:
        return all(there.ids.get(token) == number for number, token in enumerate(here.lines(name)))
    if name not in (VOCABULARY, ADDED_TOKENS):
        return False
    return all(there.ids.get(token) == number for token, number in here.json(name).items())


def _parts(here: SideFiles, there: SideFiles, place: str) -> Iterator[_Candidate]:
    """Normalizer, pre-tokenizer, post-processor, decoder and settings of the model."""
    mine, its = parts_of(here.tokenizer), parts_of(there.tokenizer)
    names = [name for name in {**its, **mine} if mine.get(name) != its.get(name)]
    if not (here.tokenizer and there.tokenizer):  # vocab.json and merges.txt have no parts: the class makes them
        names = [name for name in names if name in PARTS]
        if names and here.reads_vocabulary and there.reads_vocabulary:
            has = "is no" if there.tokenizer else "is a"
            words = f"there {has} {TOKENIZER} with its {' and '.join(names)}, unlike {place}"
            difference = Difference(TOKENIZER, TOKENIZER, words, "warning")
            yield _Candidate(difference, "transformers", (), bool(here.tokenizer), "warning")
        return
    if not names:
        return
    described = []
    for name in names:
        leaf = first_difference(mine.get(name), its.get(name), name)
        values = describe_leaf(leaf)
        described.append(f"{leaf.path} is {values[0]} but {values[1]} {place}")
    strings = [text for name in names for side in (mine, its) for text in strings_in(side.get(name))]
    difference = Difference(TOKENIZER, " and ".join(names), "; ".join(described), count=len(names))
    yield _Candidate(difference, "tokenizers", tuple(strings))


def _flags(here: SideFiles, there: SideFiles, place: str) -> Iterator[_Candidate]:
    """Which tokens are added, and their flags, in tokenizer.json and as transformers has them."""
    if here.tokenizer and there.tokenizer:
        mine, its = ({*flags_in(side.tokenizer.get("added_tokens"))} for side in (here, there))
        for odd, words in ((its - mine, "not among the added tokens, as"), (mine - its, "an added token, and not one")):
            if odd := {token for token in odd if token in here.ids and here.ids[token] == there.ids.get(token)}:
                more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
                difference = Difference(
                    TOKENIZER, "added tokens", f"{min(odd)!r}{more}: {words} {place}", count=len(odd)
                )
                yield _Candidate(difference, "tokenizers", tuple(sorted(odd)))
    for file, views in (
        (TOKENIZER, [flags_in(side.tokenizer.get("added_tokens")) for side in (here, there)]),
        (TOKENIZER_CONFIG, [side.added_tokens for side in (here, there)]),
    ):
        own, other = views
        if tokens := [token for token in other if token in own and own[token] != other[token]]:
            first, last = own[tokens[0]], other[tokens[0]]
            flag = next(flag for flag in last if first[flag] != last[flag])
            words = f"{flag} of {tokens[0]!r} is {first[flag]} but {last[flag]} {place}"
            words += f", and {len(tokens) - 1} other added tokens differ" if len(tokens) > 1 else ""
            library = "tokenizers" if file == TOKENIZER else "transformers"
            difference = Difference(file, f"flags of {len(tokens)} added tokens", words, count=len(tokens))
            flags = {flag for token in tokens for flag in own[token] if own[token][flag] != other[token][flag]}
            # That one matters only where a normalizer changes the token.
            unseen: Severity = "warning" if flags == {"normalized"} else "error"
            yield _Candidate(difference, library, tuple(tokens), unseen=unseen)
            return


def _special(here: SideFiles, there: SideFiles, place: str) -> Iterator[_Candidate]:
    """The end, begin, padding and unknown tokens, wherever they are stated."""
    for kind in SPECIAL:
        mine, its = _special_values(here, kind), _special_values(there, kind)
        if mine == its:
            continue
        file = next((name for name in (SPECIAL_TOKENS, TOKENIZER_CONFIG) if here.special_in(name, kind)), None)
        words = f"{kind}_token is {_or(mine)} but {_or(its)} {place}"
        severity: Severity = "warning" if kind == "pad" and not its else "error"
        difference = Difference(file or TOKENIZER_CONFIG, f"{kind}_token", words, severity, is_presentation=True)
        yield _Candidate(difference, "transformers", (), not (mine and its), severity, severity)
    mine, its = _more_special(here), _more_special(there)
    if mine != its:
        words = f"extra_special_tokens are {_or(mine)} but {_or(its)} {place}"
        difference = Difference(TOKENIZER_CONFIG, "extra_special_tokens", words, is_presentation=True)
        yield _Candidate(difference, "transformers", tuple(mine ^ its), True, "warning")


def _more_special(side: SideFiles) -> frozenset[str]:
    """The tokens that are special besides those with a name; transformers 5 has another key for them."""
    found = [
        value
        for file in SETTINGS_FILES
        for key in ("additional_special_tokens", "extra_special_tokens")
        for value in _values(side.json(file).get(key))
    ]
    return frozenset(str(one.get("content")) if isinstance(one, Mapping) else str(one) for one in found)


def _values(content: Any) -> list[Any]:
    return list(content.values()) if isinstance(content, Mapping) else content if isinstance(content, list) else []


def _special_values(side: SideFiles, kind: str) -> frozenset[str]:
    return frozenset(filter(None, (side.special_in(file, kind) for file in SETTINGS_FILES)))


def _or(tokens: frozenset[str]) -> str:
    return " or ".join(map(repr, sorted(tokens))) or "missing"


def _settings(here: SideFiles, there: SideFiles, place: str) -> Iterator[_Candidate]:
    """Settings of tokenizer_config.json."""
    mine, its = here.tokenizer_config, there.tokenizer_config
    for is_default in (False, True):
        names = [
            name
            for name in _SETTINGS
            if _plain(mine.get(name)) != _plain(its.get(name)) and is_default == _one_sided(name, mine, its)
        ]
        if names:
            described = [f"{name} is {show(mine.get(name))} but {show(its.get(name))} {place}" for name in names]
            difference = Difference(TOKENIZER_CONFIG, " and ".join(names), "; ".join(described), count=len(names))
            is_on = any(mine.get(name) or its.get(name) for name in names)
            unasked: Severity | None = "error" if not is_default else "warning" if is_on else None
            yield _Candidate(difference, "transformers", (), is_default, unasked, "error")


def _one_sided(name: str, mine: Mapping[str, Any], its: Mapping[str, Any]) -> bool:
    """Whether only one side states a setting; transformers renames classes without a change of what they do."""
    return name not in mine or name not in its or name == "tokenizer_class"


def _plain(value: Any) -> Any:
    """A setting; of a class its name without what transformers 4 and 5 add to it."""
    if not isinstance(value, str):
        return value
    return "TokenizersBackend" if value == "PreTrainedTokenizerFast" else value.removesuffix("Fast")


def _rest(side: SideFiles) -> Mapping[str, Any]:
    """Settings besides those that are compared by name."""
    rest = {key: value for key, value in side.tokenizer_config.items() if key not in _UNREAD and value is not None}
    return {**rest, SPECIAL_TOKENS: side.json(SPECIAL_TOKENS)}


def _judge(
    candidates: Sequence[_Candidate], answers: Sequence[Answer], reason: str, place: str, *, is_explained: bool
) -> Iterator[Difference]:
    """The candidates that a text shows as errors, others as warnings; and what is seen though no value explains it."""
    by_library = {one.library: one for one in answers}
    told = False
    for one in sorted(candidates, key=lambda one: one.is_default):
        answer = by_library.get(one.library) or next(iter(answers), None)
        seen = [seen for answer in answers if (seen := _seen(answer, one))]
        if seen and one.is_default and told:
            continue  # the difference that was told explains it
        if seen:
            told = True
            severity = one.difference.severity if one.difference.is_presentation else "error"
            yield replace(one.difference, words=f"{one.difference.words}; {seen[0]}", severity=severity)
        elif answer is None:
            if one.unasked is not None:
                words = f"{one.difference.words}; no text was tried: {reason}"
                yield replace(one.difference, words=words, severity=one.unasked)
        elif not one.is_default:
            words = f"{one.difference.words}; none of {answer.texts} texts shows it in {answer.library}"
            yield replace(one.difference, words=words, severity=one.unseen)
    for answer in answers:
        if (seen_alone := _first(answer)) and not told and not is_explained:
            file = TOKENIZER if answer.library == "tokenizers" else TOKENIZER_CONFIG
            words = seen_alone if answer.refused else f"in {answer.library} {seen_alone} {place}"
            yield Difference(file, "ids of a text", words)
            return


def _seen(answer: Answer, candidate: _Candidate) -> str:
    """What an answer shows of a candidate; of a special token only its id."""
    return answer.special if candidate.difference.is_presentation and not answer.refused else _first(answer)


def _first(answer: Answer) -> str:
    if answer.refused:
        return f"{answer.library} loads the other tokenizer but not this one: {answer.refused}"
    return answer.ids or answer.text or answer.shown or answer.special
