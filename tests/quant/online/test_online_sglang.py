"""The online quantizer against real SGLang on the CPU: its model classes, `load_weights` once a bucket, repacking.

Configs and zero points go through SGLang's own code, in a process of its own.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import online_runs, quantized
from support.forking import run_script
from support.messages import text_with
from support.sglang_runs import int4_config

from ckptkit.app.api import quantize
from ckptkit.quant.formats import grids
from ckptkit.quant.formats.packing import pack_zero_point, to_sglang_zero_points
from ckptkit.quant.formats.scheme import QuantScheme, quantization_config

pytestmark = pytest.mark.sglang

GROUP = 32
ATTENTION = r"re:.*\.self_attn\..*"
DENSE = r"re:.*\.mlp\.(gate|up|gate_up|down)_proj(\.weight)?$"
SHARED = r"re:.*\.shared_experts\..*"
FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def reports(releases, tmp_path_factory):
    root = tmp_path_factory.mktemp("online")
    quantize(releases("qwen3_moe"), root / "qwen3_moe", QuantScheme(GROUP, "qmax7", (ATTENTION,)))
    quantize(releases("glm4_moe"), root / "glm4_moe", QuantScheme(GROUP, "minmax", (ATTENTION, DENSE, SHARED)))
    # As Kimi K2 Thinking is released, made by compressed-tensors alone.
    made = quantized.int4(strategy="group", group_size=GROUP, symmetric=True)
    lists = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    edit = {"quantization_config": int4_config(lists, GROUP)}
    source, target = releases("deepseek_v3"), root / "deepseek_v3"
    quantized.write(source, target, lambda name: ".mlp.experts." in name, made, lambda old: old | edit)
    orders = {name: {"int4": root / name, "bf16": releases(name)} for name in FAMILIES}
    orders["qwen3_moe"] |= {"broken": root}
    return online_runs.run(root, orders)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_updates_leave_what_was_loaded_from_disk(family, reports):
    report = reports[family]
    assert report["parameters"] > 100
    assert report["repacked"] == ["w13_weight_packed", "w2_weight_packed"]
    assert report["updates"] == [[[], []], [[], []]]


def test_what_goes_wrong_in_an_update_is_seen_and_a_whole_one_mends_it(reports):
    broken = reports["qwen3_moe"]
    weights = [f"model.layers.3.mlp.experts.{name}_weight" for name in ("w13", "w2")]
    parts = {f"{name}_{part}" for name in weights for part in ("packed", "scale")}
    assert broken["altered"] == sorted(parts)
    assert broken["left out"] == text_with("CkptkitError update 3 model.layers.3.mlp.experts.4.down_proj.weight,")
    assert parts <= set(broken["destroyed"])
    assert broken["mended"] == []
    assert broken["end twice"] == text_with("CkptkitError repacked")
    assert broken["without begin"].startswith("RuntimeError")  # SGLang's own: the weights do not fit


SCHEMES = [
    QuantScheme(32, "qmax7", ("a", "re:b.*")),
    QuantScheme(None, "qmax7", ("lm_head",)),
    QuantScheme(64, "minmax", ("lm_head",), symmetric=False),
    QuantScheme(None, "minmax", (), False, "mse", torch.float16),
    QuantScheme(32, "qmax7", scale_dtype=torch.float32),
]
WORKER = """
import json, sys, torch
from safetensors.torch import load_file, save_file
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.marlin_utils import marlin_zero_points, moe_awq_to_marlin_zero_points

read = [CompressedTensorsConfig.from_config(content) for content in json.loads(sys.argv[2])]
found = [(one, one.target_scheme_map["Linear"]["weights"]) for one in read]
facts = [
    [one.quant_format, one.ignore, weights.num_bits, weights.symmetric, weights.strategy, weights.group_size, \
one._is_wNa16_group_channel(weights, None)]
    for one, weights in found
]
tensors = load_file(sys.argv[1])
groups, rows = tensors["codes"].shape
made = moe_awq_to_marlin_zero_points(tensors["stored"].unsqueeze(0), size_k=groups, size_n=rows, num_bits=4)[0]
save_file({"made": made, "expected": marlin_zero_points(tensors["codes"], groups, rows, 4)}, sys.argv[1])
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    """How SGLang reads the config of each scheme, and what it makes of zero points in its layout for experts."""
    file = tmp_path_factory.mktemp("sglang") / "zero_points.safetensors"
    torch.manual_seed(0)
    zero_point = grids.quantize(torch.randn(128, 96), QuantScheme(32, "minmax", (), symmetric=False)).zero_point
    stored = to_sglang_zero_points(pack_zero_point(zero_point), 128, "a")
    assert stored.shape == (3, 16)
    save_file({"stored": stored, "codes": (zero_point.T.int() + 8).contiguous()}, file)
    configs = json.dumps([quantization_config(scheme) for scheme in SCHEMES])
    return json.loads(run_script("sglang", WORKER, file, configs).splitlines()[-1]), load_file(file)


def test_sglang_reads_every_config(sglang):
    for one, found in zip(SCHEMES, sglang[0], strict=True):
        strategy = "group" if one.group_size else "channel"
        assert found == ["pack-quantized", list(one.ignore), 4, one.symmetric, strategy, one.group_size, True]


def test_zero_points_of_experts_are_those_that_a_linear_layer_would_get(sglang):
    assert torch.equal(sglang[1]["made"], sglang[1]["expected"])
    assert sglang[1]["made"].unique().numel() > 10
