"""Options of several verbs, and those of schemes. `RunOptions` has the remaining ones of `convert` and `quantize`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import click

from ckptkit.app.option import Needs, option, together
from ckptkit.app.run_options import PARALLEL, PATH, PATH_OR_URL, QUANTIZED, rows
from ckptkit.converters.config.bounds import MAX_RANKS


def _ranks(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Parses `0,5,56-63`. Raises click.BadParameter."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()) or int(last or first) > MAX_RANKS:
            raise click.BadParameter(f"{part!r} is neither a rank nor a range: use numbers such as 0,5,56-63")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _writable(context: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Raises click.BadParameter for a report that cannot be written, before any check runs."""
    if paths:
        from ckptkit.verify.reports import fault_of

        if (fault := next(filter(None, map(fault_of, paths)), None)) is not None:
            raise click.BadParameter(fault)
    return paths


_HF_HELP = "HF directory with the config of a Megatron checkpoint that was saved without it."
hf = option("--hf", type=PATH_OR_URL, help=_HF_HELP)
local_hf = option("--hf", type=PATH, help=_HF_HELP)
workers, ray = rows("workers"), rows("ray")
as_json = option("--json", "as_json", is_flag=True, help="Print only JSON on stdout.")
strict = option("--strict", is_flag=True, help="Exit 1 also when there are warnings or a check was skipped.")
every = option("--all", "every", is_flag=True, help="Print every check, and all details of all findings.")
reports = option(
    "--report",
    "reports",
    multiple=True,
    type=click.Path(path_type=Path),
    callback=_writable,
    help="Also write the report to this file: .json, .md, .xml (JUnit), .sarif or .html. Repeatable.",
)
writing = rows(group="writing")
# Programs that may be in separate environments, and the options that run each.
PROGRAMS = {
    "megatron": Needs(("against_megatron",), "pass --against-megatron, or remove this option"),
    "sglang": Needs(
        ("against_sglang", "engine", "update", "release_resume", "rollout_data"),
        "pass --against-sglang, --engine or --rollout-data, or remove this option",
    ),
    "vllm": Needs(("against_vllm",), "pass --against-vllm, or remove this option"),
}
pythons = together(
    *(
        option(
            f"--{name}-python",
            type=click.Path(),
            needs=needs,
            help=f"The Python of the environment with {name}. [default: CKPTKIT_{name.upper()}_PYTHON, else this one]",
        )
        for name, needs in PROGRAMS.items()
    )
)


def pythons_of(options: Mapping[str, str | None]) -> dict[str, str]:
    """The values of the options `pythons`, by program."""
    return {name: path for name in PROGRAMS if (path := options[f"{name}_python"]) is not None}


parallel = together(
    *(
        option(f"--{name}", default=1, show_default=True, type=PARALLEL, help=f"{kind} parallel size to verify with.")
        for name, kind in (("tp", "Tensor"), ("pp", "Pipeline"), ("ep", "Expert"))
    )
)
megatron_option = partial(
    option,
    needs=Needs(
        ("against_megatron",),
        "pass --against-megatron, or remove this option: files and values do not depend on Megatron's launch",
    ),
)
megatron = together(
    megatron_option("--cp", default=1, show_default=True, type=PARALLEL, help="Megatron: context parallel size."),
    megatron_option(
        "--pipeline-layout",
        "--pipeline-model-parallel-layout",
        metavar="LAYOUT",
        help="Megatron: the layers of each pipeline stage, such as 'Et*3|(tt|)*29m|L'. It implies --vpp.",
    ),
    megatron_option("--decoder-first-pipeline-num-layers", type=PARALLEL, help="Megatron: layers of the first stage."),
    megatron_option("--decoder-last-pipeline-num-layers", type=PARALLEL, help="Megatron: layers of the last stage."),
    megatron_option(
        "--account-for-embedding-in-pipeline-split", is_flag=True, help="Megatron: the embedding counts as a layer."
    ),
    megatron_option(
        "--account-for-loss-in-pipeline-split", is_flag=True, help="Megatron: the output layer counts as a layer."
    ),
    megatron_option(
        "--ranks",
        "--rank",
        callback=_ranks,
        metavar="N[,N...]",
        help="Megatron: check only these ranks, such as 0,5,56-63. The report lists the skipped parts.",
    ),
    megatron_option(
        "--trainer-loader",
        is_flag=True,
        help="Megatron: load with Megatron-LM's own load_checkpoint, which reads the tracker file, as a trainer does.",
    ),
)
_quantizing = partial(option, needs=QUANTIZED)
quantizing = together(
    _quantizing(
        "--group-size",
        type=click.Choice(["32", "64", "128", "channel"]),
        help="Number of weights per scale; channel: a complete row. [default: as in an INT4 source, or 128]",
    ),
    _quantizing(
        "--grid",
        type=click.Choice(["qmax7", "minmax"]),
        help="qmax7: scale absmax/7 (slime's QAT, Kimi); minmax: absmax/7.5 (compressed-tensors). "
        "[default: as ckptkit recorded in an INT4 source, or qmax7]",
    ),
    _quantizing("--asymmetric", is_flag=True, default=None, help="Store a zero point per scale; needs --grid minmax."),
    _quantizing(
        "--search",
        default="none",
        show_default=True,
        type=click.Choice(["none", "mse"]),
        help="mse: clip the largest weights if that reduces the error; requires --grid minmax.",
    ),
    _quantizing(
        "--scale-dtype",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        help="The dtype of scales; auto: the dtype of the weight.",
    ),
    _quantizing(
        "--rounding",
        type=click.Choice(
            ["online", "slime", "slime-cuda", "transformers", "deepgemm", "compressed-tensors", "modelopt"]
        ),
        help="The program to match byte for byte. fp8-block: all but modelopt; fp8-channel: slime, slime-cuda, "
        "compressed-tensors; mxfp8: modelopt; mxfp4: compressed-tensors; nvfp4: modelopt, compressed-tensors. "
        "[defaults, in this order: online, slime, modelopt, compressed-tensors, modelopt]",
    ),
    _quantizing(
        "--exact",
        is_flag=True,
        help="Not for w4a16: stop at a weight that rounding would change. Useful for an MXFP4 source if scales are "
        "powers of two (fp8-block with --rounding deepgemm, mxfp8, mxfp4).",
    ),
    rows(group="quantizing"),
    _quantizing(
        "--ignore",
        multiple=True,
        help="More modules to leave unquantized: a module name, or `re:` and a regex. Repeatable.",
    ),
)


def reader_words(readers: Collection[str]) -> list[str]:
    """The `--reader` options for these readers."""
    return [word for reader in readers for word in ("--reader", reader)]
