"""What a command does not need it does not import: in a run of a second or two, imports are most of the time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import CASES
from releases.header_only import write
from releases.record import load
from support.fixture_types import PathOf
from support.launch_scripts import write_headers, write_launch
from support.megatron_saves import SAVES
from support.processes import python

# Each costs from a tenth of a second to two.
COMPILER = {"torch._dynamo", "torch._inductor", "triton"}
MODELS = {"compressed_tensors", "huggingface_hub", "transformers"}
REMOTE = {"aiohttp", "botocore", "fsspec", "gcsfs", "httpx", "s3fs"}  # and huggingface_hub: only for URLs
HEAVY = (
    COMPILER
    | MODELS
    | REMOTE
    | {"jinja2", "llvmlite", "megatron", "numba", "pandas", "ray", "scipy", "sglang", "sklearn", "torchao"}
    | {"torchvision"}
)

# Runs commands one after the other; after each it writes the names of all modules that are there.
RUN = """
import contextlib, json, sys
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
for command in json.loads(sys.argv[1]):
    with contextlib.suppress(SystemExit, CkptkitError):  # where there are findings, or it is refused
        cli.main(command, standalone_mode=False)
    print(json.dumps(list(sys.modules)), file=sys.stderr)
"""


def loaded(*commands: list[str]) -> list[set[str]]:
    """The modules that a process has after each of these commands."""
    done = python("-c", RUN, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stderr.splitlines()]


def test_converting_and_verifying_import_neither_the_compiler_nor_model_classes(
    releases: PathOf, converted: PathOf, tmp_path: Path
) -> None:
    hf, megatron = str(releases("glm4_moe")), str(converted("glm4_moe"))
    back, both, mixed, compared, there = loaded(
        ["convert", megatron, str(tmp_path / "back"), "--dry-run"],
        ["verify", hf, "--source", hf],
        ["verify", megatron, "--source", hf],
        ["diff", megatron, hf],
        ["convert", hf, str(tmp_path / "there")],
    )
    assert {"ckptkit.app.conversion", "ckptkit.converters.planner"} <= back
    assert "torch" not in back
    assert {"ckptkit.verify.checks.values.values", "ckptkit.verify.checks.quantization.int4"} <= both
    assert "ckptkit.verify.diff.diff" in compared
    for modules in (back, both, mixed, compared, there):
        assert modules & HEAVY == set()
    # Only what writes Megatron's metadata imports torch's classes for it, and with them sympy.
    for modules in (back, both, mixed, compared):
        assert modules & {"sympy", "torch.distributed.checkpoint", "torch.distributed.tensor"} == set()
    # A bar is drawn on a terminal only, and a report after the values have been read.
    assert not any(name.startswith("rich") for name in back)


def test_what_is_refused_imports_no_torch(releases: PathOf, converted: PathOf, tmp_path: Path) -> None:
    """A destination that is there, a source that is not, and options of the other direction."""
    hf, megatron, new = str(releases("glm4_moe")), str(converted("glm4_moe")), str(tmp_path / "new")
    *_, modules = loaded(
        ["convert", hf, megatron],
        ["quantize", hf, hf, "--overwrite"],
        ["quantize", str(tmp_path / "nowhere"), new],
        ["convert", hf, new, "--hf", hf],
    )
    assert {"ckptkit.app.conversion", "ckptkit.transfer.destination"} <= modules
    assert modules & (HEAVY | {"torch"}) == set()
    assert not Path(new).exists()


@pytest.mark.parametrize("command", [["--help"], ["convert", "--help"], ["verify", "--help"]])
def test_help_imports_nothing_that_is_not_needed(command: list[str]) -> None:
    (modules,) = loaded(command)
    assert "ckptkit.app.cli" in modules
    assert modules & (HEAVY | {"numpy", "rich", "torch"}) == set()


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> PathOf:
    """A real release as headers alone."""
    return lambda model: write(load(model), tmp_path_factory.mktemp("headers") / "release")


@pytest.mark.parametrize(
    "model",
    ["Qwen/Qwen3-0.6B", "openai/gpt-oss-20b", "Qwen/Qwen3-32B-FP8", "RedHatAI/Qwen3-30B-A3B-quantized.w4a16"],
)
def test_inspect_and_preflight_import_no_torch_for_a_release(headers: PathOf, model: str) -> None:
    """In bfloat16, MXFP4, FP8 and INT4."""
    release = str(headers(model))
    *_, modules = loaded(["inspect", release], ["preflight", "--hf-checkpoint", release])
    assert {"ckptkit.formats.hf.reader", "ckptkit.verify.launch.preflight"} <= modules
    assert modules & (HEAVY | {"torch"}) == set()


def test_lint_imports_no_torch(headers: PathOf) -> None:
    (modules,) = loaded(["lint", str(headers("RedHatAI/Qwen3-30B-A3B-quantized.w4a16"))])
    assert "ckptkit.quant.ignore.lint" in modules
    assert modules & (HEAVY | {"torch"}) == set()


def test_header_verbs_import_no_torch_for_a_megatron_checkpoint(releases: PathOf, converted: PathOf) -> None:
    hf, torch_dist = str(releases("glm4_moe")), str(converted("glm4_moe"))
    *_, modules = loaded(
        ["doctor"],
        ["explain", "CK107"],
        ["inspect", torch_dist, "--json"],
        ["preflight", "--hf-checkpoint", hf, "--ref-load", torch_dist],
    )
    assert {"ckptkit.formats.torch_dist.reader", "ckptkit.verify.explain", "ckptkit.verify.launch.preflight"} <= modules
    assert modules & (HEAVY | {"torch"}) == set()


def test_preflight_of_a_yaml_file_imports_no_torch_and_no_hydra(
    releases: PathOf, converted: PathOf, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    checkpoint = f"{{path: {converted('qwen3_moe')}, format: megatron_lm}}"
    sizes = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    megatron = ", ".join(f"{name}_parallel_size: 1" for name in sizes)
    file.write_text(
        f"policy:\n  model_name: {releases('qwen3_moe')}\n  pretrained_checkpoint: {checkpoint}\n"
        f"  megatron_cfg: {{enabled: true, {megatron}}}\ncluster: {{num_nodes: 1, gpus_per_node: 8}}\n"
    )
    (modules,) = loaded(["preflight", str(file)])
    assert {"ckptkit.verify.launch.stacks.nemo_rl", "yaml", "ckptkit.formats.torch_dist.reader"} <= modules
    assert modules & (HEAVY | {"torch", "hydra", "omegaconf"}) == set()


def test_preflight_of_a_script_imports_no_torch(tmp_path: Path) -> None:
    """DeepSeek V3, with 91,991 tensors."""
    root = write_headers(tmp_path / "hf", "deepseek_v3")
    (modules,) = loaded(["preflight", str(write_launch(tmp_path, "deepseek_v3", root)), "--json"])
    assert {"ckptkit.verify.launch.shell.run", "ckptkit.verify.launch.checks.model"} <= modules
    assert modules & (HEAVY | {"torch"}) == set()


def test_inspect_imports_no_torch_for_megatrons_legacy_format(releases: PathOf, saved: Path) -> None:
    name, _ = SAVES["legacy, experts cut"]
    (modules,) = loaded(["inspect", str(saved / "legacy, experts cut"), "--hf", str(releases(name))])
    assert "ckptkit.converters.megatron.legacy" in modules
    assert modules & (HEAVY | {"torch"}) == set()


# Works out every Megatron shape of each config, in both dialects, and writes the names of all modules.
SHAPES = """
import json, sys
from ckptkit.converters.planner import DIALECTS, rules_of
rules = (rule for config in json.load(sys.stdin) for dialect in DIALECTS for rule in rules_of(config, dialect))
count = sum(len(rule.megatron_shape) > 0 for rule in rules)
print(json.dumps([count, list(sys.modules)]))
"""


def test_no_rule_needs_torch_to_tell_a_shape() -> None:
    configs = [case.edit(case.config().to_dict()) for case in CASES.values()]
    count, modules = json.loads(python("-c", SHAPES, given=json.dumps(configs)).stdout)
    assert count > 100 * len(configs)
    assert "torch" not in modules
