"""The scheme in config.json: what compressed-tensors, transformers and ckptkit make of it."""

import copy
import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization
from support.messages import refusal
from support.published import quantization
from transformers.utils.quantization_config import CompressedTensorsConfig

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.quant.formats.compressed import stated_scheme
from ckptkit.quant.formats.scheme import QuantScheme, quantization_config, read_scheme
from ckptkit.quant.planner import quantize_step
from ckptkit.quant.schemes.w4a16 import PackedWeights

KIMI = quantization(["lm_head", "re:.*self_attn.*"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((16, "qmax7"), "group size 16"),
        ((-1, "qmax7"), "group size -1"),
        ((32, "qmax8"), "unknown grid 'qmax8'"),
        ((32, "qmax7", ("re:(",)), "expression"),
        ((32, "qmax7", ("",)), "is empty"),
        ((32, "qmax7", ("re:",)), "is empty"),
        ((32, "qmax7", (), False), "symmetric"),
        ((32, "qmax7", (), True, "mse"), "qmax7"),
        ((32, "minmax", (), True, "best"), "unknown search 'best'"),
        ((32, "minmax", (), True, "none", torch.float64), "unknown scale dtype torch.float64"),
    ],
)
def test_an_invalid_scheme_cannot_exist(arguments, message):
    refusal(message.replace("(", r"\("), QuantScheme, *arguments)


SCHEMES = [
    QuantScheme(32, "qmax7", ("a", "re:b.*")),
    QuantScheme(128, "minmax"),
    QuantScheme(None, "qmax7", ("lm_head",)),
    QuantScheme(64, "minmax", ("lm_head",), symmetric=False),
    QuantScheme(None, "minmax", (), False, "mse", torch.float16),
    QuantScheme(32, "qmax7", scale_dtype=torch.float32),
]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_and_transformers_accept_the_config(scheme):
    content = json.loads(json.dumps(quantization_config(scheme)))
    parsed = QuantizationConfig.model_validate(content)
    assert parsed.quantization_status == QuantizationStatus.COMPRESSED
    weights = parsed.config_groups["group_0"].weights
    assert (weights.strategy, weights.group_size) == ("group" if scheme.group_size else "channel", scheme.group_size)
    assert (weights.symmetric, weights.scale_dtype) == (scheme.symmetric, scheme.scale_dtype)
    hf = CompressedTensorsConfig.from_dict(content)
    assert hf.is_quantization_compressed
    # What transformers writes back still tells the grid.
    assert read_scheme({"quantization_config": hf.to_dict()}) == scheme


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_names_of_the_parts_are_those_that_compressed_tensors_expects(scheme):
    """Shapes and dtypes too, as compressed-tensors allocates them, and by hand as vLLM and SGLang do."""
    parsed = QuantizationConfig.model_validate(quantization_config(scheme)).config_groups["group_0"]
    weight = torch.randn(24, 256).bfloat16()
    spec = TensorSpec("x.weight", (24, 256), "bfloat16")
    step = quantize_step([spec], PackedWeights(scheme, frozenset([spec.name])))
    made = {one.name.removeprefix("x."): tensor for one, tensor in zip(step.outputs, step.run([weight]), strict=True)}
    assert list(step.outputs) == [TensorSpec.of(f"x.{name}", part) for name, part in made.items()]
    assert set(made) == set(PackedQuantizationCompressor.compression_param_names(parsed))
    module = torch.nn.Linear(256, 24, bias=False, dtype=torch.bfloat16)
    initialize_module_for_quantization(module, parsed)
    assert module.weight_scale.shape == made["weight_scale"].shape
    assert scheme.scale_dtype or module.weight_scale.dtype == made["weight_scale"].dtype
    groups = 256 // scheme.group_size if scheme.group_size else 1
    expected = {
        "weight_packed": ((24, 32), torch.int32),
        "weight_scale": ((24, groups), scheme.scale_dtype or torch.bfloat16),
        "weight_shape": ((2,), torch.int64),
    }
    if not scheme.symmetric:
        expected["weight_zero_point"] = ((3, groups), torch.int32)
    assert {name: (tuple(part.shape), part.dtype) for name, part in made.items()} == expected


def test_reads_a_config_of_another_tool():
    expected = QuantScheme(32, "minmax", ("lm_head", "re:.*self_attn.*"))
    for actorder in (None, "weight", "static"):  # GPTQ with columns in their own order is the same scheme
        assert read_scheme({"quantization_config": changed(actorder=actorder)}) == expected


def changed(**weights):
    group = KIMI["config_groups"]["group_0"]
    return KIMI | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no quantization_config"),
        (KIMI | {"quant_method": "fp8"}, "quant_method is 'fp8'"),
        (KIMI | {"format": "mixed-precision"}, "format is 'mixed-precision'"),
        (KIMI | {"config_groups": {}}, "config_groups is 0"),
        (KIMI | {"config_groups": {"group_0": {"targets": ["Linear"]}}}, "no weights"),
        (KIMI | {"config_groups": {"nonsense": ["Linear"]}}, "refuses"),
        (KIMI | {"config_groups": {"W4A16": ["re:.*experts.*"]}}, r"targets is \['re:"),
        (KIMI | {"config_groups": {"W8A8": ["Linear"]}}, "input_activations is"),
        (KIMI | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "kv_cache_scheme is"),
        (changed(num_bits=8), "num_bits is 8"),
        (changed(strategy="tensor", group_size=None), "strategy is 'tensor'"),
        (changed(scale_dtype="torch.float64"), r"torch\.float64"),
        # compressed-tensors refuses it for Kimi's other arguments from 0.20 on; before, it is left to us.
        (changed(actorder="group"), "refuses|actorder is 'group'"),
        (changed(unknown=1), "refuses"),
        (changed(group_size=16), "group size 16"),
    ],
)
def test_refuses_what_it_does_not_support(content, message):
    refusal(message, read_scheme, {} if content is None else {"quantization_config": content})


# By key of `weights`, what may stand there; every one is tried in a config that is otherwise usual.
ODD = {
    "type": ["float", "INT", None, 4],
    "num_bits": [8, "4", None, 3],
    "symmetric": [False, None, 1, "true"],
    "strategy": ["channel", "tensor", "block", "token", "GROUP", None],
    "group_size": [None, 0, -1, -2, 32.0, "32", 64, 7],
    "block_structure": [[4, 4], "2x4"],
    "dynamic": [True, "local", 0, None],
    "actorder": ["weight", "static", False, 0, True, "group"],
    "observer": [None, "mse", "minmax", 7],
    "observer_kwargs": [None, {}, [], {"grid": "qmax7"}],
    "scale_dtype": [None, "torch.bfloat16", "bfloat16", "torch.float99"],
    "zp_dtype": ["torch.int8", "torch.uint4", 8],
    "unknown": [None, 1],
}
# The same of the group and of the whole config.
ODD_GROUP = {
    "targets": [[], ["re:.*"], None, "Linear", [1]],
    "input_activations": [{"num_bits": 8}, {}, {"num_bits": 8, "dynamic": True, "strategy": "token"}],
    "output_activations": [{"num_bits": 8}],
    "format": [None, "float-quantized", "no-such"],
    "unknown": [None, 1],
}
ODD_TOP = {
    "ignore": [None, [], ["lm_head", 1], "lm_head"],
    "format": ["float-quantized", "no-such", None],
    "kv_cache_scheme": [{"num_bits": 8}],
    "quantization_status": ["frozen", "no-such", None],
    "config_groups": [{}, None, [], {"W4A16": ["Linear"]}],
    "unknown": [1],
}


@pytest.fixture(params=["group", "channel", "asymmetric"])
def usual(request):
    size = None if request.param == "channel" else 32
    return quantization_config(QuantScheme(size, "minmax", ("lm_head",), request.param != "asymmetric"))


def odd_configs(usual):
    for place, odd in enumerate((ODD_TOP, ODD_GROUP, ODD)):
        for key, value in [(key, value) for key, values in odd.items() for value in values]:
            content = copy.deepcopy(usual)
            group = content["config_groups"]["group_0"]
            (content, group, group["weights"])[place][key] = value
            yield key, value, content


def outcome(read, content):
    try:
        return read({"quantization_config": content})
    except CkptkitError as error:
        return str(error)


# compressed-tensors 0.18 says so of one of the odd configs.
@pytest.mark.filterwarnings("ignore:No observer is used for dynamic quant:UserWarning")
def test_stated_scheme_is_the_one_that_compressed_tensors_reads(usual):
    usual |= {"quant_method": "compressed-tensors"}
    assert isinstance(outcome(stated_scheme, usual), QuantScheme)
    for key, value, content in [("", None, usual), *odd_configs(usual)]:
        assert outcome(stated_scheme, content) == outcome(read_scheme, content), (key, value)
