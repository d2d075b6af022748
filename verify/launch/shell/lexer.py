"""Cuts the text of a bash script into words: quotes, escapes, comments, expansions, line continuations."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.shell.operators import unescaped
from ckptkit.verify.launch.shell.syntax import Arithmetic, Literal, Parameter, Part, ShellWord, Substitution

# Ends an unquoted word.
_BREAKS = frozenset(" \t\n;&|<>()")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]")
_LONG_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]+|[@*#?$!-]")
_OPERATOR = re.compile(r":[-=?+]|[-=?+]|##?|%%?|//?|\^\^?|,,?|:|@")
_HEREDOC = re.compile(r"(?<!<)<<(-)?(?!<)[ \t]*([^\s;&|<>()]+)")
_ANSI = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_DEPTH = 100
_CHECK = "check it with `bash -n`; if that accepts it, paste the trainer's command into a file of its own"


@dataclass
class Lexer:
    """A position in a text, and the number of its line."""

    text: str
    name: str
    position: int = 0
    line: int = 1
    depth: int = 0

    def error(self, message: str, line: int | None = None) -> CkptkitError:
        """What is wrong with the script, and where."""
        where = f"{self.name}:{line or self.line}"
        return CkptkitError(f"{where}: {message}", _CHECK)

    @property
    def rest(self) -> bool:
        """Whether anything is left."""
        return self.position < len(self.text)

    def peek(self, count: int = 1) -> str:
        """The next characters."""
        return self.text[self.position : self.position + count]

    def take(self, count: int = 1) -> str:
        """The next characters, which are then behind."""
        taken = self.text[self.position : self.position + count]
        self.position += count
        self.line += taken.count("\n")
        return taken

    def skip_blanks(self) -> None:
        """Goes past blanks, continued lines, and a comment up to the end of its line."""
        while self.rest:
            if self.peek() in " \t":
                self.take()
            elif self.peek(2) in ("\\\n", "\\"):  # the second one ends the file
                self.take(2)
            elif self.peek() == "#":
                end = self.text.find("\n", self.position)
                self.take((len(self.text) if end < 0 else end) - self.position)
            else:
                return

    def at_word(self) -> bool:
        """Whether a word begins here."""
        return self.rest and (self.peek() not in _BREAKS or self.peek(2) in ("<(", ">("))

    def word(self, breaks: frozenset[str] = _BREAKS) -> ShellWord:
        """The word that begins here."""
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
                parts.append(Literal(self._until("'"), quoted=True))
            case '"':
                self._double(parts)
            case "$" if self.peek(2) == "$'":
                parts.append(Literal(self._escaped(), quoted=True))
            case "$" if self.peek(2) == '$"':
                self.take()
                self._double(parts)
            case "$" | "`":
                parts.append(self._dollar(quoted=False))
            case _:
                start = self.position
                while self.rest and self.peek() not in breaks and self.peek() not in "\\'\"$`":
                    self.take()
                parts.append(Literal(self.text[start : self.position]))

    def _until(self, quote: str) -> str:
        line = self.line
        self.take()
        end = self.text.find(quote, self.position)
        if end < 0:
            raise self.error(f"{quote} is never closed", line)
        return self.take(end - self.position + 1)[:-1]

    def _escaped(self) -> str:
        """The text of `$'...'`, in which a quote may be escaped too."""
        found = _ANSI.match(self.text, self.position)
        if found is None:
            raise self.error("$' is never closed")
        self.take(len(found[0]))
        return unescaped(found[1])

    def _double(self, parts: list[Part]) -> None:
        """A string in double quotes, in which `$`, backticks and some escapes count."""
        line = self.line
        self.take()
        parts.append(Literal("", quoted=True))
        self._expanded(parts, '"')
        if not self.rest:
            raise self.error('" is never closed', line)
        self.take()

    def _expanded(self, parts: list[Part], end: str) -> None:
        """Text in which only expansions and their escapes count, up to the quote `end`, or up to the last character."""
        special = f"$`\\{end}"
        while self.rest and (not end or self.peek() != end):
            if self.peek() in "$`":
                parts.append(self._dollar(quoted=True))
            elif self.peek() == "\\":
                escaped = self.take(2)[1:]
                if escaped != "\n":
                    parts.append(Literal(escaped if escaped and escaped in special else f"\\{escaped}", quoted=True))
            else:
                start = self.position
                while self.rest and self.peek() not in special:
                    self.take()
                parts.append(Literal(self.text[start : self.position], quoted=True))

    def argument(self, quoted: bool) -> tuple[Part, ...]:
        """All that is left as the argument of `${name:-argument}`; `quoted`: the whole stands in double quotes."""
        if not quoted:
            return self.word(frozenset()).parts
        parts: list[Part] = []
        while self.rest:
            self._expanded(parts, '"')
            self.take()
        return tuple(parts)

    def heredoc(self, mark: str, literal: bool, tabs: bool, begin: int) -> tuple[ShellWord, int]:
        """The text of a heredoc that begins at position `begin`, up to the line `mark`, and the position behind it."""
        line = self.text.count("\n", 0, begin) - self.text.count("\n", 0, self.position) + self.line
        lines: list[str] = []
        while begin < len(self.text):
            end = self.text.find("\n", begin)
            end = len(self.text) if end < 0 else end + 1
            shown = self.text[begin:end].lstrip("\t" if tabs else "")
            begin = end
            if shown.rstrip("\n") == mark:
                break
            lines.append(shown)
        parts: list[Part] = [Literal("" if not literal else "".join(lines), quoted=True)]
        if not literal:
            Lexer("".join(lines), self.name, line=line)._expanded(parts, "")
        return ShellWord(tuple(parts), line), begin

    def _dollar(self, quoted: bool) -> Part:
        """What begins with `$` or a backtick."""
        start, line = self.position, self.line
        if self.peek() == "`":
            text = self._until_backtick()
            return Substitution(text, self.text[start : self.position], quoted, line)
        if self.peek(3) == "$((":
            self.take(3)
            if (calculation := self._calculation()) is not None:
                return Arithmetic(calculation, self.text[start : self.position])
            self.position, self.line = start, line
        if self.peek(2) == "$(":
            self.take()
            return self._command(quoted)
        if self.peek(2) == "${":
            return self._braces(quoted)
        self.take()
        if found := _NAME.match(self.text, self.position):
            self.take(len(found[0]))
            return Parameter(found[0], f"${found[0]}", quoted)
        return Literal("$", quoted)

    def _until_backtick(self) -> str:
        line, text = self.line, ""
        self.take()
        while self.rest and self.peek() != "`":
            text += self.take(2)[1:] if self.peek() == "\\" and self.peek(2)[1:] in "`\\$" else self.take()
        if not self.rest:
            raise self.error("` is never closed", line)
        self.take()
        return text

    def _calculation(self) -> str | None:
        """The text up to `))`; None where the parentheses are those of a command."""
        start, depth = self.position, 0
        while self.rest:
            if self.peek(2) == "))" and not depth:
                text = self.text[start : self.position]
                self.take(2)
                return text
            depth += {"(": 1, ")": -1}.get(self.take(), 0)
            if depth < 0:
                return None
        return None

    def calculation(self) -> str:
        """The text between `((` and `))`. Raises CkptkitError where it does not end."""
        line = self.line
        self.take(2)
        if (text := self._calculation()) is None:
            raise self.error("(( is never closed", line)
        return text

    def _command(self, quoted: bool, readable: bool = True) -> Substitution:
        """The command in parentheses that begins here."""
        start, line = self.position, self.line
        self.take()
        inside = self.position
        while self.peek() != ")":
            if not self.rest:
                raise self.error("$( is never closed", line)
            self._inside()
        text = self.text[inside : self.position]
        self.take()
        source = self.text[start - 1 : self.position]
        return Substitution(text, source, quoted, line, readable)

    def _inside(self) -> None:
        """Goes past one part of a command in parentheses, so that only its own one closes it."""
        self._deeper()
        if self.peek() == "(":
            self._command(False)
        elif found := _HEREDOC.match(self.text, self.position):
            self.take(len(found[0]))
            newline = self.text.find("\n", self.position)
            begin = len(self.text) if newline < 0 else newline + 1
            end = self.heredoc(found[2].strip("'\"\\"), True, bool(found[1]), begin)[1]
            # What follows on the line of `<<` is taken with the heredoc: nothing there opens or closes parentheses.
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
        """`${...}`, whose argument is kept as text."""
        self._deeper()
        start, line = self.position, self.line
        self.take(2)
        mark = self.peek() if self.peek() in "#!" and self.peek(2)[1:] not in ("}", "") else ""
        self.take(len(mark))
        found = _LONG_NAME.match(self.text, self.position)
        if found is None:
            raise self.error("${ without a name", line)
        self.take(len(found[0]))
        index = self._brackets() if self.peek() == "[" else None
        operator = _OPERATOR.match(self.text, self.position)
        self.take(len(operator[0]) if operator else 0)
        begin = self.position
        plain = quoted and not (operator and operator[0][0] in "#%/")
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
        shown = operator[0] if operator else ""
        return Parameter(found[0], source, quoted, index, shown, argument, mark == "#", mark == "!")

    def _brackets(self) -> str:
        line = self.line
        self.take()
        start, depth = self.position, 0
        while self.peek() != "]" or depth:
            if not self.rest:
                raise self.error("[ is never closed", line)
            depth += {"[": 1, "]": -1}.get(self.take(), 0)
        text = self.text[start : self.position]
        self.take()
        return text
