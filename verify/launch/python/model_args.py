"""Reads the model arguments in a Python file of miles, as `model_args_utils.py NAME` prints them. Runs nothing.

Source: miles `utils/external_utils/model_args_utils.py`, which calls `model_args` of `scripts/models/NAME.py`.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptkit.verify.launch.python.statements import Follower
from ckptkit.verify.launch.python.values import (
    Module,
    PythonFunction,
    State,
    Text,
    TooMuchError,
    Unknown,
    join_pieces,
    why_unread,
)

TOOL = "model_args_utils.py"
_FUNCTION = "model_args"
_MAX_FILES = 10


def model_arguments(tool: Path, name: str, environment: Mapping[str, Any]) -> str | Text | Unknown:
    """The arguments of the model `name` on one line, or why they are unknown. `tool` is `model_args_utils.py`."""
    count = itertools.count()

    def load(path: Path, named: Mapping[str, Any]) -> str | Text | Unknown:
        """The arguments in a file, which may be derived from another model's."""
        if next(count) == _MAX_FILES:
            return Unknown(path.name, "its models refer to each other in a circle")
        follower = Follower(tool.absolute().parent, environment, {"load_sibling_model_args": sibling})
        follower.modules[Path()] = Module(Path())  # so that no file is `__main__`
        try:
            function = follower.module(path).names.get(_FUNCTION)
            if not isinstance(function, PythonFunction):
                return Unknown(path.name, f"{path} has no function {_FUNCTION}")
            call = ast.copy_location(ast.Call(ast.Name(_FUNCTION, ast.Load()), [], []), function.node)
            value = follower.call(follower.state, function, [], named, ast.fix_missing_locations(call))
        except (OSError, ValueError) as error:
            return Unknown(path.name, f"{path}: {getattr(error, 'strerror', None) or error}")
        except (SyntaxError, TooMuchError, RecursionError, MemoryError) as error:
            return Unknown(path.name, f"{path}: {why_unread(error)}")
        if isinstance(value, str | Text):
            pieces = (value,) if isinstance(value, str) else value.pieces
            joined = join_pieces(re.sub(r"\s+", " ", piece) if isinstance(piece, str) else piece for piece in pieces)
            return joined.strip() if isinstance(joined, str) else joined
        return value if isinstance(value, Unknown) else Unknown(path.name, f"{path} returns no text")

    def sibling(_: State, arguments: Sequence[Any], named: Mapping[str, Any], node: ast.Call) -> Any:
        """`load_sibling_model_args(__file__, NAME, ...)`."""
        if len(arguments) != 2 or not all(isinstance(argument, str) for argument in arguments):
            return Unknown(ast.unparse(node), "another model of unknown name")
        return load(Path(arguments[0]).parent / f"{arguments[1]}.py", named)

    parents = tool.absolute().parents
    return load((parents[3] / "scripts" / "models" if len(parents) > 3 else tool.parent) / f"{name}.py", {})
