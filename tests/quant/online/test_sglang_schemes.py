"""SGLang's own code on our configs and zero points, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.forking import run_script

from quant.formats.grids import quantize
from quant.formats.packing import for_sglang_experts, pack_zero_point
from quant.formats.scheme import QuantScheme, quantization_config

pytestmark = pytest.mark.sglang

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
def sglang(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[Any]], dict[str, torch.Tensor]]:
    """How SGLang reads the config of each scheme, and what it makes of zero points in its layout for experts."""
    file: Path = tmp_path_factory.mktemp("sglang") / "zero_points.safetensors"
    torch.manual_seed(0)
    zero_point = quantize(torch.randn(128, 96), QuantScheme(32, "minmax", (), symmetric=False)).zero_point
    assert zero_point is not None
    stored = for_sglang_experts(pack_zero_point(zero_point), 128, "a")
    assert stored.shape == (3, 16)
    save_file({"stored": stored, "codes": (zero_point.T.int() + 8).contiguous()}, file)
    configs = json.dumps([quantization_config(scheme) for scheme in SCHEMES])
    printed = run_script("sglang", WORKER, file, configs)
    return json.loads(printed.splitlines()[-1]), load_file(file)


def test_sglang_reads_every_config(sglang: tuple[list[list[Any]], dict[str, torch.Tensor]]) -> None:
    expected = [
        [
            "pack-quantized",
            list(one.ignore),
            4,
            one.symmetric,
            "group" if one.group_size else "channel",
            one.group_size,
            True,
        ]
        for one in SCHEMES
    ]
    assert sglang[0] == expected


def test_zero_points_of_experts_are_those_that_a_linear_layer_would_get(
    sglang: tuple[list[list[Any]], dict[str, torch.Tensor]],
) -> None:
    assert torch.equal(sglang[1]["made"], sglang[1]["expected"])
    assert sglang[1]["made"].unique().numel() > 10
