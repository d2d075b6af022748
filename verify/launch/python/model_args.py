"""The model arguments that a Python file of miles gives: `model_args_utils.py NAME`, read and not run.

Source: miles `utils/external_utils/model_args_utils.py`: the function `model_args` of `scripts/models/NAME.py` gives
one text, with keyword arguments where a model is derived from another one.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verify.launch.python.statements import Follower
from verify.launch.python.values import Function, Module, State, Text, TooMuchPythonError, Unknown, text_of, why_unread

TOOL = "model_args_utils.py"
_FUNCTION = "model_args"


def model_arguments(tool: Path, name: str, environment: Mapping[str, Any], **given: Any) -> str | Text | Unknown:
    """The arguments of the model `name` on one line, or why they are not known. `tool` is the file that is asked.

    `given` are arguments of the function.
    """
    folder = models_of(tool)
    siblings = _Siblings(tool, environment)
    return siblings.load(folder / f"{name}.py", given)


def models_of(tool: Path) -> Path:
    """The folder of the models that a checkout of miles has."""
    return tool.absolute().parents[3] / "scripts" / "models" if len(tool.absolute().parents) > 3 else tool.parent


class _Siblings:
    """Models that are derived from one another."""

    def __init__(self, tool: Path, environment: Mapping[str, Any]) -> None:
        self.tool, self.environment = tool, environment
        self.depth = 0

    def load(self, path: Path, given: Mapping[str, Any]) -> str | Text | Unknown:
        """The arguments that a file gives."""
        self.depth += 1
        if self.depth > 10:
            return Unknown(path.name, "its models are derived from one another in circles")
        follower = Follower(self.tool.absolute().parent, self.environment, {"load_sibling_model_args": self._sibling})
        follower.modules[Path()] = Module(Path())  # so that no file is the one that is started
        try:
            module = follower.module(path)
            function = module.names.get(_FUNCTION)
            if not isinstance(function, Function):
                return Unknown(path.name, f"{path} has no function {_FUNCTION}")
            call = ast.copy_location(ast.Call(ast.Name(_FUNCTION, ast.Load()), [], []), function.node)
            value = follower.call(follower.state, module, function, [], given, ast.fix_missing_locations(call))
        except (OSError, ValueError) as error:
            return Unknown(path.name, f"{path}: {getattr(error, 'strerror', None) or error}")
        except (SyntaxError, TooMuchPythonError, RecursionError, MemoryError) as error:
            return Unknown(path.name, f"{path}: {why_unread(error)}")
        return on_one_line(value) if isinstance(value, str | Text) else _why(path, value)

    def _sibling(self, _: State, arguments: Sequence[Any], named: Mapping[str, Any], node: ast.Call) -> Any:
        """`load_sibling_model_args(__file__, NAME, ...)`."""
        if len(arguments) != 2 or not all(isinstance(one, str) for one in arguments):
            return Unknown(ast.unparse(node), "another model whose name is not known")
        return self.load(Path(arguments[0]).parent / f"{arguments[1]}.py", named)


def _why(path: Path, value: Any) -> Unknown:
    return value if isinstance(value, Unknown) else Unknown(path.name, f"{path} gives no text")


def on_one_line(text: str | Text) -> str | Text:
    """A text with one blank between its words."""
    pieces = (text,) if isinstance(text, str) else text.pieces
    joined = text_of(_one_line(piece) if isinstance(piece, str) else piece for piece in pieces)
    return joined.strip() if isinstance(joined, str) else joined


def _one_line(piece: str) -> str:
    words = " ".join(piece.split())
    return f"{' ' * piece[:1].isspace()}{words}{' ' * (piece[-1:].isspace() and bool(words))}"
