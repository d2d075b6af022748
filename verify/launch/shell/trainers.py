"""Finds the command of a script that starts a trainer, and the trainer's own words."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptkit.verify.launch.options.argv import options_of
from ckptkit.verify.launch.shell.values import Shell, ShellValue, Start
from ckptkit.verify.launch.words import Word

# slime, miles, Megatron-LM, NeMo-RL and ROLL start a file; verl, its recipes and Relax start a module.
_FILE = re.compile(
    r"(?:pre)?train\w*\.py|run_\w*(?:grpo|ppo|dpo|sft|distillation|rm)\w*\.py|start_\w+_pipeline\.py|"
    r"main_(?:ppo|dapo)\w*\.py|\w*sft_trainer\w*\.py|fully_async_main\.py"
)
_MODULE = re.compile(
    r"(?:[\w.]+\.)?(?:(?:pre)?train\w*|main_(?!eval|generation|checkpoint)\w+|fully_async_main|\w*sft_trainer\w*)"
)
_LAUNCHER = re.compile(r"python[\d.]*|torchrun|deepspeed|accelerate|uv|ray")
# Commands that name a trainer without starting it.
_MENTIONS = ("echo", "printf", "pkill", "kill", "killall", "pgrep", "grep", "ls", "cat", "cp", "mv", "rm", "sed")
_RUNS_TEXT = ("bash", "sh", "ssh", "srun", "docker", "ray", "nohup", "kubectl", "su", "sudo", "tmux")
_INNER = re.compile(r"(?:python[\d.]*|torchrun)\s[^\n]*(?:train\w*\.py|main_ppo)", re.DOTALL)
# Programs that start processes, with the options that count them; None is the default of a program that uses all GPUs.
_COUNTED = (
    (re.compile(r"torchrun|torch\.distributed\.(?:run|launch)"), {"--nproc-per-node": 1, "--nnodes": 1}),
    (re.compile("deepspeed"), {"--num-gpus": None, "--num-nodes": 1}),
    (re.compile("accelerate"), {"--num-processes": None}),
)
_UNKNOWN = "?"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def find_start(words: Sequence[ShellValue], shell: Shell, exports: Mapping[str, ShellValue], line: int) -> Start | None:
    """The start of a trainer by these words, or None if they start none. `exports` are assigned before them."""
    at = _trainer_index(words)
    if at is None:
        return None
    environment, before = shell.exported, tuple(words[:at])
    for word in before:
        if match := _ASSIGNMENT.fullmatch(word.text):
            environment[match[1]] = replace(word, text=match[2])
    environment |= exports
    return Start(tuple(words[at + 1 :]), before, environment, line, shell.file, shell.directory, words[at].text)


def names_trainer(words: Sequence[str]) -> bool:
    """Whether these words of a command start a trainer."""
    return _trainer_index([ShellValue(word) for word in words]) is not None


def _trainer_index(words: Sequence[ShellValue]) -> int | None:
    if words[0].text in _MENTIONS:
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


def count_processes(before: Sequence[ShellValue]) -> Word | None:
    """The number of processes that torchrun, deepspeed or accelerate starts, or None for another program or number."""
    names = [os.path.basename(word.text) for word in before]
    programs = ((at, counts) for at, name in enumerate(names) for one, counts in _COUNTED if one.fullmatch(name))
    at, counts = next(programs, (0, {}))
    words = [Word(one.text if one.known else _hide_value(one.text), one.file, one.line) for one in before[at + 1 :]]
    options = {one.name.replace("_", "-"): one.value.text if one.value else "" for one in options_of(words)}
    # An unknown word that is not the value of an option may be any option.
    is_complete = not words or words[0].text != _UNKNOWN
    sizes = [str(options.get(option, default if is_complete else None)) for option, default in counts.items()]
    if not counts or not all(re.fullmatch(r"[1-9]\d{0,5}", size) for size in sizes):
        return None
    return Word(str(math.prod(map(int, sizes))), before[at].file, before[at].line)


def _hide_value(text: str) -> str:
    """Replaces an unknown word, or the value in it if it is an option."""
    name, equals, _ = text.partition("=")
    return f"{name}={_UNKNOWN}" if equals and name.startswith("--") else text if text.startswith("--") else _UNKNOWN


def inner_script(words: Sequence[ShellValue]) -> str | None:
    """The text that `bash -c` or `ssh` runs as a script, if it starts a trainer."""
    if os.path.basename(words[0].text) not in _RUNS_TEXT:
        return None
    return next((word.text for word in words[1:] if " " in word.text and _INNER.search(word.text)), None)
