"""`preflight --ask-trainer`: what the trainer's own parser and validation say of a launch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.core.isolation import is_secret, is_withheld
from verify.issue import Issue
from verify.launch.job import Job
from verify.launch.options.argv import options_of
from verify.launch.words import LaunchText, UnresolvedWord, Word
from verify.witnesses.process.interpreter import Interpreter, python_of
from verify.witnesses.process.run import ask
from verify.witnesses.trainer.job import GPU_CAPABILITY, MEGATRON, MILES, SLIME, Answer, TrainerJob

_LIMIT_S = 300.0
_VARIABLE = re.compile(r"\$\{?(\w+)")
# A name that slime gives to what it lists: `hf_validate_args failed: a; b`.
_LIST = re.compile(r"\w+ failed: ")
# Set for the trainer whatever the launch sets: no network, no GPU, and no other place to import from.
_OWN = re.compile(r"PYTHON\w*|HF_\w*OFFLINE|TRANSFORMERS_OFFLINE|HF_HUB_DISABLE_IMPLICIT_TOKEN|LD_\w+")
_NAMES = {SLIME: "slime", MILES: "miles", MEGATRON: "Megatron-LM"}


@dataclass(frozen=True)
class Asked:
    """A job with what its trainer refuses, and why the trainer gave no answer, empty where it did."""

    job: Job
    reason: str = ""


def ask_trainer(job: Job, python: str | Path) -> Asked:
    """Has the trainer in the Python `python` parse the launch, which executes the trainer's code.

    Raises UsageError where that is not a Python that runs.
    """
    interpreter = Interpreter(python_of("trainer", {"trainer": str(python)}))
    text, world = _commanded(job.text), _world(job)
    unknown = [word for word in text.words if isinstance(word, UnresolvedWord) and not _is_hidden(word)]
    reason = ""
    if not job.stack.one_model:
        reason = f"{job.stack.name} cannot be asked: only slime, miles and Megatron-LM can"
    elif unknown:
        reason = f"{unknown[0].place}: {unknown[0].text} is not known: {unknown[0].why}"
    elif text.unresolved:
        reason = text.unresolved[0]
    elif text.directory is None:
        reason = "the directory that the trainer is started in is not known"
    elif world is None:
        reason = "the number of processes is not known: start it by torchrun, or set WORLD_SIZE in the launch"
    if reason:
        return Asked(job, f"the trainer was not asked: {reason}")
    interpreter.release("pip")  # raises where it does not run
    trainer_job = TrainerJob(_trainers(job), [text.program, *_texts(text)], _folders(text), str(text.directory))
    interpreter = replace(interpreter, variables=_variables(text, world or 1))
    answer, failed = ask(trainer_job, "verify.witnesses.trainer.process", Answer, _LIMIT_S, interpreter)
    if answer is None:
        return Asked(job, f"the trainer gave no answer: {failed or 'it ended by itself'}")
    issues = (*_refusals(answer, text), *_untaken(answer, text, job))
    more = f"; stand-ins took the place of {', '.join(answer.stand_ins)}" if answer.stand_ins else ""
    gpu = f"without a GPU, as on one of compute capability {'.'.join(map(str, GPU_CAPABILITY))}"
    note = f"--ask-trainer executed the code of {_NAMES[answer.trainer]} in {answer.home} {gpu}{more}"
    return Asked(replace(job, combinations=(*(job.combinations or ()), *issues), notes=(*job.notes, note)))


def _commanded(text: LaunchText) -> LaunchText:
    """The launch, with its program: that of words alone is one of them."""
    at = next((at for at, word in enumerate(text.words) if word.text.endswith(".py")), None)
    if text.program or at is None:
        return text if text.program else replace(text, program="train.py", directory=text.directory or Path.cwd())
    return replace(text, program=text.words[at].text, words=text.words[at + 1 :], directory=Path.cwd())


def _is_hidden(word: Word) -> bool:
    """Whether all that is not known of a word is a secret, as in `--wandb-key $WANDB_KEY`."""
    return all(is_secret(name) for name in _VARIABLE.findall(word.text) or [""])


def _texts(text: LaunchText) -> list[str]:
    return ["hidden" if isinstance(word, UnresolvedWord) else word.text for word in text.words]


def _world(job: Job) -> int | None:
    """The number of the trainer's processes, or None if it is not known."""
    if not {"actor_num_nodes", "actor_num_gpus_per_node"}.isdisjoint(job.arguments.places) or not _is_megatron(job):
        nodes, each = job.arguments.known("actor_num_nodes", 1), job.arguments.known("actor_num_gpus_per_node", 8)
        return nodes * each if nodes and each else None
    word = job.text.ranks or job.text.environment.get("WORLD_SIZE")
    return int(word.text) if word and word.text.isdecimal() and int(word.text) else None


def _is_megatron(job: Job) -> bool:
    """Whether the program is one of Megatron-LM itself."""
    return job.text.program_name.startswith("pretrain") or job.combinations is None


def _trainers(job: Job) -> list[str]:
    return [MEGATRON] if _is_megatron(job) else [SLIME, MILES]


def _folders(text: LaunchText) -> list[str]:
    """Where Python looks first: beside the program, and in the PYTHONPATH of the launch."""
    directory = text.directory or Path.cwd()
    path = text.environment.get("PYTHONPATH", Word(os.environ.get("PYTHONPATH", "")))
    named = [] if isinstance(path, UnresolvedWord) else path.text.split(os.pathsep)
    beside = (directory / text.program).parent if text.program.endswith(".py") else directory
    return [str(beside), *(str(directory / one) for one in named if one)]


def _variables(text: LaunchText, world: int) -> Mapping[str, str]:
    """The variables of the launch that are known and public, and those of one rank of a job without a GPU."""
    known = {name: word.text for name, word in text.environment.items() if not isinstance(word, UnresolvedWord)}
    public = {name: value for name, value in known.items() if not is_withheld(name, value) and not _OWN.fullmatch(name)}
    rank = {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    # Megatron-LM before 0.17 builds a kernel as it is imported, if it can, for the GPUs that are there.
    capability = ".".join(map(str, GPU_CAPABILITY))
    return {**public, **rank, "MASTER_ADDR": "127.0.0.1", "TORCH_CUDA_ARCH_LIST": capability}


def _refusals(answer: Answer, text: LaunchText) -> Iterator[Issue]:
    """An issue for each message of the trainer, at the options that it names."""
    listed = _LIST.match(answer.refusal)
    messages = answer.refusal[listed.end() :].split("; ") if listed else [answer.refusal]
    for message in filter(None, messages):
        named = _named(message, text)
        places = ", ".join(f"{word.text.partition('=')[0]} at {word.place}" for word in named)
        trainer = _NAMES[answer.trainer]
        yield Issue(
            f"a launch that {trainer} accepts",
            f"{message.rstrip('.')} ({places})" if places else message,
            f"change what the message names: {trainer} stops at {answer.at}",
            file=next((word.file for word in [*named, *text.words] if word.file), None),
        )


def _named(message: str, text: LaunchText) -> list[Word]:
    """The options of a launch that a message names, as they are written or as Megatron calls their values."""
    plain = message.replace("-", "_")
    words = {one.name.strip("-").replace("-", "_"): one.word for one in options_of(text.words)}
    return [word for name, word in words.items() if name and re.search(rf"(?<![a-z0-9]){re.escape(name)}(?!\w)", plain)]


def _untaken(answer: Answer, text: LaunchText, job: Job) -> Iterator[Issue]:
    trainer = _NAMES[answer.trainer]
    for word in text.words:
        if word.text in answer.untaken:
            name = word.text.partition("=")[0]
            hint = f"correct it or leave it out: {job.stack.unknown}"
            actual = f"{name}, which no parser of {trainer} takes, at {word.place}"
            yield Issue(f"options that {trainer} takes", actual, hint, file=word.file, severity="warning")
