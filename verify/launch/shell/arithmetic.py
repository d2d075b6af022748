"""Integer arithmetic as bash does it."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(?:(\d+#\w+|0[xX][0-9a-fA-F]+|\d+)|\$?\{?([A-Za-z_]\w*)\}?|(\*\*|\+\+|--|<<|>>|[<>=!]=|&&|\|\||[-+*/%&|^]=|.))"
)
_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a or b))},
    {"&&": lambda a, b: int(bool(a and b))},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge},
    {"<<": lambda a, b: a << min(b, 63), ">>": lambda a, b: a >> min(b, 63)},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": lambda a, b: _quotient(a, b), "%": lambda a, b: a - b * _quotient(a, b)},
)
_PREFIXES: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "~": operator.invert,
    "!": lambda value: int(not value),
}
_MAX_INTEGER = 2**63


class ArithmeticFault(Exception):  # noqa: N818 - not an error of the program: the caller reports an unknown value
    """The value of an expression is unknown; the message is the reason."""


def _quotient(left: int, right: int) -> int:
    if right == 0:
        raise ArithmeticFault("it divides by zero")
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


class _Expression:
    """The tokens of an expression with the current position; `get` and `put` read and set variables."""

    def __init__(self, text: str, get: Callable[[str], int], put: Callable[[str, int], None]) -> None:
        self.tokens = [*(match.groups("") for match in _TOKEN.finditer(text.strip())), ("", "", "")]
        self.position = 0
        self.get, self.put = get, put
        self.depth = 0
        self.skipped = 0  # number of enclosing parts that are not evaluated, such as the right side of `0 &&`

    def accept(self, *symbols: str) -> str:
        symbol = self.tokens[self.position][2]
        if symbol not in symbols:
            return ""
        self.position += 1
        return symbol

    def comma(self) -> int:
        value = self.ternary()
        while self.accept(","):
            value = self.ternary()
        return value

    def ternary(self) -> int:
        self.depth += 1
        if self.depth > 50:
            raise ArithmeticFault("it is nested too deeply")
        value = self.binary(0)
        if self.accept("?"):
            then = self.unless(not value, self.ternary)
            if not self.accept(":"):
                raise ArithmeticFault("? without :")
            otherwise = self.unless(bool(value), self.ternary)
            value = then if value else otherwise
        self.depth -= 1
        return value

    def unless(self, skipped: bool, part: Callable[[], int]) -> int:
        """The value of a part, without its assignments if it is `skipped`."""
        self.skipped += skipped
        value = part()
        self.skipped -= skipped
        return value

    def binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self.power()
        value = self.binary(level + 1)
        while symbol := self.accept(*_LEVELS[level]):
            decided = bool(value) if symbol == "||" else not value if symbol == "&&" else False
            right = self.unless(decided, lambda: self.binary(level + 1))
            if self.skipped and symbol in ("/", "%") and not right:
                right = 1
            value = self.limited(int(_LEVELS[level][symbol](value, right)))
        return value

    def power(self) -> int:
        value = self.unary()
        if self.accept("**"):
            exponent = self.power()
            if not 0 <= exponent < 64:
                raise ArithmeticFault("its exponent is out of range")
            value = self.limited(value**exponent)
        return value

    def unary(self) -> int:
        if symbol := self.accept(*_PREFIXES):
            return _PREFIXES[symbol](self.unary())
        if symbol := self.accept("++", "--"):
            if not (name := self.tokens[self.position][1]):
                raise ArithmeticFault("++ or -- without a name")
            self.position += 1
            return self.set(name, self.get(name) + (1 if symbol == "++" else -1))
        if not self.accept("("):
            return self.operand()
        value = self.comma()
        if not self.accept(")"):
            raise ArithmeticFault("( is never closed")
        return value

    def operand(self) -> int:
        number, name, symbol = self.tokens[self.position]
        if not number and not name:
            raise ArithmeticFault(f"unexpected {symbol!r}" if symbol else "it ends too early")
        self.position += 1
        if number:
            return _number(number)
        if symbol := self.accept("=", "+=", "-=", "*=", "/=", "%="):
            value = self.ternary()
            simple = {"+": _LEVELS[8]["+"], "-": _LEVELS[8]["-"], **_LEVELS[9]}
            return self.set(name, value if symbol == "=" else int(simple[symbol[0]](self.get(name), value)))
        before = self.get(name)
        if symbol := self.accept("++", "--"):
            self.set(name, before + (1 if symbol == "++" else -1))
        return before

    def set(self, name: str, value: int) -> int:
        if not self.skipped:
            self.put(name, self.limited(value))
        return value

    def limited(self, value: int) -> int:
        if not -_MAX_INTEGER <= value < _MAX_INTEGER:
            raise ArithmeticFault("it does not fit into 64 bits")
        return value


def integer(text: str) -> int:
    """The value of a variable, 0 for empty text. Raises ArithmeticFault for text that is not a number."""
    found = re.fullmatch(r"\s*([-+]?)(0[xX][0-9a-fA-F]+|[0-9]+)\s*", text)
    if found is None:
        if not text.strip():
            return 0
        raise ArithmeticFault(f"{text[:40]!r} is not a number")
    return -_number(found[2]) if found[1] == "-" else _number(found[2])


def _number(text: str) -> int:
    base, sharp, digits = text.partition("#")
    try:
        if sharp:
            return int(digits, int(base))
        return int(text, 16) if text[:2].lower() == "0x" else int(text, 8 if text[0] == "0" and text != "0" else 10)
    except ValueError as error:
        raise ArithmeticFault(f"{text} is not a number") from error


def calculate(text: str, get: Callable[[str], int], put: Callable[[str, int], None]) -> int:
    """The value of an expression; `get` and `put` read and set its variables. Raises ArithmeticFault."""
    if not text.strip():
        return 0
    if len(text) > 10_000:
        raise ArithmeticFault("it is too long")
    expression = _Expression(text, get, put)
    value = expression.comma()
    if expression.position != len(expression.tokens) - 1:
        raise ArithmeticFault(f"unexpected {''.join(expression.tokens[expression.position])!r}")
    return value
