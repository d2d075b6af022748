"""The parts of a tokenizer.json in one spelling, so that equal ones compare equal however they were saved.

Source: the serialization of `tokenizers` 0.22, in `tokenizers/src/` of each kind of part.
transformers 4 and 5 save the same tokenizer with other defaults written out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.printable import shortened

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_CHILDREN = ("normalizers", "pretokenizers", "processors", "decoders")
_VOCABULARY = ("type", "vocab", "merges")  # fields of a model that are compared by themselves, or have a default
_DEFAULTS = {"dropout": 0, "max_input_chars_per_word": 100}
_IDS = "ids around a text"  # what every kind of post-processor becomes
_CONTEXT = 24  # characters of two long strings in front of their first difference


@dataclass(frozen=True)
class Leaf:
    """The first place where two values differ."""

    path: str
    here: Any
    there: Any


def parts_of(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """What maps text to ids and back, besides vocabulary, merges and added tokens; only what has an effect."""
    model = _mapping(tokenizer.get("model"))
    parts = {part: _plain(tokenizer.get(part), part) for part in PARTS}
    stated = {key: value for key, value in model.items() if key not in _VOCABULARY and value != _DEFAULTS.get(key)}
    settings = {f"model.{key}": value for key, value in {"type": _type_of(model), **stated}.items()}
    # An absent field of a model means the same as a false or empty one; an id may be 0.
    return {name: value for name, value in {**parts, **settings}.items() if value or type(value) is int}


def _type_of(model: Mapping[str, Any]) -> Any:
    """The type of a model, which old files do not have."""
    if isinstance(model.get("vocab"), list):
        return model.get("type", "Unigram")
    guess = "BPE" if "merges" in model else "WordPiece" if "max_input_chars_per_word" in model else "WordLevel"
    return model.get("type", guess) if model else None


def scores_of(tokenizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The score of each token of a Unigram model; empty for other models."""
    vocab = _mapping(tokenizer.get("model")).get("vocab")
    pairs = [pair for pair in vocab if isinstance(pair, list) and len(pair) == 2] if isinstance(vocab, list) else []
    return {str(token): score for token, score in pairs}


def _plain(part: Any, kind: str) -> Any:
    """A part without what changes offsets only, sequences of one written as the one, absent defaults as None."""
    if not isinstance(part, Mapping):
        return part
    children = next((part[key] for key in _CHILDREN if isinstance(part.get(key), list)), None)
    if part.get("type") == "Sequence" and children is not None:
        return _sequence([_plain(child, kind) for child in children])
    match part.get("type"), kind:
        case "ByteLevel", "post_processor":
            return None
        case "ByteLevel", "decoder":
            return {"type": "ByteLevel"}
        case "ByteLevel", _:
            return {"add_prefix_space": True, "use_regex": True, **_without(part, "trim_offsets")}
        case "Metaspace", _:
            prefix = "always" if part.get("add_prefix_space", True) else "never"
            rest = _without(part, "add_prefix_space", "str_rep")
            return {"prepend_scheme": prefix, "split": True, **rest}
        case (("BertProcessing" | "RobertaProcessing" | "TemplateProcessing"), _):
            return _template(part)
        case _:
            return _without(part, "trim_offsets")


def _sequence(parts: Sequence[Any]) -> Any:
    flat: list[Any] = []
    for part in parts:
        nested = isinstance(part, Mapping) and part.get("type") == "Sequence"
        flat += part["parts"] if nested else [part] if part is not None else []
    return {"type": "Sequence", "parts": flat} if len(flat) > 1 else next(iter(flat), None)


def _template(part: Mapping[str, Any]) -> Any:
    """The ids around one text (A) and two (A, B); None where there are none."""
    if part["type"] == "TemplateProcessing":
        known = _mapping(part.get("special_tokens"))
        single, pair = (list(_pieces(part.get(key), known)) for key in ("single", "pair"))
    else:
        first, last = ((_second(part.get(key))) for key in ("cls", "sep"))
        single = [first, "A", last]
        pair = [*single, *([last] if part["type"] == "RobertaProcessing" else []), "B", last]
    return None if (single, pair) == (["A"], ["A", "B"]) else {"type": _IDS, "one": single, "two": pair}


def _pieces(content: Any, known: Mapping[str, Any]) -> Iterator[Any]:
    for piece in content if isinstance(content, list) else []:
        for kind, one in _mapping(piece).items():
            name = _mapping(one).get("id")
            ids = _mapping(known.get(str(name))).get("ids")
            yield from [name] if kind == "Sequence" or not isinstance(ids, list) else ids


def first_difference(here: Any, there: Any, path: str) -> Leaf:
    """Where two different values first differ: a part by its type, another one by the field."""
    if isinstance(here, Mapping) and isinstance(there, Mapping) and here.get("type") == there.get("type") != _IDS:
        key = next(key for key in {**here, **there} if here.get(key) != there.get(key))
        return first_difference(here.get(key), there.get(key), path if key == "parts" else f"{path}.{key}")
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        at = next(at for at, (one, other) in enumerate(zip(here, there, strict=True)) if one != other)
        return first_difference(here[at], there[at], f"{path}[{at}]")
    return Leaf(path, here, there)


def describe_leaf(leaf: Leaf) -> tuple[str, str]:
    """Both values of a difference in words; of two long strings what is around their first difference."""
    if isinstance(leaf.here, str) and isinstance(leaf.there, str):
        pairs = enumerate(zip(leaf.here, leaf.there, strict=False))
        at = next((at for at, (one, other) in pairs if one != other), min(len(leaf.here), len(leaf.there)))
        start = max(0, at - _CONTEXT)
        texts = [f"{'…' if start else ''}{one[start : start + 2 * _CONTEXT]}" for one in (leaf.here, leaf.there)]
        return shortened(texts[0]), shortened(texts[1])
    return describe(leaf.here), describe(leaf.there)


def describe(value: Any) -> str:
    """A part by its type, a sequence by the types in it, another value as it is."""
    if isinstance(value, Mapping) and isinstance(parts := value.get("parts"), list):
        return f"[{', '.join(map(describe, parts))}]"
    if isinstance(value, Mapping) and value.get("type") == _IDS:
        return f"{_IDS} {shortened(value['one'])}"
    if isinstance(value, Mapping) and isinstance(value.get("type"), str):
        fields = _without(value, "type")
        return str(value["type"]) + (f" {shortened(next(iter(fields.values())))}" if len(fields) == 1 else "")
    if isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        return f"[{', '.join(map(describe, value))}]"
    return "missing" if value is None else shortened(value)


def strings_in(value: Any) -> Iterator[str]:
    """Every text in a part but its type: what a Replace replaces, a Strip strips."""
    if isinstance(value, str):
        yield value
    fields = _without(value, "type").values() if isinstance(value, Mapping) else ()
    inner = value if isinstance(value, list) else fields
    for one in inner:
        yield from strings_in(one)


def _second(value: Any) -> Any:
    return value[1] if isinstance(value, list) and len(value) == 2 else value


def _without(part: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in keys and value is not None}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
