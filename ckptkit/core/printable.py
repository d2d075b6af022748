"""Names from checkpoints made printable: what a file says never moves a cursor, turns text round or starts a line."""

from __future__ import annotations

import json
import reprlib
import unicodedata
from typing import Any

# Control characters, format characters (some reverse the direction of text), surrogates, and line separators.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str) -> str:
    """The text on one line: characters that cannot be seen, line breaks too, become escapes (`\\x1b`)."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if unicodedata.category(char) not in _HIDDEN else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 12
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlong = 60


def shortened(value: Any) -> str:
    """A value of a file as Python writes it, without what is deep or long in it."""
    return _SHORT.repr(value)


def json_text(content: Any) -> str:
    """Indented JSON of characters that a terminal shows as they are. Python's leaves DEL alone."""
    return json.dumps(content, indent=2).replace("\x7f", "\\u007f")
