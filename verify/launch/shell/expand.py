"""Expands words as bash does: variables, arrays, arithmetic, known commands, quotes and the splitting at blanks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptkit.verify.launch.shell.arithmetic import ArithmeticFault, calculate, integer
from ckptkit.verify.launch.shell.lexer import Lexer
from ckptkit.verify.launch.shell.operators import changed_text
from ckptkit.verify.launch.shell.syntax import Arithmetic, Literal, Parameter, Part, ShellWord, Substitution
from ckptkit.verify.launch.shell.values import MAX_CHARACTERS, MAX_WORDS, Gap, Shell, ShellValue, TooMuchError, together

# What arithmetic assigns to: `n = 1`, `n += 1`, `A[0]++`, `--n`.
_ASSIGNED = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:(?:<<|>>|[-+*/%&|^])?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
_DEFAULTS = (":-", "-", ":+", "+")
_NAMED = re.compile(r"[A-Za-z_]\w*|[0-9]+")
# An unquoted pattern of file names. So are Megatron's patterns of layers, which no file has: `[0]*3+[1]*58`,
# `Et*3|(tt|)*29,m|L`, `MEM*EMEM`.
_GLOB = re.compile(r"[*?]")
_LAYERS = re.compile(r"[\[\]\d*+(),\0]*|(?=.*\|)[EtmL\d*(),|\0]*|[ME*GD+|/-]{8,}")


BRACES, FILES = "braces are not expanded here", "it expands to names of files"


@dataclass
class _Fields:
    """The words that become of one: those that are whole, and the one that is being put together."""

    shell: Shell
    line: int
    done: list[ShellValue] = field(default_factory=list)
    text: str = ""
    gaps: list[Gap] = field(default_factory=list)
    there: bool = False
    maybe: str = ""
    origin: ShellValue | None = None
    pieces: int = 0

    def add(self, value: ShellValue, quoted: bool = True) -> None:
        """Adds a text to the current word. An unquoted one is only a word where it is not empty."""
        self.text += value.text
        self.gaps += value.gaps
        self.maybe = self.maybe or value.maybe
        self.there |= quoted or bool(value.text)
        if value.text or value.gaps:
            self.origin, self.pieces = value, self.pieces + 1
        if len(self.text) > MAX_CHARACTERS:
            raise TooMuchError(f"a word has more than {MAX_CHARACTERS} characters")

    def end(self) -> None:
        """Ends the current word. One that is an array's element alone is written where that is."""
        if self.there:
            alone = self.origin if self.pieces == 1 and self.origin and self.origin.line is not None else None
            file, line = (alone.file, alone.line) if alone else (self.shell.file, self.line)
            self.done.append(ShellValue(self.text, tuple(self.gaps), file, line, self.maybe))
        self.text, self.gaps, self.there, self.maybe, self.origin, self.pieces = "", [], False, "", None, 0


def expand(shell: Shell, words: Sequence[ShellWord]) -> list[ShellValue]:
    """The words that become of these."""
    found: list[ShellValue] = []
    for word in words:
        found += (made := _expand(shell, word))
        shell.step(sum(len(value.text) for value in made) + len(made))
        if len(found) > MAX_WORDS:
            raise TooMuchError(f"a command has more than {MAX_WORDS} words")
    return found


def _expand(shell: Shell, word: ShellWord) -> list[ShellValue]:
    if why := _many_words(word):
        source = "".join(part.text if isinstance(part, Literal) else part.source for part in word.parts)
        return [ShellValue(source, (Gap(source, why),), shell.file, word.line)]
    fields = _Fields(shell, word.line)
    for number, part in enumerate(_with_defaults(shell, word.parts)):
        match part:
            case Literal(text, split=True):
                _add_split(fields, _literal(shell, text, False, number == 0), False)
            case Literal(text, quoted):
                fields.add(_literal(shell, text, quoted, number == 0), quoted)
            case Parameter(quoted=True) if _is_list(part):
                values = _listed(shell, part)
                for count, value in enumerate(values):
                    if count:
                        fields.end()
                    fields.add(value)
                # "${A[@]}" of an empty array is not a word, but `"${A[@]}"` is parsed with an empty literal before it.
                fields.there = bool(values) or fields.text != ""
            case _:
                for count, value in enumerate(_values(shell, part)):
                    if count:
                        fields.end()
                    _add_split(fields, value, getattr(part, "quoted", False))
    fields.end()
    return fields.done


def _many_words(word: ShellWord) -> str:
    """Why a word is others in their place: braces, or a pattern of file names. Empty where it is not."""
    text = "".join(
        part.text if isinstance(part, Literal) and not part.quoted else "\0" * bool(getattr(part, "text", "x"))
        for part in word.parts
    )
    if _braced(text):
        return BRACES
    return FILES if _is_glob(text) else ""


def _braced(text: str) -> bool:
    """Whether braces stand for several words: `{a,b}`, `{1..3}`, also inside of others."""
    opened: list[list[bool]] = []
    for index, character in enumerate(text):
        if character == "{":
            opened.append([False])
        elif opened and (character == "," or text[index : index + 2] == ".."):
            opened[-1][0] = True
        elif opened and character == "}" and opened.pop()[0]:
            return True
    return False


def _is_glob(text: str) -> bool:
    return _GLOB.search(text) is not None and not _LAYERS.fullmatch(text)


def _literal(shell: Shell, text: str, quoted: bool, first: bool) -> ShellValue:
    if quoted or not first or not text.startswith("~"):
        return ShellValue(text)
    name, slash, rest = text.partition("/")
    home = shell.lookup("HOME")
    if not re.fullmatch(r"~[A-Za-z_+-]?[\w-]*", name):
        return ShellValue(text)
    if name != "~" or home is None or not home.values:
        return ShellValue(text, (Gap(name, "the home directory is not known"),))
    return replace(home.values[0], text=home.values[0].text + slash + rest)


def _add_split(fields: _Fields, value: ShellValue, quoted: bool) -> None:
    """Adds a value; an unquoted one is split at blanks. Those of a gap are not known: a word with one stays unknown."""
    if quoted or value.whole:
        fields.add(value)
        return
    blanks = separators(fields.shell)
    if blanks.startswith("${"):
        fields.add(replace(value, gaps=(*value.gaps, Gap(value.text, "IFS is not known"))))
        return
    if value.gaps:
        for count, part in enumerate(_split_around_gaps(value, blanks)):
            if count:
                fields.end()
            fields.add(part, quoted=False)
        return
    pieces = re.split(f"[{re.escape(blanks)}]+", value.text) if blanks else [value.text]
    others = re.escape("".join(blanks.split()))
    if others and re.search(rf"^[{others}]|[{others}]\s*[{others}]", value.text):
        fields.add(replace(value, gaps=(Gap(value.text, "IFS makes empty words of it"),)))
        return
    for count, piece in enumerate(pieces):
        if count:
            fields.end()
        gaps = (Gap(piece, FILES),) if _is_glob(piece) else ()
        fields.add(ShellValue(piece, gaps, value.file, value.line, value.maybe), quoted=False)


def _split_around_gaps(value: ShellValue, blanks: str) -> list[ShellValue]:
    """The words of a text with gaps, each with its own gaps."""
    text = value.text
    for number, gap in enumerate(value.gaps):
        text = text.replace(gap.source, f"\0{number}\0", 1)
    if blanks.strip() or text.count("\0") != 2 * len(value.gaps) or not any(blank in text for blank in blanks):
        return [value]
    found = []
    for piece in re.split(f"[{re.escape(blanks)}]+", text):
        gaps = tuple(value.gaps[int(number)] for number in re.findall("\0([0-9]+)\0", piece))
        whole = re.sub("\0([0-9]+)\0", lambda mark: value.gaps[int(mark[1])].source, piece)
        found.append(ShellValue(whole, gaps, value.file, value.line, value.maybe))
    return found


def separators(shell: Shell) -> str:
    """The characters of `$IFS`."""
    known = shell.lookup("IFS") if "IFS" in shell.variables else None
    return known.values[0].text if known and known.values else " \t\n"


def joined(shell: Shell, word: ShellWord | None, *, is_pattern: bool = False) -> ShellValue:
    """A word as the one text that an assignment or a `[[ ]]` takes: nothing is split.

    `is_pattern`: as `case` and the right side of `==` take it, where what is quoted stands for itself.
    """
    if word is None:
        return ShellValue("")
    text, gaps, maybe = "", list[Gap](), ""
    for number, part in enumerate(_with_defaults(shell, word.parts)):
        quoted = getattr(part, "quoted", False)
        if not isinstance(part, Literal):
            values = _values(shell, part)
        elif not (quoted or part.split or is_pattern) and _braced(part.text):
            values = [unknown(part.text, BRACES)]
        else:
            values = [_literal(shell, part.text, quoted, number == 0)]
        star = isinstance(part, Parameter) and "*" in (part.index, part.name)
        between = separators(shell)[:1] if star else " "
        for count, value in enumerate(values):
            piece = re.sub(r"[*?[]", r"[\g<0>]", value.text) if is_pattern and quoted else value.text
            text = together((text, piece), between if count else "")
            gaps += value.gaps
            maybe = maybe or value.maybe
    if not is_pattern:
        shell.step(len(text))
    return ShellValue(text, tuple(gaps), shell.file, word.line, maybe)


def _is_list(part: Parameter) -> bool:
    """Whether a quoted expansion makes a word of each value, as `"${A[@]}"` and `"$@"` do."""
    return not part.length and (part.index == "@" or part.name == "@")


def _values(shell: Shell, part: Arithmetic | Substitution | Parameter) -> list[ShellValue]:
    """The values of one part, which are several for an array."""
    match part:
        case Arithmetic(text, source):
            try:
                return [ShellValue(str(calculate_in(shell, text)))]
            except ArithmeticFault as fault:
                return [unknown(source, str(fault))]
        case Substitution(readable=False):
            return [unknown(part.source, "the output of another command")]
        case Substitution():
            return [shell.run(shell, part)]
    values = _listed(shell, part)
    if not part.quoted or "*" not in (part.index, part.name):
        return values
    text = together((value.text for value in values), separators(shell)[:1])
    return [ShellValue(text, tuple(gap for value in values for gap in value.gaps), maybe=next(_maybes(values), ""))]


def _maybes(values: Sequence[ShellValue]) -> Iterator[str]:
    yield from (value.maybe for value in values if value.maybe)


def _reasons(values: Sequence[ShellValue]) -> str:
    """Why the first of these that is not known is not."""
    return next(_reason(value) for value in values if not value.known)


def unknown(source: str, why: str) -> ShellValue:
    """A value of which nothing is known."""
    return ShellValue(source, (Gap(source, why),))


def calculate_in(shell: Shell, text: str) -> int:
    """The value of an arithmetic expression, whose variables are the shell's. Raises ArithmeticFault."""
    # `${A[i]}`, `${#A[@]}` and `$1` are expanded first, as bash does; plain names are left to the expression.
    lexer = Lexer(text, "arithmetic")
    value = joined(shell, lexer.word(frozenset())) if re.search(r"\$[^A-Za-z_]", text) else ShellValue(text)
    if not value.known:
        raise ArithmeticFault(_reason(value))

    def get(name: str) -> int:
        known = shell.lookup(name)
        if known is None or not known.values:
            return 0
        found = known.values[0]
        if not found.known:
            raise ArithmeticFault(_reason(found))
        try:
            return integer(found.text)
        except ArithmeticFault as error:
            raise ArithmeticFault(f"${name} is {found.text[:40]!r}, which is not a number") from error

    try:
        return calculate(
            value.text, get, lambda name, number: shell.assign(name, ShellValue(str(number), (), shell.file))
        )
    except ArithmeticFault as fault:
        for found in _ASSIGNED.finditer(value.text):
            shell.forget(found[1] or found[2], str(fault))
        raise


def _reason(value: ShellValue) -> str:
    return "; ".join(gap.why for gap in value.gaps) or value.maybe


def _listed(shell: Shell, part: Parameter) -> list[ShellValue]:
    """The values of a parameter, after its operator."""
    values = _looked_up(shell, part)
    if part.indirect:
        return _indirect(shell, part, values)
    if part.length:
        return [_length(part, values or [])]
    if part.operator in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
        return _defaulted(shell, part, values)
    if values is None and part.index in ("@", "*") and not shell.unresolved:
        # No array comes from the environment: one that the script does not set is empty.
        shell.empty.setdefault(part.name, str(shell.file or "the text"))
        return []
    set_here = shell.variables.get(part.name)
    if values is None and part.index and set_here and set_here.array and all(value.known for value in set_here.values):
        return [ShellValue("")]
    if values is None:
        return [unknown(part.source, "set neither in the script nor in the environment")]
    if not part.operator:
        return values
    known = shell.lookup(part.name)
    if part.operator == ":" and (part.name in ("@", "*") or (part.index in ("@", "*") and known and known.array)):
        return _slice(shell, part, values)
    return [_changed(shell, part, value) for value in values]


def _slice(shell: Shell, part: Parameter, values: list[ShellValue]) -> list[ShellValue]:
    """`${A[@]:1:2}`; of `$@` the word 0 is the script."""
    if not all(value.known for value in values):
        return [unknown(part.source, _reasons(values))]
    if part.name in ("@", "*"):
        values = [ShellValue(str(shell.file or "bash")), *values]
    bounds = _bounds(shell, part, len(values))
    return [unknown(part.source, bounds)] if isinstance(bounds, str) else values[bounds]


def _bounds(shell: Shell, part: Parameter, length: int) -> slice | str:
    """What `:start:count` takes of so many characters or words; a reason where nobody can tell."""
    start_text, colon, count_text = part.argument.partition(":")
    if "?" in part.argument or count_text.strip().startswith("-"):
        return "this change of a variable is not worked out here"
    try:
        start = calculate_in(shell, start_text)
        count = calculate_in(shell, count_text) if colon else length
    except ArithmeticFault as fault:
        return str(fault)
    start += length if start < 0 else 0
    return slice(0, 0) if start < 0 or count < 0 else slice(start, start + count)


def _looked_up(shell: Shell, part: Parameter) -> list[ShellValue] | None:
    if part.name in ("@", "*"):
        shell.argument_uses.append(0)
        return list(shell.arguments)
    if part.name.isdecimal():
        return _positional(shell, int(part.name[-9:]))
    if part.name == "#":
        shell.argument_uses.append(0)
        if any(value.maybe or value.gaps for value in shell.arguments):
            return [unknown(part.source, "how many there are is not known")]
        return [ShellValue(str(len(shell.arguments)))]
    if part.name in ("?", "$", "!", "-") or part.name in ("RANDOM", "SECONDS", "BASHPID"):
        return [unknown(part.source, "known only when the script runs")]
    if part.name == "BASH_SOURCE" and part.index not in (None, "0", "@", "*"):
        return [unknown(part.source, "which file sources this one is not followed")]
    if part.name == "BASH_SOURCE" and part.name not in shell.variables:
        return [ShellValue(str(shell.file))] if shell.file else None
    if part.name == "PWD" and part.name not in shell.variables:
        return [ShellValue(str(shell.directory))] if shell.directory else None
    known = shell.lookup(part.name)
    if known is None or part.index in ("@", "*"):
        return None if known is None else list(known.values)
    return _element(shell, part, known.values)


def _positional(shell: Shell, number: int) -> list[ShellValue] | None:
    if number == 0:
        return [ShellValue(str(shell.script))] if shell.script else None
    shell.argument_uses.append(number)
    if any(value.maybe for value in shell.arguments[:number]):
        return [unknown(f"${number}", next(_maybes(shell.arguments)))]
    if number <= len(shell.arguments):
        return [shell.arguments[number - 1]]
    # A function is called with these and no others; what a script is started with is not known for certain.
    return [ShellValue("")] if shell.locals else None


def _element(shell: Shell, part: Parameter, values: Sequence[ShellValue]) -> list[ShellValue] | None:
    index = 0
    if part.index is not None:
        try:
            index = calculate_in(shell, part.index)
        except ArithmeticFault as fault:
            return [unknown(part.source, str(fault))]
    # What is not known may be several elements.
    before = values[:index] if index >= 0 else values
    if any(value.maybe for value in values[: index + 1]) or not all(value.known for value in before):
        return [unknown(part.source, _reasons(values))]
    if index < -len(values):
        shell.unresolved[f"{shell.file or 'the text'}: {part.source}: bash stops, since there is no such element"] = (
            None
        )
    return [values[index]] if -len(values) <= index < len(values) else None


def _length(part: Parameter, values: Sequence[ShellValue]) -> ShellValue:
    if not all(value.known for value in values):
        return unknown(part.source, "not all of it is known")
    many = part.index in ("@", "*") or part.name in ("@", "*")
    return ShellValue(str(len(values) if many else len(values[0].text if values else "")))


def _indirect(shell: Shell, part: Parameter, values: list[ShellValue] | None) -> list[ShellValue]:
    """`${!A[@]}`: the indices of an array; `${!A}`: what the variable has that `$A` names."""
    if part.index in ("@", "*"):
        if not all(value.known for value in values or ()):
            return [unknown(part.source, "which elements there are is not known")]
        return [ShellValue(str(index)) for index in range(len(values or ()))]
    name = values[0] if values else None
    if name is None or not name.known or not _NAMED.fullmatch(name.text):
        why = "which variable it is can not be told here"
        shell.unresolved[f"{shell.file or 'the text'}: {part.source}: {why}, and bash stops if it is not one"] = None
        return [unknown(part.source, why)]
    return _listed(shell, replace(part, name=name.text, index=None, indirect=False))


def _is_empty(part: Parameter, values: Sequence[ShellValue] | None) -> bool | None:
    """Whether `${A:-default}` and its like take the parameter for one that is not set; None where nobody can tell."""
    if values and all(value.maybe for value in values):
        return None
    if not values or not part.operator.startswith(":"):
        return not values
    if any(value.text and not value.gaps and not value.maybe for value in values):
        return False
    return None if any(not value.known for value in values) else len(values) == 1 and not values[0].text


def _with_defaults(shell: Shell, parts: Sequence[Part]) -> Iterator[Part]:
    """The parts of a word, where those of a default stand in the place of `${A:-default}` and `${A:+other}`."""
    for part in parts:
        if not isinstance(part, Parameter) or part.length or part.indirect or part.operator not in _DEFAULTS:
            yield part
            continue
        if _is_empty(part, _looked_up(shell, part)) is not (part.operator[-1] == "-"):
            yield part
            continue
        where = str(shell.file or "the command line")
        inner = Lexer(part.argument, where).argument(part.quoted)
        for one in _with_defaults(shell, inner):
            yield replace(one, split=True) if isinstance(one, Literal) and not one.quoted else one
        if part.quoted and not inner:
            yield Literal("", True)


def _defaulted(shell: Shell, part: Parameter, values: list[ShellValue] | None) -> list[ShellValue]:
    """`${A:=default}` and `${A:?message}`, and the value of a parameter that takes no default."""
    if not (empty := _is_empty(part, values)):
        maybe = next(_maybes(values or ()), "") if empty is None else ""
        return [unknown(part.source, maybe)] if maybe else list(values or ())
    if part.operator[-1] == "+":
        return [] if _is_list(part) else [ShellValue("")]
    if part.operator[-1] == "?":
        return [unknown(part.source, "the script stops, since it is not set")]
    word = ShellWord(Lexer(part.argument, str(shell.file or "the command line")).argument(part.quoted), 0)
    default = joined(shell, word)
    shell.assign(part.name, default)
    return [ShellValue(default.text, default.gaps, maybe=default.maybe)]


def _changed(shell: Shell, part: Parameter, value: ShellValue) -> ShellValue:
    """`${A#pattern}`, `${A/pattern/text}`, `${A:1:2}`, `${A,,}`."""
    if value.gaps:
        return ShellValue(part.source, value.gaps)
    trims = part.operator in ("#", "##", "%", "%%")
    shell.step(min(len(value.text), 1_000) ** 2 // 10 if trims else len(value.text))
    if part.operator == ":":
        bounds = _bounds(shell, part, len(value.text))
        changed = None if isinstance(bounds, str) else value.text[bounds]
    elif trims:
        word = Lexer(part.argument, str(shell.file or "the command line")).word(frozenset())
        pattern = joined(shell, word, is_pattern=True)
        changed = changed_text(value.text, part.operator, pattern.text) if pattern.known else None
    else:
        changed = changed_text(value.text, part.operator, part.argument)
    if changed is None:
        return unknown(part.source, "this change of a variable is not worked out here")
    return ShellValue(changed, (), value.file, value.line, value.maybe)


def script_directory(shell: Shell, text: str) -> Path | None:
    """A path of the script, relative to the directory it has changed to; None where that is not known."""
    path = Path(text)
    if path.is_absolute():
        return path
    return None if shell.directory is None else shell.directory / path
