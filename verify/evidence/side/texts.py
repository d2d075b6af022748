"""Encodes and decodes texts with tokenizers and transformers, as a program; no code of a checkpoint runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any

from ckptkit.core.printable import shortened
from ckptkit.verify.evidence.side_files import TOKENIZER
from ckptkit.verify.witnesses.process.exit_report import ExitReport, Phase, run_job
from ckptkit.verify.witnesses.runner import ask

LIBRARIES = ("tokenizers", "transformers")
_LOADING_HERE = Phase("loading the tokenizer")
_LIMIT_S = 180
_TOKENS = 400  # tokens of the vocabulary that are decoded, one by one and in a row
_SHOWN = 12  # printed ids of a text
_TEXTS = (
    "a b",
    "hello World tokenizer",
    "hello 123 1234567\n\nthink ><\n</x>",
    "I'll don't CAFÉ naïve Straße\r\n\r\n",
    "'tis y'all'd've",
    "  a\tb  ",
    " leading, trailing . and ! doubled  spaces ",
    "中文 12,5 e\u0301 x\u00a0y ﬁ ① Å 한국어 \U0001f600",
    "def f(x):\n    return x['a'] + 0x1F  # 3.14e-5\n",
    "abc\u200bdef\ufeff\u0000\u2028A",
)
_WORDS = 2  # the number of these with words and single spaces only
# A piece of each kind that pre-tokenizers distinguish; every three of them in a row are a text.
_PIECES = ("a", "Bc", "é", "e\u0301", "中", "1", "234", " ", "  ", "\n", "\r\n", ".", "'s", "_", "</", "\U0001f600")
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_ROW = 32  # texts that are first compared as one
_PLANES = 0x20000  # the characters of the first two planes are compared one by one
_NO_TEXT = (range(0xD800, 0xF900), range(0xF0000, 0x110000))  # surrogates and private use


@dataclass(frozen=True)
class TextJob:
    """Two directories with a tokenizer, the library to load them with, and texts such as added tokens."""

    library: str
    here: str
    there: str
    strings: Sequence[str]
    report: str = ""


@dataclass(frozen=True)
class TextAnswer:
    """The differences between two tokenizers in a library, in words; empty if equal."""

    library: str
    texts: int = 0
    ids: str = ""  # of a text
    text: str = ""  # of ids, with or without special tokens
    special: Mapping[str, Sequence[str | None]] = field(default_factory=dict)  # `eos_token` and the like, on both sides
    refused: str = ""  # the reason if it loads only the other tokenizer
    parts: str = ""  # the first difference of tokenizer.json, as tokenizers writes it
    lengths: Sequence[int] = ()  # model_max_length of both

    @property
    def first(self) -> str:
        """The first difference of ids and texts."""
        return self.ids or self.text


def ask_libraries(here: Path, there: Path, strings: Sequence[str]) -> tuple[Sequence[TextAnswer], str]:
    """The answers of tokenizers and transformers up to the first difference, and the reason if there are none."""
    answers: list[TextAnswer] = []
    reason = "tokenizers is not installed"
    for library in LIBRARIES:
        is_unreadable = library == "tokenizers" and not all((root / TOKENIZER).exists() for root in (here, there))
        if find_spec(library) is None or is_unreadable:
            continue
        answer, failure = ask_library(TextJob(library, str(here), str(there), list(dict.fromkeys(strings))))
        if answer is None:
            reason = failure
            continue
        answers.append(answer)
        if answer.first or answer.refused:
            break
    return answers, "" if answers else reason


def ask_library(job: TextJob) -> tuple[TextAnswer | None, str]:
    """The answer of one library, or None and the reason. A tokenizer that it refuses is an answer."""
    if missing := [one for one in {LIBRARIES[0], job.library} if find_spec(one) is None]:
        return None, f"{missing[0]} is not installed"
    answer = ask(job, __name__, TextAnswer, _LIMIT_S)
    if (failure := answer.failure) and failure.phase == _LOADING_HERE and "install" not in failure.message:
        return TextAnswer(job.library, refused=failure.message.partition(" (at ")[0]), ""
    return answer.report, "" if answer.report else f"{job.library} did not answer {failure}"


class _Loaded:
    """A tokenizer of either library: ids of texts, the text of ids, and special tokens."""

    def __init__(self, root: Path, library: str, *, around: bool = True) -> None:
        self.special: Mapping[str, str | None] = {}
        self.split: Callable[[str], list[str]] = lambda text: []
        self.parts: Mapping[str, Any] = {}
        self.length, self.is_fast = 0, True
        if library == "tokenizers":
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(root / TOKENIZER))
            fast.no_truncation()  # transformers sets both anew for every call
            fast.no_padding()
            self.encode: Callable[[list[str]], list[list[int]]] = lambda texts: [
                one.ids for one in fast.encode_batch(texts, add_special_tokens=around)
            ]
            self.decode: Callable[[list[int], bool], str] = fast.decode
            self.vocabulary: Mapping[str, int] = fast.get_vocab()
            self.split = lambda text: _split(fast, text)
            self.parts = json.loads(fast.to_str())
            return
        from transformers import AutoTokenizer

        auto = AutoTokenizer.from_pretrained(root, trust_remote_code=False, local_files_only=True)
        self.encode = lambda texts: auto(texts, add_special_tokens=around)["input_ids"] if texts else []
        self.decode = lambda ids, skip: str(auto.decode(ids, skip_special_tokens=skip))
        self.vocabulary = auto.get_vocab()
        self.special = {f"{kind}_token": getattr(auto, f"{kind}_token", None) for kind in ("eos", "bos", "pad", "unk")}
        self.special |= dict.fromkeys(map(str, auto.all_special_tokens), "special")
        self.length, self.is_fast = auto.model_max_length, auto.is_fast


def _split(tokenizer: Any, text: str) -> list[str]:
    normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(normal) if tokenizer.pre_tokenizer else [(normal, None)]
    return [piece for piece, _ in pieces]


def run(job: TextJob, phases: ExitReport) -> TextAnswer:
    """Loads both tokenizers and compares them."""
    is_same = job.here == job.there
    phases.enter(Phase(f"loading {job.there}"))
    there = _Loaded(Path(job.there), LIBRARIES[0] if is_same else job.library, around=not is_same)
    phases.enter(_LOADING_HERE)
    here = _Loaded(Path(job.here), job.library, around=not is_same)
    phases.enter(Phase("encoding texts"))
    if is_same:  # compares a class of transformers with tokenizer.json for words: rarer texts may differ
        return TextAnswer(job.library, _WORDS, _different_ids(here, there, _TEXTS[:_WORDS]))
    return _compare(job.library, here, there, job.strings)


def _compare(library: str, here: _Loaded, there: _Loaded, strings: Sequence[str]) -> TextAnswer:
    in_parts = [text for side in (here, there) for part in _PARTS for text in strings_in(side.parts.get(part))]
    strings = list(dict.fromkeys([*strings, *in_parts]))
    short = list(dict.fromkeys(_short_texts(there, strings)))
    texts: list[str] = []
    if here.is_fast and there.is_fast:  # every token, and every character of the first planes inside a word
        characters = (number for number in range(_PLANES) if not any(number in one for one in _NO_TEXT))
        texts = [there.decode([number], False) for number in there.vocabulary.values()]
        texts += [f"a{chr(number)}b" for number in characters]
    rows = [" ".join(texts[at : at + _ROW]) for at in range(0, len(texts), _ROW)]
    ids, text = _different_ids(here, there, short), ""
    if not ids and (ids := _different_ids(here, there, rows)):
        ids = _different_ids(here, there, texts) or ids
    for one in short if not ids else ():
        if here.split(one) != there.split(one):  # another vocabulary would show it in the ids
            ids = f"{shortened(one)} is split into {shortened(here.split(one))} but {shortened(there.split(one))}"
            break
    for numbers in there.encode(short[: len(_TEXTS) + 3 * len(strings) + _TOKENS]):
        for skip in (False, True):
            mine, its = here.decode(numbers, skip), there.decode(numbers, skip)
            if mine != its and not text:
                text = f"{_listed(numbers, numbers)} is {shortened(mine)} but {shortened(its)}"
    mine_ids, its_ids = here.vocabulary, there.vocabulary
    if not ids and mine_ids != its_ids:
        token = next(one for one in {**its_ids, **mine_ids} if mine_ids.get(one) != its_ids.get(one))
        ids = f"{token!r} is {mine_ids.get(token, 'missing')} but {its_ids.get(token, 'missing')}"
    models = (side.parts.get("model", {}) for side in (here, there))
    tables, their_tables = ({key: model.get(key) for key in ("merges", "vocab")} for model in models)
    ids = ids or describe_first_difference(tables, their_tables, "model")  # only rare texts may show it
    pairs = {name: (here.special.get(name), there.special.get(name)) for name in {**there.special, **here.special}}
    special = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    parts = describe_first_difference(here.parts, there.parts, "") if ids or text else ""
    lengths = (here.length, there.length) if here.length != there.length else ()
    return TextAnswer(library, len(short) + len(texts), ids, text, special, "", parts, lengths)


def strings_in(value: Any) -> Iterator[str]:
    """Every text in a part, such as the pattern of a Replace."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    yield from [value] if isinstance(value, str) else (text for one in inner for text in strings_in(one))


def _different_ids(here: _Loaded, there: _Loaded, texts: Sequence[str]) -> str:
    for one, mine, its in zip(texts, here.encode(list(texts)), there.encode(list(texts)), strict=True):
        if mine != its:
            return f"{shortened(one)} is {_listed(mine, its)} but {_listed(its, mine)}"
    return ""


def _short_texts(there: _Loaded, strings: Sequence[str]) -> Iterator[str]:
    """Fixed texts, texts of the tokenizers, tokens one by one and in a row, and pieces in a row."""
    yield from _TEXTS
    for text in strings:
        yield from (f"a{text}b {text} c", text, f"{text}A")
    step = max(1, len(there.vocabulary) // _TOKENS)
    by_id = sorted(there.vocabulary.items(), key=lambda item: item[1])
    tokens = [there.decode([number], False) for _, number in islice(by_id, 0, None, step)]
    rows = [tokens[at : at + 8] for at in range(0, len(tokens), 8)]
    yield from tokens
    yield from (glue.join(row) for row in rows for glue in ("", " "))
    yield from map("".join, product(_PIECES, repeat=3))


def describe_first_difference(here: Any, there: Any, path: str) -> str:
    """Describes the first difference of two JSON values: `pre_tokenizer.type is 'Whitespace' but 'Sequence'`."""
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        pairs = {f"{path}.{key}" if path else key: (here.get(key), there.get(key)) for key in {**here, **there}}
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        pairs = {f"{path}[{at}]": pair for at, pair in enumerate(zip(here, there, strict=True))}
    else:
        if type(here) is type(there) and isinstance(here, str | list):
            start = max(0, first_difference(here, there) - 24)
            here, there = here[start : start + 48], there[start : start + 48]
        mine, its = ("missing" if one is None else shortened(one) for one in (here, there))
        return f"{path} is {mine} but {its}"
    key = next((key for key, pair in pairs.items() if pair[0] != pair[1]), None)
    return describe_first_difference(*pairs[key], key) if key is not None else ""


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The index of the first difference of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


def _listed(ids: Sequence[int], other: Sequence[int]) -> str:
    """The ids of a text; of a long one those around the first difference."""
    start = max(0, first_difference(ids, other) - 2) if len(ids) > _SHOWN else 0
    part = list(ids[start : start + _SHOWN])
    return f"{'[… ' if start else '['}{', '.join(map(str, part))}{' …]' if start + _SHOWN < len(ids) else ']'}"


if __name__ == "__main__":
    run_job(TextJob, run)
