"""`make failures`: breaks a small model in six ways, and writes what `ckptkit verify` prints to lab/failures.md.

With `--check` it writes nothing and fails where the page says something else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckptkit.app.api import quantize
from ckptkit.core.findings_text import plain
from ckptkit.formats.hf.reader import INDEX
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.reports.render import report_lines
from ckptkit.verify.run import verify
from docs.examples.demo import MOE, lose_a_shard, make_release, pack_routers

PAGE = Path(__file__).resolve().parents[2] / "lab/failures.md"
COLUMNS, ROWS = 80, 24
SIZES = MOE | {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
_MIDDLE = 6  # the first layer of the second half


@dataclass(frozen=True)
class Failure:
    """How a copy of the model is broken, and what people see of it."""

    title: str
    seen: str
    broken: Callable[[Path], None]
    made_of: str = "moe"

    @property
    def source(self) -> str | None:
        """What it is verified against: INT4 weights against nothing."""
        return "moe" if self.made_of == "moe" else None


def _rewritten(path: Path, change: Callable[[str, Mapping[str, Tensor]], Tensor]) -> None:
    """Writes each tensor as `change(name, all tensors)`, in the file that it is in."""
    files = {file: load_file(file) for file in sorted(path.glob("*.safetensors"))}
    every = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    for file, tensors in files.items():
        save_file({name: change(name, every).contiguous() for name in tensors}, file, {"format": "pt"})


def shift_layers(path: Path) -> None:
    """The second half of the layers is saved one place too late."""

    def change(name: str, every: Mapping[str, Tensor]) -> Tensor:
        parts = name.split(".")
        if parts[1] != "layers" or int(parts[2]) <= _MIDDLE:
            return every[name]
        parts[2] = str(int(parts[2]) - 1)
        return every[".".join(parts)].clone()

    _rewritten(path, change)


def exchange_experts(path: Path) -> None:
    """Experts 3 and 7 of layer 5 are in each other's slot."""
    other = {"3": "7", "7": "3"}

    def change(name: str, every: Mapping[str, Tensor]) -> Tensor:
        parts = name.split(".")
        if parts[:5] == ["model", "layers", "5", "mlp", "experts"]:
            parts[5] = other.get(parts[5], parts[5])
        return every[".".join(parts)]

    _rewritten(path, change)


def round_biases(path: Path) -> None:
    """The router's bias goes through bfloat16 and is stored as float32 again."""
    _rewritten(
        path,
        lambda name, every: every[name].bfloat16().float() if name.endswith("_bias") else every[name],
    )


def misname(path: Path) -> None:
    """The index names the output norm as a wrapper does that was not taken off."""
    index = path / INDEX
    content = json.loads(index.read_text())
    content["weight_map"]["module.model.norm.weight"] = content["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(content))


FAILURES = (
    Failure(
        "The router is quantized, and missing from `ignore`",
        "The server answers fluent nonsense: engines build the router unquantized and skip the packed one.",
        pack_routers,
        made_of="moe-int4",
    ),
    Failure("A shard is missing", "An interrupted download, or an upload that skipped a file.", lose_a_shard),
    Failure(
        "Layers are shifted", "A save began to count from another layer. Names and shapes are right.", shift_layers
    ),
    Failure("An expert is in another's slot", "Names and shapes are right; only the values tell.", exchange_experts),
    Failure(
        "An fp32 bias was rounded", "The dtype is right again, but the router chooses other experts.", round_biases
    ),
    Failure(
        "The index names a tensor that no shard has",
        "Loading leaves the parameter random, often with no more than a warning.",
        misname,
    ),
)

_INTRO = f"""# What the commonest failures look like
Each is what `ckptkit verify` prints in a terminal of {COLUMNS} columns and {ROWS} lines, for a small GLM-4.5-style
mixture of experts with seeded random weights. `make failures` breaks the model and writes this page; a test makes
it again and compares. [symptoms.md](../docs/symptoms.md) goes the other way, from what is seen in a job to the command.
"""


_MARK = "<!-- not run: tests/test_failures_page.py makes this page anew -->"


def page() -> str:
    """The page, made anew. Raises SystemExit where an output does not fit the terminal, or nothing was found."""
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        make_release("glm4_moe", SIZES, Path("moe"), "2MB")
        quantize("moe", "moe-int4", QuantScheme(32, "qmax7"))
        return "\n".join([_INTRO, *_sections()])


def _sections() -> Iterator[str]:
    for failure in FAILURES:
        shutil.copytree(failure.made_of, "broken")
        failure.broken(Path("broken"))
        words = ["verify", "broken", *(["--source", failure.source] if failure.source else [])]
        report = verify("broken", source=failure.source)
        report = replace(
            report, findings=[replace(one, file=one.file and os.path.relpath(one.file)) for one in report.findings]
        )
        lines = list(plain(report_lines(report, COLUMNS)))
        if report.status != "failed" or len(lines) > ROWS or any(len(line) > COLUMNS for line in lines):
            raise SystemExit("\n".join([f"{failure.title}: {report.status}, {len(lines)} lines", *lines]))
        yield "\n".join(
            [
                f"## {failure.title}",
                failure.seen,
                "",
                _MARK,
                "```console",
                f"$ ckptkit {' '.join(words)}",
                *lines,
                "```",
                "",
            ]
        )
        shutil.rmtree("broken")


def main() -> None:
    """Writes the page, or with `--check` raises SystemExit where it is not as it should be."""
    torch.set_num_threads(1)
    made = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(made, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != made:
        raise SystemExit(f"{PAGE.name} is not what verify prints now: make failures")


if __name__ == "__main__":
    main()
