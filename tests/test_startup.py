"""What a command does not need it does not import: in a run of a second or two, imports are most of the time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from families import CASES
from fixture_types import PathOf
from processes import environment

# Each costs from a tenth of a second to two: torch's compiler with what it stands on, model classes, and what is only there for GPUs or losses.
COMPILER = {"torch._dynamo", "torch._inductor", "triton"}
MODELS = {"compressed_tensors", "huggingface_hub", "transformers"}
REMOTE = {"aiohttp", "botocore", "fsspec", "gcsfs", "httpx", "s3fs"}  # and huggingface_hub: only for URLs
HEAVY = (
    COMPILER
    | MODELS
    | REMOTE
    | {"llvmlite", "megatron", "numba", "pandas", "ray", "scipy", "sglang", "sklearn", "torchao", "torchvision"}
)

# Runs commands one after the other; after each it writes the names of all modules that are there. A module that is only marked as absent is None.
RUN = """
import json, sys
from ckptkit.app.cli import cli
for command in json.loads(sys.argv[1]):
    cli.main(command, standalone_mode=False)
    print(json.dumps([name for name, module in sys.modules.items() if module is not None]), file=sys.stderr)
"""


def loaded(*commands: list[str]) -> list[set[str]]:
    """The modules that a process has after each of these commands."""
    words = [sys.executable, "-c", RUN, json.dumps(commands)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stderr.splitlines()]


def test_converting_and_verifying_import_neither_the_compiler_nor_model_classes(
    releases: PathOf, converted: PathOf, tmp_path: Path
) -> None:
    hf, megatron = str(releases("glm4_moe")), str(converted("glm4_moe"))
    back, both, mixed, there = loaded(
        ["convert", megatron, str(tmp_path / "back"), "--dry-run"],
        ["verify", hf, "--source", hf],
        ["verify", megatron, "--source", hf],
        ["convert", hf, str(tmp_path / "there")],
    )
    assert {"torch", "ckptkit.app.api", "converters.planner"} <= back
    assert {"verify.checks.values.values", "verify.checks.quantization.int4"} <= both
    for modules in (back, both, mixed, there):
        assert modules & HEAVY == set()
    # Only what writes Megatron's metadata imports torch's classes for it, and with them sympy.
    for modules in (back, both, mixed):
        assert modules & {"sympy", "torch.distributed.checkpoint", "torch.distributed.tensor"} == set()
    # A bar is drawn on a terminal only, and a report after the values have been read.
    assert not any(name.startswith("rich") for name in back)


def test_what_is_hidden_hides_nothing_that_others_need(releases: PathOf, tmp_path: Path) -> None:
    """transformers imports scikit-learn where there is one, which needs scipy: a stand-in that fails as the real one would."""
    package = tmp_path / "installed/sklearn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import scipy.sparse\n")
    (package / "metrics.py").write_text("roc_curve = None\n")
    there = {"PYTHONPATH": f"{package.parent}:{environment().get('PYTHONPATH', '')}"}
    words = [
        sys.executable,
        "-m",
        "ckptkit",
        "quantize",
        str(releases("qwen2-untied")),
        str(tmp_path / "int4"),
        "--group-size",
        "32",
        "--dry-run",
    ]
    done = subprocess.run(words, env=environment() | there, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "would write" in done.stdout


# Works out every Megatron shape of each config, in both dialects, and writes the names of all modules that are then there.
SHAPES = """
import json, sys
from converters.planner import DIALECTS, rules_of
count = sum(len(rule.megatron_shape) > 0 for config in json.load(sys.stdin) for dialect in DIALECTS for rule in rules_of(config, dialect))
print(json.dumps([count, list(sys.modules)]))
"""


def test_no_rule_needs_the_compiler_to_tell_a_shape() -> None:
    configs = [case.edit(case.config().to_dict()) for case in CASES.values()]
    words = [sys.executable, "-c", SHAPES]
    done = subprocess.run(
        words, env=environment(), input=json.dumps(configs), capture_output=True, text=True, check=True
    )
    count, modules = json.loads(done.stdout)
    assert count > 100 * len(configs)
    assert COMPILER & set(modules) == set()
