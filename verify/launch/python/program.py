"""What the Python file of a trainer says by itself: the file of settings that it takes where a launch names none."""

from __future__ import annotations

import ast
from pathlib import Path

from ckptkit.storage.regular import read_regular

_MAX_BYTES = 300_000


def default_config(program: Path) -> Path | None:
    """The file that a program of NeMo-RL takes: `args.config = os.path.join(os.path.dirname(__file__), "a", "b.yaml")`.

    None where its file is not there, or says nothing of the kind.
    """
    try:
        tree = ast.parse(read_regular(program, _MAX_BYTES).decode(errors="replace"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr="config")], value=ast.Call(args=[folder, *parts]) as call):
                names = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
                known = ast.unparse(call.func) == "os.path.join" and ast.unparse(folder) == "os.path.dirname(__file__)"
                if known and names and len(names) == len(parts):
                    return program.parent.joinpath(*names)
    return None
