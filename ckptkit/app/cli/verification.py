"""The verbs that verify: `verify`, `preflight` and `gate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptkit.app.cli import options as common
from ckptkit.app.cli.output import echo, echo_json, guard_stdout
from ckptkit.app.cli.verb import LAUNCH, LaunchVerb, Verb
from ckptkit.app.option import Needs, option, together
from ckptkit.app.run_options import PARALLEL, PATH
from ckptkit.core.progress import closing, phase
from ckptkit.quant.ignore.readers import ALL_READERS
from ckptkit.verify.witnesses.registry import ENGINES, WITNESSES

if TYPE_CHECKING:
    from ckptkit.verify.core.report import Report


_verify_options = together(
    click.argument("checkpoint", type=PATH),
    option("--source", type=PATH, help="The checkpoint that it was made from, HF or Megatron: compare every value."),
    option(
        "--trained",
        is_flag=True,
        needs=Needs(("source",), "pass --source RELEASE, from which training started"),
        help="It was trained from --source: only values may differ, not names, shapes, configuration or tokenizer.",
    ),
    option(
        "--adapter",
        type=PATH,
        needs=Needs(("source",), "pass --source BASE, into which the adapter was merged"),
        help="A PEFT adapter (LoRA) that was merged into --source.",
    ),
    common.local_hf,
    option(
        "--against-megatron",
        is_flag=True,
        help="Load it into real Megatron, one process per rank, and compare every parameter.",
    ),
    *(
        option(
            f"--against-{one.name}",
            is_flag=True,
            help=f"Load it into the real {one.label} model class, one process per rank, and compare every parameter.",
        )
        for one in ENGINES
    ),
    option(
        "--against-transformers",
        is_flag=True,
        help="Load names and shapes into transformers' own class, without values. [default: for models outside "
        "ckptkit's families]",
    ),
    common.pythons,
    option(
        "--engine",
        is_flag=True,
        help="Serve it with a live engine: SGLang, or vLLM with --against-vllm. Needs GPUs, as do the next two.",
    ),
    option("--update", is_flag=True, help="Serve it, and load it again, by tensor and from disk: nothing may change."),
    option("--release-resume", is_flag=True, help="Serve it, release its memory and resume: nothing may be lost."),
    option(
        "--logits",
        is_flag=True,
        help="Check that it predicts text, with transformers on the CPU. With --engine, compare the engine's "
        "output with transformers'; for a Megatron checkpoint with --against-megatron, Megatron's output.",
    ),
    option(
        "--rollout-data",
        type=PATH,
        help="A rollout that slime or miles recorded (--save-debug-rollout-data): log-probabilities and prompts are "
        "computed again with transformers.",
    ),
    option(
        "--rollout-temperature",
        type=click.FloatRange(0, min_open=True),
        needs=Needs(("rollout_data",), "pass --rollout-data FILE, which was sampled at this temperature"),
        help="The sampling temperature of --rollout-data. [default: the recorded one, or 1]",
    ),
    option(
        "--manifest",
        type=PATH,
        help="A ckptkit.json stored elsewhere: compare every tensor and side file with its digest.",
    ),
    common.parallel,
    option("--etp", type=PARALLEL, help="Tensor parallel size inside experts. [default: tp, or 1 with --ep]"),
    option(
        "--dp-attention",
        is_flag=True,
        needs=(
            Needs(("against_sglang",), "pass --against-sglang and --tp, or remove this option"),
            Needs(("tp",), "pass --tp: a single rank has complete attention layers anyway"),
        ),
        help="With --tp: SGLang has complete attention layers on every rank.",
    ),
    common.megatron_option(
        "--vpp", default=1, show_default=True, type=PARALLEL, help="Virtual pipeline stages per rank."
    ),
    common.megatron,
    option(
        "--reader",
        "readers",
        multiple=True,
        type=click.Choice(ALL_READERS),
        help="A reader whose interpretation of an INT4 checkpoint's `ignore` list counts. Repeatable. "
        "[default: the engine (vllm with only --against-vllm, else sglang), slime and miles]",
    ),
    option(
        "--accept",
        multiple=True,
        metavar="CODE",
        help="A check that may be skipped, such as CK506 (repacking) without a GPU: the report lists it without "
        "becoming inconclusive. Repeatable.",
    ),
    common.ray,
)


@click.command(cls=Verb, short_help="Prove a checkpoint: files, values, real engines.")
@_verify_options
@common.reports
@common.strict
@common.every
@common.as_json
def verify(
    checkpoint: Path,
    readers: tuple[str, ...],
    reports: tuple[Path, ...],
    strict: bool,
    every: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Prove CHECKPOINT: files, values, quantization, and loading into real Megatron, SGLang and vLLM."""
    pythons = common.pythons_of({f"{name}_python": options.pop(f"{name}_python") for name in common.PROGRAMS})
    flags = {one.name: options.pop(one.option.removeprefix("--").replace("-", "_")) for one in WITNESSES}
    against = frozenset(name for name, is_set in flags.items() if is_set)
    with phase("loading ckptkit and torch"):
        from ckptkit.verify.run import verify as run

    report = run(checkpoint, command=sys.argv, readers=readers or None, against=against, pythons=pythons, **options)
    print_report(report, as_json, strict, reports, every)


@click.command(cls=LaunchVerb, short_help="Check a launch against its checkpoints, before the job.")
@option("--hf-checkpoint", type=PATH, help="The checkpoint that the rollout engine loads.")
@option("--load", type=PATH, help="The checkpoint that the trainer loads.")
@option("--ref-load", type=PATH, help="The checkpoint that the reference model loads.")
@option(
    "--ckpt-step",
    type=click.IntRange(0),
    needs=Needs(
        ("load", "ref_load", "script", "launch"),
        "pass --load, --ref-load or a launch: an HF directory has no iterations",
    ),
    help="The iteration to load instead of the latest.",
)
@option(
    "--ask-trainer",
    metavar="[PYTHON]",
    is_flag=False,
    flag_value=sys.executable,
    help="After SCRIPT: let slime, miles, Megatron-LM, verl, NeMo-RL or ROLL parse the launch, here or in PYTHON. "
    "This executes the trainer's code, from the launch's checkout or the installed one, without a GPU and offline.",
)
@common.parallel
@common.reports
@common.strict
@common.every
@common.as_json
@click.argument("script", type=click.Path(), required=False, metavar="[SCRIPT] [-- LAUNCH ARGUMENTS]")
@click.pass_context
def preflight(
    context: click.Context,
    /,
    script: str | None,
    reports: tuple[Path, ...],
    strict: bool,
    every: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Before a training job: find the weights that each side would load, and check that they match.

    SCRIPT is a launch script in bash, or `-` for a command on standard input. It is read and never run. Its paths,
    model arguments, parallel sizes and GPUs are compared with the checkpoints; of weights, at most samples are read.
    Launch arguments after -- are appended to those of SCRIPT, or are a launch by themselves. A path or size that is
    unknown before the script runs makes the report inconclusive.

    For a job of verl, NeMo-RL or ROLL, SCRIPT may be its YAML file, and the words after -- override its settings.
    """
    from ckptkit.verify.launch.preflight import preflight as run

    arguments = context.meta[LAUNCH]
    paths = [options[name] for name in ("hf_checkpoint", "load", "ref_load")]
    if script is None and not arguments and not any(paths):
        raise click.UsageError("pass a launch script, or at least one of --hf-checkpoint, --load and --ref-load")
    report = run(script, arguments=arguments, **options)
    print_report(report, as_json, strict, reports, every)


@click.command(cls=LaunchVerb, short_help="Run a launch, and stop it before the trainer starts if preflight fails.")
@common.reports
@common.strict
@click.argument("words", nargs=-1, metavar="-- COMMAND...")
@click.pass_context
def gate(context: click.Context, /, words: tuple[str, ...], reports: tuple[Path, ...], strict: bool) -> None:
    """Run the command after --, which starts the job: a script, Python, make.

    Before it starts its first trainer by python, python3, torchrun or ray, `preflight` checks the exact words, in their
    directory and environment. If that fails, no trainer is started, and the exit code is 1. If it passes or is
    inconclusive, the job continues, and the exit code is that of the command.
    """
    from ckptkit.app.gate import gate as run

    if words or not (command := context.meta[LAUNCH]):
        raise click.UsageError("pass the command that starts the job after --: ckptkit gate -- bash run.sh")
    options = [word for path in reports for word in ("--report", str(path.absolute()))] + ["--strict"] * strict
    code, remark = run(command, options)
    if remark:
        echo(f"ckptkit gate: {remark}", err=True)
    raise SystemExit(code)


def print_report(report: Report, as_json: bool, strict: bool, reports: tuple[Path, ...], every: bool = False) -> None:
    """Prints a report, writes it to the files `reports`, and raises SystemExit unless its status is `passed`."""
    from ckptkit.verify.reports import write_report
    from ckptkit.verify.reports.text import groups, totals

    try:
        for path in reports:
            write_report(report, path)
    finally:
        # Findings are printed even if the disk is full.
        if as_json:
            echo_json(report.to_json())
        else:
            from ckptkit.verify.reports.render import render

            with guard_stdout():
                render(report, every=every)
    lines = [totals(report)] if as_json else []
    lines += [f"report in {', '.join(map(str, reports))}"] if reports else []
    # The text report already contains the counts and this command.
    after = f"ckptkit explain {groups(report, 1)[0].code}" if as_json and report.findings else None
    closing("; ".join(lines) or "done", after)
    skipped = [check.code for check in report.checks if check.status == "skipped"]
    if strict and skipped:
        echo(f"--strict: skipped {', '.join(skipped)}", err=True)
    if strict and report.warnings:
        echo(f"--strict: warnings: {report.warnings}", err=True)
    if report.status == "failed" or (strict and (skipped or report.warnings) and report.status == "passed"):
        raise SystemExit(1)
    if report.status == "inconclusive":
        raise SystemExit(2)
