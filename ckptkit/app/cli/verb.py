"""Base classes of verbs: global options, and errors for options without effect.

It imports no package that a user's file could shadow: the check for such files runs after this import.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from ckptkit.app.option import EXCLUDES, Needs, Option

_SIZES = frozenset({"--pp", "--ep", "--etp", "--vpp", "--cp"})
_GLOBAL = (
    (("-q", "--quiet"), "quiet", "Print no progress and no closing line."),
    (("-v", "--verbose"), "verbose", "Print a line for each step."),
    (("--debug",), "debug", "Show a traceback when something goes wrong."),
)


class VerbRow(NamedTuple):
    """A verb: its heading in --help, its module in this folder, and an example."""

    group: str
    module: str
    example: str


_MAKE, _PROVE, _AROUND_A_JOB, _LOOK_UP = "Make", "Prove", "Before and after a job", "Look up"
# In the order of --help.
VERBS = {
    "convert": VerbRow(_MAKE, "conversion", "ckptkit convert qwen3 qwen3-megatron"),
    "quantize": VerbRow(_MAKE, "conversion", "ckptkit quantize qwen3 qwen3-int4 --preset rl"),
    "verify": VerbRow(_PROVE, "verification", "ckptkit verify qwen3-int4 --source qwen3 --against-sglang"),
    "diff": VerbRow(_PROVE, "inspection", "ckptkit diff qwen3-trained qwen3"),
    "lint": VerbRow(_PROVE, "inspection", "ckptkit lint qwen3-int4"),
    "manifest": VerbRow(_PROVE, "inspection", "ckptkit manifest qwen3-int4"),
    "preflight": VerbRow(_AROUND_A_JOB, "verification", "ckptkit preflight run-qwen3-30B-A3B.sh"),
    "gate": VerbRow(_AROUND_A_JOB, "verification", "ckptkit gate -- bash run-qwen3-30B-A3B.sh"),
    "triage": VerbRow(_AROUND_A_JOB, "inspection", "ckptkit triage job.log"),
    "inspect": VerbRow(_LOOK_UP, "inspection", "ckptkit inspect hf://Qwen/Qwen3-30B-A3B"),
    "explain": VerbRow(_LOOK_UP, "inspection", "ckptkit explain garbled"),
    "doctor": VerbRow(_LOOK_UP, "inspection", "ckptkit doctor sglang"),
}
# The sections in --help of verbs that compare; the remaining options come last.
_SECTIONS = {
    "Compare with": {"--source", "--trained", "--adapter", "--hf", "--manifest"},
    "Real engines and trainers": {
        *("--against-megatron", "--against-sglang", "--against-vllm", "--against-transformers"),
        *("--engine", "--update", "--release-resume"),
        *("--logits", "--rollout-data", "--rollout-temperature"),
        *("--megatron-python", "--sglang-python", "--vllm-python"),
    },
    "Parallel sizes": {"--tp", "--pp", "--ep", "--etp", "--dp-attention", "--vpp", "--cp"},
    "Megatron's layout": {
        *("--pipeline-layout", "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
        *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
        *("--ranks", "--trainer-loader"),
    },
    "Output": {"--report", "--accept", "--strict", "--all", "--json", "--quiet", "--verbose"},
}
LAUNCH = "launch"  # the key in `Context.meta` for the words after `--`


def global_options() -> list[click.Option]:
    """The options that are allowed before and after a verb. `main` reads them before it imports the verb."""
    return [
        click.Option([*spelled, name], is_flag=True, expose_value=False, help=text) for spelled, name, text in _GLOBAL
    ]


def parse_flags(words: list[str]) -> frozenset[str]:
    """The names of the global options in a command line."""
    own = words[: words.index("--")] if "--" in words else words
    return frozenset(name for spelled, name, _ in _GLOBAL if not set(spelled).isdisjoint(own))


class Verb(click.Command):
    """A verb. Raises click.UsageError for options without effect."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.params += global_options()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options, in sections for a verb that compares."""
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        if not any("--source" in one.opts for one in options):
            super().format_options(ctx, formatter)
            return
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in (*_SECTIONS, "Other")}
        for one in options:
            title = next((title for title, names in _SECTIONS.items() if not names.isdisjoint(one.opts)), "Other")
            if (record := one.get_help_record(ctx)) is not None:
                sections[title].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Example"):
            formatter.write_text(VERBS[str(self.name)].example)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses words. Raises click.UsageError for options without effect."""
        try:
            rest = super().parse_args(ctx, args)
        except click.MissingParameter as error:
            message = f"{error.format_message().rstrip('.')}, for example: {VERBS[str(self.name)].example}"
            raise click.UsageError(message, ctx) from error
        except click.NoSuchOption as error:
            if self.name == "convert" and error.option_name in _SIZES:
                message = f"convert has no option {error.option_name}: the output loads at any parallel size"
                raise click.UsageError(message, ctx) from error
            raise
        # A shell that completes a line parses an incomplete one.
        if not ctx.resilient_parsing and (text := _refusal(ctx)) is not None:
            raise click.UsageError(text, ctx)
        return rest


class LaunchVerb(Verb):
    """A verb with launch arguments after `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Stores the words after the first `--` separately, to distinguish them from the script."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[LAUNCH] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


def needs_of(command: click.Command) -> dict[Needs, list[str]]:
    """The options of a verb that require one of several parameters, by these requirements."""
    names = {*(one.name for one in command.params), LAUNCH}
    found: dict[Needs, list[str]] = {}
    for one in command.params:
        for needs in one.needs if isinstance(one, Option) else ():
            if not names.isdisjoint(needs.any_of):
                found.setdefault(needs, []).append(str(one.name))
    return found


def _refusal(ctx: click.Context) -> str | None:
    """Why some of the given options are rejected, or None if each has an effect."""
    given, spelled = _given(ctx), _spelled(ctx)
    for names, hint in EXCLUDES:
        if len(named := [spelled[name] for name in names if name in given]) > 1:
            return f"{' and '.join(named)} exclude each other: {hint}"
    for needs, options in needs_of(ctx.command).items():
        named = [spelled[name] for name in options if name in given]
        if named and given.isdisjoint(needs.any_of):
            required = " or ".join(spelled[name] for name in needs.any_of)
            return f"{', '.join(named)}: no effect without {required}; {needs.hint}"
    return None


def _given(ctx: click.Context) -> set[str]:
    """The names of the parameters on the command line."""
    found = {
        str(one.name)
        for context in filter(None, (ctx.parent, ctx))
        for one in context.command.params
        if context.get_parameter_source(str(one.name)) is ParameterSource.COMMANDLINE
    }
    return found | ({LAUNCH} if ctx.meta.get(LAUNCH) else set())


def _spelled(ctx: click.Context) -> dict[str, str]:
    """The spelling of every parameter on the command line, by its name."""
    found = {str(one.name): next(word for word in (*one.opts, "") if len(word) != 2) for one in ctx.command.params}
    return found | {"script": "SCRIPT", LAUNCH: "launch arguments after --"}
