"""Parses a bash script into commands. Nothing is expanded or run."""

from __future__ import annotations

import re

from ckptkit.verify.launch.shell import syntax
from ckptkit.verify.launch.shell.lexer import Lexer
from ckptkit.verify.launch.shell.syntax import Literal, Node, ShellWord

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(?:\[([^]]*)\])?(\+?)=")
_REDIRECT = re.compile(r"\d*(?:&>>|&>|<<<|<<-|<<|<>|<&|>&|>>|>\||<|>)(?!\()")
_TEST_OPERATOR = re.compile(r"&&|\|\||[()<>;&|]")
_RESERVED = re.compile(r"(?:[a-z]+|[{}!]|\[\[)(?=[\s;&|()<>]|$)")
_ENDS = frozenset({"then", "do", "done", "fi", "else", "elif", "esac", "}"})
_DEPTH = 60
# Builtins with assignments, also of arrays, as arguments.
_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})


def parse(text: str, name: str, line: int = 1) -> tuple[Node, ...]:
    """The commands of the script `name`, which begins at line `line`. Raises CkptkitError if bash refuses it too."""
    parser = _Parser(Lexer(text, name, line=line))
    if "\r\n" in text:
        raise parser.lexer.error("lines end in carriage returns, which bash does not accept")
    nodes = parser.list_until(frozenset())
    if parser.lexer.rest:
        raise parser.lexer.error(f"unexpected {parser.lexer.peek()!r}")
    return nodes


class _Parser:
    """The state of a parser: its lexer, the end of heredocs after this line, and the depth of nested commands."""

    def __init__(self, lexer: Lexer) -> None:
        self.lexer = lexer
        self.heredoc_end: int | None = None
        self.depth = 0

    def list_until(self, ends: frozenset[str]) -> tuple[Node, ...]:
        """Commands before one of these reserved words, a closing parenthesis, `;;` or the end."""
        self.depth += 1
        if self.depth > _DEPTH:
            raise self.lexer.error("commands are nested too deeply to be read")
        nodes: list[Node] = []
        while True:
            self._separators()
            if not self.lexer.rest or self.lexer.peek() == ")" or self.lexer.peek(2) in (";;", ";&"):
                break
            if (word := self._reserved()) in _ENDS:
                if word not in ends or not (nodes or word == "esac"):
                    raise self.lexer.error(f"unexpected {word!r}")
                break
            nodes.append(self._and_or())
        self.depth -= 1
        return tuple(nodes)

    def _separators(self) -> None:
        """Skips blanks, newlines with the heredocs after them, `;` and `&`."""
        while True:
            self.lexer.skip_blanks()
            if self.lexer.peek() == "\n":
                self._newline()
            elif self.lexer.peek() in (";", "&") and self.lexer.peek(2) not in (";;", ";&") and not self._at_redirect():
                self.lexer.take()
            else:
                return

    def _newline(self) -> None:
        self.lexer.take((self.heredoc_end or 0) - self.lexer.position if self.heredoc_end else 1)
        self.heredoc_end = None

    def _reserved(self) -> str:
        """The next word, if it may be a reserved one."""
        match = _RESERVED.match(self.lexer.text, self.lexer.position)
        return match[0] if match else ""

    def _expect(self, word: str, opened: int) -> None:
        self._separators()
        if self._reserved() != word:
            raise self.lexer.error(f"no {word!r} for the command that begins here", opened)
        self.lexer.take(len(word))

    def _and_or(self) -> Node:
        line, parts, operators = self.lexer.line, [self._pipeline()], list[str]()
        while True:
            self.lexer.skip_blanks()
            if self.lexer.peek(2) not in ("&&", "||"):
                break
            operators.append(self.lexer.take(2))
            self._blank_lines()
            parts.append(self._pipeline())
        return syntax.AndOr(tuple(parts), tuple(operators), line) if operators else parts[0]

    def _blank_lines(self) -> None:
        self.lexer.skip_blanks()
        while self.lexer.peek() == "\n":
            self._newline()
            self.lexer.skip_blanks()

    def _pipeline(self) -> Node:
        line, negated = self.lexer.line, False
        while self._reserved() in ("!", "time"):
            negated ^= self.lexer.take(len(self._reserved())) == "!"
            self.lexer.skip_blanks()
        commands = [self._command()]
        while True:
            self.lexer.skip_blanks()
            if self.lexer.peek() != "|" or self.lexer.peek(2) == "||":
                break
            self.lexer.take(2 if self.lexer.peek(2) == "|&" else 1)
            self._blank_lines()
            commands.append(self._command())
        return syntax.Pipeline(tuple(commands), negated, line) if negated or commands[1:] else commands[0]

    def _command(self) -> Node:
        line = self.lexer.line
        loops = {"for": self._for, "select": self._for, "while": self._while, "until": self._while}
        others = {"if": self._if, "case": self._case, "function": self._function, "{": self._group, "[[": self._test}
        if read := (loops | others).get(self._reserved()):
            node = read(line)
        elif self.lexer.peek(2) == "((":
            node = syntax.Calculation(self.lexer.calculation(), line)
        elif self.lexer.peek() == "(":
            self.lexer.take()
            body = self.list_until(frozenset())
            if self.lexer.peek() != ")" or not body:
                raise self.lexer.error("( is never closed, or encloses no command", line)
            self.lexer.take()
            node = syntax.CommandGroup(body, line, subshell=True)
        else:
            return self._simple(line)
        silent = False
        self.lexer.skip_blanks()
        while self._at_redirect():
            silent |= self._redirection()[1] is not None
            self.lexer.skip_blanks()
        return syntax.CommandGroup((node,), line, silent=True) if silent else node

    def _group(self, line: int) -> Node:
        self.lexer.take()
        body = self.list_until(frozenset({"}"}))
        self._expect("}", line)
        return syntax.CommandGroup(body, line)

    def _if(self, line: int) -> Node:
        branches: list[tuple[tuple[Node, ...], tuple[Node, ...]]] = []
        ends = frozenset({"elif", "else", "fi"})
        while self._reserved() in ("if", "elif"):
            self.lexer.take(len(self._reserved()))
            condition = self.list_until(frozenset({"then"}))
            self._expect("then", line)
            branches.append((condition, self.list_until(ends)))
        if self._reserved() == "else":
            self.lexer.take(4)
            branches.append(((), self.list_until(ends)))
        self._expect("fi", line)
        return syntax.If(tuple(branches), line)

    def _for(self, line: int) -> Node:
        self.lexer.take(len(self._reserved()))
        self.lexer.skip_blanks()
        if self.lexer.peek(2) == "((":
            parts = [part.strip() for part in self.lexer.calculation().split(";")]
            if len(parts) != 3:
                raise self.lexer.error("for (( without two semicolons", line)
            return syntax.ForArithmetic(parts[0], parts[1], parts[2], self._loop_body(line), line)
        name = self.lexer.word().plain or ""
        self._blank_lines()
        if self._reserved() != "in":
            return syntax.For(name, None, self._loop_body(line), line)
        self.lexer.take(2)
        self.lexer.skip_blanks()
        words: list[ShellWord] = []
        while self.lexer.at_word():
            words.append(self.lexer.word())
            self.lexer.skip_blanks()
        return syntax.For(name, tuple(words), self._loop_body(line), line)

    def _loop_body(self, line: int) -> tuple[Node, ...]:
        self._expect("do", line)
        body = self.list_until(frozenset({"done"}))
        self._expect("done", line)
        return body

    def _while(self, line: int) -> Node:
        until = self.lexer.take(5) == "until"
        return syntax.While(self.list_until(frozenset({"do"})), self._loop_body(line), until, line)

    def _case(self, line: int) -> Node:
        self.lexer.take(4)
        self.lexer.skip_blanks()
        subject = self.lexer.word()
        self._expect("in", line)
        branches: list[tuple[tuple[ShellWord, ...], tuple[Node, ...], str]] = []
        self._separators()
        while self._reserved() != "esac":
            branches.append(self._branch(line))
            self._separators()
        self._expect("esac", line)
        return syntax.Case(subject, tuple(branches), line)

    def _branch(self, line: int) -> tuple[tuple[ShellWord, ...], tuple[Node, ...], str]:
        if self.lexer.peek() == "(":
            self.lexer.take()
        patterns: list[ShellWord] = []
        while True:
            self.lexer.skip_blanks()
            patterns.append(self.lexer.word())
            self.lexer.skip_blanks()
            end = self.lexer.take()
            if end == ")":
                break
            if end != "|":
                raise self.lexer.error("case without a pattern and `)`", line)
        body = self.list_until(frozenset({"esac"}))
        end = next((end for end in (";;&", ";;", ";&") if self.lexer.peek(len(end)) == end), "")
        self.lexer.take(len(end))
        return tuple(patterns), body, end or ";;"

    def _function(self, line: int) -> Node:
        self.lexer.take(len("function"))
        self.lexer.skip_blanks()
        name = self.lexer.word().plain or ""
        self.lexer.skip_blanks()
        return self._definition(name, line, re.match(r"\(\s*\)", self.lexer.peek(10)) is not None)

    def _definition(self, name: str, line: int, has_parentheses: bool) -> Node:
        if has_parentheses:
            self.lexer.take()
            self.lexer.skip_blanks()
            self.lexer.take()
        self._blank_lines()
        return syntax.ShellFunction(name, self._command(), line)

    def _test(self, line: int) -> Node:
        self.lexer.take(2)
        words: list[ShellWord] = []
        while True:
            self._blank_lines()
            if not self.lexer.rest:
                raise self.lexer.error("[[ is never closed", line)
            if operator := self.lexer.take_match(_TEST_OPERATOR):
                words.append(ShellWord((Literal(operator[0]),), self.lexer.line))
            elif re.match(r"\]\](?:[\s;&|)]|$)", self.lexer.peek(3)):
                self.lexer.take(2)
                return syntax.Test(tuple(words), line)
            else:
                words.append(self.lexer.word(frozenset(" \t\n)")))

    def _simple(self, line: int) -> Node:
        assignments: list[syntax.Assignment] = []
        words: list[ShellWord] = []
        here: ShellWord | None = None
        target: ShellWord | None = None
        while True:
            self.lexer.skip_blanks()
            if self._at_redirect():
                text, output = self._redirection()
                here, target = text or here, output or target
            elif not self.lexer.at_word():
                break
            elif (not words or words[0].plain in _DECLARES) and (found := self.lexer.take_match(_ASSIGNED)):
                # After `export` and other declarations the name is also a word.
                at = self.lexer.line - found[0].count("\n")
                words += [ShellWord((Literal(found[1]),), at)] if words else []
                array = self._array() if self.lexer.peek() == "(" else None
                value = self.lexer.word() if array is None else None
                assignments.append(syntax.Assignment(found[1], bool(found[3]), at, value, array, found[2]))
            else:
                words.append(self.lexer.word())
                if len(words) == 1 and words[0].plain and self.lexer.peek() == "(":
                    return self._definition(words[0].plain, line, True)
        if not words and not assignments and here is None and self.lexer.peek() not in ("", "\n", ";", "&", "|", ")"):
            raise self.lexer.error(f"unexpected {self.lexer.peek()!r}")
        return syntax.Simple(tuple(assignments), tuple(words), line, here, target)

    def _array(self) -> tuple[ShellWord, ...]:
        line, words = self.lexer.line, list[ShellWord]()
        self.lexer.take()
        while True:
            self._blank_lines()
            if self.lexer.peek() == ")":
                self.lexer.take()
                return tuple(words)
            if not self.lexer.at_word():
                message = f"unexpected {self.lexer.peek()!r} in an array" if self.lexer.rest else "( is never closed"
                raise self.lexer.error(message, self.lexer.line if self.lexer.rest else line)
            words.append(self.lexer.word())

    def _at_redirect(self) -> bool:
        return _REDIRECT.match(self.lexer.text, self.lexer.position) is not None

    def _redirection(self) -> tuple[ShellWord | None, ShellWord | None]:
        """Reads a redirection. Returns the text of a `<<<` or a heredoc, and the target of the output."""
        found = self.lexer.take_match(_REDIRECT)
        source = found[0] if found else ""
        operator = source.lstrip("0123456789")
        self.lexer.skip_blanks()
        target = self.lexer.word()
        if operator not in ("<<", "<<-"):
            taken = operator in (">", ">>", ">|", ">&", "&>", "&>>") and source[:1] in ("1", ">", "&")
            return target if operator == "<<<" else None, target if taken else None
        literal = any(isinstance(part, Literal) and part.quoted for part in target.parts)
        begin = self.heredoc_end or self.lexer.next_line()
        text, self.heredoc_end = self.lexer.heredoc(target.source, literal, operator == "<<-", begin)
        return text, None
