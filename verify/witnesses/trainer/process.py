"""Has a trainer parse and validate the words of a launch: `python -m verify.witnesses.trainer.process JOB.json`.

This executes code of the trainer, in a process without a GPU, without the network and without secrets. Code of a
checkpoint is not run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import traceback
import types
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import one_line
from verify.witnesses.process.exit_report import Phase, PhaseLog, run_job
from verify.witnesses.trainer.job import GPU_CAPABILITY, MEGATRON, Answer, TrainerJob

# What trainers import for other things than parsing. Where one of these is not installed an empty package stands in.
_NOT_NEEDED = frozenset(
    {"accelerate", "memray", "mlflow", "polars", "qwen_vl_utils", "ring_flash_attn", "sglang_router", "tensorboard"}
    | {"wandb"}
)
# Prefixes of options that only a package knows.
_OPTIONS_OF = {"sglang_router": ("--router-", "--sglang-router-")}
_REFUSES = (AssertionError, FileNotFoundError, SystemExit, ValueError)
# What a refusal says that may be due to this machine.
_OF_THE_MACHINE = re.compile(
    r"(?<![-\w])versions?\b|is_\w+_version|\binstall|not available|\bcapability\b|CUDA (?!graph)"
)


class _StandIn(types.ModuleType):
    """An empty package: each of its names is a class that adds no option."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"add_cli_args": staticmethod(lambda *_, **__: None)})
        setattr(self, name, made)
        return made


class _StandIns(MetaPathFinder, Loader):
    """Comes last among the finders, so that it is asked for what is not installed."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        # A module that an installed package lacks is not a package that is absent.
        if package not in _NOT_NEEDED or (package in sys.modules and package not in self.names):
            return None
        self.names.add(package)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> _StandIn:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Parsers:
    """Records what argparse says and leaves over while a trainer parses."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.error = ""
        self._untaken = Counter(self.words)
        error, parse = argparse.ArgumentParser.error, argparse.ArgumentParser.parse_known_args

        def recorded_error(parser: argparse.ArgumentParser, message: str) -> typing.NoReturn:
            self.error = message
            error(parser, message)

        def recorded_parse(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
            given = sys.argv[1:] if args is None else list(args)
            found = parse(parser, args, namespace)
            # Only parsers that saw all words say which of them nothing takes.
            if given == self.words:
                self._untaken &= Counter(found[1])
            return found

        argparse.ArgumentParser.error = recorded_error  # type: ignore[method-assign]
        argparse.ArgumentParser.parse_known_args = recorded_parse  # type: ignore[method-assign]

    def untaken(self) -> list[str]:
        """The options that every parser left over."""
        return [word for word in self._untaken if word.startswith("-") and word != "--"]


def run(job: TrainerJob, phases: PhaseLog) -> Answer:
    """Parses the words. Raises what says nothing about them, and CkptkitError where the trainer cannot be asked."""
    phases.enter(Phase("importing the trainer"))
    process, stand_ins = os.getpid(), _StandIns()
    os.chdir(job.directory)
    sys.path[:0] = job.folders
    sys.meta_path.append(stand_ins)
    if not hasattr(typing, "override"):  # before Python 3.12
        typing.override = lambda method: method  # type: ignore[attr-defined]
    trainer, home = _find_trainer(job.trainers)
    sys.argv = list(job.words)
    sys.addaudithook(_refuse_checkpoint_code)
    parse = _parse_of(trainer)
    _answer_for_gpu()
    parsers, refusal, at = _Parsers(job.words[1:]), "", ""
    phases.enter(Phase("parsing"))
    try:
        parse()
    except _REFUSES as error:
        refusal, at = _refusal_of(error, parsers, home)
        if not refusal:
            raise
    finally:
        if os.getpid() != process:  # the trainer forked, and this process has nothing to report
            os._exit(1)
    for package in stand_ins.names & _OPTIONS_OF.keys():
        if unknown := [word for word in job.words if word.startswith(_OPTIONS_OF[package])]:
            message = f"{package}, which takes {unknown[0].partition('=')[0]}, is not installed"
            raise CkptkitError(message, "name a Python that has it")
    # Where a parser stops, others have not seen the words.
    untaken = [] if parsers.error else parsers.untaken()
    return Answer(trainer, home, refusal, at, untaken, sorted(stand_ins.names))


def _find_trainer(trainers: Sequence[str]) -> tuple[str, str]:
    """The first of these packages that is there, and its directory. Raises CkptkitError where there is none."""
    for trainer in trainers:
        spec = find_spec(trainer)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if os.path.isfile(os.path.join(folder, *_module_of(trainer).split(".")[1:]) + ".py"):
                return trainer, os.path.abspath(folder)
    names = " or ".join(_module_of(trainer) for trainer in trainers)
    raise CkptkitError(f"{names} was not found", "name a Python that has it, or set PYTHONPATH to its checkout")


def _module_of(trainer: str) -> str:
    return "megatron.training.arguments" if trainer == MEGATRON else f"{trainer}.utils.arguments"


def _parse_of(trainer: str) -> Callable[[], object]:
    """What parses and validates the command line."""
    module = importlib.import_module(_module_of(trainer))
    return partial(_parse_megatron, module) if trainer == MEGATRON else module.parse_args


def _parse_megatron(module: Any) -> None:
    """Parses as Megatron-LM's programs do, but for options that a program adds to Megatron's own."""
    arguments = module.parse_args(ignore_unknown_args=True)
    for name in ("use_checkpoint_args", "yaml_cfg"):
        if getattr(arguments, name, None):
            message = f"--{name.replace('_', '-')} reads further options from a file"
            raise CkptkitError(message, "give them as options")
    module.validate_args(arguments, {"tokenizer_type": "GPT2BPETokenizer"})  # the default of pretrain_gpt.py


def _refuse_checkpoint_code(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook that stops code of a checkpoint, which slime has transformers copy into a package and run."""
    if event == "exec" and "transformers_modules" in str(getattr(arguments[0], "co_filename", "")):
        raise CkptkitError("the checkpoint's config has code of its own, which is not run here")


def _answer_for_gpu() -> None:
    """Has torch describe a Hopper GPU to a trainer that asks for one's compute capability as it validates."""
    if (cuda := getattr(sys.modules.get("torch"), "cuda", None)) is not None:
        cuda.get_device_capability = lambda *_: GPU_CAPABILITY
        cuda.get_device_properties = lambda *_: types.SimpleNamespace(
            major=GPU_CAPABILITY[0], minor=GPU_CAPABILITY[1], name="NVIDIA H100"
        )


def _refusal_of(error: BaseException, parsers: _Parsers, home: str) -> tuple[str, str]:
    """The message of the trainer or of argparse, and the trainer's place; empty where another cause is possible."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    megatron = getattr(sys.modules.get(_module_of(MEGATRON)), "__file__", None)
    homes = [home, *([os.path.dirname(os.path.dirname(megatron))] if megatron else [])]
    theirs = [
        one for one in frames if os.path.abspath(one.filename).startswith(tuple(f"{path}{os.sep}" for path in homes))
    ]
    is_parser = bool(frames) and frames[-1].filename == argparse.__file__
    if not theirs or not (is_parser or frames[-1] is theirs[-1]) or any(one.name == "<module>" for one in frames):
        return "", ""
    says = parsers.error if is_parser else str(error)
    says = says or f"it stops at `{theirs[-1].line}`"
    causes = (error.__cause__, error.__context__)
    if _OF_THE_MACHINE.search(f"{says} {theirs[-1].line}") or any(isinstance(one, ImportError) for one in causes):
        return "", ""
    return one_line(says), f"{theirs[-1].filename}:{theirs[-1].lineno}"


if __name__ == "__main__":
    run_job(TrainerJob, run)
