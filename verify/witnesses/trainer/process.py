"""Has a trainer parse and validate a launch: `python -m ckptkit.verify.witnesses.trainer.process JOB.json`.

This runs the trainer's code, in a process without a GPU, network or secrets. Code of a checkpoint is not run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import runpy
import sys
import traceback
import types
import typing
from collections import Counter
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock, patch

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import one_line
from ckptkit.verify.witnesses.process.exit_report import ExitReport, Phase, run_job
from ckptkit.verify.witnesses.process.h100 import CAPABILITY, PROPERTIES
from ckptkit.verify.witnesses.trainer.job import MEGATRON, PROGRAMS, TrainerAnswer, TrainerJob

# Imports of trainers that parsing does not need; sglang_router has its own options.
_NOT_NEEDED = (
    *("accelerate", "decord", "math_verify", "matplotlib", "memray", "mlflow", "nltk", "polars", "qwen_vl_utils"),
    *("ring_flash_attn", "rouge_score", "swanlab", "tensorboard", "torchdata", "transfer_queue", "trl", "wandb"),
)
_ROUTER, _ROUTER_OPTIONS = "sglang_router", ("--router-", "--sglang-router-")
_REFUSES = (AssertionError, FileNotFoundError, SystemExit, ValueError)
# Packages that read configurations for trainers; their errors are refusals too.
_READERS = ("dacite", "hydra", "omegaconf", "pydantic")
# The first call of a trainer's job, after its configuration was read and validated: module and function.
_BEGINS = {
    "verl": ("ray", "init"),
    "nemo_rl": ("nemo_rl.utils.logger", "get_next_experiment_dir"),
    "roll": ("roll.distributed.scheduler.initialize", "init"),
}
# Words of a refusal that may be due to this machine.
_OF_THE_MACHINE = re.compile(
    r"(?<![-\w])versions?\b|is_\w+_version|\binstall|not available|\bcapability\b|CUDA (?!graph)|Environment variable"
)


class _StandIns(MetaPathFinder, Loader):
    def __init__(self) -> None:
        self.names = sorted(name for name in (*_NOT_NEEDED, _ROUTER) if find_spec(name) is None)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock()

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Parsers:
    """Records argparse's errors, and the words that every parser leaves over."""

    def __init__(self, words: Sequence[str]) -> None:
        self.error, self.untaken, self.have_parsed = "", Counter(words), False
        error, parse = argparse.ArgumentParser.error, argparse.ArgumentParser.parse_known_args

        def recorded_error(parser: argparse.ArgumentParser, message: str) -> typing.NoReturn:
            self.error = message
            error(parser, message)

        def recorded_parse(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
            result = parse(parser, args, namespace)
            if list(sys.argv[1:] if args is None else args) == list(words):
                self.untaken &= Counter(result[1])
                self.have_parsed = True
            return result

        patch.multiple(argparse.ArgumentParser, error=recorded_error, parse_known_args=recorded_parse).start()


class _AcceptedError(BaseException):
    """Ends a program that would begin its job now; no `except Exception` of the trainer catches it."""


def run(job: TrainerJob, phases: ExitReport) -> TrainerAnswer:
    """Parses the words. Raises errors that are not about them, and CkptkitError if the trainer cannot run."""
    phases.enter(Phase("importing the trainer"))
    sys.addaudithook(_refuse_checkpoint_code)
    os.environ["HF_MODULES_CACHE"] = os.path.join(os.path.dirname(job.report), "modules")
    os.chdir(job.directory)
    sys.path[:0] = job.folders
    sys.meta_path.append(stand_ins := _StandIns())
    if sys.version_info < (3, 12):
        import typing_extensions

        # pydantic accepts no other TypedDict there.
        typing.override, typing.TypedDict = typing_extensions.override, typing_extensions.TypedDict  # type: ignore
    sys.argv, process = list(job.words), os.getpid()
    trainer, home = _find_trainer(job.trainers)
    module = importlib.import_module(_module_of(trainer))
    if (cuda := getattr(sys.modules.get("torch"), "cuda", None)) is not None:
        cuda.get_device_capability = lambda *_: CAPABILITY
        cuda.get_device_properties = lambda *_: PROPERTIES
    program, refusal, at = "", "", ""
    if trainer in PROGRAMS:
        program = _program_file(job.words[0])
        for begin, function in {("ray", "init"), _BEGINS[trainer]}:
            setattr(importlib.import_module(begin), function, _accept)
        os.environ["HYDRA_FULL_ERROR"] = "1"
        if trainer == "verl":
            # Has Hydra write its log there. argparse accepts only one group of overrides.
            last = max((at for at, word in enumerate(sys.argv) if "=" in word and not word.startswith("-")), default=0)
            overrides = [f"hydra.run.dir='{os.path.dirname(job.report)}'", "hydra.output_subdir=null"]
            sys.argv[last + 1 : last + 1] = overrides
    parsers = _Parsers(sys.argv[1:])
    phases.enter(Phase("parsing"))
    try:
        if program:
            _run_program(job.words[0], program)
        else:
            _parse_megatron(module) if trainer == MEGATRON else module.parse_args()
    except (Exception, SystemExit) as error:
        refusal, at = _refusal_of(error, parsers, home, program)
        if not refusal:
            raise
    finally:
        if os.getpid() != process:  # the trainer forked, and this process has nothing to report
            os._exit(1)
    if _ROUTER in stand_ins.names and any(word.startswith(_ROUTER_OPTIONS) for word in job.words):
        raise CkptkitError(f"{_ROUTER}, which parses options of the launch, is missing", "install it for the trainer")
    # After an error of one parser, later ones have not run.
    is_known = parsers.have_parsed and not parsers.error
    untaken = [word for word in parsers.untaken if is_known and word.startswith("-") and word != "--"]
    return TrainerAnswer(trainer, home, refusal, at, untaken, stand_ins.names)


def _find_trainer(trainers: Sequence[str]) -> tuple[str, str]:
    """The first of these packages that is installed, and its directory. Raises CkptkitError without one."""
    for trainer in trainers:
        spec = find_spec(trainer)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            module = os.path.join(folder, *_module_of(trainer).split(".")[1:])
            if os.path.isfile(f"{module}.py") or os.path.isfile(os.path.join(module, "__init__.py")):
                return trainer, os.path.abspath(folder)
    names = " or ".join(map(_module_of, trainers))
    raise CkptkitError(f"{names} was not found", "pass a Python that has it, or set PYTHONPATH to its checkout")


def _module_of(trainer: str) -> str:
    if trainer in PROGRAMS:
        return trainer
    return "megatron.training.arguments" if trainer == MEGATRON else f"{trainer}.utils.arguments"


def _program_file(program: str) -> str:
    spec = None if program.endswith(".py") else find_spec(program)
    file = os.path.abspath(program if spec is None else spec.origin or "")
    if not os.path.isfile(file):
        raise CkptkitError(f"{program} was not found", "start preflight in the directory of the launch")
    return file


def _accept(*_: Any, **__: Any) -> typing.NoReturn:
    raise _AcceptedError


def _run_program(program: str, file: str) -> None:
    """Runs a program until it would begin its job. Raises its refusals, and CkptkitError if it ended before that."""
    try:
        if program.endswith(".py"):
            runpy.run_path(file, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except _AcceptedError:
        return
    except SystemExit as ended:
        if ended.code:
            raise
    raise CkptkitError(f"{program} ended before it began a job", "pass the options of a job")


def _parse_megatron(module: Any) -> None:
    """Parses as Megatron-LM's programs do, without options that a program adds to Megatron's own."""
    arguments = module.parse_args(ignore_unknown_args=True)
    if getattr(arguments, "use_checkpoint_args", None) or getattr(arguments, "yaml_cfg", None):
        message = "--use-checkpoint-args and --yaml-cfg take options from a file that ckptkit does not read"
        raise CkptkitError(message, "write these options into the launch instead")
    module.validate_args(arguments, {"tokenizer_type": "GPT2BPETokenizer"})  # the default of pretrain_gpt.py


def _refuse_checkpoint_code(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook that stops code of a checkpoint, which slime has transformers copy into a package and run."""
    if event == "exec" and "transformers_modules" in str(getattr(arguments[0], "co_filename", "")):
        raise CkptkitError("the checkpoint's config needs code of the checkpoint, which ckptkit does not run")


def _refusal_of(error: BaseException, parsers: _Parsers, home: str, program: str) -> tuple[str, str]:
    """The message and place of the trainer's or a config library's refusal; empty if there may be another cause."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    is_call = _package_of(error) == "hydra" and type(error).__name__ == "InstantiationException"
    if is_call and error.__cause__ is not None:  # Hydra called a class of the trainer
        error = error.__cause__
        frames += traceback.extract_tb(error.__traceback__)
    megatron = getattr(sys.modules.get(_module_of(MEGATRON)), "__file__", None) or home
    homes = (f"{home}{os.sep}", f"{os.path.dirname(os.path.dirname(megatron))}{os.sep}", program or home)
    theirs = [frame for frame in frames if os.path.abspath(frame.filename).startswith(homes)]
    imports = [frame for frame in frames if frame.name == "<module>" and frame.filename != program]
    readers = [file for name in _READERS if (file := getattr(sys.modules.get(name), "__file__", None))]
    reader_homes = tuple(f"{os.path.dirname(file)}{os.sep}" for file in readers)
    is_parser = bool(frames) and frames[-1].filename == argparse.__file__
    is_reader = bool(frames) and frames[-1].filename.startswith(reader_homes)
    is_refusal = isinstance(error, _REFUSES) or _package_of(error) in (*_READERS, os.path.basename(home))
    is_refusal |= is_call and is_reader and isinstance(error, TypeError)  # an argument that the class does not accept
    if not theirs or imports or not is_refusal or not (is_parser or is_reader or frames[-1] is theirs[-1]):
        return "", ""
    message = (parsers.error if is_parser else str(error)) or f"it stops at `{theirs[-1].line}`"
    is_import = isinstance(error.__cause__ or error.__context__, ImportError)
    if is_import or _OF_THE_MACHINE.search(f"{message} {theirs[-1].line}"):
        return "", ""
    return one_line(message), f"{theirs[-1].filename}:{theirs[-1].lineno}"


def _package_of(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


if __name__ == "__main__":
    run_job(TrainerJob, run)
