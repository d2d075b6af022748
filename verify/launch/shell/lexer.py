"""Splits the text of a bash script into words: quotes, escapes, comments, expansions, line continuations."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.shell.operators import decode_escapes
from ckptkit.verify.launch.shell.syntax import Arithmetic, Literal, Parameter, Part, ShellWord, Substitution

_BREAKS = frozenset(" \t\n;&|<>()")  # they end an unquoted word
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]")
_LONG_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]+|[@*#?$!-]")
_OPERATOR = re.compile(r":[-=?+]|[-=?+]|##?|%%?|//?|\^\^?|,,?|:|@")
_HEREDOC = re.compile(r"(?<!<)<<(-)?(?!<)[ \t]*([^\s;&|<>()]+)")
_ANSI = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_BACKTICKS = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL)
_SINGLE = re.compile(r"'([^']*)'")
_COMMENT = re.compile("#[^\n]*")
_LINE = re.compile("[^\n]*\n|[^\n]+")
_QUOTES = frozenset("\\'\"$`")
_DEPTH = 100
_CHECK = "check it with `bash -n`; if that accepts it, paste the trainer's command into a new file"


@dataclass
class Lexer:
    """A position in a text, and the number of its line."""

    text: str
    name: str
    position: int = 0
    line: int = 1
    depth: int = 0

    def error(self, message: str, line: int | None = None) -> CkptkitError:
        """An error at a line of the script, by default the current one."""
        return CkptkitError(f"{self.name}:{line or self.line}: {message}", _CHECK)

    @property
    def rest(self) -> bool:
        return self.position < len(self.text)

    def peek(self, count: int = 1) -> str:
        return self.text[self.position : self.position + count]

    def take(self, count: int = 1) -> str:
        taken = self.peek(count)
        self.position += count
        self.line += taken.count("\n")
        return taken

    def take_match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Reads the text that a pattern matches here."""
        match = pattern.match(self.text, self.position)
        self.take(len(match[0]) if match else 0)
        return match

    def skip_blanks(self) -> None:
        """Skips blanks, continued lines, and a comment up to the end of its line."""
        while self.rest:
            if self.peek() in " \t":
                self.take()
            elif self.peek(2) in ("\\\n", "\\"):  # the second one ends the file
                self.take(2)
            elif self.peek() == "#":
                self.take_match(_COMMENT)
            else:
                return

    def next_line(self) -> int:
        """The position after the end of this line."""
        newline = self.text.find("\n", self.position)
        return len(self.text) if newline < 0 else newline + 1

    def at_word(self) -> bool:
        return self.rest and (self.peek() not in _BREAKS or self.peek(2) in ("<(", ">("))

    def word(self, breaks: frozenset[str] = _BREAKS) -> ShellWord:
        line, parts = self.line, list[Part]()
        while self.rest:
            if self.peek(2) in ("<(", ">(") and not parts:
                self.take()
                parts.append(self._command(False, readable=False))
            elif self.peek() in breaks:
                break
            else:
                self._part(parts, breaks)
        return ShellWord(tuple(parts), line)

    def _part(self, parts: list[Part], breaks: frozenset[str]) -> None:
        match self.peek():
            case "\\":
                self.take()
                escaped = self.take() or "\\"
                parts += [] if escaped == "\n" else [Literal(escaped, quoted=True)]
            case "'":
                if not (found := self.take_match(_SINGLE)):
                    raise self.error("' is never closed")
                parts.append(Literal(found[1], quoted=True))
            case '"':
                self._double(parts)
            case "$" if self.peek(2) == "$'":
                if not (found := self.take_match(_ANSI)):
                    raise self.error("$' is never closed")
                parts.append(Literal(decode_escapes(found[1]), quoted=True))
            case "$" if self.peek(2) == '$"':
                self.take()
                self._double(parts)
            case "$" | "`":
                parts.append(self._dollar(quoted=False))
            case _:
                parts.append(Literal(self._until(breaks | _QUOTES)))

    def _until(self, ends: frozenset[str]) -> str:
        start = self.position
        while self.rest and self.peek() not in ends:
            self.take()
        return self.text[start : self.position]

    def _double(self, parts: list[Part]) -> None:
        """A string in double quotes, in which `$`, backticks and some escapes are special."""
        line = self.line
        self.take()
        parts.append(Literal("", quoted=True))
        self._expanded(parts, '"')
        if not self.rest:
            raise self.error('" is never closed', line)
        self.take()

    def _expanded(self, parts: list[Part], end: str) -> None:
        """Text in which only expansions and their escapes are special, up to the quote `end` or the last character."""
        special = frozenset(f"$`\\{end}")
        while self.rest and (not end or self.peek() != end):
            if self.peek() in "$`":
                parts.append(self._dollar(quoted=True))
            elif self.peek() == "\\":
                escaped = self.take(2)[1:]
                if escaped != "\n":
                    parts.append(Literal(escaped if escaped in special else f"\\{escaped}", quoted=True))
            else:
                parts.append(Literal(self._until(special), quoted=True))

    def argument(self, quoted: bool) -> tuple[Part, ...]:
        """The rest as the argument of `${name:-argument}`, which may itself be in double quotes (`quoted`)."""
        if not quoted:
            return self.word(frozenset()).parts
        parts: list[Part] = []
        while self.rest:
            self._expanded(parts, '"')
            self.take()
        return tuple(parts)

    def heredoc(self, mark: str, literal: bool, tabs: bool, begin: int) -> tuple[ShellWord, int]:
        """The text of a heredoc from position `begin` to the line `mark`, and the position after that line."""
        line = self.text.count("\n", 0, begin) - self.text.count("\n", 0, self.position) + self.line
        text = ""
        for match in _LINE.finditer(self.text, begin):
            begin = match.end()
            shown = match[0].lstrip("\t" if tabs else "")
            if shown.rstrip("\n") == mark:
                break
            text += shown
        parts: list[Part] = [Literal(text if literal else "", quoted=True)]
        if not literal:
            Lexer(text, self.name, line=line)._expanded(parts, "")
        return ShellWord(tuple(parts), line), begin

    def _dollar(self, quoted: bool) -> Part:
        start, line = self.position, self.line
        if self.peek() == "`":
            if not (found := self.take_match(_BACKTICKS)):
                raise self.error("` is never closed")
            return Substitution(re.sub(r"\\([`\\$])", r"\1", found[1]), found[0], quoted, line)
        if self.peek(3) == "$((":
            self.take(3)
            if (calculation := self._balanced("()", "))")) is not None:
                return Arithmetic(calculation, self.text[start : self.position])
            self.position, self.line = start, line
        if self.peek(2) == "$(":
            self.take()
            return self._command(quoted)
        if self.peek(2) == "${":
            return self._braces(quoted)
        self.take()
        if found := self.take_match(_NAME):
            return Parameter(found[0], f"${found[0]}", quoted)
        return Literal("$", quoted)

    def _balanced(self, brackets: str, end: str) -> str | None:
        """Reads the text before `end` outside of brackets, or None if `end` does not follow."""
        start, depth = self.position, 0
        while self.rest and depth >= 0:
            if self.peek(len(end)) == end and not depth:
                self.take(len(end))
                return self.text[start : self.position - len(end)]
            depth += {brackets[0]: 1, brackets[1]: -1}.get(self.take(), 0)
        return None

    def calculation(self) -> str:
        """The text between `((` and `))`. Raises CkptkitError if `))` is missing."""
        line = self.line
        self.take(2)
        if (text := self._balanced("()", "))")) is None:
            raise self.error("(( is never closed", line)
        return text

    def _command(self, quoted: bool, readable: bool = True) -> Substitution:
        start, line = self.position, self.line
        self.take()
        while self.peek() != ")":
            if not self.rest:
                raise self.error("$( is never closed", line)
            self._skip_part()
        self.take()
        source = self.text[start - 1 : self.position]
        return Substitution(source[2:-1], source, quoted, line, readable)

    def _skip_part(self) -> None:
        """Skips one part of a command in parentheses, with any parentheses in it."""
        self._deeper()
        if self.peek() == "(":
            self._command(False)
        elif found := self.take_match(_HEREDOC):
            end = self.heredoc(found[2].strip("'\"\\"), True, bool(found[1]), self.next_line())[1]
            # The rest of the line of `<<` is skipped with the heredoc: its parentheses do not count.
            self.take(end - self.position)
        elif self.peek() == "#" and self.text[self.position - 1] in " \t\n;(":
            self.skip_blanks()
        elif self.peek() in _BREAKS:
            self.take()
        else:
            self._part([], _BREAKS)
        self.depth -= 1

    def _deeper(self) -> None:
        self.depth += 1
        if self.depth > _DEPTH:
            raise self.error("parentheses and braces are nested too deeply to be read")

    def _braces(self, quoted: bool) -> Part:
        self._deeper()
        start, line = self.position, self.line
        self.take(2)
        mark = self.peek() if self.peek() in "#!" and self.peek(2)[1:] not in ("}", "") else ""
        self.take(len(mark))
        if not (found := self.take_match(_LONG_NAME)):
            raise self.error("${ without a name", line)
        at, is_element = self.line, self.peek() == "["
        index = self._balanced("[]", "]") if is_element and self.take() else None
        if is_element and index is None:
            raise self.error("[ is never closed", at)
        match = self.take_match(_OPERATOR)
        operator = match[0] if match else ""
        begin = self.position
        plain = quoted and operator[:1] not in ("#", "%", "/")
        while self.peek() != "}":
            if not self.rest:
                raise self.error("${ is never closed", line)
            if plain and self.peek() == "'":
                self.take()  # in double quotes it quotes nothing, except in a pattern
            else:
                self._part([], frozenset("}'" if plain else "}"))
        argument = self.text[begin : self.position]
        self.take()
        self.depth -= 1
        source = self.text[start : self.position]
        return Parameter(found[0], source, quoted, index, operator, argument, mark == "#", mark == "!")
