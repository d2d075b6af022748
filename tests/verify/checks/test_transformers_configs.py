"""CK302 and CK303: INT4 of a config that transformers answers otherwise. What it answers is asked of transformers."""

import json
import math

import pytest
import torch
from click.testing import CliRunner
from mutations.edits import edit_config, edit_quantization, replace
from support.nightly import daily
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from ckptkit.app.api import quantize
from ckptkit.app.cli import cli
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.ignore.lint import lint
from ckptkit.verify.run import verify

# Where what is changed is: keys of quantization_config.
GROUP = ("config_groups", "group_0")
WEIGHTS = (*GROUP, "weights")
CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
ONLINE = {"u": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input", "inverse": False}]}}
IN_WEIGHTS = {"u": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}}


@pytest.fixture(scope="module")
def int4(tmp_path_factory):
    root = tmp_path_factory.mktemp("llama")
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False)).bfloat16()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(root / "plain", max_shard_size="200KB")
    Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(root / "plain" / "tokenizer.json"))  # noqa: S106
    quantize(root / "plain", root / "int4", QuantScheme(64, "minmax"))
    return root / "int4"


@pytest.fixture(scope="module")
def answered(int4):
    """`answered(path)`: how far transformers' logits are from those of a sound checkpoint; inf if it raises or NaN."""
    ids, level = torch.arange(24).reshape(2, 12), logging.get_verbosity()
    logging.set_verbosity_error()

    def logits(path):
        with torch.no_grad():
            return AutoModelForCausalLM.from_pretrained(path, dtype="auto")(ids).logits.float()

    def differs(path, sound=int4):
        expected = logits(sound)
        try:
            found = float((logits(path) - expected).abs().max())
        except (ValueError, RuntimeError, TypeError, KeyError, NotImplementedError, AttributeError, AssertionError):
            return math.inf
        return math.inf if math.isnan(found) else found

    yield differs
    logging.set_verbosity(level)


def scales(names, layers=(0, 1)):
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.full(shape, 0.05, dtype=torch.bfloat16)
        for layer in layers
        for name, shape in names.items()
    }


STATUS = {  # what compressed-tensors does not decompress
    "frozen": (("quantization_status",), "frozen"),
    "no status": (("quantization_status",), ...),
    "null status": (("quantization_status",), None),
    "status in capitals": (("quantization_status",), "COMPRESSED"),
    "group in dense": ((*GROUP, "format"), "dense"),
    "group in nvfp4-pack-quantized": ((*GROUP, "format"), "nvfp4-pack-quantized"),
}
MISREAD = STATUS | {
    "static cache": (("kv_cache_scheme",), CACHE),
    "empty scheme of the cache": (("kv_cache_scheme",), {}),
    "cache with zero points": (("kv_cache_scheme",), CACHE | {"type": "int", "symmetric": False}),
    "cache of 4 bits": (("kv_cache_scheme",), CACHE | {"type": "int", "num_bits": 4}),
    "columns in another order": ((*WEIGHTS, "actorder"), "group"),
    "blocks": ((*WEIGHTS, "block_structure"), [64, 64]),
    "dynamic weights": ((*WEIGHTS, "dynamic"), True),
    "key that is not known": ((*WEIGHTS, "bits"), 4),
    "static activations": ((*GROUP, "input_activations"), CACHE),
    "static outputs": ((*GROUP, "output_activations"), CACHE),
    "targets of the MLP": ((*GROUP, "targets"), ["re:.*mlp.*"]),
    "attention as a target": ((*GROUP, "targets"), ["Linear", "LlamaAttention"]),
    "target in lower case": ((*GROUP, "targets"), ["linear"]),
    "one matrix more in ignore": (("ignore",), ["lm_head", "model.embed_tokens", "model.layers.1.mlp.down_proj"]),
    "method of another spelling": (("quant_method",), "compressed_tensors"),
}


@pytest.mark.parametrize("what", MISREAD)
def test_what_transformers_answers_otherwise_is_an_error(what, int4, copy_of, answered):
    path = edit_quantization(copy_of(int4), *MISREAD[what])
    assert answered(path) > 0.5
    report = verify(path)
    assert report.status == "failed"
    assert {one.code for one in report.findings if one.severity == "error"} <= {"CK104", "CK302", "CK303"}
    if what in STATUS:
        (error,) = [one for one in lint(path).findings if one.severity == "error"]
        assert (error.kind, error.readers) == ("refused", ("compressed-tensors", "transformers"))
        assert error.message.startswith(STATUS[what][0][-1])
    if what in STATUS and what not in ("null status", "status in capitals"):  # which compressed-tensors refuses
        found = verify(path, readers=("sglang",)).findings
        assert [one.severity for one in found if one.actual.startswith("compressed")] == ["warning"]


SAME = {
    "group without a format": ((*GROUP, "format"), ...),
    "no type": ((*WEIGHTS, "type"), ...),
    "symmetric by default": ((*WEIGHTS, "symmetric"), ...),
    "order of GPTQ": ((*WEIGHTS, "actorder"), "static"),
    "float32 scales": ((*WEIGHTS, "scale_dtype"), "torch.float32"),
    "no transforms": (("transform_config",), {}),
    "sparsity of before": (("sparsity_config",), {"format": "dense", "global_sparsity": 0.14}),
    "transforms in the weights": (("transform_config",), {"config_groups": IN_WEIGHTS}),
    "targets by name": ((*GROUP, "targets"), ["re:.*_proj$"]),
}


@pytest.mark.parametrize("what", SAME)
def test_what_transformers_answers_alike_has_no_finding(what, int4, copy_of, answered):
    path = edit_quantization(copy_of(int4), *SAME[what])
    assert answered(path) == 0
    report = verify(path)
    assert (report.status, [str(one) for one in report.findings]) == ("passed", [])
    assert [one for one in lint(path).findings if one.severity != "note"] == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("transform_config", {"config_groups": ONLINE}, "'input'"),
        ("transform_config", {"config_groups": IN_WEIGHTS | {"v": ONLINE["u"]}}, "'input'"),
        ("transform_config", "hadamard", "unknown"),
        ("sparsity_config", {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}, "'sparse-24-bitmask'"),
        ("sparsity_config", {"format": "marlin-24"}, "'marlin-24'"),
    ],
)
def test_parts_of_a_config_that_readers_leave_out_are_named(key, value, said, int4, copy_of, answered):
    """transformers answers as without them, so a model that needs them is answered wrongly."""
    path = edit_quantization(copy_of(int4), (key,), value)
    assert answered(path) == 0
    (found,) = verify(path).findings
    assert (found.code, found.severity) == ("CK302", "error")
    assert key in found.actual
    assert said in found.actual
    assert [(one.kind, one.severity) for one in lint(path).findings] == [("refused", "error")]


K, V = "k_scale", "v_scale"
STORED = {  # scheme, tensors, and whether it is sound
    "one each": (CACHE, scales({K: (1,), V: (1,)}), True),
    "by head": (CACHE | {"strategy": "attn_head"}, scales({K: (2, 1, 1), V: (2, 1, 1)}), True),
    "with zero points": (
        CACHE | {"type": "int", "symmetric": False},
        scales({K: (1,), V: (1,)})
        | {name: torch.zeros(1, dtype=torch.int8) for name in scales({"k_zero_point": (1,), "v_zero_point": (1,)})},
        True,
    ),
    "none, and dynamic": (CACHE | {"dynamic": True}, {}, True),
    "dynamic by token": (CACHE | {"dynamic": True, "strategy": "token"}, {}, True),
    "keys alone": (CACHE, scales({K: (1,)}), False),
    "one layer": (CACHE, scales({K: (1,), V: (1,)}, layers=(0,)), False),
    "two numbers": (CACHE, scales({K: (2,), V: (2,)}), False),
    "by head, one stored": (CACHE | {"strategy": "attn_head"}, scales({K: (1,), V: (1,)}), False),
    "as ModelOpt names them": (CACHE, scales({"k_proj.k_scale": (1,), "v_proj.v_scale": (1,)}), False),
    "one for both, as of before": (CACHE, scales({"kv_scale": (1,)}), False),
    "zero points not stored": (CACHE | {"type": "int", "symmetric": False}, scales({K: (1,), V: (1,)}), False),
}


@pytest.mark.parametrize("what", STORED)
def test_scales_of_a_cache_are_those_that_compressed_tensors_loads(what, int4, copy_of, answered, alone):
    scheme, tensors, sound = STORED[what]
    path = edit_quantization(copy_of(int4), ("kv_cache_scheme",), scheme)
    replace(path, tensors)
    if sound:
        assert answered(path) < 0.5  # a cache of 8 bits rounds
        report = verify(path)
        assert (report.status, [str(one) for one in report.findings]) == ("passed", [])
        return
    assert alone("CK303", path)[1]
    assert "error" in {one.severity for one in alone("CK303", path, readers=("transformers",))[1]}
    assert {one.severity for one in alone("CK303", path, readers=("vllm",))[1]} <= {"warning", "error"}


def test_scales_of_a_cache_without_a_scheme_are_called_so(int4, copy_of, alone):
    path = copy_of(int4)
    replace(path, scales({K: (1,), V: (1,)}))
    found = alone("CK104", path)[1]
    assert [(one.tensor, one.count) for one in found] == [
        (f"model.layers.{{0..1}}.self_attn.{name}", 2) for name in (K, V)
    ]
    assert all("no kv_cache_scheme" in one.actual for one in found)


FLOATS = {
    "mxfp4": ("--scheme", "mxfp4"),
    "nvfp4": ("--scheme", "nvfp4", "--rounding", "compressed-tensors"),
    "fp8": ("--scheme", "fp8-channel", "--rounding", "compressed-tensors"),
}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
INT4_TOKENS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FIRST = {"targets": ["re:.*down_proj"], "weights": None}


@pytest.fixture(scope="module", params=daily(FLOATS, ("nvfp4",)))
def in_floats(request, int4):
    path = int4.parent / str(request.param)
    command = ["quantize", str(int4.parent / "plain"), str(path), *FLOATS[request.param]]
    assert CliRunner().invoke(cli, command).exit_code == 0
    return path


def group_first(path, group):
    content = json.loads((path / "config.json").read_text())["quantization_config"]
    groups = {"first": group, **content["config_groups"]}
    edit_config(path, quantization_config=content | {"config_groups": groups})
    return path


FLOATS_MISREAD = {
    "static activations": ((*GROUP, "input_activations"), INT8),
    "activations by channel": ((*GROUP, "input_activations"), INT8 | {"strategy": "channel"}),
    "outputs by head": ((*GROUP, "output_activations"), INT8 | {"strategy": "attn_head"}),
    "dynamic weights": ((*WEIGHTS, "dynamic"), True),
    "no format": (("format",), None),
}


@pytest.mark.parametrize("what", [*FLOATS_MISREAD, "a group without weights"])
def test_floats_that_transformers_answers_otherwise_are_an_error(what, in_floats, copy_of, answered):
    path = copy_of(in_floats)
    path = edit_quantization(path, *FLOATS_MISREAD[what]) if what in FLOATS_MISREAD else group_first(path, FIRST)
    assert answered(path, in_floats) > 0.5
    for readers in (None, ("transformers",), ("vllm",)):
        report = verify(path, readers=readers)
        severities = {one.severity for one in report.findings if one.code == "CK302"}
        assert severities if readers == ("vllm",) else "error" in severities
        assert not any("internal error" in reason for reason in report.reasons)


@pytest.mark.parametrize("target", [None, "re:.*self_attn$", "LlamaAttention"])
def test_floats_that_are_sound_have_no_finding(target, in_floats, copy_of):
    outputs = {"targets": [target], "weights": None, "output_activations": CACHE | {"dynamic": True}}
    assert verify(group_first(copy_of(in_floats), outputs) if target else in_floats).findings == []


@pytest.mark.parametrize("key", ["input_activations", "output_activations", "kv_cache_scheme"])
def test_integers_below_8_bits_to_which_answers_are_rounded_are_named(key, in_floats, int4, copy_of):
    place = (key,) if key == "kv_cache_scheme" else (*GROUP, key)
    for start in (in_floats, int4) if key == "kv_cache_scheme" else (in_floats,):
        (found,) = verify(edit_quantization(copy_of(start), place, INT4_TOKENS)).findings
        assert (found.code, found.severity) == ("CK302", "warning")
        assert f"{key} has 4-bit integers" in found.actual


def test_a_method_that_transformers_does_not_know_is_an_error_for_it_alone(int4, tmp_path):
    path = tmp_path / "modelopt"
    command = ["quantize", str(int4.parent / "plain"), str(path), "--scheme", "nvfp4"]
    assert CliRunner().invoke(cli, command).exit_code == 0
    assert verify(path).findings == []
    (found,) = verify(path, readers=("transformers",)).findings
    assert (found.code, found.severity) == ("CK302", "error")
    assert "modelopt" in found.actual
