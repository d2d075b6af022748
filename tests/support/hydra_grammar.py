"""Overrides made by `hydra_grammar.txt`, and how the settings that we read compare with those that Hydra composes."""

from pathlib import Path

from ckptkit.verify.launch.settings.config import Config, UnresolvedError
from ckptkit.verify.launch.settings.overrides import apply_overrides, hydra_value
from ckptkit.verify.launch.settings.tree import parse_yaml
from ckptkit.verify.launch.words import UnresolvedWord, Word
from support.grammar import text_of

FILE = """a: {x: 1, l: [1, 2], n: {p: q, r: 0.5}, rel: "${.x}"}
b: hi
c: ${a.x}
d: {from: "${a.n.p}"}
e: ${b}/${a.n.p}
m: {k: {z: 1}, s: null}
deep: {a: 1, b: {c: 2}, l: [x, {y: 1}]}
t: true
"""
ENVIRONMENT = {"HOME": "/home/me"}


def overrides(number):
    return text_of(Path(__file__).with_suffix(".txt"), number, {"value": "x"}).split(" ;; ")


def compared(words, composed):
    """`equal`, `unresolved`, `refused` or `differ: ...`; `composed` is what Hydra has by dotted key, or its error."""
    tree = parse_yaml(FILE)
    assert isinstance(tree, dict)
    found, groups = apply_overrides(tree, [Word(word) for word in words])
    if groups:
        return "unresolved"
    config = Config(found, ENVIRONMENT)
    ours = {}
    try:
        for key in config.names():
            value = config.find(key)
            ours |= {key: value} if value is None else _flat(value, key)
    except UnresolvedError:
        return "unresolved"
    values = [hydra_value(word.partition("=")[2], Word(word)) for word in words if "=" in word]
    if str(composed).startswith("OverrideParseException") and any(isinstance(one, UnresolvedWord) for one in values):
        return "unresolved"  # of a key that a later override replaces
    if isinstance(composed, str):
        return "refused" if composed.startswith("ConfigCompositionException") else f"differ: {composed}, not {ours}"
    if (mine := {key: _plain(value) for key, value in ours.items()}) == (
        theirs := {key: _plain(value) for key, value in composed.items()}
    ):
        return "equal"
    more = {key: (theirs.get(key, "absent"), mine.get(key, "absent")) for key in mine.keys() | theirs.keys()}
    return f"differ: Hydra, ours: { {key: both for key, both in more.items() if both[0] != both[1]} }"


def _flat(value, key):
    if isinstance(value, Word):
        if "${" in value.text:
            raise UnresolvedError("an interpolation that is found by another one, which its own key resolves")
        return {key: value.text}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {name: one for inner, below in pairs for name, one in _flat(below, f"{key}.{inner}").items()}


def _plain(value):
    text = "null" if value is None else str(value)
    if text.lower() in ("true", "false", "null"):
        return text.lower()
    try:
        return str(float(text))
    except ValueError:
        return text
