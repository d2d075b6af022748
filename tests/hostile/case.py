"""What a hostile input is: a function that breaks a sound one, and what the verbs must say of it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RAN = "ran"  # the file that every payload would make, in the directory in which the verbs run


@dataclass(frozen=True)
class Case:
    """A sound input of the kind `base`, whose copy at `in` the function `make` breaks; it is given that directory.

    `said`: a regular expression for what every verb says that does not pass. `verbs`: those of the base that read it;
    None: all. `passing`: those that may pass, because what is wrong is nothing that they read, or is harmless.
    """

    name: str
    base: str
    make: Callable[[Path], object]
    said: str
    verbs: tuple[str, ...] | None = None
    passing: tuple[str, ...] = ()


def put(file, content):
    """Puts a file in place of another. Those of a copy are links to the sound ones, and are not written into."""
    file.unlink(missing_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)


def edit_json(file, **changes):
    put(file, json.dumps(json.loads(file.read_bytes()) | changes))
