"""`make cards`: pages of releases, made from their published headers alone, and compared with real weights."""

import sys
import tempfile
import textwrap
from collections import Counter, defaultdict
from contextlib import ExitStack
from difflib import unified_diff
from pathlib import Path

from ckptkit.app.api import inspect, model_arguments
from ckptkit.app.forecast import START, forecast_bytes
from ckptkit.app.plan import make_plan
from ckptkit.app.run_options import run_options
from ckptkit.converters.megatron.arguments import launch_flags
from ckptkit.converters.stored import adapt_config
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.plan import View
from ckptkit.core.specs import fold
from ckptkit.formats.hf.remote import open_directory
from ckptkit.quant.formats.part_names import PACKED
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.ignore.names import matrices_of
from ckptkit.quant.ignore.readers import INT4_READERS
from ckptkit.quant.ignore.reading import read_all
from ckptkit.quant.ignore.tree import class_tree
from ckptkit.storage.url import is_url
from ckptkit.verify.run import verify
from releases.header_only import write
from releases.record import load

FOLDER = Path(__file__).resolve().parents[2] / "lab/cards"
MODELS = (
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen3-30B-A3B",
    "zai-org/GLM-4.5-Air",
    "deepseek-ai/DeepSeek-V3",
    "moonshotai/Kimi-K2-Instruct",
    "openai/gpt-oss-20b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "ibm-granite/granite-4.0-h-tiny",
    "google/gemma-4-31B-it",
    "stepfun-ai/Step-3.5-Flash",
    "MiniMaxAI/MiniMax-M3",
    "deepseek-ai/DeepSeek-V4-Flash",
)
KNOWN = {
    "index": "the published index",
    "numbers": "transformers' class under the names of the release; the published numbers agree",
    "parameters": "transformers' class under the names of the release; the published number of elements agrees",
    "class": "transformers' class",
}
WORKERS = 8
_PROCESS = 600_000_000  # lab/scale.md: Python, torch and their libraries, and 1 KB a tensor for the plan
_PER_TENSOR = 1000


def file_of(model):
    return FOLDER / f"{model.partition('/')[2]}.md"


def card(release, path):
    facts = inspect(path)
    with tempfile.TemporaryDirectory() as empty:
        lines = [*_head(release, facts), *_megatron(path, Path(empty)), *_int4(path, Path(empty))]
    return "\n".join(lines) + "\n"


def dtype_counts(dtypes):
    """`34 bfloat16, 2 float32`."""
    return ", ".join(f"{count:,} {dtype}" for dtype, count in sorted(Counter(dtypes).items()))


def _head(release, facts):
    name = release.model.partition("/")[2]
    dtypes = dtype_counts(Counter(facts["dtypes"]).elements())
    yield from (f"# {name}", "Written by `make cards`; see [all cards](index.md).", "")
    yield from ("| | |", "| --- | --- |")
    yield f"| release | [{release.model}](https://huggingface.co/{release.model}) |"
    yield f"| `model_type` | `{release.config['model_type']}` |"
    yield f"| tensors | {facts['tensors']:,} ({dtypes}) |"
    yield f"| size | {facts['bytes']:,} bytes |"
    yield f"| quantized as | {facts['quantization'] or 'not at all'} |"
    yield f"| names and shapes from | {KNOWN[release.known]} |"
    yield from ("", "## Names and shapes", "```text")
    shapes = defaultdict(list)
    for tensor in release.tensors_in_order:
        shapes[f"{list(tensor.shape)} {tensor.dtype}"].append(tensor.name)
    yield from sorted(f"{one}  {shape}" for shape, names in shapes.items() for one in fold(names))
    yield "```"


def _megatron(path, empty):
    options = run_options("convert", path, empty / "megatron", None, workers=WORKERS)
    with ExitStack() as stack:
        try:
            plan = make_plan(options, _sources(options, stack))
        except UnsupportedError as error:  # no released Megatron holds it
            words = f"`convert` refuses it: {error.message}. What of it SGLang and vLLM load is in"
            yield from ("", "## To Megatron", *textwrap.wrap(words, 118), "[mappings.md](../mappings.md).")
            return
        yield from ("", "## To Megatron", f"`ckptkit convert {Path(str(path)).name} DST --workers {WORKERS}` plans", "")
        yield f"- {len(plan.view.specs):,} tensors: {dtype_counts(spec.dtype for spec in plan.view.specs.values())}"
        yield from _forecast(options, plan)
        yield from (f"- {note}" for note in plan.notes)
    yield from ("", "Megatron's arguments, as `ckptkit inspect --megatron-args` prints them:", "```text")
    yield from ("MODEL_ARGS=(", *(f"    {line}" for line in launch_flags(model_arguments(path))), ")", "```")


def _sources(options, stack):
    return {source: stack.enter_context(open_directory(source)) for source in options.sources}


def _forecast(options, plan):
    found = forecast_bytes(options, plan, _PROCESS + _PER_TENSOR * len(plan.view.specs))
    if plan.dequantized:
        yield f"- dequantized from {plan.dequantized}"
    yield f"- reads {found.read / 1e9:.1f} GB, writes {found.written / 1e9:.1f} GB"
    yield f"- needs {found.memory / 1e9:.1f} GB of memory at {WORKERS} workers"
    yield f"- takes {_time(found, 1e9)} on a disk of 1 GB/s, {_time(found, 5e9)} on one of 5 GB/s"


def _time(found, rate):
    seconds = START + (found.read + found.written) / rate
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def _int4(path, empty):
    yield from ("", "## INT4")
    for preset, words in (("rl", " --preset rl"), (None, "")):
        options = run_options(
            "quantize", path, empty / "int4", QuantScheme(32, "qmax7"), preset=preset, workers=WORKERS
        )
        with ExitStack() as stack:
            try:
                plan = make_plan(options, _sources(options, stack))
            except CkptkitError as error:
                yield from textwrap.wrap(f"`quantize{words}` refuses it: {error.message}.", 118)
                yield ""
                continue
            yield from (f"`ckptkit quantize {Path(str(path)).name} DST{words} --group-size 32` plans", "")
            yield f"- {len(plan.view.specs):,} tensors: {dtype_counts(spec.dtype for spec in plan.view.specs.values())}"
            yield from _forecast(options, plan)
            yield from _decision(plan)
        return


def _decision(plan):
    """Every matrix: whether it is packed, else the reason, and who would pack it but for the list."""
    view = plan.view
    assert isinstance(view, View)
    config = adapt_config(view.source.config, view.source.specs)
    ignore = plan.config["quantization_config"]["ignore"]
    matrices = matrices_of(view.source.specs, class_tree(config), config)
    packed = [matrix.module + PACKED in view.specs for matrix in matrices]
    without = read_all(INT4_READERS, matrices, (), config)
    rows = defaultdict(list)
    for index, matrix in enumerate(matrices):
        why = "INT4" if packed[index] else f"kept: {matrix.reason or 'left out by this preset'}"
        eager = [reader for reader, reading in without.items() if reading.answers[index] == "packs"]
        rows[why, ", ".join(eager) or "none"].append(matrix.tensor)
    yield from ("", "| matrices | decision | who would pack them without the list |", "| --- | --- | --- |")
    for (why, eager), names in sorted(rows.items()):
        shown = "<br>".join(f"`{name}`" for name in fold(names))
        yield f"| {shown} | {why} | {eager} |"
    yield from ("", "The `ignore` list that all readers read alike:", "```text", *ignore, "```")


def header_only_card(model):
    release = load(model)
    with tempfile.TemporaryDirectory() as root:
        return card(release, write(release, Path(root) / release.model.partition("/")[2]))


def main(given):
    """Writes all pages; or compares the page of each `MODEL=PATH` with the weights there. Returns an exit code."""
    if not given:
        for model in MODELS:
            file_of(model).write_text(header_only_card(model))
        return 0
    return max([_against_weights(*one.split("=", 1)) for one in given])


def _against_weights(model, path):
    page, made = file_of(model), card(load(model), path)
    lines = list(unified_diff(page.read_text().splitlines(), made.splitlines(), page.name, path, lineterm=""))
    print("\n".join(lines) or f"{path}: its headers give {page.name}, word for word")
    if is_url(path):
        print(f"{path}: no weights were read, since verify reads directories only")
        return int(bool(lines))
    report = verify(path)
    print(f"{path}: verify {report.status}, {report.counts}")
    return int(bool(lines) or report.status != "passed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
