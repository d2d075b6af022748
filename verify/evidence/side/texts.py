"""What the installed `tokenizers` and transformers make of texts with two tokenizers.

As a program, `python -m verify.evidence.side.texts JOB.json`, it loads both. No code of a checkpoint is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from ckptkit.core.printable import shortened
from verify.evidence.side_files import TOKENIZER
from verify.witnesses.process.exit_report import Phase, PhaseLog, run_job
from verify.witnesses.process.run import ask

_LIBRARIES = ("tokenizers", "transformers")
_LOADING_HERE = "loading the tokenizer"
_LIMIT_S = 180
_TOKENS = 400  # of the vocabulary that are tried
_STRINGS = 64  # of the parts that differ
_SHOWN = 12  # ids of a text that are printed
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


@dataclass(frozen=True)
class TextJob:
    """Two directories with a tokenizer, the library to ask, and strings that the parts of the tokenizers name."""

    library: str
    here: str
    there: str
    strings: Sequence[str]
    report: str = ""


@dataclass(frozen=True)
class Answer:
    """What a library makes of both tokenizers; each difference in words, empty where there is none."""

    library: str
    texts: int = 0
    ids: str = ""  # of a text
    text: str = ""  # of ids
    shown: str = ""  # of ids, with special tokens left out
    special: str = ""  # the id of an `eos_token` or the like
    refused: str = ""  # why it loads only the tokenizer that should be equalled


def ask_libraries(here: Path, there: Path, strings: Sequence[str]) -> tuple[Sequence[Answer], str]:
    """What tokenizers and transformers make of the tokenizers of two directories, up to the first other id or text.

    Without an answer, why there is none.
    """
    answers: list[Answer] = []
    reason = "the library tokenizers is not installed"
    for library in _LIBRARIES:
        alone = library == "tokenizers" and not all((root / TOKENIZER).exists() for root in (here, there))
        if find_spec(library) is None or alone:
            continue
        job = TextJob(library, str(here), str(there), list(dict.fromkeys(strings))[:_STRINGS])
        answer, failed = ask(job, __name__, Answer, _LIMIT_S)
        if failed.startswith(f"while {_LOADING_HERE}: ") and "install" not in failed:
            answer = Answer(library, refused=failed.partition(": ")[2].partition(" (at ")[0])
        if answer is None:
            reason = f"{library} did not answer {failed}"
            continue
        answers.append(answer)
        if answer.ids or answer.text or answer.refused:
            break
    return answers, "" if answers else reason


class _Loaded:
    """A tokenizer of either library: ids of a text, the text of ids, and ids of special tokens."""

    def __init__(self, root: Path, library: str) -> None:
        self.special: Mapping[str, Any] = {}
        self.split: Callable[[str], list[str]] = lambda text: []
        if library == "tokenizers":
            from tokenizers import Tokenizer

            own = Tokenizer.from_file(str(root / TOKENIZER))
            own.no_truncation()  # transformers sets both anew for every call
            own.no_padding()
            self.encode: Callable[[str], list[int]] = lambda text: list(own.encode(text).ids)
            self.decode: Callable[[list[int], bool], str] = own.decode
            self.vocabulary: Mapping[str, int] = own.get_vocab()
            self.split = lambda text: _pieces(own, text)
            return
        from transformers import AutoTokenizer

        made = AutoTokenizer.from_pretrained(root, trust_remote_code=False, local_files_only=True)
        self.encode = lambda text: list(made(text)["input_ids"])
        self.decode = lambda ids, skip: str(made.decode(ids, skip_special_tokens=skip))
        self.vocabulary = made.get_vocab()
        self.special = {kind: getattr(made, f"{kind}_token_id", None) for kind in ("eos", "bos", "pad", "unk")}
        self.special["all"] = sorted(made.all_special_ids)


def _pieces(tokenizer: Any, text: str) -> list[str]:
    """What normalizer and pre-tokenizer make of a text, before the model looks up tokens."""
    normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(normal) if tokenizer.pre_tokenizer else [(normal, None)]
    return [piece for piece, _ in pieces]


def run(job: TextJob, phases: PhaseLog) -> Answer:
    """Loads both tokenizers and compares them."""
    phases.enter(Phase(f"loading {job.there}"))
    there = _Loaded(Path(job.there), job.library)
    phases.enter(Phase(_LOADING_HERE))
    here = _Loaded(Path(job.here), job.library)
    phases.enter(Phase("encoding texts"))
    return _compare(job.library, here, there, job.strings)


def _compare(library: str, here: _Loaded, there: _Loaded, strings: Sequence[str]) -> Answer:
    texts = list(dict.fromkeys(_texts(there, strings)))
    ids, text, shown = "", "", ""
    for one in texts:
        ids_here, ids_there = here.encode(one), there.encode(one)
        if not ids and ids_here != ids_there:
            ids = f"{shortened(one)} is {_listed(ids_here, ids_there)} but {_listed(ids_there, ids_here)}"
        elif not ids and here.split(one) != there.split(one):  # which ids another vocabulary shows
            ids = f"{shortened(one)} is split into {shortened(here.split(one))} but {shortened(there.split(one))}"
        for skip in (False, True):
            decoded = here.decode(ids_there, skip), there.decode(ids_there, skip)
            if decoded[0] != decoded[1]:
                words = f"{_listed(ids_there, ids_there)} is {shortened(decoded[0])} but {shortened(decoded[1])}"
                text, shown = (text, shown or words) if skip else (text or words, shown)
    moved = [kind for kind, number in there.special.items() if here.special[kind] != number]
    special = "".join(
        f"{kind}_token_id is {here.special[kind]} but {there.special[kind]}" for kind in moved[:1] if kind != "all"
    )
    if moved == ["all"]:
        odd = sorted({*here.special["all"]} ^ {*there.special["all"]})
        mine, its = ("special" if odd[0] in side.special["all"] else "not special" for side in (here, there))
        special = f"{shortened(there.decode(odd[:1], False))} is {mine} but {its}"
    if not ids and here.vocabulary != there.vocabulary:
        both = here.vocabulary, there.vocabulary
        token = next(one for one in {**both[1], **both[0]} if both[0].get(one) != both[1].get(one))
        ids = f"{token!r} is {here.vocabulary.get(token, 'missing')} but {there.vocabulary.get(token, 'missing')}"
    return Answer(library, len(texts), ids, text, shown, special)


def _texts(there: _Loaded, strings: Sequence[str]) -> Iterator[str]:
    """Fixed texts, tokens of the vocabulary alone and in a row, and the strings of the parts that differ."""
    yield from _TEXTS
    for text in strings:
        yield from (f"a{text}b {text} c", text, f"{text}A")
    step = max(1, len(there.vocabulary) // _TOKENS)
    by_id = sorted(there.vocabulary.items(), key=lambda item: item[1])
    tokens = [there.decode([number], False) for _, number in islice(by_id, 0, None, step)]
    rows = [tokens[at : at + 8] for at in range(0, len(tokens), 8)]
    yield from tokens
    yield from (glue.join(row) for row in rows for glue in ("", " "))


def _listed(ids: Sequence[int], other: Sequence[int]) -> str:
    """The ids of a text, of a long one those up to the first that differs."""
    at = next((at for at, pair in enumerate(zip(ids, other, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, at - 2) if len(ids) > _SHOWN else 0
    part = list(ids[start : start + _SHOWN])
    return f"{'[… ' if start else '['}{', '.join(map(str, part))}{' …]' if start + _SHOWN < len(ids) else ']'}"


if __name__ == "__main__":
    run_job(TextJob, run)
