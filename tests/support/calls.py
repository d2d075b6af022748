"""Calls a function in a process that has imported SGLang or Megatron: `python -m support.calls FILE`."""

import pickle
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from support.forking import run_module


def call(package, function, *arguments):
    """What the function returns there. Raises RuntimeError with what it printed when it fails."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "call"
        file.write_bytes(pickle.dumps((function, arguments)))
        run_module(package, "support.calls", file)
        return pickle.loads(file.read_bytes())


if __name__ == "__main__":
    file = Path(sys.argv[1])
    function, arguments = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(function(*arguments)))
