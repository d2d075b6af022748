"""Reads the files beside the weights of an HF directory: config, generation_config, tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import lexists  # a link to nothing is a file that cannot be read
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.json_text import MAX_BYTES
from ckptkit.formats.hf.reader import read_json
from ckptkit.storage.regular import read_regular

TOKENIZER, TOKENIZER_CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
_TIKTOKEN, _SENTENCEPIECE = "tiktoken.model", "tokenizer.model"
# What holds a vocabulary, or is code that does. transformers makes a tokenizer of no words of the settings alone.
_TOKENIZER_FILES = ("tokenizer.*", "vocab*", "tekken.json", "*.model", "*.tiktoken", "*.spm", "tokenization_*.py")
_TEMPLATE, _TEMPLATE_JSON, _MORE_TEMPLATES = "chat_template.jinja", "chat_template.json", "additional_chat_templates"


@dataclass(frozen=True)
class SideFiles:
    """The files of one HF directory. Absent ones are empty; one that is not a JSON object raises CkptkitError."""

    root: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json."""
        return self._json("config.json")

    @cached_property
    def generation(self) -> Mapping[str, Any]:
        """generation_config.json."""
        return self._json(GENERATION)

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        """tokenizer_config.json."""
        return self._json(TOKENIZER_CONFIG)

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer is there, of whatever kind; its settings (tokenizer_config.json) alone are none."""
        return any(next(self.root.glob(pattern), None) for pattern in _TOKENIZER_FILES)

    @cached_property
    def merges(self) -> Sequence[str]:
        """The merges of a BPE tokenizer in order, `a b` each; empty where no file states them."""
        model = self._json(TOKENIZER).get("model")
        stated = model.get("merges") if isinstance(model, Mapping) else None
        if isinstance(stated, list):
            return [" ".join(map(str, one)) if isinstance(one, list) else str(one) for one in stated]
        path = self.root / "merges.txt"
        lines = _text(path).splitlines() if lexists(path) else []
        return [line for line in lines if line and not line.startswith("#version")]

    @cached_property
    def sentencepiece(self) -> str | None:
        """The SHA-256 of tokenizer.model, which only its own library can read; None where there is none."""
        path = self.root / _SENTENCEPIECE
        return hashlib.sha256(_content(path)).hexdigest() if lexists(path) else None

    @cached_property
    def special_flags(self) -> Mapping[str, bool]:
        """Whether each added token is special, so that decoding may leave it out."""
        decoder = self.tokenizer_config.get("added_tokens_decoder")
        stated = [
            *(decoder.values() if isinstance(decoder, Mapping) else ()),
            *_objects(self._json(TOKENIZER).get("added_tokens")),
        ]
        return {
            str(one["content"]): bool(one.get("special"))
            for one in stated
            if isinstance(one, Mapping) and "content" in one
        }

    @property
    def has_vocabulary(self) -> bool:
        """Whether a file is there from which token ids can be read."""
        files = (TOKENIZER, "vocab.json", _TIKTOKEN)
        return any(lexists(self.root / file) for file in files) or bool(self.vocabularies)

    @cached_property
    def vocabularies(self) -> Mapping[str, Mapping[str, int]]:
        """Token -> id, by the file that says so. Raises CkptkitError for a file that is not as tokenizers write it."""
        found = {file: ids for file, ids in self._vocabularies() if ids}
        for file, ids in found.items():
            if odd := next((token for token, number in ids.items() if type(number) is not int), None):
                raise CkptkitError(
                    f"{self.root / file}: the id of {odd!r} is {ids[odd]!r}, not a whole number",
                    "copy the tokenizer from the release",
                )
        return found

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Token -> id over all files; the first that says it counts."""
        return {token: number for ids in reversed(list(self.vocabularies.values())) for token, number in ids.items()}

    def _vocabularies(self) -> Iterator[tuple[str, Mapping[str, int]]]:
        tokenizer = self._json(TOKENIZER)
        model = tokenizer.get("model")
        vocab = model.get("vocab") if isinstance(model, Mapping) else None
        yield (
            TOKENIZER,
            _model_vocabulary(vocab)
            | {str(one["content"]): one["id"] for one in _objects(tokenizer.get("added_tokens")) if _is_token(one)},
        )
        added = self.tokenizer_config.get("added_tokens_decoder")
        pairs = added.items() if isinstance(added, Mapping) else ()
        yield (
            TOKENIZER_CONFIG,
            {
                str(one["content"]): int(number)
                for number, one in pairs
                if number.isdecimal() and isinstance(one, Mapping) and "content" in one
            },
        )
        for file in ("vocab.json", "added_tokens.json"):
            yield file, self._json(file)
        yield _TIKTOKEN, self._tiktoken()

    def _tiktoken(self) -> Mapping[str, int]:
        """Ranks of a tiktoken file: one line a token, its bytes in base64 and its rank. Tokens stand here in base64."""
        path = self.root / _TIKTOKEN
        if not lexists(path):
            return {}
        parts = [line.split() for line in _text(path).splitlines() if line]
        if any(len(part) != 2 or not part[1].isdecimal() for part in parts):
            raise CkptkitError(f"{path} is not a tiktoken file", "copy the tokenizer from the release")
        return {f"{_TIKTOKEN}:{token}": int(rank) for token, rank in parts}

    @cached_property
    def templates(self) -> Mapping[str, str]:
        """Chat templates by name, `default` for the only one, from whichever file holds them."""
        return {name: text for name, (_, text) in self._templates.items()}

    def file_of_template(self, name: str) -> str:
        """The file that holds the chat template `name`."""
        return self._templates[name][0]

    def file_of_token(self, token: str) -> str:
        """The file that gives a token its id."""
        return next(file for file, ids in self.vocabularies.items() if token in ids)

    @cached_property
    def _templates(self) -> Mapping[str, tuple[str, str]]:
        """File and text of each template."""
        files = sorted((self.root / _MORE_TEMPLATES).glob("*.jinja"))
        named = {path.stem: (f"{_MORE_TEMPLATES}/{path.name}", _text(path)) for path in files}
        if lexists(self.root / _TEMPLATE):
            return {"default": (_TEMPLATE, _text(self.root / _TEMPLATE)), **named}
        own = self._json(_TEMPLATE_JSON).get("chat_template")
        file, content = (_TEMPLATE_JSON, own) if own else (TOKENIZER_CONFIG, self.tokenizer_config.get("chat_template"))
        if isinstance(content, list):
            return {str(one.get("name")): (file, str(one.get("template"))) for one in _objects(content)} | named
        return {"default": (file, content), **named} if isinstance(content, str) else named

    def special(self, kind: str) -> str | None:
        """The text of the tokenizer's `eos`, `pad`, `bos` or `unk` token; None where it says none."""
        for holder in (self.tokenizer_config, self._json("special_tokens_map.json")):
            token = holder.get(f"{kind}_token")
            text = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(text, str):
                return text
        return None

    def _json(self, file: str) -> Mapping[str, Any]:
        return read_json(self.root / file) if lexists(self.root / file) else {}


def _text(path: Path) -> str:
    return _content(path).decode(errors="replace")


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_BYTES)
    except OSError as error:
        raise CkptkitError(f"{path}: {error.strerror}", "it belongs to the tokenizer; make it readable") from error


def _objects(content: Any) -> list[Mapping[str, Any]]:
    return [one for one in content if isinstance(one, Mapping)] if isinstance(content, list) else []


def _is_token(one: Mapping[str, Any]) -> bool:
    return "content" in one and "id" in one


def _model_vocabulary(vocab: Any) -> dict[str, int]:
    """`model.vocab` of tokenizer.json: an object, or (Unigram) a list of pairs in the order of ids."""
    if isinstance(vocab, Mapping):
        return dict(vocab)
    return (
        {json.dumps(pair[0]): number for number, pair in enumerate(vocab) if isinstance(pair, list) and pair}
        if isinstance(vocab, list)
        else {}
    )
