"""Models that SGLang has no class for: what its Transformers backend refuses is said before a server starts.

Run once: `verify --against-sglang` of seed_oss in every scheme of `quantize`. Those of compressed-tensors end with
"Unable to find matching target for model.layers.0.self_attn.q_proj"; FP8 in blocks, MXFP8 and ModelOpt's NVFP4 load.
"""

import pytest
from click.testing import CliRunner
from families import HF_CASES
from families.case import save
from families.table import config_of
from support.messages import text_with
from support.published import quantization, write_config
from torch import bfloat16

from ckptkit.app.api import quantize
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.groups import find_refusals
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.ignore.lint import lint
from ckptkit.quant.ignore.readers import SGLANG
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FP4 = {**FP8, "num_bits": 4, "strategy": "group", "group_size": 32}
ALL = ["lm_head", "model.embed_tokens"]


def floats(weights, form):
    content = quantization(ALL)
    return {**content, "format": form, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


REFUSED = {
    "INT4": quantization(ALL),
    "INT4 in two groups": quantization(ALL, groups=2),
    "INT4 with an own target": quantization(ALL, targets=["Linear", "model.layers.0.self_attn.q_proj"]),
    "FP8 a row": floats({**FP8, "strategy": "channel"}, "float-quantized"),
    "FP8 in blocks": floats({**FP8, "strategy": "block", "block_structure": [128, 128]}, "float-quantized"),
    "NVFP4": floats({**FP4, "strategy": "tensor_group", "group_size": 16}, "nvfp4-pack-quantized"),
}
LOADED = {
    "FP8 of its own": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
    "MXFP8": {"quant_method": "mxfp8", "modules_to_not_convert": ["lm_head"], "ignored_layers": ["lm_head"]},
    "ModelOpt's NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
}


def write(path, content, **changes):
    return write_config(path, {**config_of(HF_CASES["seed_oss"]), **changes}, content)


def refused(path, readers=None):
    return [(one.severity, one.readers) for one in lint(path, readers=readers).findings if one.kind == "refused"]


@pytest.mark.parametrize("form", REFUSED)
def test_lists_of_compressed_tensors_are_refused(tmp_path, form):
    for changes in ({}, {"architectures": None}):
        write(tmp_path, REFUSED[form], **changes)
        assert ("error", SGLANG) in refused(tmp_path)
        assert refused(tmp_path, ["sglang"]) == [("error", SGLANG)]
        assert refused(tmp_path, ["vllm"]) == refused(tmp_path, ["transformers"]) == []


@pytest.mark.parametrize("form", LOADED)
def test_formats_that_the_backend_loads_are_not(tmp_path, form):
    assert refused(write(tmp_path, LOADED[form]), ["sglang"]) == []


def test_models_with_a_class_and_targets_that_name_every_module_are_not():
    every = quantization(ALL, targets=[f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"])
    for config in (
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        {"model_type": "seed_oss", "architectures": ["Qwen2ForCausalLM", "SeedOssForCausalLM"]},
        {"model_type": "seed_oss", "architectures": "SeedOssForCausalLM"},
        {"model_type": "qwen3"},
        {"architectures": ["SeedOssForCausalLM"], "quantization_config": every},
    ):
        assert list(find_refusals({"quantization_config": REFUSED["INT4"], **config})) == []


@pytest.fixture(scope="module")
def seed(tmp_path_factory):
    path = tmp_path_factory.mktemp("seed") / "hf"
    save("seed_oss", HF_CASES["seed_oss"], path, bfloat16)
    return path


@pytest.mark.parametrize(
    "options",
    [
        ["--group-size", "32"],
        ["--group-size", "32", "--reader", "vllm", "--reader", "sglang"],
        ["--scheme", "fp8-channel"],
        ["--scheme", "nvfp4", "--rounding", "compressed-tensors"],
    ],
)
def test_quantize_refuses_and_names_the_way(seed, tmp_path, options):
    result = CliRunner().invoke(cli, ["quantize", str(seed), str(tmp_path / "out"), *options])
    assert isinstance(result.exception, CkptkitError)
    assert result.exception.code == "unsupported"
    assert result.exception.message == text_with("SGLang seed_oss")
    assert "--reader vllm" in (result.exception.hint or "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [["--group-size", "32", "--reader", "vllm"], ["--scheme", "mxfp8"], ["--scheme", "mxfp4", "--reader", "vllm"]],
)
def test_quantize_writes_what_some_reader_loads(seed, tmp_path, options):
    result = CliRunner().invoke(cli, ["quantize", str(seed), str(tmp_path / "out"), *options])
    assert result.exit_code == 0, result.output
    if "--reader" in options:
        said = CliRunner().invoke(cli, ["preflight", "--hf-checkpoint", str(tmp_path / "out")])
        assert (said.exit_code, said.output == text_with("SGLang seed_oss")) == (1, True)


@pytest.fixture(scope="module")
def in_int4(seed):
    path = seed.parent / "int4"
    quantize(seed, path, QuantScheme(32, "qmax7"), readers=("vllm",))
    return path


def by_sglangs_rule(report):
    """The severity of each finding on the quantization that names SGLang, by its code."""
    return {one.code: one.severity for one in report.findings if one.code in ("CK302", "CK307")}


VERL = (
    "actor_rollout_ref.model.path={} actor_rollout_ref.rollout.name={} trainer.n_gpus_per_node=2 trainer.nnodes=1 "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
)
NEMO_RL = "policy.model_name={} policy.generation.backend={} cluster.gpus_per_node=2 policy.dtensor_cfg.enabled=True"
BY_SGLANG = {"CK302": "error"}  # CK307 is not asked of models as small as these, but for ranks


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"against": frozenset({"vllm"})}, {"CK302": "warning"}),
        ({"readers": ("vllm",)}, {"CK302": "warning"}),
        ({"against": frozenset({"vllm"}), "tp": 2}, {"CK302": "warning"}),
        ({"tp": 2}, BY_SGLANG | {"CK307": "error"}),
        ({"readers": ("sglang",), "against": frozenset({"vllm"})}, BY_SGLANG),
        ({}, BY_SGLANG),
    ],
    ids=str,
)
def test_sglangs_rules_are_no_errors_where_vllm_is_asked(in_int4, seed, options, expected):
    assert by_sglangs_rule(verify(in_int4, seed, **options)) == expected


@pytest.mark.parametrize(
    ("engine", "expected"), [("vllm", {"CK302": "warning"}), ("hf", {"CK302": "warning"}), ("sglang", BY_SGLANG)]
)
@pytest.mark.parametrize("words", [VERL, NEMO_RL])
def test_sglangs_rules_are_no_errors_where_another_engine_serves(in_int4, words, engine, expected):
    report = preflight(arguments=words.format(in_int4, engine).split())
    assert by_sglangs_rule(report) == expected
    # That the trainer loads packed weights (CK711) and sends none (CK747) are errors of their own.
    errors = {one.code for one in report.findings if one.severity == "error"}
    assert errors - {"CK747"} == {"CK711", *(code for code, severity in expected.items() if severity == "error")}


def test_options_of_vllm_name_the_engine(in_int4):
    vllm = preflight(hf_checkpoint=in_int4, arguments=["--vllm-gpu-memory-utilization", "0.7"])
    assert by_sglangs_rule(vllm) == {"CK302": "warning"}
    assert by_sglangs_rule(preflight(hf_checkpoint=in_int4)) == BY_SGLANG
