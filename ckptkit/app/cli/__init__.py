"""The command line. Exit codes: 0 nothing wrong, 1 findings, 2 bad usage or input, or inconclusive, 130 interrupted,
129 and 143 ended by SIGHUP and SIGTERM.

A verb's module is imported when the verb is looked up; its own dependencies are imported when it runs.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import traceback
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from itertools import groupby
from types import FrameType

import click

from ckptkit.app.cli.output import echo, prepare_streams, show_progress
from ckptkit.app.cli.verb import VERBS, global_options, parse_flags
from ckptkit.core.allocator import return_freed_memory
from ckptkit.core.errors import CkptkitError, MissingDependencyError, memory_for, words_of
from ckptkit.core.installation import INSTALL_CONVERT, missing_of_convert, program_version
from ckptkit.core.printable import printable
from ckptkit.storage.url import refuse_credentials


class LazyGroup(click.Group):
    """A group of verbs that are imported from the modules of this folder on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the verbs in groups, with an example for each."""
        width = formatter.width - max(map(len, VERBS)) - 6
        for title, verbs in groupby(VERBS, lambda name: VERBS[name].group):
            rows = []
            for name in verbs:
                command = self.get_command(ctx, name)
                rows += [(name, command.get_short_help_str(width) if command else ""), ("", VERBS[name].example)]
            with formatter.section(title):
                formatter.write_dl(rows)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a verb. Returns None for an unknown name."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.{VERBS[cmd_name].module}"), cmd_name)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses words. Raises UsageError like `refuse_credentials` for each word before `--`."""
        if not ctx.resilient_parsing:
            for word in args[: args.index("--")] if "--" in args else args:
                refuse_credentials(word)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the verb. Raises click.UsageError for an unknown verb, with the most similar one."""
        if args[0] not in VERBS and not ctx.resilient_parsing:
            near = get_close_matches(args[0], VERBS, 1)
            hint = f"did you mean {near[0]}?" if near else f"verbs: {', '.join(sorted(VERBS))}"
            raise click.UsageError(f"there is no verb {args[0]!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(program_version(), prog_name="ckptkit")
def cli() -> None:
    """Converts HF <-> Megatron checkpoints, quantizes them, and proves what Megatron, SGLang and vLLM loaded.

    Formats: INT4, FP8, MXFP8, MXFP4, NVFP4. Trainers: slime, miles, verl, NeMo-RL, ROLL.
    """


cli.params += global_options()


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP: like after Ctrl-C, a run cleans up before it exits."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _end(number: int, _: FrameType | None) -> None:
    raise Ended(number)


def main() -> None:
    prepare_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, _end)
    flags = parse_flags(sys.argv[1:])
    debug = "debug" in flags
    # Headers of large models are a million long-lived objects: Python's default thresholds would double the run time.
    gc.set_threshold(200_000, 10, 10)
    if debug:
        logging.basicConfig()
        logging.getLogger("ckptkit").setLevel(logging.DEBUG)
    return_freed_memory()
    try:
        with show_progress(flags), memory_for("this command"):
            code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        _show_usage(error)
        code = 2
    except (KeyboardInterrupt, click.Abort) as error:
        cause = error.__cause__ or error
        notes = getattr(cause, "__notes__", ["nothing was left behind"])
        by: int = cause.number if isinstance(cause, Ended) else signal.SIGINT
        ending = "interrupted" if by == signal.SIGINT else f"ended by {signal.Signals(by).name}"
        echo("; ".join([ending, *notes]), err=True)
        code = 128 + by
    except Exception as error:  # noqa: BLE001 - Python's exit code for an exception is 1, which here means findings
        _show_error(error, debug)
        code = 2
    finally:
        # Without this the interpreter collects garbage again at exit: a second if model classes were imported.
        gc.freeze()
    sys.exit(code if isinstance(code, int) else 0)


def _show_usage(error: click.ClickException) -> None:
    """Shows a usage error, made printable: a shell may have expanded file names into the command line."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return
    text = printable(error.format_message())
    (click.UsageError(text, error.ctx) if isinstance(error, click.UsageError) else click.ClickException(text)).show()


def _package(error: ImportError) -> str:
    return (error.name or "").partition(".")[0]


def _not_usable(error: ImportError) -> CkptkitError:
    """The error for a library that is missing or cannot be loaded, for example torch without CUDA libraries."""
    name = _package(error)
    if isinstance(error, ModuleNotFoundError) and name:
        message = f"{name} is not installed in {sys.executable}"
    else:
        message = f"{name or 'a library'} cannot be used: {words_of(error)}"
    if missing_of_convert(error):
        return MissingDependencyError(message, f"{INSTALL_CONVERT}: this command computes with weights")
    return MissingDependencyError(message, "install ckptkit again for this Python; `ckptkit doctor` lists its parts")


def _show_error(error: Exception, debug: bool) -> None:
    if debug:
        echo(*"".join(traceback.format_exception(error)).split("\n"), err=True)
        return
    if isinstance(error, CkptkitError):
        shown = error
    elif isinstance(error, OSError):
        shown = CkptkitError(str(error), "check the path and its permissions")
    elif isinstance(error, ImportError) and _package(error) != "ckptkit":
        shown = _not_usable(error)
    else:
        shown = CkptkitError(
            f"an error inside ckptkit: {words_of(error, with_class=True)}",
            "please report it, with the output of `ckptkit --debug ...`",
        )
    with suppress(OSError):  # `echo` handles it
        click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    echo(*str(shown).split("\n"), *getattr(error, "__notes__", []), err=True)
