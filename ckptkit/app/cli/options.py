"""Options that several verbs have: how each is spelled, and what it has an effect beside."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from ckptkit.app.cli.verb import Needs, option
from ckptkit.core.errors import CkptkitError
from ckptkit.storage.url import place
from converters.config.bounds import MAX_RANKS
from quant.selection.readers import ALL_READERS


class PathOrUrl(click.Path):
    """A Path, or a URL as str: a Path would make one slash of its two."""

    def convert(
        self, value: str | os.PathLike[str], parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        found = place(os.fspath(value))
        return found if isinstance(found, str) else super().convert(found, parameter, context)


def _size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Bytes of `512MB` or `2GiB`. Raises click.BadParameter."""
    if text is None:
        return None
    from ckptkit.app.run_options import parse_size

    try:
        return parse_size(text)
    except CkptkitError as error:
        raise click.BadParameter(f"{error.message}: {error.hint}") from error


def _ranks(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Numbers of `0,5,56-63`. Raises click.BadParameter."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()) or int(last or first) > MAX_RANKS:
            raise click.BadParameter(f"{part!r} is not a rank and no range of ranks: give numbers such as 0,5,56-63")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _writable(context: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Refuses a report that could not be written before the work is done whose outcome it would hold."""
    if paths:
        from verify.reports import fault_of

        for path in paths:
            if (fault := fault_of(path)) is not None:
                raise click.BadParameter(fault)
    return paths


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes one decorator of several options, which --help lists in this order."""

    def decorate(command: Any) -> Any:
        for one in reversed(options):
            command = one(command)
        return command

    return decorate


PATH = click.Path(path_type=Path)
PARALLEL = click.IntRange(1, MAX_RANKS)  # a parallel size
PATH_OR_URL = PathOrUrl(path_type=Path)
_HF_HELP = "HF directory with the config of a Megatron checkpoint that does not carry it."
hf = option("--hf", type=PATH_OR_URL, help=_HF_HELP)
local_hf = option("--hf", type=PATH, help=_HF_HELP)
workers = option(
    "--workers",
    type=click.IntRange(1),
    help="Threads that read, compute and write. "
    "[default: three more than there are cores, one for each 48 MiB of --memory at most]",
)
ray = option(
    "--ray",
    is_flag=False,
    flag_value="auto",
    metavar="[ADDRESS]",
    help="Work on a Ray cluster: the one at ADDRESS or at hand, or a new one on this machine.",
)
as_json = option("--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else there.")
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
writing = together(
    workers,
    option(
        "--memory",
        callback=_size,
        default="512MB",
        show_default=True,
        help="Most bytes of tensors in flight: 512MB, 2GB.",
    ),
    option(
        "--max-shard-size",
        callback=_size,
        help="Where a file of DST ends: 5GB, 512MiB or bytes. [default: as in the release; of Megatron's files "
        "an eighth of the weights, 500MB to 5GB]",
    ),
    ray,
    option("--resume", is_flag=True, help="Go on with what a run that was cut off has finished."),
    option(
        "--overwrite",
        is_flag=True,
        help="Replace what is at DST, once the new one is whole; at a URL, once its first file is.",
    ),
    option(
        "--dry-run",
        is_flag=True,
        help="Check everything; print the plan and what it will take. "
        "Writes only a file to measure the disk with, which is removed at once.",
    ),
)
# Programs that may be in environments of their own, and what asks each.
PROGRAMS = {
    "megatron": Needs(("against_megatron",), "add --against-megatron, or leave it out"),
    "sglang": Needs(
        ("against_sglang", "engine", "update", "release_resume", "rollout_data"),
        "add --against-sglang, --engine or --rollout-data, or leave it out",
    ),
    "vllm": Needs(("against_vllm",), "add --against-vllm, or leave it out"),
}
pythons = together(
    *(
        option(
            f"--{name}-python",
            type=click.Path(),
            needs=needs,
            help=f"The Python of the environment that has it. [default: CKPTKIT_{name.upper()}_PYTHON, else this one]",
        )
        for name, needs in PROGRAMS.items()
    )
)


def pythons_of(given: Mapping[str, str | None]) -> dict[str, str]:
    """What the options `pythons` say, by program."""
    found = {name: given[f"{name}_python"] for name in PROGRAMS}
    return {name: path for name, path in found.items() if path is not None}


parallel = together(
    *(
        option(f"--{name}", default=1, show_default=True, type=PARALLEL, help=f"{what} parallel size to verify with.")
        for name, what in (("tp", "Tensor"), ("pp", "Pipeline"), ("ep", "Expert"))
    )
)
megatron_option = partial(
    option,
    needs=Needs(
        ("against_megatron",),
        "add --against-megatron, or leave it out: files and values do not depend on how Megatron is launched",
    ),
)
megatron = together(
    megatron_option("--cp", default=1, show_default=True, type=PARALLEL, help="Megatron: context parallel size."),
    megatron_option(
        "--pipeline-layout",
        "--pipeline-model-parallel-layout",
        metavar="LAYOUT",
        help="Megatron: what each pipeline stage holds, such as 'Et*3|(tt|)*29m|L'. It implies --vpp.",
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
        help="Megatron: look at these ranks only, such as 0,5,56-63. The report says what was left out.",
    ),
    megatron_option(
        "--trainer-loader",
        is_flag=True,
        help="Megatron: load with Megatron-LM's own load_checkpoint, by the tracker in the root, as a trainer does.",
    ),
)
_quantizing = partial(
    option,
    needs=Needs(
        ("quantization",),
        "leave it out, or add --quantize w4a16 on the way from Megatron to HF; "
        "`ckptkit quantize` quantizes an HF checkpoint",
    ),
)
quantizing = together(
    _quantizing(
        "--group-size",
        type=click.Choice(["32", "64", "128", "channel"]),
        help="Weights that share a scale; channel: a whole row. [default: as an INT4 source has it, or 128]",
    ),
    _quantizing(
        "--grid",
        type=click.Choice(["qmax7", "minmax"]),
        help="Scale: absmax/7 (slime's QAT, Kimi) or absmax/7.5 (compressed-tensors). "
        "[default: as ckptkit recorded it in an INT4 source, or qmax7]",
    ),
    _quantizing("--asymmetric", is_flag=True, default=None, help="A zero point for each scale; on the minmax grid."),
    _quantizing(
        "--search",
        default="none",
        show_default=True,
        type=click.Choice(["none", "mse"]),
        help="mse: clip the largest weights where that rounds the others less; on the minmax grid.",
    ),
    _quantizing(
        "--scale-dtype",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        help="What scales are stored in; auto: the weight's own dtype.",
    ),
    _quantizing(
        "--rounding",
        type=click.Choice(
            ["online", "slime", "slime-cuda", "transformers", "deepgemm", "compressed-tensors", "modelopt"]
        ),
        help="The writer whose bytes are wanted. fp8-block: all but modelopt; fp8-channel: slime, slime-cuda, "
        "compressed-tensors; mxfp8: modelopt; mxfp4: compressed-tensors; nvfp4: modelopt, compressed-tensors. "
        "[default: online, slime, modelopt, compressed-tensors, modelopt]",
    ),
    _quantizing(
        "--exact",
        is_flag=True,
        help="Floats: end with an error at a weight that rounding would change, as of an MXFP4 source where powers of "
        "two reach (fp8-block with --rounding deepgemm, mxfp8, mxfp4).",
    ),
    _quantizing(
        "--like", type=PATH_OR_URL, help="A checkpoint of the same model in the same scheme: pack what it has packed."
    ),
    _quantizing(
        "--preset",
        type=click.Choice(["rl"]),
        help="rl: what updates of an engine bring. w4a16: routed experts alone, symmetric and on the qmax7 grid, as "
        "slime's training rounds them; SGLang takes no other INT4 layers again, vLLM takes all. fp8-block, mxfp8: the "
        "rounding of trainers' updates.",
    ),
    _quantizing(
        "--tp",
        type=PARALLEL,
        needs=Needs(("quantization",), "leave it out: converting needs no parallel sizes, and the output loads at any"),
        help="Tensor parallel size that SGLang's INT4 kernels must be able to load.",
    ),
    _quantizing(
        "--reader",
        "readers",
        multiple=True,
        type=click.Choice(ALL_READERS),
        help="Who must agree on what is packed. Repeatable. [default: all]",
    ),
    _quantizing(
        "--device",
        default="cpu",
        show_default=True,
        type=click.Choice(["cpu", "cuda"]),
        help="What computes; the bytes are the same.",
    ),
    _quantizing(
        "--ignore",
        multiple=True,
        help="More modules to leave as they are: a module name, or `re:` and a regex. Repeatable.",
    ),
)


def reader_words(readers: Collection[str]) -> list[str]:
    """The options of the next command that name the same readers."""
    return [word for reader in readers for word in ("--reader", reader)]
