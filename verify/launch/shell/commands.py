"""What the few commands do whose effect on variables and output is known: echo, printf, cd, read and their like."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckptkit.verify.launch.python.model_args import TOOL, model_arguments
from ckptkit.verify.launch.python.values import Unknown, pieces_of
from ckptkit.verify.launch.shell.arithmetic import ArithmeticFault
from ckptkit.verify.launch.shell.expand import calculate_in, script_directory, separators, unknown
from ckptkit.verify.launch.shell.values import Gap, Shell, ShellValue, TooMuchError, Variable, together

# True or False: whether the command succeeded; None: nobody knows.
Result = bool | None
_FORMAT = re.compile(r"%(?:(%)|([sdiq])|(0?\d*[sd]))")
_MAX_NUMBERS = 4096  # that `seq` writes
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


def known_command(shell: Shell, words: Sequence[ShellValue], here: ShellValue | None, line: int) -> tuple[bool, Result]:
    """Does what a command does. Returns whether its effect is known, and whether it succeeded."""
    name, arguments = os.path.basename(words[0].text), list(words[1:])
    if (act := _COMMANDS.get(name)) is not None:
        return act(shell, arguments, line)
    if re.fullmatch(r"python[\d.]*", name) and len(arguments) == 2 and arguments[0].text.endswith(f"/{TOOL}"):
        return _model_arguments(shell, *arguments)
    if name == "cat" and not arguments and here is not None:
        _say(shell, here.text, here.gaps)
        return True, True
    if name in ("read", "mapfile", "readarray"):
        return _read(shell, name, arguments, here, line)
    return False, None


def _model_arguments(shell: Shell, tool: ShellValue, model: ShellValue) -> tuple[bool, Result]:
    """`python3 .../model_args_utils.py NAME` of miles, whose files are read."""
    path = script_directory(shell, tool.text) if tool.known and model.known else None
    if path is None or not path.is_file():
        return False, None
    environment: dict[str, Any] = dict(shell.environment)
    for name, value in shell.exported.items():
        environment[name] = value.text if value.known else Unknown(f"${name}", "a variable that is not known")
    found = model_arguments(path, model.text, environment)
    if isinstance(found, str):
        _say(shell, f"{found}\n")
        return True, True
    gap = next(piece for piece in pieces_of(found) if not isinstance(piece, str))
    if shell.output is not None:
        shell.output.append(unknown(f"$({TOOL} {model.text})", gap.why))
    return True, None


def _say(shell: Shell, text: str, gaps: tuple[Gap, ...] = ()) -> None:
    if shell.output is not None:
        shell.output.append(ShellValue(text, gaps))


def _texts(words: Sequence[ShellValue]) -> tuple[str, tuple[Gap, ...]]:
    """Words joined by blanks; one that may be missing is a gap too."""
    maybe = tuple(Gap(word.text, word.maybe) for word in words if word.maybe)
    return together((word.text for word in words), " "), (*(gap for word in words for gap in word.gaps), *maybe)


def _echo(shell: Shell, words: list[ShellValue], _: int) -> tuple[bool, Result]:
    newline = True
    escapes = False
    while words and re.fullmatch(r"-[neE]+", words[0].text):
        option = words.pop(0).text
        newline &= "n" not in option
        escapes = "e" in option
    text, gaps = _texts(words)
    if escapes and "\\" in text:
        return False, True
    _say(shell, text + "\n" * newline, gaps)
    return True, True


def _printf(shell: Shell, words: list[ShellValue], line: int) -> tuple[bool, Result]:
    name = None
    if len(words) > 2 and words[0].text == "-v":
        name, words = words[1].text, words[2:]
    if not words:
        return True, False
    if words[0].text == "--":
        words = words[1:]
    gaps = _texts(words)[1]
    text = None if gaps else _formatted(words[0].text, [word.text for word in words[1:]])
    value = ShellValue(text, (), shell.file, line) if text is not None else unknown("printf", "its text is not known")
    if name is None:
        _say(shell, value.text, value.gaps)
    elif re.fullmatch(r"\w+", name):
        shell.assign(
            name, value if text is not None else ShellValue(f"${{{name}}}", gaps or value.gaps, shell.file, line)
        )
    return True, True


def _formatted(form: str, arguments: list[str]) -> str | None:
    """What printf writes; None for a format that is not known. The format is used again while arguments are left."""
    if re.search(r"\\[^nt\\]", form):
        return None
    form = re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), form)
    if re.search(r"%(?![sdiq]|0?\d*[sd])", form.replace("%%", "")):
        return None
    left, text = list(arguments), ""
    for _ in range(len(arguments) + 1):
        text = together((text, _FORMAT.sub(lambda found: "%" if found[1] else _converted(found[0], left), form)))
        if not left or "%" not in form.replace("%%", ""):
            return text
    return None


def _converted(directive: str, left: list[str]) -> str:
    given = left.pop(0) if left else ""
    if directive[-1] == "q":
        return shlex.quote(given)
    width, kind = directive[1:-1], directive[-1]
    if len(width) > 4:
        raise TooMuchError("printf with a width of more than 9999")
    if kind == "s":
        return f"%{width}s" % given
    return f"%{width}d" % (int(given) if re.fullmatch(r"-?\d{1,18}", given) else 0)


def _cd(shell: Shell, words: list[ShellValue], _: int) -> tuple[bool, Result]:
    words = [word for word in words if word.text not in ("--", "-P", "-L")]
    known = len(words) == 1 and words[0].known and words[0].text != "-"
    shell.directory = script_directory(shell, words[0].text) if known else None
    if shell.directory is not None:
        shell.directory = Path(os.path.abspath(shell.directory))
    return True, True if known else None


def _pwd(shell: Shell, _words: list[ShellValue], _: int) -> tuple[bool, Result]:
    gap = () if shell.directory else (Gap("$(pwd)", "the directory is not known"),)
    _say(shell, f"{shell.directory or '$(pwd)'}\n", gap)
    return True, True


def _path(
    change: Callable[[str], str], suffixes: int = 0
) -> Callable[[Shell, list[ShellValue], int], tuple[bool, Result]]:
    """A command that writes a path made of its one argument, less a suffix where a second one gives it."""

    def act(shell: Shell, words: list[ShellValue], _: int) -> tuple[bool, Result]:
        words = [word for word in words if not word.text.startswith("-")]
        if not words:
            return True, False
        if len(words) not in (1, suffixes + 1) or not all(word.known for word in words):
            return False, None
        text = change(words[0].text)
        cut = words[1].text if words[1:] else ""
        _say(shell, (text if text == cut else text.removesuffix(cut)) + "\n")
        return True, True

    return act


def filtered(words: Sequence[ShellValue], text: str) -> str | None:
    """What a command writes that reads this text; None where it is not known: `cat`, and `sed` of plain text."""
    if words[0].text == "cat" and not words[1:]:
        return text
    scripts = [word.text for word in words[1:] if word.text not in ("-e", "-E", "-r")]
    if words[0].text != "sed" or len(scripts) != 1 or not all(word.known for word in words):
        return None
    rest = scripts[0]
    while rest:
        found = re.match(r"s([^\w\s;])((?:(?!\1).)+)\1((?:(?!\1).)*)\1(g?) *(?:; *|$)", rest)
        if found is None or set("\\.*[]^$+?(){}|").intersection(found[2]) or set("\\&").intersection(found[3]):
            return None
        text = "\n".join(line.replace(found[2], found[3], -1 if found[4] else 1) for line in text.split("\n"))
        rest = rest[found.end() :]
    return text


def _absolute(shell: Shell, words: list[ShellValue], _: int) -> tuple[bool, Result]:
    """`realpath` and `readlink -f`."""
    words = [word for word in words if not word.text.startswith("-")]
    path = script_directory(shell, words[0].text) if len(words) == 1 and words[0].known else None
    if path is None:
        return False, None
    _say(shell, f"{os.path.realpath(path)}\n")
    return True, True


def _seq(shell: Shell, words: list[ShellValue], _: int) -> tuple[bool, Result]:
    """`seq LAST`, `seq FIRST LAST` and `seq FIRST STEP LAST` of whole numbers."""
    if len(words) not in (1, 2, 3) or not all(word.known and re.fullmatch(r"-?\d{1,6}", word.text) for word in words):
        return False, None
    numbers = [int(word.text) for word in words]
    first, step = numbers[0] if words[1:] else 1, numbers[1] if words[2:] else 1
    values = range(first, numbers[-1] + (1 if step > 0 else -1), step) if step else range(0)
    if not step or len(values) > _MAX_NUMBERS:
        return False, None
    _say(shell, "".join(f"{value}\n" for value in values))
    return True, True


def _read(
    shell: Shell, command: str, words: Sequence[ShellValue], here: ShellValue | None, line: int
) -> tuple[bool, Result]:
    """`read -ra NAME <<< TEXT`; names that are read from anything else become unknown."""
    flags = "".join(word.text[1:] for word in words if word.text.startswith("-"))
    names = [word.text for word in words if re.fullmatch(r"[A-Za-z_]\w*", word.text)]
    if flags == "rd" and [word.text for word in words[:-1]] == ["-r", "-d", ""] and here is not None and names:
        # The whole text, up to a character that it has not.
        shell.assign(names[0], ShellValue(here.text.strip(" \t\n"), here.gaps, shell.file, line))
        return True, False
    if here is None or here.gaps or command != "read" or set(flags) - {"r", "a"} or len(names) != 1:
        why = f"{command} at {shell.place(line)}: " + (here.gaps[0].why if here and here.gaps else "what it reads")
        for name in names:
            shell.forget(name, why)
            if command != "read" or "a" in flags:
                shell.assign_array(
                    name, (ShellValue(f"${{{name}[@]}}", (Gap(f"${{{name}[@]}}", why),), shell.file, line),)
                )
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


def _unset(shell: Shell, words: list[ShellValue], line: int) -> tuple[bool, Result]:
    functions = bool(words) and words[0].text == "-f"
    for word in words:
        element = re.fullmatch(r"(\w+)\[.*\]", word.text, re.DOTALL)
        if not word.known:
            shell.unresolved[f"{shell.place(line)}: unset of a name that is not known"] = None
        elif element and shell.lookup(element[1]) is None:
            continue
        elif element:
            shell.forget(element[1], f"unset of an element at {shell.place(line)}")
        elif functions or (word.text in shell.functions and shell.lookup(word.text) is None):
            shell.functions.pop(word.text, None)
        else:
            shell.drop(word.text)
    return True, True


def _let(shell: Shell, words: list[ShellValue], _: int) -> tuple[bool, Result]:
    value = 0
    for word in words:
        try:
            if not word.known or "$(" in word.text:
                raise ArithmeticFault("an expression that is not known")
            value = calculate_in(shell, word.text)
        except ArithmeticFault as fault:
            if found := re.match(r"\s*([A-Za-z_]\w*)", word.text):
                shell.forget(found[1], str(fault))
            return True, None
    return True, value != 0


def _export(shell: Shell, words: list[ShellValue], _: int) -> tuple[bool, Result]:
    """`export`, whose assignments are made before."""
    for word in words:
        known = shell.lookup(word.text) or Variable(())
        if not word.text.startswith("-"):
            shell.variables[word.text] = Variable(known.values, known.array, True)
    return True, True


def _shift(shell: Shell, words: list[ShellValue], _: int) -> tuple[bool, Result]:
    count = int(words[0].text[-9:]) if words and words[0].text.isdecimal() else 1
    known = all(value.known for value in shell.arguments)
    if known and count > len(shell.arguments):
        return True, False
    shell.arguments = shell.arguments[count:]
    return True, True if known else None


def _set(shell: Shell, words: list[ShellValue], _: int) -> tuple[bool, Result]:
    """`set -- words` gives the positional parameters, `-e` makes failures end the script; others are passed over."""
    named = False
    for number, word in enumerate(words):
        if named:
            # The name of an option, behind `-o`, `-euo` and their like.
            on = words[number - 1].text[0] == "-"
            shell.errexit = on if word.text == "errexit" else shell.errexit
            shell.pipefail = on if word.text == "pipefail" else shell.pipefail
            named = False
            continue
        if word.text == "--" or word.text[:1] not in "-+":
            shell.arguments = tuple(words[number + (word.text == "--") :])
            shell.argument_uses.append(0)
            break
        if "e" in word.text:
            shell.errexit = word.text[0] == "-"
        named = "o" in word.text
    return True, True


def _shopt(shell: Shell, words: list[ShellValue], line: int) -> tuple[bool, Result]:
    """`shopt`, of whose options two change what is read here."""
    for word in words:
        if word.text in ("nocasematch", "lastpipe"):
            shell.unresolved[f"{shell.place(line)}: shopt {word.text} is not followed"] = None
    return True, True


def _nothing(result: Result) -> Callable[[Shell, list[ShellValue], int], tuple[bool, Result]]:
    return lambda *_: (True, result)


_COMMANDS: dict[str, Callable[[Shell, list[ShellValue], int], tuple[bool, Result]]] = {
    "echo": _echo,
    "printf": _printf,
    "cd": _cd,
    "pwd": _pwd,
    "seq": _seq,
    "dirname": _path(lambda path: os.path.dirname(path.rstrip("/")) or ("/" if path.startswith("/") else ".")),
    "basename": _path(lambda path: os.path.basename(path.rstrip("/")), suffixes=1),
    "realpath": _absolute,
    "readlink": _absolute,
    "unset": _unset,
    "export": _export,
    "set": _set,
    "shift": _shift,
    "let": _let,
    "shopt": _shopt,
    "wait": _nothing(None),
    "false": _nothing(False),
    **dict.fromkeys(("declare", "typeset", "readonly", "local", "trap", "sleep", ":", "true"), _nothing(True)),
}
