"""What a known symptom in a log is, and the table of them, `symptoms.toml`."""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class Symptom:
    """A message that is known to mean something; `symptoms.toml` explains the fields."""

    key: str
    title: str
    meaning: str
    command: str
    needles: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    pattern: str | None = None
    near: tuple[str, ...] = ()
    effect: bool = False
    loads: bool = False
    _regex: re.Pattern[str] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.pattern is not None:
            object.__setattr__(self, "_regex", re.compile(self.pattern))

    def matches(self, line: str) -> bool:
        """Whether a line with one of the needles has it, `near` aside."""
        return self._regex is None or self._regex.search(line) is not None


@dataclass(frozen=True, slots=True)
class Phase:
    """What the lines around a message show: the engine, and the function that was updating its weights, or ""."""

    engine: str = ""
    update: str = ""

    def of(self, symptom: Symptom) -> Symptom:
        """A symptom with the title, meaning and command that go with this engine, and with an update."""
        vllm = self.engine == "vLLM"
        if not self.update:
            wanted = symptom.command.replace("--against-sglang", "--against-vllm") if vllm else symptom.command
            return replace(symptom, command=wanted)
        return replace(
            symptom,
            title=f"{symptom.title}, in a weight update",
            meaning=f"The trainer sent it in a weight update ({self.update}); the stored checkpoint is not at fault. "
            "Names or shapes that the trainer sends are not those of the engine's class. In the job, "
            "`ckptkit.hooks.WeightSyncCheck` names what did not arrive.",
            command=f"ckptkit verify HF{' --against-vllm' if vllm else ''} --update --tp N",
            codes=("CK512", "CK503"),
        )


@dataclass(frozen=True, slots=True)
class Served:
    """What a log shows of the engine's start: the directory that it serves, and over how many ranks."""

    path: str
    tp: str = ""

    def of(self, symptom: Symptom) -> Symptom:
        """A symptom whose command names the directory and the ranks."""
        command = re.sub(r"\bHF\b", lambda _: shlex.quote(self.path), symptom.command)
        return replace(symptom, command=command.replace("--tp N", f"--tp {self.tp}") if self.tp else command)


NEAR = 100  # lines: a traceback of a deep call, twice, since ranks print into each other

_ROWS: list[dict[str, Any]] = tomllib.loads(files("verify.triage").joinpath("symptoms.toml").read_text())["symptom"]
_FIELDS: list[dict[str, Any]] = [
    {name: tuple(one) if isinstance(one, list) else one for name, one in row.items()} for row in _ROWS
]
TABLE = tuple(Symptom(**row) for row in _FIELDS)
