"""Training programs that preflight does not read. It refuses their launches by name, with an alternative."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from ckptkit.core.errors import CkptkitError

_READ = "slime, miles, vime, Relax, Megatron-LM, verl, NeMo-RL and ROLL"


@dataclass(frozen=True)
class OtherStack:
    """A training program that preflight does not read, and the marks of its launches."""

    name: str
    command: re.Pattern[str]  # matches only commands that start it
    keys: tuple[frozenset[str], ...]  # a file of its settings has all keys of one of these sets
    model: str  # the option or setting that names the model

    def refusal(self, source: object) -> CkptkitError:
        """The error for a launch of this program."""
        hint = (
            f"check the directory of {self.model} with `ckptkit verify DIR` and `ckptkit lint DIR`; "
            "`ckptkit verify DIR && COMMAND` starts the command only if nothing is wrong"
        )
        return CkptkitError(f"{source} is a launch of {self.name}; preflight reads those of {_READ}", hint)


_OTHERS = (  # source: the public documentation of each, as of 2026-11
    OtherStack(
        "ms-swift",
        re.compile(
            r"(?:^|[\s;&|/])(?:swift|megatron)\s+(?:pt|sft|rlhf|export|infer|deploy|rollout)\b|\bswift[./]cli[./]"
        ),
        (frozenset({"model", "rlhf_type"}), frozenset({"model", "train_type"}), frozenset({"model", "tuner_type"})),
        "--model",
    ),
    OtherStack(
        "SkyRL",
        re.compile(r"\bskyrl\w*[./]\w"),
        (frozenset({"trainer", "generator", "environment"}),),
        "trainer.policy.model.path",
    ),
    OtherStack("AReaL", re.compile(r"\bareal[./]\w"), (frozenset({"actor", "allocation_mode"}),), "actor.path"),
    OtherStack("OpenRLHF", re.compile(r"\bopenrlhf[./]cli[./]\w"), (), "--pretrain"),
    OtherStack(
        "TRL",
        re.compile(
            r"(?:^|[\s;&|/])trl\s+(?:sft|dpo|grpo|kto|rloo|reward|vllm-serve)\b|\btrl[./]scripts[./]|"
            r"^\s*(?:from|import)\s+trl\b",
            re.MULTILINE,
        ),
        (),
        "--model_name_or_path",
    ),
)
_COMMENT = re.compile(r"(?:^|\s)#.*")


def find_stack_by_command(text: str) -> OtherStack | None:
    """The program that a script or a command starts, or None if it is not one of these."""
    text = "\n".join(_COMMENT.sub("", line) for line in text.replace("\\\n", " ").splitlines())
    return next((one for one in _OTHERS if one.command.search(text)), None)


def find_stack_by_settings(keys: Collection[str]) -> OtherStack | None:
    """The program of a settings file with these keys, or None if it is not one of these."""
    return next((one for one in _OTHERS if any(required <= set(keys) for required in one.keys)), None)
