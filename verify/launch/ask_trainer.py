"""`preflight --ask-trainer`: what the trainer's own parser and validation say of a launch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.core.isolation import is_secret, is_withheld
from verify.issue import Issue
from verify.launch.job import Job
from verify.launch.options.argv import options_of
from verify.launch.words import LaunchText, UnresolvedWord, Word
from verify.witnesses.process.interpreter import Interpreter, python_of
from verify.witnesses.process.run import ask
from verify.witnesses.trainer.job import GPU_CAPABILITY, MEGATRON, Answer, TrainerJob

_LIMIT_S = 600.0
_VARIABLE = re.compile(r"\$\{?(\w+)")
# How slime begins a list of what it refuses: `hf_validate_args failed: a; b`.
_LIST = re.compile(r"\w+ failed: ")
# What a launch does not set for the witness: where it imports from, and that it is offline.
_OWN = re.compile(r"PYTHON\w*|HF_\w*OFFLINE|TRANSFORMERS_OFFLINE|HF_HUB_DISABLE_IMPLICIT_TOKEN|LD_\w+")


def ask_trainer(job: Job, python: str | Path) -> Job:
    """Has the trainer in the Python `python` parse the launch, which executes the trainer's code.

    Returns the job with what the trainer refuses. Raises CkptkitError where it was not asked or gave no answer, and
    UsageError, which is one, where that is not a Python that runs.
    """
    interpreter = Interpreter(python_of("trainer", {"trainer": str(python)}))
    interpreter.release("pip")  # raises where it does not run
    text = job.text
    unknown = [word for word in text.words if isinstance(word, UnresolvedWord) and not _is_hidden(word)]
    if reasons := [*text.unresolved, *(f"{word.place}: {word.text}: {word.why}" for word in unknown)]:
        raise CkptkitError("the trainer was not asked: not all words are known", reasons[0])
    if not job.stack.one_model or not text.program or text.directory is None:
        message = "the trainer was not asked: it is not a launch that starts slime, miles or Megatron-LM"
        raise CkptkitError(message, "give the script that runs `python3 train.py ...`")
    words = ["hidden" if isinstance(word, UnresolvedWord) else word.text for word in text.words]
    trainers = [MEGATRON] if _is_megatron(job) else ["slime", "miles"]
    request = TrainerJob(trainers, [text.program, *words], _folders(text, text.directory), str(text.directory))
    interpreter = replace(interpreter, variables=_variables(job))
    answer, failed = ask(request, "verify.witnesses.trainer.process", Answer, _LIMIT_S, interpreter)
    if answer is None:
        raise CkptkitError("the trainer gave no answer", failed or "it ended by itself")
    gpu = f"told of a GPU of compute capability {'.'.join(map(str, GPU_CAPABILITY))}"
    more = f", with stand-ins for {', '.join(answer.stand_ins)}" if answer.stand_ins else ""
    note = f"--ask-trainer executed the code of {answer.trainer} in {answer.home}, {gpu}{more}"
    issues = (*(job.combinations or ()), *_refusals(answer, text), *_untaken(answer, job))
    return replace(job, combinations=issues, notes=(*job.notes, note))


def _is_hidden(word: Word) -> bool:
    """Whether all that is not known of a word is a secret, as in `--wandb-key $WANDB_KEY`."""
    return all(is_secret(name) for name in _VARIABLE.findall(word.text) or [""])


def _is_megatron(job: Job) -> bool:
    """Whether the program is one of Megatron-LM itself."""
    return job.text.program_name.startswith("pretrain") or job.combinations is None


def _folders(text: LaunchText, directory: Path) -> list[str]:
    """Where Python looks first: beside the program, and in the PYTHONPATH of the launch."""
    path = text.environment.get("PYTHONPATH", Word(""))
    named = [] if isinstance(path, UnresolvedWord) else path.text.split(os.pathsep)
    beside = (directory / text.program).parent if text.program.endswith(".py") else directory
    return [str(beside), *(str(directory / one) for one in named if one)]


def _variables(job: Job) -> Mapping[str, str]:
    """The public variables of the launch, and those of one rank of the job. Raises CkptkitError without their number.

    slime and miles count their ranks by options of their own.
    """
    known = {name: word.text for name, word in job.text.environment.items() if not isinstance(word, UnresolvedWord)}
    world = job.text.ranks.text if job.text.ranks else known.get("WORLD_SIZE", "" if _is_megatron(job) else "1")
    if not world:
        message = "the trainer was not asked: the number of its processes is not known"
        raise CkptkitError(message, "start it by torchrun, or set WORLD_SIZE in the launch")
    public = {key: text for key, text in known.items() if not (is_withheld(key, text) or _OWN.fullmatch(key))}
    rank = {"WORLD_SIZE": world, "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    # Megatron-LM tries to build a kernel as it is imported, for the GPUs that are there unless it is told.
    return {**public, **rank, "CUDA_VISIBLE_DEVICES": "", "TORCH_CUDA_ARCH_LIST": ".".join(map(str, GPU_CAPABILITY))}


def _refusals(answer: Answer, text: LaunchText) -> Iterator[Issue]:
    """An issue for each message of the trainer, at the options that it names as they are written or by their `dest`."""
    options = {one.name.strip("-").replace("-", "_"): one.word for one in options_of(text.words)}
    listed = _LIST.match(answer.refusal)
    messages = answer.refusal[listed.end() :].split("; ") if listed else [answer.refusal]
    for message in filter(None, messages):
        plain = message.replace("-", "_")
        named = [
            word
            for key, word in options.items()
            if re.search(rf"(?<![a-z0-9])(?<![a-z0-9]_){re.escape(key)}(?!\w)", plain)
        ]
        places = ", ".join(f"{word.text.partition('=')[0]} at {word.place}" for word in named)
        actual = f"{message.rstrip('.')} ({places})" if places else message
        hint = f"change what the message names: {answer.trainer} stops at {answer.at}"
        file = next((word.file for word in [*named, *text.words] if word.file), None)
        yield Issue(f"a launch that {answer.trainer} accepts", actual, hint, file=file)


def _untaken(answer: Answer, job: Job) -> Iterator[Issue]:
    for word in job.text.words:
        if word.text in answer.untaken:
            name = word.text.partition("=")[0]
            hint = f"correct it or leave it out: {job.stack.unknown}"
            actual = f"{name}, which no parser of {answer.trainer} takes, at {word.place}"
            yield Issue(f"options that {answer.trainer} takes", actual, hint, file=word.file, severity="warning")
