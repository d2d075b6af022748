"""Which command of a script starts a trainer, and which of its words the trainer sees."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from ckptkit.verify.launch.options.argv import options_of
from ckptkit.verify.launch.shell.values import Shell, ShellValue, Start
from ckptkit.verify.launch.words import Word

# slime, miles, Megatron-LM, NeMo-RL and ROLL start a file, verl, its recipes, Relax and others a module.
_FILE = re.compile(
    r"(?:pre)?train\w*\.py|run_\w*(?:grpo|ppo|dpo|sft|distillation|rm)\w*\.py|start_\w+_pipeline\.py|"
    r"main_(?:ppo|dapo)\w*\.py|\w*sft_trainer\w*\.py|fully_async_main\.py"
)
_MODULE = re.compile(
    r"(?:[\w.]+\.)?(?:(?:pre)?train\w*|main_(?!eval|generation|checkpoint)\w+|fully_async_main|\w*sft_trainer\w*)"
)
_LAUNCHER = re.compile(r"python[\d.]*|torchrun|deepspeed|accelerate|uv|ray")
# Commands that name a trainer and start none.
_OTHERS = frozenset(
    {"echo", "printf", "pkill", "kill", "killall", "pgrep", "grep", "ls", "cat", "cp", "mv", "rm", "sed"}
)
_RUNS_TEXT = frozenset({"bash", "sh", "ssh", "srun", "docker", "ray", "nohup", "kubectl", "su", "sudo", "tmux"})
_INNER = re.compile(r"(?:python[\d.]*|torchrun)\s[^\n]*(?:train\w*\.py|main_ppo)", re.DOTALL)
# Programs that start processes, with the options that count them; a program that takes all GPUs without one has None.
_DISTRIBUTED = re.compile(r"torchrun|torch\.distributed\.(?:run|launch)")
_COUNTED = (
    (_DISTRIBUTED, {"--nproc-per-node": 1, "--nnodes": 1}),
    (re.compile("deepspeed"), {"--num-gpus": None, "--num-nodes": 1}),
    (re.compile("accelerate"), {"--num-processes": None}),
)
_GAP = "?"
_SET = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def start_of(words: Sequence[ShellValue], shell: Shell, given: Mapping[str, ShellValue], line: int) -> Start | None:
    """The start of a trainer that these words are; None where they are none. `given`: variables set before them."""
    at = _trainer_at(words)
    if at is None:
        return None
    environment, before = shell.exported, tuple(words[:at])
    for word in before:
        if found := _SET.fullmatch(word.text):
            environment[found[1]] = ShellValue(found[2], word.gaps, word.file, word.line, word.maybe)
    rest, variables = tuple(words[at + 1 :]), environment | dict(given)
    return Start(rest, before, variables, line, shell.file, shell.directory, words[at].text)


def names_trainer(words: Sequence[str]) -> bool:
    """Whether these words of a command start a trainer."""
    return _trainer_at([ShellValue(word) for word in words]) is not None


def _trainer_at(words: Sequence[ShellValue]) -> int | None:
    """The index of the word that names the trainer."""
    if words[0].text in _OTHERS:
        return None
    launched = False
    for number, word in enumerate(words):
        name = os.path.basename(word.text)
        if _FILE.fullmatch(name) and (launched or number == 0):
            return number
        if launched and number and words[number - 1].text == "-m" and _MODULE.fullmatch(word.text):
            return number
        launched |= _LAUNCHER.fullmatch(name) is not None
    return None


def started_processes(before: Sequence[ShellValue]) -> Word | None:
    """The processes that torchrun, deepspeed or accelerate starts, by the words before the trainer's own.

    None where another program starts it, or where their number is not known.
    """
    names = [os.path.basename(word.text) for word in before]
    at, counts = next(((i, one) for i, name in enumerate(names) for of, one in _COUNTED if of.fullmatch(name)), (0, {}))
    words = [Word(one.text if one.known else _unknown(one.text), one.file, one.line) for one in before[at + 1 :]]
    given = {one.name.replace("_", "-"): one.value.text if one.value else "" for one in options_of(words)}
    # What a variable stands for that is no option's value may be any option.
    is_whole = not words or words[0].text != _GAP
    ranks, sizes = 1, [given.get(option, default if is_whole else None) for option, default in counts.items()]
    for size in sizes:
        if not re.fullmatch(r"[1-9]\d{0,5}", str(size)):
            return None
        ranks *= int(size or 0)
    return Word(str(ranks), before[at].file, before[at].line) if counts else None


def _unknown(text: str) -> str:
    """A word whose value is not known, with the name of the option that it is."""
    name, equals, _ = text.partition("=")
    return f"{name}={_GAP}" if equals and name.startswith("--") else text if text.startswith("--") else _GAP


def inner_script(words: Sequence[ShellValue]) -> str | None:
    """The text that `bash -c` or `ssh` runs as a script, where a trainer is started in it."""
    if os.path.basename(words[0].text) not in _RUNS_TEXT:
        return None
    return next((word.text for word in words[1:] if " " in word.text and _INNER.search(word.text)), None)
