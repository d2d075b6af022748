"""The options of `quantize` and `convert --quantize`: grids, `--like`, `--reader`, `--tp`, `--device`, `--preset`."""

import json

import pytest
import torch
from click.testing import CliRunner
from support import models
from support.messages import refusal

from ckptkit.app.api import convert, quantize
from ckptkit.app.cli import cli
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.formats.scheme import QuantScheme, read_scheme
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

CASES = [
    (["--ignore", r"re:.*\.o_proj(\.weight)?$"], QuantScheme(128, "qmax7")),  # 320 input features
    (["--group-size", "64", "--asymmetric"], QuantScheme(64, "minmax", (), symmetric=False)),
    (["--group-size", "channel", "--grid", "minmax", "--search", "mse"], QuantScheme(None, "minmax", (), True, "mse")),
    (["--group-size", "32", "--scale-dtype", "float32"], QuantScheme(32, "qmax7", scale_dtype=torch.float32)),
]
IGNORED = ["--ignore", r"re:.*\.mlp\.down_proj(\.weight)?$"]  # 288 input features, which only 32 divides


def run(*arguments):
    result = CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def scheme_of(path):
    scheme = read_scheme(json.loads((path / "config.json").read_text()))
    return QuantScheme(scheme.group_size, scheme.grid, (), scheme.symmetric, scheme.search, scheme.scale_dtype)


@pytest.mark.parametrize(("options", "scheme"), CASES)
def test_every_option_is_recorded_and_the_result_verifies(options, scheme, releases, tmp_path):
    """`verify` unpacks with compressed-tensors and compares every weight with its source."""
    run("quantize", releases("qwen2-tied"), tmp_path / "out", *options, *IGNORED)
    assert scheme_of(tmp_path / "out") == scheme
    report = verify(tmp_path / "out", source=releases("qwen2-tied"))
    assert report.status == "passed", report.findings
    assert {check.code for check in report.checks if check.status == "passed"} >= {"CK302", "CK303", "CK304", "CK305"}


def test_options_of_convert_and_of_an_int4_source(releases, converted, tmp_path):
    """`convert --quantize` has the same; of an INT4 source those that are not given are its own."""
    options = ("--group-size", "32", "--asymmetric")
    run("convert", converted("qwen2-tied"), tmp_path / "out", "--quantize", "w4a16", *options)
    run("quantize", releases("qwen2-tied"), tmp_path / "first", *options)
    run("quantize", tmp_path / "first", tmp_path / "second")
    for name in ("out", "second"):
        assert scheme_of(tmp_path / name) == QuantScheme(32, "minmax", (), symmetric=False)


@pytest.mark.usefixtures("kernel_tiles")
def test_layers_that_no_kernel_of_sglang_runs_are_noted(releases, tmp_path):
    """down_proj has 288 columns, which no tile divides; other readers have other kernels."""
    scheme = QuantScheme(32, "qmax7")
    (note,) = quantize(releases("qwen2-untied"), tmp_path / "all", scheme).notes
    assert "mlp.down_proj.weight: shape [128, 288]" in note
    assert r"--ignore 're:.*\.mlp\.down_proj(\.weight)?$'" in note
    assert quantize(releases("qwen2-untied"), tmp_path / "vllm", scheme, readers=("vllm",)).notes == ()


SCHEME = int4_scheme(group_size=32)
QAT = ("OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1", "OPEN_TRAINING_INT4_GROUP_SIZE=32")


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_only_routed_experts_are_packed_and_a_launch_that_trains_in_int4_accepts_it(name, releases, tmp_path):
    made = quantize(releases(name), tmp_path / "int4", SCHEME, preset="rl")
    tensors = models.tensors(tmp_path / "int4")
    unpacked = made.packed.unpacked
    assert unpacked["output embedding"] == {"lm_head": 1}
    assert any("not a Linear" in reason and "gate" in modules for reason, modules in unpacked.items())
    chosen = unpacked.get("--preset rl", {})
    assert ("self_attn" in chosen) == (name != "deepseek_v3"), "SGLang holds no latent attention in INT4"
    packed = {key.removesuffix("_packed") for key in tensors if key.endswith(".weight_packed")}
    plain = models.tensors(releases(name))
    layers = json.loads((releases(name) / "config.json").read_text())["num_hidden_layers"]
    draft = f"model.layers.{layers}."
    assert packed == {key for key in plain if ".mlp.experts." in key and not key.startswith(draft)}
    assert {key for key in plain if key in tensors} == plain.keys() - packed
    convert(releases(name), tmp_path / "megatron")
    report = preflight(hf_checkpoint=tmp_path / "int4", ref_load=tmp_path / "megatron", arguments=QAT)
    status = {check.code: check.status for check in report.checks}
    assert [status[code] for code in ("CK301", "CK302", "CK709", "CK715")] == ["passed"] * 4, report.findings


def test_what_the_preset_refuses(releases, tmp_path):
    refused = refusal("packs", quantize, releases("qwen2-tied"), tmp_path / "int4", SCHEME, preset="rl")
    assert "BF16" in str(refused.hint)
    for scheme in (int4_scheme(grid="minmax"), int4_scheme(symmetric=False)):
        refusal("qmax7", quantize, releases("qwen3_moe"), tmp_path / "int4", scheme, preset="rl")
    refusal("both", quantize, releases("qwen3_moe"), tmp_path / "int4", SCHEME, preset="rl", like=releases("qwen3_moe"))
    assert not (tmp_path / "int4").exists()


def test_a_run_on_trainings_grid_says_what_loses_less_where_no_training_rounds_so(releases, tmp_path):
    def advice(name, scheme=SCHEME, preset=None):
        found = quantize(releases(name), tmp_path / "out", scheme, dry_run=True, preset=preset)
        return found.packed.advice

    dense, experts = str(advice("qwen2-tied")), str(advice("qwen3_moe"))
    assert ("--asymmetric" in dense, "--asymmetric" in experts) == (True, False)
    assert dense.count("--search mse") == experts.count("--search mse") == 1
    assert advice("qwen3_moe", preset="rl") is None
    assert advice("qwen3_moe", int4_scheme(grid="minmax", group_size=32)) is None


ROUTER = r"re:.*\.mlp\.gate(\.weight)?$"
PLAIN = ["model.embed_tokens", ROUTER, "lm_head"]
ATTENTION = [r"re:.*\.self_attn\.(q|k|v|qkv)_proj(\.weight)?$", r"re:.*\.self_attn\.o_proj(\.weight)?$"]


@pytest.fixture(scope="module")
def source(releases):
    return releases("qwen3_moe")


@pytest.fixture(scope="module")
def reference(source, tmp_path_factory):
    """Attention left as it is, in a spelling of its own."""
    path = tmp_path_factory.mktemp("reference") / "int4"
    run("quantize", source, path, "--group-size", "32", "--grid", "minmax", "--ignore", "re:.*self_attn.*")
    return path


def packed(path):
    return {name for name in HfCheckpoint(path).specs if name.endswith("_packed")}


def test_what_the_reference_has_packed_is_packed(source, reference, tmp_path):
    run("quantize", source, tmp_path / "int4", "--like", str(reference))
    assert packed(tmp_path / "int4") == packed(reference)
    config = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == [*PLAIN, *ATTENTION]
    weights = config["config_groups"]["group_0"]["weights"]
    assert (weights["group_size"], weights["observer_kwargs"]["grid"]) == (32, "minmax")
    assert HfCheckpoint(tmp_path / "int4").specs == HfCheckpoint(reference).specs
    assert models.unequal(tmp_path / "int4", reference) == []


def test_an_int4_source_is_its_own_reference_less_what_is_ignored(source, reference, tmp_path):
    """The classes of the model would pack the attention too."""
    run("quantize", reference, tmp_path / "again")
    assert models.unequal(tmp_path / "again", reference) == []
    run("quantize", source, tmp_path / "whole", "--group-size", "32")
    run("quantize", tmp_path / "whole", tmp_path / "less", "--ignore", "re:.*self_attn.*")
    assert packed(tmp_path / "whole") > packed(tmp_path / "less") == packed(reference)


def test_only_engines_must_agree(source, tmp_path):
    """The entry spares o_proj for engines and not for slime."""
    options = ("--group-size", "32", "--ignore", "re:.*o_proj$")
    refusal("slime would pack", run, "quantize", source, tmp_path / "int4", *options)
    run("quantize", source, tmp_path / "int4", *options, "--reader", "sglang", "--reader", "vllm")
    assert not any("o_proj" in name for name in packed(tmp_path / "int4"))


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and tests/gpu uses it")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--like", "none"), "config.json"),
        (("--group-size", "32", "--tp", "2"), "SGLang.*2"),
        (("--grid", "qmax7", "--asymmetric"), "qmax7 grid"),
        (("--grid", "qmax7", "--search", "mse"), "qmax7 grid"),
        pytest.param(("--group-size", "32", "--device", "cuda"), "no GPU .*--device cuda", marks=NO_GPU),
    ],
)
def test_options_that_cannot_be_followed(options, message, source, tmp_path):
    refusal(message, run, "quantize", source, tmp_path / "int4", *options)
    assert not (tmp_path / "int4").exists()
