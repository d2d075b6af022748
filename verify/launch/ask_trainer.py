"""`preflight --ask-trainer`: checks a launch with the trainer's own parser and validation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.core.isolation import is_secret, is_withheld
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.launch.job import Job
from ckptkit.verify.launch.options.argv import options_of
from ckptkit.verify.launch.settings.overrides import is_override
from ckptkit.verify.launch.words import LaunchText, UnresolvedWord, Word, changes_every_start
from ckptkit.verify.witnesses.process.h100 import CAPABILITY
from ckptkit.verify.witnesses.process.interpreter import Interpreter, python_of
from ckptkit.verify.witnesses.runner import ask
from ckptkit.verify.witnesses.trainer.job import MEGATRON, PROGRAMS, TrainerAnswer, TrainerJob

_LIMIT_S = 600.0
_VARIABLE = re.compile(r"\$\{?(\w+)")
_PACKAGES = {"verl": "verl", "NeMo-RL": "nemo_rl", "ROLL": "roll"}  # of trainers with their own programs
_LIST = re.compile(r"\w+ failed: ")  # the start of a list of refusals of slime: `hf_validate_args failed: a; b`
# Variables that a launch does not set for the witness: import paths, and offline mode.
_RESERVED = re.compile(r"PYTHON\w*|HF_\w*OFFLINE|TRANSFORMERS_OFFLINE|HF_HUB_DISABLE_IMPLICIT_TOKEN|LD_\w+")


def ask_trainer(job: Job, python: str | Path) -> Job:
    """Parses the launch with the trainer of the Python `python`, which executes the trainer's code.

    Returns the job with the trainer's refusals. Raises CkptkitError if the trainer is not asked or gives no answer, and
    its subclass UsageError if `python` does not run.
    """
    interpreter = Interpreter(python_of("trainer", {"trainer": str(python)}))
    interpreter.release("pip")  # raises UsageError if it does not run
    text = job.text
    unresolved = [word for word in text.words if isinstance(word, UnresolvedWord)]
    replaceable = {_reason(word) for word in unresolved if _is_replaceable(word)}
    if reasons := [one for one in (*text.unresolved, *map(_reason, unresolved)) if one not in replaceable]:
        raise CkptkitError("the trainer was not asked, because a part of its command is unknown", reasons[0])
    package = _PACKAGES.get(job.stack.name, "")
    is_asked = PROGRAMS[package].fullmatch(text.program) if package else job.stack.one_model and text.program
    if not is_asked or text.directory is None:
        message = f"the trainer was not asked, because {text.program or 'the launch'} starts no known trainer"
        hint = "pass a script that starts train.py, pretrain_*.py, verl.trainer.main_ppo, NeMo-RL's run_*.py or ROLL's "
        raise CkptkitError(message, f"{hint}start_*_pipeline.py")
    words = [_hide(word) if isinstance(word, UnresolvedWord) else word.text for word in text.words]
    if package == "roll":  # Hydra's `initialize` accepts only a folder relative to the program
        home = (text.directory / text.program).parent
        words = [
            os.path.relpath(word, home) if before == "--config_path" and os.path.isabs(word) else word
            for before, word in pairwise(["", *words])
        ]
    trainers = [package] if package else [MEGATRON] if _is_megatron(job) else ["slime", "miles"]
    request = TrainerJob(trainers, [text.program, *words], _folders(text, text.directory), str(text.directory))
    interpreter = replace(interpreter, variables=_variables(job))
    result = ask(request, "ckptkit.verify.witnesses.trainer.process", TrainerAnswer, _LIMIT_S, interpreter)
    if (answer := result.report) is None:
        raise CkptkitError("the trainer gave no answer", str(result.failure))
    gpu = f"with a simulated GPU of compute capability {'.'.join(map(str, CAPABILITY))}"
    stand_ins = f" and stand-ins for {', '.join(answer.stand_ins)}" if answer.stand_ins else ""
    note = f"--ask-trainer executed the code of {answer.trainer} in {answer.home}, {gpu}{stand_ins}"
    issues = (*(job.combinations or ()), *_refusals(answer, job, bool(package)), *_unknown_options(answer, job))
    return replace(job, combinations=issues, notes=(*job.notes, note))


def _reason(word: UnresolvedWord) -> str:
    return f"{word.place}: {word.text}: {word.why}"


def _is_replaceable(word: UnresolvedWord) -> bool:
    """Whether any text may replace the unresolved part: a secret, as in `--wandb-key $WANDB_KEY`, or the time."""
    return changes_every_start(word.text) or all(is_secret(name) for name in _VARIABLE.findall(word.text) or [""])


def _hide(word: Word) -> str:
    """A word with `hidden` instead of its unresolved part."""
    return f"{word.text.partition('=')[0]}=hidden" if is_override(word.text) else "hidden"


def _is_megatron(job: Job) -> bool:
    """Whether the program is one of Megatron-LM itself."""
    return job.stack.one_model and (job.text.program_name.startswith("pretrain") or job.combinations is None)


def _folders(text: LaunchText, directory: Path) -> list[str]:
    """The first import paths of Python: the program's folder, and the PYTHONPATH of the launch."""
    path = text.environment.get("PYTHONPATH", Word(""))
    folders = [] if isinstance(path, UnresolvedWord) else path.text.split(os.pathsep)
    home = (directory / text.program).parent if text.program.endswith(".py") else directory
    return [str(home), *(str(directory / folder) for folder in folders if folder)]


def _variables(job: Job) -> Mapping[str, str]:
    """The public variables of the launch, and of one rank. Raises CkptkitError if Megatron-LM has no rank number."""
    known = {name: word.text for name, word in job.text.environment.items() if not isinstance(word, UnresolvedWord)}
    world = job.text.ranks.text if job.text.ranks else known.get("WORLD_SIZE", "" if _is_megatron(job) else "1")
    if not world:
        message = "the trainer was not asked, because the number of its processes is unknown"
        raise CkptkitError(message, "start the trainer with torchrun, or set WORLD_SIZE in the launch")
    public = {key: text for key, text in known.items() if not (is_withheld(key, text) or _RESERVED.fullmatch(key))}
    rank = {"WORLD_SIZE": world, "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    # Megatron-LM builds a kernel during its import, for TORCH_CUDA_ARCH_LIST or else for the local GPUs.
    return {**public, **rank, "CUDA_VISIBLE_DEVICES": "", "TORCH_CUDA_ARCH_LIST": ".".join(map(str, CAPABILITY))}


def _refusals(answer: TrainerAnswer, job: Job, has_settings: bool) -> Iterator[Issue]:
    """An issue for each message of the trainer, at the options that it names by flag or by `dest`."""
    text = job.text
    written = job.written if has_settings else {one.name: one.word for one in options_of(text.words)}
    listed = _LIST.match(answer.refusal)
    messages = answer.refusal[listed.end() :].split("; ") if listed else [answer.refusal]
    for message in filter(None, messages):
        named = {key: word for key, word in written.items() if _names(message, key)}
        # A message without a complete key may name the last part of one.
        named = named or {key: word for key, word in written.items() if _names_last(message, key.rpartition(".")[2])}
        places = ", ".join(f"{key} at {word.place}" for key, word in named.items())
        actual = f"{message.rstrip('.')} ({places})" if places else message
        hint = f"change the options in the message: {answer.trainer} stops at {answer.at}"
        file = next((word.file for word in [*named.values(), *text.words] if word.file), None)
        yield Issue(f"a launch that {answer.trainer} accepts", actual, hint, file=file)


def _names(message: str, key: str) -> bool:
    """Whether a message contains an option or setting as a complete name."""
    key, plain = (one.replace("-", "_") for one in (key.strip("-"), message))
    return re.search(rf"(?<![a-z0-9])(?<![a-z0-9]_){re.escape(key)}(?!\w|\.\w)", plain) is not None


def _names_last(message: str, part: str) -> bool:
    """Whether a message names the last part of a key: with an underscore or in quotes, as it may be any word."""
    return ("_" in part or f"'{part}'" in message) and _names(message, part)


def _unknown_options(answer: TrainerAnswer, job: Job) -> Iterator[Issue]:
    for word in job.text.words:
        if word.text in answer.untaken:
            name = word.text.partition("=")[0]
            hint = f"correct or remove the option: {job.stack.unknown}"
            actual = f"{answer.trainer} has no option {name} (at {word.place})"
            yield Issue(f"options that {answer.trainer} accepts", actual, hint, file=word.file, severity="warning")
