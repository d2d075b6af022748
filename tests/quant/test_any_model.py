"""Models of no family of ours: what is quantized of them is what transformers' own class says is a Linear layer."""

import json
import os
import sys

import pytest
import torch
import transformers
from click.testing import CliRunner
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from support import models
from support.nightly import daily
from support.other_models import class_for, save_small, small_config
from support.published import quantization

from ckptkit.app.cli import cli
from ckptkit.converters import by_class, class_in_transformers
from ckptkit.converters.by_class import built_from, family_by_class, family_from
from ckptkit.converters.class_in_transformers import build, describe
from ckptkit.converters.planner import tied_head
from ckptkit.converters.registry import FAMILIES, family_of
from ckptkit.core.errors import CkptkitError, UnknownModelError
from ckptkit.core.isolation import start_python
from ckptkit.quant.engines.transformers_class import transformers_deviation
from ckptkit.quant.ignore.tree import family_tree
from ckptkit.verify.run import verify

# Dense, with experts in one tensor each or all in one, with a vision tower, with other layers than attention.
TYPES = ("olmo2", "phimoe", "jetmoe", "qwen2_vl", "lfm2", "cohere2", "gpt_neox", "flex_olmo", "granitemoe", "llava")
# SGLang's kernels take these, so that `verify` finds nothing at all.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 320}
OLMO2 = WIDE | {"pad_token_id": None, "eos_token_id": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


def content(model_type):
    config = json.loads(small_config(transformers.CONFIG_MAPPING[model_type]).to_json_string(False))
    return config | {"architectures": [class_for(model_type).__name__]}


@pytest.mark.parametrize("model_type", daily(TYPES, TYPES[:5:2]))
def test_names_shapes_and_linear_layers_are_those_of_transformers(model_type, tmp_path):
    assert model_type not in FAMILIES
    save_small(model_type, tmp_path)
    saved = {name: tuple(tensor.shape) for name, tensor in models.tensors(tmp_path).items()}
    built = built_from(describe(build(json.loads((tmp_path / "config.json").read_text()))))
    assert {one.name: one.shape for one in built.tensors} == saved

    with torch.device("meta"):
        model = class_for(model_type)(small_config(transformers.CONFIG_MAPPING[model_type]))
    scheme = {key: value for key, value in quantization([]).items() if key != "quantization_status"}
    apply_quantization_config(model, QuantizationConfig.model_validate(scheme))
    taken = {name for name, module in model.named_modules() if getattr(module, "quantization_scheme", None) is not None}
    linears = {one.own.removesuffix(".weight") for one in built.tensors if one.is_linear and not one.is_fused}
    assert linears == taken - {name.removesuffix(".weight") for name in model.all_tied_weights_keys}


def save_wide(path, **more):
    torch.manual_seed(0)
    config = transformers.Olmo2Config(**OLMO2 | more)
    transformers.Olmo2ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def olmo2(tmp_path_factory):
    return save_wide(tmp_path_factory.mktemp("olmo2") / "model")


def quantize(source, target, *more):
    return CliRunner().invoke(cli, ["quantize", str(source), str(target), *more])


def packed(path):
    return {name.removesuffix(".weight_packed") for name in models.tensors(path) if name.endswith(".weight_packed")}


def errors(report):
    return [(one.code, one.tensor) for one in report.findings if one.severity == "error"]


@pytest.fixture(scope="module")
def olmo2_int4(olmo2):
    target = olmo2.parent / "int4"
    done = quantize(olmo2, target)
    assert done.exit_code == 0, done.output
    return target


LINEAR = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
PACKED = {f"model.layers.{layer}.{name}" for layer in range(2) for name in LINEAR}


def test_quantize_and_verify_a_dense_model(olmo2, olmo2_int4):
    assert packed(olmo2_int4) == PACKED
    assert set(json.loads((olmo2_int4 / "config.json").read_text())["quantization_config"]["ignore"]) == {
        "model.embed_tokens",
        "lm_head",
    }
    report = verify(olmo2_int4, olmo2)
    assert errors(report) == []
    passed = {one.code for one in report.checks if one.status == "passed"}
    assert passed >= {"CK104", "CK301", "CK302", "CK541"}


@pytest.mark.parametrize(
    ("name", "code"),
    [("model.layers.1.mlp.up_proj.weight_packed", "CK302"), ("model.layers.0.self_attn.q_norm.weight", "CK104")],
)
def test_verify_names_what_is_gone_of_the_quantized_model(olmo2, olmo2_int4, copy_of, name, code):
    broken = copy_of(olmo2_int4)
    models.edit(broken, name, None)
    report = verify(broken, olmo2)
    assert report.status == "failed"
    assert code in {found for found, tensor in errors(report)}, report.findings


ROUTED = {f"block_sparse_moe.experts.{expert}.w{name}" for expert in range(4) for name in (1, 2, 3)}
OF_ROUTED = {f"model.layers.{layer}.{name}" for layer in range(2) for name in ROUTED}


AT_NIGHT = [
    ("phimoe", ("--group-size", "32", "--preset", "rl"), OF_ROUTED, r"re:.*\.self_attn\.o_proj(\.weight)?$"),
    ("qwen2_vl", ("--group-size", "32"), PACKED, r"re:.*visual\..*"),
]


@pytest.mark.parametrize(
    ("model_type", "options", "expected", "ignored"),
    [
        ("olmo2", (), PACKED, "model.embed_tokens"),  # a tied head is neither stored nor packed
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in AT_NIGHT),
    ],
)
def test_tied_heads_routers_and_towers_stay_as_they_are(model_type, options, expected, ignored, tmp_path):
    if model_type == "olmo2":
        source = save_wide(tmp_path / "source", tie_word_embeddings=True)
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        assert tied_head(json.loads((source / "config.json").read_text())) == (head, embedding)
    else:
        source = save_small(model_type, tmp_path / "source")
    done = quantize(source, tmp_path / "int4", *options)
    assert done.exit_code == 0, done.output
    assert packed(tmp_path / "int4") == expected
    assert ignored in json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]["ignore"]
    # CK307: matrices smaller than any tile of a kernel.
    assert {code for code, _ in errors(verify(tmp_path / "int4", source))} <= ({"CK307"} if options else set())


def test_experts_of_another_layout_are_refused(tmp_path):
    source = save_small("llama4_text", tmp_path / "llama4")
    done = quantize(source, tmp_path / "int4", "--group-size", "32")
    assert isinstance(done.exception, CkptkitError)
    assert done.exception.code == "unsupported"
    assert "tensor" in done.exception.message
    assert not (tmp_path / "int4").exists()


def family_without_process(config):
    """The family that `family_by_class` makes of a config, built here."""
    return family_from((built_from(describe(build(config))),), config["model_type"])


def test_stacked_experts_stay_as_they_are():
    """Under names of Linear layers, with three axes: engines that ask about them are told to leave them."""
    config = content("granitemoehybrid")
    family = family_without_process(config)
    tree = family_tree(family, family.release, config)
    block = "model.layers.1.block_sparse_moe."
    assert "GraniteMoeHybridParallelExperts" in str(tree.reason_to_keep(f"{block}input_linear"))
    assert "router" in str(tree.reason_to_keep(f"{block}router.layer"))
    assert family.release.stacked == ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear")


@pytest.mark.parametrize(("model_type", "offset"), [("gemma2", True), ("olmo2", False), ("starcoder2", False)])
def test_norms_are_stored_minus_one_where_the_class_begins_them_at_zero(model_type, offset):
    config = content(model_type)
    assert family_without_process(config).read_dims(config).norm_offset is offset


def test_transformers_is_no_reference_for_olmo_3_with_yarn():
    """It turns layers with a window by YaRN too, which have none in vLLM, SGLang and OLMo 3's report."""
    torch.manual_seed(0)
    window = OLMO2 | {"num_attention_heads": 4, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2}
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 32}
    model = transformers.Olmo3ForCausalLM(transformers.Olmo3Config(**window))
    scaled = transformers.Olmo3ForCausalLM(transformers.Olmo3Config(**window, rope_parameters=yarn))
    scaled.load_state_dict(model.state_dict())
    tokens = torch.arange(4, 68)[None]
    assert not model(tokens).logits.allclose(scaled(tokens).logits, atol=1e-3)
    assert "window" in str(transformers_deviation(json.loads(scaled.config.to_json_string()), 1))
    assert transformers_deviation(json.loads(model.config.to_json_string()), 1) is None


def test_megatron_has_no_names_for_it(olmo2, tmp_path):
    for more in ([], ["--unwitnessed"]):
        done = CliRunner().invoke(cli, ["convert", str(olmo2), str(tmp_path / "megatron"), *more])
        assert isinstance(done.exception, UnknownModelError)
        assert "model_type 'olmo2'" in done.exception.message


def test_without_transformers_the_type_is_unknown(monkeypatch):
    monkeypatch.setattr(by_class, "find_spec", lambda name: None)
    with pytest.raises(UnknownModelError, match="model_type 'arcee'"):
        family_of({"model_type": "arcee"})


def test_what_transformers_refuses_is_said():
    with pytest.raises(CkptkitError, match="model_type 'olmo2' from config.json: "):
        family_by_class({"model_type": "olmo2", "hidden_size": "x", "architectures": ["Olmo2ForCausalLM"]})


def test_code_of_the_checkpoint_is_not_run(tmp_path, monkeypatch):
    """Neither the files that config.json names nor a `torch.py` next to the weights, nor kernels from a hub."""
    mark = tmp_path / "run"
    for name in ("evil.py", "torch.py"):
        (tmp_path / name).write_text(f"open({str(mark)!r}, 'w')\n")
    config = content("olmo2") | {
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        "_attn_implementation": "evil/kernels",
        "experts_implementation": "evil/kernels",
        "num_hidden_layers": 3,
    }
    monkeypatch.chdir(tmp_path)
    family = family_by_class(config)
    assert family is not None
    assert family.architectures == ("Olmo2ForCausalLM",)
    assert not mark.exists()


# In the place of the program that builds the class: it writes down its number, and waits.
STAND_IN = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"


def test_a_class_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    monkeypatch.setattr(
        by_class, "start_python", lambda words, *at, **how: start_python(["-c", STAND_IN, str(pid)], *at, **how)
    )
    monkeypatch.setattr(by_class, "_LIMIT_S", 5)
    with pytest.raises(UnknownModelError, match="answer.*5"):
        family_by_class({"model_type": "olmo2", "hidden_size": 192})
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_an_error_of_our_own_is_no_verdict_on_the_config(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}))
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["", "0", str(tmp_path / "config.json"), str(report)])
    monkeypatch.setattr(class_in_transformers, "end_with_parent", lambda parent: None)

    def failing(_):
        raise KeyError("a name")

    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(class_in_transformers, "describe", failing)
        class_in_transformers.main()
    assert not report.exists()
    monkeypatch.setattr(class_in_transformers, "build", failing)
    class_in_transformers.main()
    assert list(json.loads(report.read_text())) == ["refused"]
