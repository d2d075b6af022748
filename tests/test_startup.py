"""What a command does not need it does not import: in a run of a second or two, imports are most of the time."""

import json
from pathlib import Path

import pytest
from families import CASES
from releases.header_only import write
from releases.record import load
from support.megatron_saves import SAVES
from support.processes import python

INT4 = "RedHatAI/Qwen3-30B-A3B-quantized.w4a16"
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


def loaded(*commands):
    done = python("-c", RUN, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stderr.splitlines()]


def test_converting_and_verifying_import_neither_the_compiler_nor_model_classes(releases, converted, tmp_path):
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


@pytest.mark.parametrize("command", [["--help"], ["convert", "--help"], ["verify", "--help"]])
def test_help_imports_nothing_that_is_not_needed(command):
    (modules,) = loaded(command)
    assert "ckptkit.app.cli" in modules
    assert modules & (HEAVY | {"numpy", "rich", "torch"}) == set()


def without_torch(needed, *commands):
    """After these commands, each in turn, the modules `needed` are there, and torch is not."""
    *_, modules = loaded(*commands)
    assert {f"ckptkit.{name}" for name in needed} <= modules
    assert modules & (HEAVY | {"torch", "hydra", "omegaconf"}) == set()


def test_what_is_refused_imports_no_torch(releases, converted, tmp_path):
    """A destination that is there, a source that is not, and options of the other direction."""
    hf, megatron, new = str(releases("glm4_moe")), str(converted("glm4_moe")), str(tmp_path / "new")
    without_torch(
        {"app.conversion", "transfer.destination"},
        ["convert", hf, megatron],
        ["quantize", hf, hf, "--overwrite"],
        ["quantize", str(tmp_path / "nowhere"), new],
        ["convert", hf, new, "--hf", hf],
    )
    assert not Path(new).exists()


def test_verbs_that_read_headers_import_no_torch(releases, converted, saved, tmp_path):
    """Of releases in bfloat16, MXFP4, FP8 and INT4, of torch_dist and of Megatron's legacy format."""
    models = ["Qwen/Qwen3-0.6B", "openai/gpt-oss-20b", "Qwen/Qwen3-32B-FP8", INT4]
    published = [str(write(load(model), tmp_path / str(number))) for number, model in enumerate(models)]
    hf, torch_dist, legacy = str(releases("glm4_moe")), str(converted("glm4_moe")), "legacy, experts cut"
    without_torch(
        {"formats.hf.reader", "formats.torch_dist.reader", "converters.megatron.legacy", "quant.ignore.lint"}
        | {"verify.explain", "verify.launch.preflight"},
        *(words for one in published for words in (["inspect", one], ["preflight", "--hf-checkpoint", one])),
        ["lint", published[-1]],
        ["doctor"],
        ["explain", "CK107"],
        ["inspect", torch_dist, "--json"],
        ["inspect", str(saved / legacy), "--hf", str(releases(SAVES[legacy][0]))],
        ["preflight", "--hf-checkpoint", hf, "--ref-load", torch_dist],
    )


# Works out every Megatron shape of each config, in both dialects, and writes the names of all modules.
SHAPES = """
import json, sys
from ckptkit.converters.planner import DIALECTS, rules_of
rules = (rule for config in json.load(sys.stdin) for dialect in DIALECTS for rule in rules_of(config, dialect))
count = sum(len(rule.megatron_shape) > 0 for rule in rules)
print(json.dumps([count, list(sys.modules)]))
"""


def test_no_rule_needs_torch_to_tell_a_shape():
    configs = [case.edit(case.config().to_dict()) for case in CASES.values()]
    count, modules = json.loads(python("-c", SHAPES, given=json.dumps(configs)).stdout)
    assert count > 100 * len(configs)
    assert "torch" not in modules
