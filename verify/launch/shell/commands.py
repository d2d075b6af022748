"""Simulates commands with a known effect on variables and output, such as echo, printf, cd and read."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.verify.launch.python.model_args import TOOL, model_arguments
from ckptkit.verify.launch.python.values import TooMuchError, Unknown, split_pieces
from ckptkit.verify.launch.shell.arithmetic import ArithmeticFault
from ckptkit.verify.launch.shell.expand import evaluate_arithmetic, resolve_path, separators
from ckptkit.verify.launch.shell.values import Gap, Shell, ShellValue, Variable, join_texts, unknown_value

Result = bool | None  # whether a command succeeded, or None if that is unknown
Effect = tuple[bool, Result]  # whether the effect of a command is known, and its result
Command = Callable[[Shell, list[ShellValue], int], Effect]
_FORMAT = re.compile(r"%(?:(%)|([sdiq])|(0?\d*[sd]))")
_MAX_NUMBERS = 4096  # that `seq` writes
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


def run_known_command(shell: Shell, words: Sequence[ShellValue], here: ShellValue | None, line: int) -> Effect:
    """Applies the effect of a command to the shell, if it is known. `here` is the text on its standard input."""
    name, arguments = os.path.basename(words[0].text), list(words[1:])
    if (act := _COMMANDS.get(name)) is not None:
        return act(shell, arguments, line)
    if re.fullmatch(r"python[\d.]*", name) and len(arguments) == 2 and arguments[0].text.endswith(f"/{TOOL}"):
        return _model_arguments(shell, *arguments)
    if name == "cat" and not arguments and here is not None:
        _write(shell, here.text, here.gaps)
        return True, True
    if name in ("read", "mapfile", "readarray"):
        return _read(shell, name, arguments, here, line)
    return False, None


def _model_arguments(shell: Shell, tool: ShellValue, model: ShellValue) -> Effect:
    """`python3 .../model_args_utils.py NAME` of miles: reads its files."""
    path = resolve_path(shell, tool.text) if tool.known and model.known else None
    if path is None or not path.is_file():
        return False, None
    unknown = {name: Unknown(f"${name}", "an unknown variable") for name in shell.exported}
    known = {name: value.text for name, value in shell.exported.items() if value.known}
    arguments = model_arguments(path, model.text, {**shell.environment, **unknown, **known})
    if isinstance(arguments, str):
        _write(shell, f"{arguments}\n")
        return True, True
    piece = next(piece for piece in split_pieces(arguments) if not isinstance(piece, str))
    source = f"$({TOOL} {model.text})"
    _write(shell, source, (Gap(source, piece.why),))
    return True, None


def _write(shell: Shell, text: str, gaps: tuple[Gap, ...] = ()) -> None:
    if shell.output is not None:
        shell.output.append(ShellValue(text, gaps))


def _join_words(words: Sequence[ShellValue]) -> tuple[str, tuple[Gap, ...]]:
    """Words with blanks between them, and their gaps; a word with a condition is also one."""
    conditional = (Gap(word.text, word.condition) for word in words if word.condition)
    return join_texts((word.text for word in words), " "), (*(gap for word in words for gap in word.gaps), *conditional)


def _echo(shell: Shell, words: list[ShellValue], _: int) -> Effect:
    newline, escapes = True, False
    while words and re.fullmatch(r"-[neE]+", words[0].text):
        option = words.pop(0).text
        newline &= "n" not in option
        escapes = "e" in option
    text, gaps = _join_words(words)
    if escapes and "\\" in text:
        return False, True
    _write(shell, text + "\n" * newline, gaps)
    return True, True


def _printf(shell: Shell, words: list[ShellValue], line: int) -> Effect:
    name = None
    if len(words) > 2 and words[0].text == "-v":
        name, words = words[1].text, words[2:]
    if not words:
        return True, False
    if words[0].text == "--":
        words = words[1:]
    gaps = _join_words(words)[1]
    text = None if gaps else _format(words[0].text, [word.text for word in words[1:]])
    unsupported = (Gap("printf", "its text is unknown"),) if text is None else ()
    if name is None:
        _write(shell, "printf" if text is None else text, unsupported)
    elif re.fullmatch(r"\w+", name):
        shell.assign(name, ShellValue(f"${{{name}}}" if text is None else text, gaps or unsupported, shell.file, line))
    return True, True


def _format(form: str, arguments: list[str]) -> str | None:
    """The output of printf, which repeats its format for more arguments, or None for an unsupported format."""
    if re.search(r"\\[^nt\\]", form):
        return None
    form = re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), form)
    if re.search(r"%(?![sdiq]|0?\d*[sd])", form.replace("%%", "")):
        return None
    left, text = list(arguments), ""
    for _ in range(len(arguments) + 1):
        text = join_texts((text, _FORMAT.sub(lambda match: "%" if match[1] else _convert(match[0], left), form)))
        if not left or "%" not in form.replace("%%", ""):
            return text
    return None


def _convert(directive: str, left: list[str]) -> str:
    """The first of the arguments that are left, by a directive such as `%03d`."""
    argument = left.pop(0) if left else ""
    width, kind = directive[1:-1], directive[-1]
    if kind == "q":
        return shlex.quote(argument)
    if len(width) > 4:
        raise TooMuchError("printf with a width of more than 9999")
    if kind == "s":
        return f"%{width}s" % argument
    return f"%{width}d" % (int(argument) if re.fullmatch(r"-?\d{1,18}", argument) else 0)


def _cd(shell: Shell, words: list[ShellValue], _: int) -> Effect:
    words = [word for word in words if word.text not in ("--", "-P", "-L")]
    known = len(words) == 1 and words[0].known and words[0].text != "-"
    path = resolve_path(shell, words[0].text) if known else None
    shell.directory = Path(os.path.abspath(path)) if path else None
    return True, True if known else None


def _pwd(shell: Shell, _words: list[ShellValue], _: int) -> Effect:
    gap = () if shell.directory else (Gap("$(pwd)", "the directory is unknown"),)
    _write(shell, f"{shell.directory or '$(pwd)'}\n", gap)
    return True, True


def _path(change: Callable[[str], str], suffixes: int = 0) -> Command:
    """A command that writes its first argument, changed, without the suffix in its second argument."""

    def act(shell: Shell, words: list[ShellValue], _: int) -> Effect:
        words = [word for word in words if not word.text.startswith("-")]
        if not words:
            return True, False
        if len(words) not in (1, suffixes + 1) or not all(word.known for word in words):
            return False, None
        text = change(words[0].text)
        suffix = words[1].text if words[1:] else ""
        _write(shell, (text if text == suffix else text.removesuffix(suffix)) + "\n")
        return True, True

    return act


def filter_text(words: Sequence[ShellValue], text: str) -> str | None:
    """The output of `cat`, or of `sed` with plain text, for this input, or None for other commands."""
    if words[0].text == "cat" and not words[1:]:
        return text
    scripts = [word.text for word in words[1:] if word.text not in ("-e", "-E", "-r")]
    if words[0].text != "sed" or len(scripts) != 1 or not all(word.known for word in words):
        return None
    script = scripts[0]
    while script:
        match = re.match(r"s([^\w\s;])((?:(?!\1).)+)\1((?:(?!\1).)*)\1(g?) *(?:; *|$)", script)
        if match is None or set("\\.*[]^$+?(){}|").intersection(match[2]) or set("\\&").intersection(match[3]):
            return None
        text = "\n".join(line.replace(match[2], match[3], -1 if match[4] else 1) for line in text.split("\n"))
        script = script[match.end() :]
    return text


def _realpath(shell: Shell, words: list[ShellValue], _: int) -> Effect:
    """`realpath` and `readlink -f`."""
    words = [word for word in words if not word.text.startswith("-")]
    path = resolve_path(shell, words[0].text) if len(words) == 1 and words[0].known else None
    if path is None:
        return False, None
    _write(shell, f"{os.path.realpath(path)}\n")
    return True, True


def _seq(shell: Shell, words: list[ShellValue], _: int) -> Effect:
    """`seq LAST`, `seq FIRST LAST` and `seq FIRST STEP LAST` of integers."""
    if len(words) not in (1, 2, 3) or not all(word.known and re.fullmatch(r"-?\d{1,6}", word.text) for word in words):
        return False, None
    numbers = [int(word.text) for word in words]
    first, step = numbers[0] if words[1:] else 1, numbers[1] if words[2:] else 1
    values = range(first, numbers[-1] + (1 if step > 0 else -1), step) if step else range(0)
    if not step or len(values) > _MAX_NUMBERS:
        return False, None
    _write(shell, "".join(f"{value}\n" for value in values))
    return True, True


def _read(shell: Shell, command: str, words: Sequence[ShellValue], here: ShellValue | None, line: int) -> Effect:
    """`read -ra NAME <<< TEXT`; any other input makes the names unknown."""
    flags = "".join(word.text[1:] for word in words if word.text.startswith("-"))
    names = [word.text for word in words if re.fullmatch(r"[A-Za-z_]\w*", word.text)]
    if flags == "rd" and [word.text for word in words[:-1]] == ["-r", "-d", ""] and here is not None and names:
        # Reads up to a NUL, and so all of the text.
        shell.assign(names[0], ShellValue(here.text.strip(" \t\n"), here.gaps, shell.file, line))
        return True, False
    if here is None or here.gaps or command != "read" or set(flags) - {"r", "a"} or len(names) != 1:
        why = f"{command} at {shell.place(line)}: " + (here.gaps[0].why if here and here.gaps else "its input")
        for name in names:
            shell.forget(name, why)
            if command != "read" or "a" in flags:
                shell.assign_array(name, (unknown_value(f"${{{name}[@]}}", why, shell.file, line),))
        return True, None
    text = here.text.split("\n", 1)[0]
    blanks = separators(shell)
    pieces = re.split(f"[{re.escape(blanks)}]", text)
    if ("r" not in flags and "\\" in text) or (blanks.strip() and "" in pieces):
        shell.forget(names[0], f"read at {shell.place(line)} of a text with escapes or empty fields")
        return True, True
    if "a" in flags:
        pieces = [piece for piece in pieces if piece]
        shell.assign_array(names[0], tuple(ShellValue(piece, (), shell.file, line) for piece in pieces))
    else:
        shell.assign(names[0], ShellValue(text.strip(), (), shell.file, line))
    return True, True


def _unset(shell: Shell, words: list[ShellValue], line: int) -> Effect:
    functions = bool(words) and words[0].text == "-f"
    for word in words:
        element = re.fullmatch(r"(\w+)\[.*\]", word.text, re.DOTALL)
        if not word.known:
            shell.report(line, "unset of an unknown name")
        elif element and shell.lookup(element[1]) is None:
            continue
        elif element:
            shell.forget(element[1], f"unset of an element at {shell.place(line)}")
        elif functions or (word.text in shell.functions and shell.lookup(word.text) is None):
            shell.functions.pop(word.text, None)
        else:
            shell.drop(word.text)
    return True, True


def _let(shell: Shell, words: list[ShellValue], _: int) -> Effect:
    value = 0
    for word in words:
        try:
            if not word.known or "$(" in word.text:
                raise ArithmeticFault("an expression with an unknown variable or the output of a command")
            value = evaluate_arithmetic(shell, word.text)
        except ArithmeticFault as fault:
            if match := re.match(r"\s*([A-Za-z_]\w*)", word.text):
                shell.forget(match[1], str(fault))
            return True, None
    return True, value != 0


def _export(shell: Shell, words: list[ShellValue], _: int) -> Effect:
    """`export` of variables that are already assigned."""
    for word in words:
        if not word.text.startswith("-"):
            shell.variables[word.text] = replace(shell.lookup(word.text) or Variable(()), exported=True)
    return True, True


def _shift(shell: Shell, words: list[ShellValue], _: int) -> Effect:
    count = int(words[0].text[-9:]) if words and words[0].text.isdecimal() else 1
    known = all(value.known for value in shell.arguments)
    if known and count > len(shell.arguments):
        return True, False
    shell.arguments = shell.arguments[count:]
    return True, True if known else None


def _set(shell: Shell, words: list[ShellValue], _: int) -> Effect:
    """`set -- words` sets the positional parameters; `-e` and `-o NAME` set errexit and pipefail. Ignores the rest."""
    is_name = False  # of an option, after `-o` or `-euo`
    for number, word in enumerate(words):
        if is_name:
            if word.text in ("errexit", "pipefail"):
                setattr(shell, word.text, words[number - 1].text[0] == "-")
            is_name = False
            continue
        if word.text == "--" or word.text[:1] not in "-+":
            shell.arguments = tuple(words[number + (word.text == "--") :])
            shell.argument_uses.append(0)
            break
        if "e" in word.text:
            shell.errexit = word.text[0] == "-"
        is_name = "o" in word.text
    return True, True


def _shopt(shell: Shell, words: list[ShellValue], line: int) -> Effect:
    """`shopt`: two of its options would change results of this package."""
    for word in words:
        if word.text in ("nocasematch", "lastpipe"):
            shell.report(line, f"ckptkit does not follow shopt {word.text}")
    return True, True


_COMMANDS: dict[str, Command] = {
    "echo": _echo,
    "printf": _printf,
    "cd": _cd,
    "pwd": _pwd,
    "seq": _seq,
    "dirname": _path(lambda path: os.path.dirname(path.rstrip("/")) or ("/" if path.startswith("/") else ".")),
    "basename": _path(lambda path: os.path.basename(path.rstrip("/")), suffixes=1),
    **dict.fromkeys(("realpath", "readlink"), _realpath),
    "unset": _unset,
    "export": _export,
    "set": _set,
    "shift": _shift,
    "let": _let,
    "shopt": _shopt,
    "wait": lambda *_: (True, None),
    "false": lambda *_: (True, False),
    **dict.fromkeys(("declare", "typeset", "readonly", "local", "trap", "sleep", ":", "true"), lambda *_: (True, True)),
}
