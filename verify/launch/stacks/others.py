"""Programs that train whose launches are not read: a launch of one is refused by its name, with what can be done."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from ckptkit.core.errors import CkptkitError

_READ = "slime, miles, vime, Relax, Megatron-LM, verl, NeMo-RL and ROLL"


@dataclass(frozen=True)
class OtherStack:
    """A program that trains, and how its launches are told apart.

    command: what only a command that starts it has.
    keys: sets of keys, of which a file of its settings has one at least as a whole.
    model: the option or setting that names the model.
    """

    name: str
    command: re.Pattern[str]
    keys: tuple[frozenset[str], ...]
    model: str

    def refusal(self, source: object) -> CkptkitError:
        """The error for a launch of this program."""
        hint = (
            f"check the directory of {self.model} by itself: `ckptkit verify DIR` and `ckptkit lint DIR`; "
            "`ckptkit verify DIR && COMMAND` starts the command only where nothing is wrong"
        )
        return CkptkitError(f"{source} is a launch of {self.name}; preflight reads those of {_READ}", hint)


# By the commands and files of their public documentation, as of 2026-11.
_OTHERS = (
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
    """The program that a script, or the words of a command, start; None for any that is not of these."""
    text = "\n".join(_COMMENT.sub("", line) for line in text.replace("\\\n", " ").splitlines())
    return next((one for one in _OTHERS if one.command.search(text)), None)


def find_stack_by_settings(keys: Collection[str]) -> OtherStack | None:
    """The program that a file with these keys is for; None for any that is not of these."""
    return next((one for one in _OTHERS if any(every <= set(keys) for every in one.keys)), None)
