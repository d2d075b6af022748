"""Marlin's layout as we write it out, against the plain-Python reference that SGLang tests its kernels with."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.messages import text_with
from support.sglang_runs import answered
from torch import nn

from ckptkit.verify.checks.witnesses.loading import repacked
from ckptkit.verify.core.check import Tally
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.witnesses.loading.job import LoadReport, Observation
from ckptkit.verify.witnesses.loading.layouts.layout import Compare, LayerOutcome
from ckptkit.verify.witnesses.loading.layouts.marlin import marlin, marlin_scales, marlin_weight, marlin_zero_points
from ckptkit.verify.witnesses.loading.run import run_engine_load
from ckptkit.verify.witnesses.sglang.adapter import layout
from ckptkit.verify.witnesses.sglang.facts import SGLANG


def functions(file: str, names: Sequence[str], **known: Any) -> dict[str, Any]:
    """Functions of a file of SGLang, without importing it, which needs a CUDA driver. `known`: what else they call."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.exists():
        pytest.skip(f"this installation of SGLang comes without {file}")
    nodes = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    found: dict[str, Any] = {
        "torch": torch,
        "np": numpy,
        "numpy": numpy,
        "GPTQ_MARLIN_TILE": 16,
        "get_pack_factor": lambda bits: 32 // bits,
        **known,
    }
    exec(compile(ast.Module(nodes, []), str(path), "exec"), found)  # noqa: S102
    return found


def gptq_words(values: torch.Tensor) -> torch.Tensor:
    """[inputs, outputs] in 0..15 -> int32 [inputs / 8, outputs], built word by word."""
    words = numpy.zeros((values.shape[0] // 8, values.shape[1]), dtype=numpy.uint32)
    for row in range(values.shape[0]):
        words[row // 8] |= values[row].numpy().astype(numpy.uint32) << numpy.uint32(4 * (row % 8))
    return torch.from_numpy(words.view(numpy.int32))


@pytest.mark.sglang
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 64), (256, 192)])
def test_weights(inputs: int, outputs: int) -> None:
    reference = functions("test/test_marlin_utils.py", ["marlin_permute_weights", "marlin_weights", "get_weight_perm"])
    values = torch.randint(0, 16, (inputs, outputs), generator=torch.Generator().manual_seed(1))
    permutation = reference["get_weight_perm"](4)
    expected = reference["marlin_weights"](values, inputs, outputs, 4, permutation)
    assert torch.equal(marlin_weight(gptq_words(values)), expected)


@pytest.mark.sglang
@pytest.mark.parametrize("groups", [1, 4])
def test_scales(groups: int) -> None:
    reference = functions("srt/layers/quantization/marlin_utils.py", ["get_scale_perms", "marlin_permute_scales"])
    scales = torch.randn(groups, 192).bfloat16()
    expected = reference["marlin_permute_scales"](scales, groups * 32, 192, 32)
    assert any(torch.equal(one, expected) for one in marlin_scales(scales))


def of_sglang(name: str, *arguments: Any, **named: Any) -> torch.Tensor:
    """SGLang's own conversion of zero points, of dense layers and of experts."""
    packing = functions("srt/layers/quantization/utils.py", ["pack_cols", "unpack_cols"])
    names = ["get_scale_perms", "marlin_zero_points", "awq_to_marlin_zero_points", "moe_awq_to_marlin_zero_points"]
    found = functions(
        "srt/layers/quantization/marlin_utils.py",
        names,
        pack_cols=packing["pack_cols"],
        unpack_cols=packing["unpack_cols"],
    )
    result: torch.Tensor = found[name](*arguments, **named)
    return result


@pytest.mark.sglang
@pytest.mark.parametrize(("groups", "outputs"), [(4, 64), (3, 192), (1, 128)])
def test_zero_points_as_sglang_converts_them(groups: int, outputs: int) -> None:
    """Of experts, and of a Linear layer as `CompressedTensorsWNA16.process_weights_after_loading` calls it."""
    sizes = {"size_k": groups, "size_n": outputs, "num_bits": 4}
    stored = torch.randint(-(2**31), 2**31 - 1, (2, groups, outputs // 8), dtype=torch.int32)
    expected = of_sglang("moe_awq_to_marlin_zero_points", stored, **sizes)
    assert torch.equal(torch.stack([marlin_zero_points(one, awq=True) for one in stored]), expected)
    words = torch.randint(-(2**31), 2**31 - 1, (outputs // 8, groups), dtype=torch.int32)
    codes = of_sglang("unpack_cols", words.t(), 4, groups, outputs)
    expected = of_sglang("marlin_zero_points", codes, **sizes)
    assert torch.equal(marlin_zero_points(words.t(), awq=False), expected)


def test_zero_points_of_experts_are_checked_expert_by_expert() -> None:
    module = Packed()
    module.w13_weight_zero_point = nn.Parameter(
        torch.randint(-(2**31), 2**31 - 1, (2, 4, 8), dtype=torch.int32), requires_grad=False
    )
    _, compare = marlin(awq_experts=True)(module)
    zeros = module.w13_weight_zero_point.data
    module.w13_weight_packed = nn.Parameter(
        torch.stack([marlin_weight(one) for one in module.w13_weight_packed.data]), requires_grad=False
    )
    module.w13_weight_scale.data = torch.stack([marlin_scales(one)[0] for one in module.w13_weight_scale.data])
    module.w13_weight_zero_point.data = of_sglang(
        "moe_awq_to_marlin_zero_points", zeros, size_k=4, size_n=64, num_bits=4
    )
    assert compare() == LayerOutcome()
    module.w13_weight_zero_point.data = zeros
    differences = compare().differences
    assert list(differences) == ["w13_weight_zero_point[0]", "w13_weight_zero_point[1]"]
    found = [Observation(f"m.{place}", f"m.{place}", what) for place, what in differences.items()]
    report = LoadReport("0", "m", "cuda", "bfloat16", repacked=tuple(found), repacked_seen=2)
    subject = Subject(Path("checkpoint"))
    subject._results[run_engine_load, SGLANG] = answered(report)
    assert next(repacked["sglang"](subject, Tally())).code == "CK506"


class CompressedTensorsWNA16MoE:
    """Named as the scheme of SGLang that repacks for Marlin."""

    actorder: str | None = None


class CompressedTensorsWNA16:
    """The same for linear layers."""


class Packed(nn.Module):
    """Two experts, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.scheme = CompressedTensorsWNA16MoE()
        words = torch.randint(-(2**31), 2**31 - 1, (2, 16, 64), dtype=torch.int32)
        self.w13_weight_packed = nn.Parameter(words, requires_grad=False)
        self.w13_weight_scale = nn.Parameter(torch.rand(2, 4, 64).bfloat16(), requires_grad=False)


def test_repacking_is_checked_expert_by_expert() -> None:
    module = Packed()
    _, compare = marlin()(module)
    packed, scales = module.w13_weight_packed.data, module.w13_weight_scale.data
    module.w13_weight_packed = nn.Parameter(torch.stack([marlin_weight(one) for one in packed]), requires_grad=False)
    module.w13_weight_scale.data = torch.stack([marlin_scales(one)[0] for one in scales])
    assert compare() == LayerOutcome()
    module.w13_weight_packed.data[1, 3, 5] ^= 1
    ((place, difference),) = compare().differences.items()
    assert place == "w13_weight_packed[1]"
    assert difference.startswith("1 of 1024 elements differ")


def test_a_weight_that_was_never_repacked_is_found() -> None:
    module = Packed()
    differences = marlin()(module)[1]().differences
    assert list(differences) == ["w13_weight_packed", "w13_weight_scale[0]", "w13_weight_scale[1]"]
    assert differences["w13_weight_packed"] == "[2, 16, 64] torch.int32 instead of [2, 8, 128] torch.int32"


def test_a_repacked_linear_layer() -> None:
    module = nn.Module()
    module.scheme = CompressedTensorsWNA16()
    module.weight_packed = nn.Parameter(
        torch.randint(-(2**31), 2**31 - 1, (64, 16), dtype=torch.int32), requires_grad=False
    )
    module.weight_scale = nn.Parameter(torch.rand(64, 4), requires_grad=False)
    module.weight_zero_point = nn.Parameter(
        torch.randint(-(2**31), 2**31 - 1, (8, 4), dtype=torch.int32), requires_grad=False
    )
    _, compare = marlin()(module)
    codes = of_sglang("unpack_cols", module.weight_zero_point.data.t(), 4, 4, 64)
    repacked = of_sglang("marlin_zero_points", codes, size_k=4, size_n=64, num_bits=4)
    module.weight_zero_point = nn.Parameter(repacked, requires_grad=False)
    module.weight_packed = nn.Parameter(marlin_weight(module.weight_packed.data.t()), requires_grad=False)
    module.weight_scale = nn.Parameter(marlin_scales(module.weight_scale.data.t())[0], requires_grad=False)
    assert compare() == LayerOutcome()


def test_another_kernels_layout_is_not_taken_for_marlins() -> None:
    module = Packed()
    assert expected_of(module)[0]
    module.scheme = nn.Identity()
    params, compare = expected_of(module)
    assert not params
    assert compare().unknown == text_with("layout")
    assert layout(nn.Linear(2, 2)) is None


def test_columns_in_activation_order_are_not_checked() -> None:
    """SGLang sorts them by their groups while it repacks, which `marlin_weight` does not."""
    module = Packed()
    module.scheme.actorder = "group"
    assert expected_of(module)[1]().unknown == text_with("CompressedTensorsWNA16MoE")


def expected_of(module: nn.Module) -> tuple[Collection[str], Compare]:
    found = layout(module)
    assert found is not None
    return found(module)
