"""Makes untrusted text printable: no text from a file can move a cursor, reverse text or start a line."""

from __future__ import annotations

import json
import re
import reprlib
import unicodedata
from collections.abc import Iterator
from typing import Any

# Control characters, format characters (some reverse the direction of text), surrogates, and line separators.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Commands of CI systems in a log: `::error::` at the start of a line, which wrapping can move to any word; `##[error]`
# and `##vso[...]` anywhere (GitHub Actions, Azure Pipelines, TeamCity).
_COMMAND = re.compile(r"(?<!\S)::|##(?=\w*\[)")
# A Path merges the two slashes. Bounded, so that a long word takes linear time.
_SCHEME = r"([a-z][a-z0-9+.-]{0,31}://|(?<![a-z0-9+.-])(?:s3[an]?|gs|gcs|hf|az|abfss?|wasbs?|adl|https?|ftp|file):/)"
# In a text a quote ends a URL, unless an @ follows: a password may contain one.
_URL = re.compile(_SCHEME + r"""((?:\S{1,256}@)?[^\s"'<>]*)""", re.IGNORECASE)
_ONLY_URL = re.compile(_SCHEME + "(.*)", re.IGNORECASE | re.DOTALL)
# `user:password@`, with a password that may contain unquoted slashes; not a port (http://host:80/a@b) or Amazon's
# resource name (s3://arn:aws:s3:...).
_PASSWORD = re.compile(r"(?!arn:aws[a-z-]*:s3)[^/?#@:]*?(?::|%3A)(?!\d*(?:[/?#]|$)).*@", re.IGNORECASE | re.DOTALL)
_USER = re.compile(r"[^/?#]*@")
_TOKEN = re.compile(r"hf_\w{16,}@")
# In URLs of these stores, a name precedes the @: hf://gpt2@main, abfs://container@account.
_NAME_BEFORE_AT = frozenset({"hf", "az", "abfs", "abfss", "wasb", "wasbs"})
_SECRET = re.compile(r"sig|token|key|secret|pass|pwd|credential|auth", re.IGNORECASE)
_KEY = re.compile(r"[\w.-]+")
_QUERY = re.compile(r"[?#]([^?#]*)")


def without_credentials(text: str) -> str:
    """Replaces user and password of each URL in a text, and a query with a signature, key or token, by `***`."""
    return _URL.sub(_public_url, text) if ":/" in text else text


def public_url(url: str) -> str:
    """Like `without_credentials`, for a text that ends with a URL, which may contain blanks and quotes."""
    return _ONLY_URL.sub(_public_url, url)


def _public_url(found: re.Match[str]) -> str:
    scheme, rest = found[1], found[2]
    may_be_name = scheme.partition(":")[0].lower() in _NAME_BEFORE_AT
    user = (_PASSWORD.match(rest) or (_TOKEN if may_be_name else _USER).match(rest)) if "@" in rest else None
    public = f"***@{rest[user.end() :]}" if user else rest
    for query in _QUERY.finditer(public):
        keys = (key for key, equals, _ in (part.partition("=") for part in query[1].split("&")) if equals)
        if any(_SECRET.search(key) and _KEY.fullmatch(key) for key in keys):
            return f"{scheme}{public[: query.start() + 1]}***"
    return scheme + public


def printable(text: str) -> str:
    """One line without credentials in URLs, with escapes (`\\x1b`) for invisible characters and CI commands."""
    text = without_credentials(text)
    if not text.isascii() or not text.isprintable():
        text = "".join(char if unicodedata.category(char) not in _HIDDEN else _escape(char) for char in text)
    return _COMMAND.sub(lambda found: _escape(found[0][0]) + found[0][1:], text)


# The folder of Python's libraries, up to the name of the library, after a quote, bracket or blank.
_INSTALLED = re.compile(r"""(?<![^\s"'(=,:])[^\s"'(=,:]*/(?:(?:site|dist)-packages|lib(?:64)?/python3\.\d+)/""")
# pydantic: a location in its schema, the link to its site, and the value after a message.
_OF_SCHEMA = re.compile(r"\.?`?function-\w+\[(?:[^\[\]]|\[[^\[\]]*\])*\]`?")
_VISIT = re.compile(r"For further information visit \S+")
_INPUT = re.compile(r" \[type=\w+, input_value=(.*), input_type=\w+\]$")
_HEADING = re.compile(r"\d+ validation errors? for \S+")
_MAX_CHARACTERS = 20_000  # characters of a text
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_TRACEBACK = "Traceback (most recent call last)"


def one_line(text: str) -> str:
    """The text of another library's exception or log on one line, without stacks and folders of libraries."""
    joined, above = "", ""
    for line in filter(str.strip, _without_stacks(_INSTALLED.sub("", _COLOR.sub("", text[:_MAX_CHARACTERS])))):
        words = _INPUT.sub(r" (it is \1)", _OF_SCHEMA.sub("", line.strip()))
        if _VISIT.fullmatch(words):
            continue
        joined = f"{joined}{_between(joined, above, line)} {words}" if joined else words
        above = line
    return joined


def _between(joined: str, above: str, line: str) -> str:
    """The separator between a line and the one above it, which ends in a blank if its sentence continues."""
    if joined[-1] in ".,;:!?" or above[-1] == " ":
        return ""
    return ":" if _HEADING.fullmatch(joined) or _indent(line) > _indent(above) else ";"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _without_stacks(text: str) -> Iterator[str]:
    """The lines without the frames of tracebacks, which are indented."""
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith(_TRACEBACK):
            inside = True
        elif not inside or not line.startswith((" ", "\t")):
            inside = False
            yield line


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 12
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlong = 60


def shortened(value: Any) -> str:
    """Python's representation of an untrusted value, with nested and long parts shortened."""
    return _SHORT.repr(value)


# Output of `json.dumps` that a terminal or a CI system interprets, or that is invalid in JSON text.
_RAW = re.compile(r"[^\n -~]|##(?=\w*\[)")


def json_text(content: Any) -> str:
    """Indented ASCII JSON without credentials in URLs and without commands for terminals or CI systems."""
    return _RAW.sub(_json_escape, without_credentials(json.dumps(content, indent=2, ensure_ascii=False)))


def _json_escape(found: re.Match[str]) -> str:
    first, rest = found[0][0], found[0][1:]
    if unicodedata.category(first) == "Cs":  # other parsers reject half of a surrogate pair
        return f"\\\\u{ord(first):04x}"
    units = first.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)) + rest
