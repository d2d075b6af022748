"""Reads the files next to the weights of an HF directory: config, generation_config, tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from os.path import lexists  # a dangling link is a file that cannot be read
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.json_text import MAX_BYTES
from ckptkit.core.printable import shortened
from ckptkit.formats.detect import ADDITIONAL_TEMPLATES, LOADED, Location, is_loaded
from ckptkit.formats.hf.reader import read_json
from ckptkit.formats.hf.side_files import is_weight
from ckptkit.storage.regular import read_regular
from ckptkit.storage.tree import files_below
from ckptkit.verify.core.report import Severity

TOKENIZER, TOKENIZER_CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
VOCABULARY, MERGES, VOCABULARY_LINES = "vocab.json", "merges.txt", "vocab.txt"
SETTINGS_FILES = (TOKENIZER_CONFIG, SPECIAL_TOKENS)  # of a tokenizer, without a token
_TIKTOKEN, _SENTENCEPIECE = "tiktoken.model", "tokenizer.model"
# Files with a vocabulary. From settings only, transformers makes an empty tokenizer.
_VOCABULARY_FILES = (TOKENIZER, "tokenizer.*", "vocab*", "tekken.json", "*.model", "*.tiktoken", "*.spm")
_TOKENIZER_CODE = "tokenization_*.py"
PROCESSOR_CONFIG = "processor_config.json"
_TEMPLATE, _TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"


@dataclass(frozen=True)
class SideFiles:
    """The files of one HF directory. Absent files are empty. Raises CkptkitError for one that is not a JSON object."""

    root: Path
    within: Path | None = None  # the checkpoint that contains the directory

    @classmethod
    def of(cls, place: Location) -> SideFiles:
        """The files of an HF directory, or of the one next to a Megatron iteration."""
        return cls(place.path) if place.kind == "hf" else cls(place.root / "hf", place.root)

    @cached_property
    def loaded(self) -> Set[str]:
        """The files that loaders read besides weights and index, at any depth. Raises CkptkitError as `files_below`."""
        names = files_below(self.root, self.within)
        return {str(name) for name in names if is_loaded(name) and not is_weight(name.name)}

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json."""
        return self.json("config.json")

    @cached_property
    def generation(self) -> Mapping[str, Any]:
        """generation_config.json."""
        return self.json(GENERATION)

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        """tokenizer_config.json."""
        return self.json(TOKENIZER_CONFIG)

    @cached_property
    def tokenizer(self) -> Mapping[str, Any]:
        """tokenizer.json."""
        return self.json(TOKENIZER)

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer of any kind; settings (tokenizer_config.json) are not enough."""
        return any(next(self.root.glob(pattern), None) for pattern in (*_VOCABULARY_FILES, _TOKENIZER_CODE))

    @cached_property
    def tokenizer_files(self) -> Sequence[str]:
        """Names of the tokenizer's files except code, those with a vocabulary first."""
        patterns = (*_VOCABULARY_FILES, MERGES, ADDED_TOKENS, *SETTINGS_FILES)
        paths = [path for pattern in patterns for path in sorted(self.root.glob(pattern))]
        return list(dict.fromkeys(path.name for path in paths if not path.is_dir() or path.name in LOADED))

    @cached_property
    def merges(self) -> Sequence[tuple[str, ...]]:
        """The merges of a BPE tokenizer in order; may be empty."""
        model = self.tokenizer.get("model")
        merges = model.get("merges") if isinstance(model, Mapping) else None
        if isinstance(merges, list):
            return [tuple(map(str, one)) if isinstance(one, list) else tuple(str(one).split(" ")) for one in merges]
        return self.merges_in(MERGES)

    def merges_in(self, file: str) -> Sequence[tuple[str, ...]]:
        """The merges of a file with one a line."""
        return [tuple(line.split(" ")) for line in self.lines(file) if line and not line.startswith("#version")]

    @property
    def sentencepiece(self) -> bool:
        """Whether there is a tokenizer.model, which only its own library can read."""
        return lexists(self.root / _SENTENCEPIECE)

    @property
    def reads_vocabulary(self) -> bool:
        """Whether ckptkit can read a file with every token."""
        return any(file in self.vocabularies for file in (TOKENIZER, VOCABULARY, _TIKTOKEN))

    @cached_property
    def added_tokens(self) -> Sequence[str]:
        """The tokens that tokenizer.json and tokenizer_config.json add to the vocabulary."""
        both = [*_objects(self.tokenizer.get("added_tokens")), *self._added_by_config.values()]
        return list(dict.fromkeys(str(one["content"]) for one in both if "content" in one))

    @property
    def _added_by_config(self) -> Mapping[str, Mapping[str, Any]]:
        """The tokens that tokenizer_config.json adds, by id."""
        decoder = self.tokenizer_config.get("added_tokens_decoder")
        pairs = decoder.items() if isinstance(decoder, Mapping) else ()
        return {number: one for number, one in pairs if isinstance(one, Mapping) and "content" in one}

    @property
    def has_vocabulary(self) -> bool:
        """Whether there is a file with token ids."""
        return any(lexists(self.root / file) for file in (TOKENIZER, VOCABULARY, _TIKTOKEN)) or bool(self.vocabularies)

    @cached_property
    def vocabularies(self) -> Mapping[str, Mapping[str, int]]:
        """Token -> id, by file. Raises CkptkitError for a file in another format."""
        vocabularies = {file: ids for file, ids in self._vocabularies() if ids}
        for file, ids in vocabularies.items():
            if odd := next((token for token, number in ids.items() if type(number) is not int), None):
                message = f"{self.root / file}: the id of {odd!r} is {ids[odd]!r}, not a whole number"
                raise CkptkitError(message, "copy the tokenizer from the release")
        return vocabularies

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Token -> id over all files; the first file with a token counts."""
        return {token: number for ids in reversed(list(self.vocabularies.values())) for token, number in ids.items()}

    def _vocabularies(self) -> Iterator[tuple[str, Mapping[str, int]]]:
        tokenizer = self.tokenizer
        model = tokenizer.get("model")
        vocab = model.get("vocab") if isinstance(model, Mapping) else None
        if isinstance(vocab, list):  # Unigram: pairs in the order of ids
            vocab = {json.dumps(pair[0]): at for at, pair in enumerate(vocab) if isinstance(pair, list) and pair}
        added = [one for one in _objects(tokenizer.get("added_tokens")) if {"content", "id"} <= one.keys()]
        words = dict(vocab) if isinstance(vocab, Mapping) else {}
        yield TOKENIZER, words | {str(one["content"]): one["id"] for one in added}
        numbered = {number: one for number, one in self._added_by_config.items() if number.isdecimal()}
        yield TOKENIZER_CONFIG, {str(one["content"]): int(number) for number, one in numbered.items()}
        for file in (VOCABULARY, ADDED_TOKENS):
            yield file, self.json(file)
        yield _TIKTOKEN, self._tiktoken()

    def _tiktoken(self) -> Mapping[str, int]:
        """Ranks of a tiktoken file by token in base64; a line has both."""
        path = self.root / _TIKTOKEN
        if not lexists(path):
            return {}
        parts = [line.split() for line in _text(path).splitlines() if line]
        if any(len(part) != 2 or not part[1].isdecimal() for part in parts):
            raise CkptkitError(f"{path} is not a tiktoken file", "copy the tokenizer from the release")
        return {f"{_TIKTOKEN}:{token}": int(rank) for token, rank in parts}

    @cached_property
    def templates(self) -> Mapping[str, str]:
        """Chat templates by name, from the file that transformers prefers; an unnamed one is `default`."""
        first = next((file for file, name, _ in self.template_places if name == "default"), None)
        return {
            name: text
            for file, name, text in reversed(self.template_places)
            if first in (None, file) or file.startswith(ADDITIONAL_TEMPLATES)
        }

    @cached_property
    def template_places(self) -> Sequence[tuple[str, str, str]]:
        """File, name and text of each chat template, in the order in which transformers prefers the files."""
        files = sorted((self.root / ADDITIONAL_TEMPLATES).glob("*.jinja"))
        named = [(f"{ADDITIONAL_TEMPLATES}/{path.name}", path.stem, _text(path)) for path in files]
        default = [(_TEMPLATE, "default", _text(self.root / _TEMPLATE))] if lexists(self.root / _TEMPLATE) else []
        json_files = (_TEMPLATE_JSON, TOKENIZER_CONFIG, PROCESSOR_CONFIG)
        inline = (_inline(file, self.json(file).get("chat_template")) for file in json_files)
        return [*default, *named, *chain.from_iterable(inline)]

    def file_of_token(self, token: str) -> str:
        """The file that gives a token its id."""
        return next(file for file, ids in self.vocabularies.items() if token in ids)

    def special(self, kind: str) -> str | None:
        """The text of the tokenizer's `eos`, `pad`, `bos` or `unk` token, or None."""
        return next(filter(None, (self.special_in(file, kind) for file in SETTINGS_FILES)), None)

    def special_in(self, file: str, kind: str) -> str | None:
        """The text of a special token by one of the files with settings, or None."""
        token = self.json(file).get(f"{kind}_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        return text if isinstance(text, str) else None

    def json(self, file: str) -> Mapping[str, Any]:
        """The JSON object in a file; empty if it is absent."""
        return read_json(self.root / file) if lexists(self.root / file) else {}

    def lines(self, file: str) -> Sequence[str]:
        """The lines of a file; empty if it is absent."""
        text = _text(self.root / file) if lexists(self.root / file) else ""
        return text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []

    def content(self, file: str) -> bytes | None:
        """The bytes of a file, or None if it is absent."""
        return _content(self.root / file) if lexists(self.root / file) else None


def _text(path: Path) -> str:
    return _content(path).decode(errors="replace")


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_BYTES)
    except OSError as error:
        raise CkptkitError(f"{path}: {error.strerror}", "make this file of the tokenizer readable") from error


def _objects(content: Any) -> list[Mapping[str, Any]]:
    return [one for one in content if isinstance(one, Mapping)] if isinstance(content, list) else []


def _inline(file: str, content: Any) -> list[tuple[str, str, str]]:
    """File, name and text of each template of a JSON file: one text, or several by name."""
    if isinstance(content, Mapping):
        return [(file, str(name), str(text)) for name, text in content.items()]
    if isinstance(content, list):
        return [(file, str(one.get("name")), str(one.get("template"))) for one in _objects(content)]
    return [(file, "default", content)] if isinstance(content, str) else []


@dataclass(frozen=True)
class SideDifference:
    """A difference between a checkpoint and the one that it is compared with."""

    file: str  # of the checkpoint, relative to its directory, with the difference
    what: str  # expected, by the other checkpoint: "pre_tokenizer"
    words: str  # "pre_tokenizer is Whitespace but Split in the source; 'a b' is [1, 2] but [3]"
    severity: Severity = "error"
    count: int = 1
    source: str | None = None  # the file of the other checkpoint, if it has another name
    is_presentation: bool = False  # whether every text keeps its token ids


def show(value: Any) -> str:
    """A JSON value for a message."""
    return "missing" if value is None else shortened(value)


def setting_differences(
    file: str, pairs: Mapping[str, tuple[Any, Any]], place: str, severity: Severity, before: str = ""
) -> Iterator[SideDifference]:
    """Yields one difference for settings, given with both values, if there are any; `before` begins its text."""
    if pairs:
        first = list(pairs)[:5]
        listed = [f"{key} is {show(pairs[key][0])} but {show(pairs[key][1])} {place}" for key in first]
        more = f" and {len(pairs) - 5} more" if len(pairs) > 5 else ""
        yield SideDifference(file, ", ".join(first), before + "; ".join(listed) + more, severity, count=len(pairs))
