"""Expands words as bash does: variables, arrays, arithmetic, known commands, quotes and word splitting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptkit.verify.launch.python.values import MAX_CHARACTERS, TooMuchError
from ckptkit.verify.launch.shell.arithmetic import ArithmeticFault, calculate, integer
from ckptkit.verify.launch.shell.lexer import Lexer
from ckptkit.verify.launch.shell.operators import apply_operator
from ckptkit.verify.launch.shell.syntax import Arithmetic, Literal, Parameter, Part, ShellWord, Substitution
from ckptkit.verify.launch.shell.values import MAX_WORDS, Gap, Shell, ShellValue, join_texts, unknown_value
from ckptkit.verify.launch.words import UNSET

# An assignment in arithmetic: `n = 1`, `n += 1`, `A[0]++`, `--n`.
_ASSIGNED = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:(?:<<|>>|[-+*/%&|^])?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
_DEFAULTS = (":-", "-", ":+", "+")
_NAMED = re.compile(r"[A-Za-z_]\w*|[0-9]+")
# An unquoted pattern of file names, and Megatron's patterns of layers, which look like one but match no file:
# `[0]*3+[1]*58`, `Et*3|(tt|)*29,m|L`, `MEM*EMEM`.
_GLOB = re.compile(r"[*?]")
_LAYERS = re.compile(r"[\[\]\d*+(),\0]*|(?=.*\|)[EtmL\d*(),|\0]*|[ME*GD+|/-]{8,}")
BRACES, FILES = "ckptkit does not expand these braces", "it expands to names of files"
_UNSUPPORTED = "ckptkit does not evaluate this change of a variable"


@dataclass
class _Fields:
    """The words from the expansion of one: the complete ones, and the parts of the current one."""

    shell: Shell
    line: int
    done: list[ShellValue] = field(default_factory=list)
    text: str = ""
    gaps: list[Gap] = field(default_factory=list)
    is_word: bool = False
    condition: str = ""
    origin: ShellValue | None = None
    pieces: int = 0

    def add(self, value: ShellValue, quoted: bool = True) -> None:
        """Adds a text to the current word. Empty text makes a word only if it is quoted."""
        self.text += value.text
        self.gaps += value.gaps
        self.condition = self.condition or value.condition
        self.is_word |= quoted or bool(value.text)
        if value.text or value.gaps:
            self.origin, self.pieces = value, self.pieces + 1
        if len(self.text) > MAX_CHARACTERS:
            raise TooMuchError(f"a word has more than {MAX_CHARACTERS} characters")

    def end(self) -> None:
        """Ends the current word. A word that is one array element keeps the place of the element."""
        if self.is_word:
            at = self.origin if self.pieces == 1 and self.origin and self.origin.line is not None else None
            file, line = (at.file, at.line) if at else (self.shell.file, self.line)
            self.done.append(ShellValue(self.text, tuple(self.gaps), file, line, self.condition))
        self.text, self.gaps, self.is_word, self.condition, self.origin, self.pieces = "", [], False, "", None, 0


def expand(shell: Shell, words: Sequence[ShellWord]) -> list[ShellValue]:
    """The words after expansion and splitting."""
    values: list[ShellValue] = []
    for word in words:
        values += (made := _expand_word(shell, word))
        shell.step(sum(len(value.text) for value in made) + len(made))
        if len(values) > MAX_WORDS:
            raise TooMuchError(f"a command has more than {MAX_WORDS} words")
    return values


def _expand_word(shell: Shell, word: ShellWord) -> list[ShellValue]:
    if why := _multiplier(word):
        return [unknown_value(word.source, why, shell.file, word.line)]
    fields = _Fields(shell, word.line)
    for number, part in enumerate(_insert_defaults(shell, word.parts)):
        match part:
            case Literal(text, split=True):
                _add_split(fields, _expand_tilde(shell, text, False, number == 0), False)
            case Literal(text, quoted):
                fields.add(_expand_tilde(shell, text, quoted, number == 0), quoted)
            case Parameter(quoted=True) if _is_list(part):
                values = _parameter_values(shell, part)
                for count, value in enumerate(values):
                    if count:
                        fields.end()
                    fields.add(value)
                # "${A[@]}" of an empty array is not a word, but `"${A[@]}"` is parsed with an empty literal before it.
                fields.is_word = bool(values) or fields.text != ""
            case _:
                for count, value in enumerate(_part_values(shell, part)):
                    if count:
                        fields.end()
                    _add_split(fields, value, getattr(part, "quoted", False))
    fields.end()
    return fields.done


def _multiplier(word: ShellWord) -> str:
    """Why a word expands to several words: braces, or a pattern of file names. Otherwise ""."""
    text = "".join(
        part.text if isinstance(part, Literal) and not part.quoted else "\0" * bool(getattr(part, "text", "x"))
        for part in word.parts
    )
    return BRACES if _has_braces(text) else FILES if _is_glob(text) else ""


def _has_braces(text: str) -> bool:
    """Whether braces expand to several words: `{a,b}`, `{1..3}`, also inside other braces."""
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


def _expand_tilde(shell: Shell, text: str, quoted: bool, first: bool) -> ShellValue:
    name, slash, path = text.partition("/")
    if quoted or not first or not re.fullmatch(r"~[A-Za-z_+-]?[\w-]*", name):
        return ShellValue(text)
    home = shell.lookup("HOME")
    if name != "~" or home is None or not home.values:
        return ShellValue(text, (Gap(name, "the home directory is unknown"),))
    return replace(home.values[0], text=home.values[0].text + slash + path)


def _add_split(fields: _Fields, value: ShellValue, quoted: bool) -> None:
    """Adds a value, split at blanks unless it is quoted. A gap is not split: a word with one stays unknown."""
    blanks = separators(fields.shell)
    if quoted or value.is_unsplit:
        fields.add(value)
        return
    if blanks.startswith("${"):
        fields.add(replace(value, gaps=(*value.gaps, Gap(value.text, "IFS is unknown"))))
        return
    marks = re.escape("".join(blanks.split()))
    if not value.gaps and marks and re.search(rf"^[{marks}]|[{marks}]\s*[{marks}]", value.text):
        fields.add(replace(value, gaps=(Gap(value.text, "IFS splits it into empty words"),)))
        return
    for count, word in enumerate(_split(value, blanks)):
        if count:
            fields.end()
        fields.add(word, quoted=False)


def _split(value: ShellValue, blanks: str) -> list[ShellValue]:
    text = value.text
    if not value.gaps:
        pieces = re.split(f"[{re.escape(blanks)}]+", text) if blanks else [text]
        return [replace(value, text=piece, gaps=(Gap(piece, FILES),) if _is_glob(piece) else ()) for piece in pieces]
    for number, gap in enumerate(value.gaps):
        text = text.replace(gap.source, f"\0{number}\0", 1)
    if blanks.strip() or text.count("\0") != 2 * len(value.gaps) or not any(blank in text for blank in blanks):
        return [value]
    words = []
    for piece in re.split(f"[{re.escape(blanks)}]+", text):
        gaps = tuple(value.gaps[int(number)] for number in re.findall("\0([0-9]+)\0", piece))
        source = re.sub("\0([0-9]+)\0", lambda mark: value.gaps[int(mark[1])].source, piece)
        words.append(replace(value, text=source, gaps=gaps))
    return words


def separators(shell: Shell) -> str:
    """The characters of `$IFS`."""
    variable = shell.variables.get("IFS")
    return variable.values[0].text if variable and variable.values else " \t\n"


def expand_text(shell: Shell, word: ShellWord | None, *, is_pattern: bool = False) -> ShellValue:
    """A word as one text without splitting. Quoted characters of a pattern (`case`, `==`) match literally."""
    if word is None:
        return ShellValue("")
    text, gaps, condition = "", list[Gap](), ""
    for number, part in enumerate(_insert_defaults(shell, word.parts)):
        quoted = getattr(part, "quoted", False)
        if not isinstance(part, Literal):
            values = _part_values(shell, part)
        elif not (quoted or part.split or is_pattern) and _has_braces(part.text):
            values = [unknown_value(part.text, BRACES)]
        else:
            values = [_expand_tilde(shell, part.text, quoted, number == 0)]
        separator = separators(shell)[:1] if isinstance(part, Parameter) and "*" in (part.index, part.name) else " "
        for count, value in enumerate(values):
            piece = re.sub(r"[*?[]", r"[\g<0>]", value.text) if is_pattern and quoted else value.text
            text = join_texts((text, piece), separator if count else "")
            gaps += value.gaps
            condition = condition or value.condition
    if not is_pattern:
        shell.step(len(text))
    return ShellValue(text, tuple(gaps), shell.file, word.line, condition)


def _is_list(part: Parameter) -> bool:
    """Whether a quoted expansion makes a word of each value, as `"${A[@]}"` and `"$@"` do."""
    return not part.length and (part.index == "@" or part.name == "@")


def _part_values(shell: Shell, part: Arithmetic | Substitution | Parameter) -> list[ShellValue]:
    match part:
        case Arithmetic(text, source):
            try:
                return [ShellValue(str(evaluate_arithmetic(shell, text)))]
            except ArithmeticFault as fault:
                return [unknown_value(source, str(fault))]
        case Substitution(readable=False):
            return [unknown_value(part.source, "the output of another command")]
        case Substitution():
            return [shell.run(shell, part)]
    values = _parameter_values(shell, part)
    if not part.quoted or "*" not in (part.index, part.name):
        return values
    text = join_texts((value.text for value in values), separators(shell)[:1])
    return [ShellValue(text, tuple(gap for value in values for gap in value.gaps), condition=_condition(values))]


def _condition(values: Sequence[ShellValue]) -> str:
    return next((value.condition for value in values if value.condition), "")


def _reason(values: Sequence[ShellValue]) -> str:
    first = next(value for value in values if not value.known)
    return "; ".join(gap.why for gap in first.gaps) or first.condition


def evaluate_arithmetic(shell: Shell, text: str) -> int:
    """The value of an arithmetic expression with the shell's variables. Raises ArithmeticFault."""
    # `${A[i]}`, `${#A[@]}` and `$1` are expanded first, as bash does; plain names are left to the expression.
    lexer = Lexer(text, "arithmetic")
    value = expand_text(shell, lexer.word(frozenset())) if re.search(r"\$[^A-Za-z_]", text) else ShellValue(text)
    if not value.known:
        raise ArithmeticFault(_reason([value]))

    def get(name: str) -> int:
        variable = shell.lookup(name)
        if variable is None or not variable.values:
            return 0
        if not variable.values[0].known:
            raise ArithmeticFault(_reason(variable.values))
        try:
            return integer(variable.values[0].text)
        except ArithmeticFault as error:
            raise ArithmeticFault(f"${name} is {variable.values[0].text[:40]!r}, which is not a number") from error

    def put(name: str, number: int) -> None:
        shell.assign(name, ShellValue(str(number), (), shell.file))

    try:
        return calculate(value.text, get, put)
    except ArithmeticFault as fault:
        for match in _ASSIGNED.finditer(value.text):
            shell.forget(match[1] or match[2], str(fault))
        raise


def _parameter_values(shell: Shell, part: Parameter) -> list[ShellValue]:
    """The values of a parameter, after its operator."""
    values = _look_up(shell, part)
    is_every = part.index in ("@", "*")
    if part.indirect:
        return _indirect(shell, part, values)
    if part.length and not all(value.known for value in values or ()):
        return [unknown_value(part.source, "a part of it is unknown")]
    if part.length:
        is_count = is_every or part.name in ("@", "*")
        return [ShellValue(str(len(values or ()) if is_count else len(values[0].text if values else "")))]
    if part.operator in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
        return _assign_default(shell, part, values)
    if values is None and is_every and not shell.unresolved:
        # No array comes from the environment: one that the script does not set is empty.
        shell.empty.setdefault(part.name, str(shell.file or "the text"))
        return []
    if values is None:
        array = shell.variables.get(part.name)
        if part.index and array and array.array and all(value.known for value in array.values):
            return [ShellValue("")]
        return [unknown_value(part.source, UNSET)]
    if not part.operator:
        return values
    variable = shell.lookup(part.name)
    if part.operator == ":" and (part.name in ("@", "*") or (is_every and variable and variable.array)):
        if not all(value.known for value in values):
            return [unknown_value(part.source, _reason(values))]
        if part.name in ("@", "*"):  # word 0 is the script
            values = [ShellValue(str(shell.file or "bash")), *values]
        bounds = _bounds(shell, part, len(values))
        return [unknown_value(part.source, bounds)] if isinstance(bounds, str) else values[bounds]
    return [_apply_operator(shell, part, value) for value in values]


def _bounds(shell: Shell, part: Parameter, length: int) -> slice | str:
    """The slice of `:start:count` for this number of characters or words, or the reason why it is unknown."""
    start_text, colon, count_text = part.argument.partition(":")
    if "?" in part.argument or count_text.strip().startswith("-"):
        return _UNSUPPORTED
    try:
        start = evaluate_arithmetic(shell, start_text)
        count = evaluate_arithmetic(shell, count_text) if colon else length
    except ArithmeticFault as fault:
        return str(fault)
    start += length if start < 0 else 0
    return slice(0, 0) if start < 0 or count < 0 else slice(start, start + count)


def _look_up(shell: Shell, part: Parameter) -> list[ShellValue] | None:
    """The values of a parameter before its operator, or None if it is not set."""
    if part.name in ("@", "*"):
        shell.argument_uses.append(0)
        return list(shell.arguments)
    if part.name.isdecimal():
        return _positional(shell, int(part.name[-9:]))
    if part.name == "#":
        shell.argument_uses.append(0)
        if not all(value.known for value in shell.arguments):
            return [unknown_value(part.source, "the number of arguments is unknown")]
        return [ShellValue(str(len(shell.arguments)))]
    if part.name in ("?", "$", "!", "-", "RANDOM", "SECONDS", "BASHPID"):
        return [unknown_value(part.source, "only the running script knows it")]
    if part.name == "BASH_SOURCE" and part.index not in (None, "0", "@", "*"):
        return [unknown_value(part.source, "ckptkit does not read the files that source this one")]
    if part.name in ("BASH_SOURCE", "PWD") and part.name not in shell.variables:
        path = shell.file if part.name == "BASH_SOURCE" else shell.directory
        return [ShellValue(str(path))] if path else None
    variable = shell.lookup(part.name)
    if variable is None or part.index in ("@", "*"):
        return None if variable is None else list(variable.values)
    return _element(shell, part, variable.values)


def _positional(shell: Shell, number: int) -> list[ShellValue] | None:
    if number == 0:
        return [ShellValue(str(shell.script))] if shell.script else None
    shell.argument_uses.append(number)
    if condition := _condition(shell.arguments[:number]):
        return [unknown_value(f"${number}", condition)]
    if number <= len(shell.arguments):
        return [shell.arguments[number - 1]]
    # A function has no other arguments; a script may be started with more than we know.
    return [ShellValue("")] if shell.locals else None


def _element(shell: Shell, part: Parameter, values: Sequence[ShellValue]) -> list[ShellValue] | None:
    try:
        index = 0 if part.index is None else evaluate_arithmetic(shell, part.index)
    except ArithmeticFault as fault:
        return [unknown_value(part.source, str(fault))]
    # An unknown value may be several elements.
    before = values[:index] if index >= 0 else values
    if any(value.condition for value in values[: index + 1]) or not all(value.known for value in before):
        return [unknown_value(part.source, _reason(values))]
    if index < -len(values):
        shell.unresolved[f"{shell.file or 'the text'}: {part.source}: bash stops, since the element is missing"] = None
    return [values[index]] if -len(values) <= index < len(values) else None


def _indirect(shell: Shell, part: Parameter, values: list[ShellValue] | None) -> list[ShellValue]:
    """`${!A[@]}`, the indices of an array, and `${!A}`, the value of the variable with the name in `$A`."""
    if part.index in ("@", "*"):
        if not all(value.known for value in values or ()):
            return [unknown_value(part.source, "the elements of the array are unknown")]
        return [ShellValue(str(index)) for index in range(len(values or ()))]
    name = values[0] if values else None
    if name is None or not name.known or not _NAMED.fullmatch(name.text):
        why = "the name of the variable is unknown"
        shell.unresolved[f"{shell.file or 'the text'}: {part.source}: {why}, and bash stops if it is not one"] = None
        return [unknown_value(part.source, why)]
    return _parameter_values(shell, replace(part, name=name.text, index=None, indirect=False))


def _is_empty(part: Parameter, values: Sequence[ShellValue] | None) -> bool | None:
    """Whether `${A:-default}` and similar operators see the parameter as unset, or None if that is unknown."""
    if values and all(value.condition for value in values):
        return None
    if not values or not part.operator.startswith(":"):
        return not values
    if any(value.text and value.known for value in values):
        return False
    return None if any(not value.known for value in values) else len(values) == 1 and not values[0].text


def _insert_defaults(shell: Shell, parts: Sequence[Part]) -> Iterator[Part]:
    """The parts of a word, with the parts of the default in place of `${A:-default}` and `${A:+default}`."""
    for part in parts:
        match part:
            case Parameter(operator=operator, length=False, indirect=False) if operator in _DEFAULTS and _is_empty(
                part, _look_up(shell, part)
            ) is (operator[-1] == "-"):
                default = _argument(shell, part)
                for inner in _insert_defaults(shell, default):
                    yield replace(inner, split=True) if isinstance(inner, Literal) and not inner.quoted else inner
                if part.quoted and not default:
                    yield Literal("", True)
            case _:
                yield part


def _argument(shell: Shell, part: Parameter) -> tuple[Part, ...]:
    return Lexer(part.argument, str(shell.file or "the command line")).argument(part.quoted)


def _assign_default(shell: Shell, part: Parameter, values: list[ShellValue] | None) -> list[ShellValue]:
    """`${A:=default}` and `${A:?message}`, and the value of a parameter that needs no default."""
    if not (empty := _is_empty(part, values)):
        condition = _condition(values or ()) if empty is None else ""
        return [unknown_value(part.source, condition)] if condition else list(values or ())
    if part.operator[-1] == "+":
        return [] if _is_list(part) else [ShellValue("")]
    if part.operator[-1] == "?":
        return [unknown_value(part.source, "the script stops, since it is not set")]
    default = expand_text(shell, ShellWord(_argument(shell, part), 0))
    shell.assign(part.name, default)
    return [ShellValue(default.text, default.gaps, condition=default.condition)]


def _apply_operator(shell: Shell, part: Parameter, value: ShellValue) -> ShellValue:
    """`${A#pattern}`, `${A/pattern/text}`, `${A:1:2}`, `${A,,}`."""
    if value.gaps:
        return ShellValue(part.source, value.gaps)
    trims = part.operator in ("#", "##", "%", "%%")
    shell.step(min(len(value.text), 1_000) ** 2 // 10 if trims else len(value.text))
    if part.operator == ":":
        bounds = _bounds(shell, part, len(value.text))
        changed = None if isinstance(bounds, str) else value.text[bounds]
    elif trims:
        pattern = expand_text(shell, ShellWord(_argument(shell, replace(part, quoted=False)), 0), is_pattern=True)
        changed = apply_operator(value.text, part.operator, pattern.text) if pattern.known else None
    else:
        changed = apply_operator(value.text, part.operator, part.argument)
    return unknown_value(part.source, _UNSUPPORTED) if changed is None else replace(value, text=changed)


def resolve_path(shell: Shell, text: str) -> Path | None:
    """A path of the script in its working directory, or None if that is unknown."""
    return Path(text) if Path(text).is_absolute() else None if shell.directory is None else shell.directory / text
