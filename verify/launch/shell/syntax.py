"""The syntax tree of a bash script, by the GNU Bash Reference Manual, "Basic Shell Features"."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Literal:
    """Verbatim text. Quoted text is a word even if it is empty; `split` text is split at blanks, as a default is."""

    text: str
    quoted: bool = False
    split: bool = False


@dataclass(frozen=True)
class Parameter:
    """`$name` or `${name[index]operator argument}`, such as `${name:-default}`; `source` is its text in the script."""

    name: str
    source: str
    quoted: bool
    index: str | None = None
    operator: str = ""
    argument: str = ""
    length: bool = False  # `${#name}`
    indirect: bool = False  # `${!name}`


@dataclass(frozen=True)
class Arithmetic:
    """`$((...))`."""

    text: str
    source: str


@dataclass(frozen=True)
class Substitution:
    """`$(...)` or backticks; `readable` is False for `<(...)`, which is a file of another process."""

    text: str
    source: str
    quoted: bool
    line: int
    readable: bool = True


Part = Literal | Parameter | Arithmetic | Substitution


@dataclass(frozen=True)
class ShellWord:
    """One word before expansion, and its line."""

    parts: tuple[Part, ...]
    line: int

    @property
    def plain(self) -> str | None:
        """Its text if it is one unquoted literal, as a reserved word must be."""
        match self.parts:
            case (Literal(text, False),):
                return text
        return None

    @property
    def source(self) -> str:
        """Its text in the script, without quotes."""
        return "".join(part.text if isinstance(part, Literal) else part.source for part in self.parts)


@dataclass(frozen=True)
class Assignment:
    """`name=value`, `name+=value`, `name[index]=value` or `name=(...)`."""

    name: str
    append: bool
    line: int
    value: ShellWord | None = None
    array: tuple[ShellWord, ...] | None = None
    index: str | None = None


@dataclass(frozen=True)
class Simple:
    """Assignments, then a command with its words."""

    assignments: tuple[Assignment, ...]
    words: tuple[ShellWord, ...]
    line: int
    here: ShellWord | None = None  # the text of `<<<` or of a heredoc
    target: ShellWord | None = None  # the file of the output


@dataclass(frozen=True)
class Pipeline:
    """Commands joined by `|`; `negated` by a `!` before them."""

    commands: tuple[Node, ...]
    negated: bool
    line: int


@dataclass(frozen=True)
class AndOr:
    """Pipelines joined by `&&` and `||`; `operators` has one fewer than `parts`."""

    parts: tuple[Node, ...]
    operators: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class If:
    """Conditions with their bodies; the last condition may be empty, for `else`."""

    branches: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]
    line: int


@dataclass(frozen=True)
class For:
    """`for name in words`; `words` is None for the positional parameters."""

    name: str
    words: tuple[ShellWord, ...] | None
    body: tuple[Node, ...]
    line: int


@dataclass(frozen=True)
class ForArithmetic:
    """`for ((start; condition; step))`."""

    start: str
    condition: str
    step: str
    body: tuple[Node, ...]
    line: int


@dataclass(frozen=True)
class While:
    """`while` or, with `until`, its opposite."""

    condition: tuple[Node, ...]
    body: tuple[Node, ...]
    until: bool
    line: int


@dataclass(frozen=True)
class Case:
    """`case subject in`, with the patterns, the body and the end (`;;`, `;&` or `;;&`) of each branch."""

    subject: ShellWord
    branches: tuple[tuple[tuple[ShellWord, ...], tuple[Node, ...], str], ...]
    line: int


@dataclass(frozen=True)
class CommandGroup:
    """`{ ... }`, or with `subshell` `( ... )`; `silent`: its output goes to a file."""

    body: tuple[Node, ...]
    line: int
    subshell: bool = False
    silent: bool = False


@dataclass(frozen=True)
class ShellFunction:
    """`name() { ... }`."""

    name: str
    body: Node
    line: int


@dataclass(frozen=True)
class Calculation:
    """`(( ... ))`."""

    text: str
    line: int


@dataclass(frozen=True)
class Test:
    """`[[ ... ]]`, as words."""

    words: tuple[ShellWord, ...]
    line: int


Compound = If | For | ForArithmetic | While | Case | CommandGroup | ShellFunction | Calculation | Test
Node = Simple | Pipeline | AndOr | Compound
