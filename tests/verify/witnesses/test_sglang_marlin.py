"""Marlin's layout as we write it out, against the plain-Python reference that SGLang tests its kernels with."""

import ast
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch
from support.messages import text_with
from support.sglang_runs import answered
from torch import nn

from ckptkit.verify.checks.witnesses.loading import repacked
from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.witnesses.loading.job import LoadReport
from ckptkit.verify.witnesses.loading.layouts.marlin import marlin, marlin_scales, marlin_weight, marlin_zero_points
from ckptkit.verify.witnesses.loading.run import run_engine_load
from ckptkit.verify.witnesses.sglang.adapter import layout
from ckptkit.verify.witnesses.sglang.facts import SGLANG

NEEDED = (
    *("get_scale_perms", "get_weight_perm", "marlin_permute_weights", "marlin_weights", "marlin_permute_scales"),
    *("marlin_zero_points", "awq_to_marlin_zero_points", "moe_awq_to_marlin_zero_points", "pack_cols", "unpack_cols"),
)


def functions(file, **known):
    """The NEEDED functions of a file of SGLang, without importing it, which needs CUDA. `known`: what they call."""
    path = Path(find_spec("sglang").origin).parent / file
    if not path.exists():
        pytest.skip(f"this installation of SGLang comes without {file}")
    tree = ast.parse(path.read_text())
    tree.body = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name in NEEDED]
    found = {"torch": torch, "np": numpy, "numpy": numpy, "GPTQ_MARLIN_TILE": 16, **known}
    found["get_pack_factor"] = lambda bits: 32 // bits
    exec(compile(tree, str(path), "exec"), found)  # noqa: S102
    return found


def gptq_words(values):
    """[inputs, outputs] in 0..15 -> int32 [inputs / 8, outputs], built word by word."""
    words = numpy.zeros((values.shape[0] // 8, values.shape[1]), dtype=numpy.uint32)
    for row in range(values.shape[0]):
        words[row // 8] |= values[row].numpy().astype(numpy.uint32) << numpy.uint32(4 * (row % 8))
    return torch.from_numpy(words.view(numpy.int32))


@pytest.mark.sglang
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 64), (256, 192)])
def test_weights(inputs, outputs):
    reference = functions("test/test_marlin_utils.py")
    values = torch.randint(0, 16, (inputs, outputs), generator=torch.Generator().manual_seed(1))
    permutation = reference["get_weight_perm"](4)
    expected = reference["marlin_weights"](values, inputs, outputs, 4, permutation)
    assert torch.equal(marlin_weight(gptq_words(values)), expected)


@pytest.mark.sglang
@pytest.mark.parametrize("groups", [1, 4])
def test_scales(groups):
    reference = functions("srt/layers/quantization/marlin_utils.py")
    scales = torch.randn(groups, 192).bfloat16()
    expected = reference["marlin_permute_scales"](scales, groups * 32, 192, 32)
    assert any(torch.equal(one, expected) for one in marlin_scales(scales))


def of_sglang(name, *arguments, **named):
    """SGLang's own conversion of zero points, of dense layers and of experts."""
    packing = functions("srt/layers/quantization/utils.py")
    known = {one: packing[one] for one in ("pack_cols", "unpack_cols")}
    return functions("srt/layers/quantization/marlin_utils.py", **known)[name](*arguments, **named)


def words(*shape):
    return nn.Parameter(torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32), requires_grad=False)


@pytest.mark.sglang
@pytest.mark.parametrize(("groups", "outputs"), [(4, 64), (3, 192), (1, 128)])
def test_zero_points_as_sglang_converts_them(groups, outputs):
    """Of experts, and of a Linear layer as `CompressedTensorsWNA16.process_weights_after_loading` calls it."""
    sizes = {"size_k": groups, "size_n": outputs, "num_bits": 4}
    stored = words(2, groups, outputs // 8)
    expected = of_sglang("moe_awq_to_marlin_zero_points", stored, **sizes)
    assert torch.equal(torch.stack([marlin_zero_points(one, awq=True) for one in stored]), expected)
    dense = words(outputs // 8, groups).t()
    codes = of_sglang("unpack_cols", dense, 4, groups, outputs)
    assert torch.equal(marlin_zero_points(dense, awq=False), of_sglang("marlin_zero_points", codes, **sizes))


class CompressedTensorsWNA16MoE:
    """Named as the scheme of SGLang that repacks for Marlin."""

    actorder: str | None = None


class Packed(nn.Module):
    def __init__(self, *, zero_points=False):
        super().__init__()
        self.scheme = CompressedTensorsWNA16MoE()
        self.w13_weight_packed = words(2, 16, 64)
        self.w13_weight_scale = nn.Parameter(torch.rand(2, 4, 64).bfloat16(), requires_grad=False)
        if zero_points:
            self.w13_weight_zero_point = words(2, 4, 8)

    def repack(self):
        packed, scales = self.w13_weight_packed.data, self.w13_weight_scale.data
        self.w13_weight_packed = nn.Parameter(torch.stack([marlin_weight(one) for one in packed]), requires_grad=False)
        self.w13_weight_scale.data = torch.stack([marlin_scales(one)[0] for one in scales])


def test_repacking_is_checked_expert_by_expert():
    module = Packed()
    _, compare = marlin()(module)
    assert [seen.param for seen in compare()] == ["w13_weight_packed", "w13_weight_scale[0]", "w13_weight_scale[1]"]
    module.repack()
    assert list(compare()) == []
    module.w13_weight_packed.data[1, 3, 5] ^= 1
    assert {seen.param: seen.what for seen in compare()} == {"w13_weight_packed[1]": text_with("1 1024")}


@pytest.mark.sglang
def test_zero_points_of_experts_are_checked_expert_by_expert():
    module = Packed(zero_points=True)
    _, compare = marlin(awq_experts=True)(module)
    module.repack()
    found = list(compare())
    assert [seen.param for seen in found] == ["w13_weight_zero_point[0]", "w13_weight_zero_point[1]"]
    report = LoadReport("0", "m", "cuda", "bfloat16", repacked=tuple(found), repacked_seen=2)
    subject = Subject(Path("checkpoint"))
    subject._results[run_engine_load, SGLANG] = answered(report)
    assert next(repacked["sglang"](subject, CheckResult("", ""))).code == "CK506"
    zeros = module.w13_weight_zero_point.data
    sizes = {"size_k": 4, "size_n": 64, "num_bits": 4}
    module.w13_weight_zero_point.data = of_sglang("moe_awq_to_marlin_zero_points", zeros, **sizes)
    assert list(compare()) == []


@pytest.mark.sglang
def test_a_repacked_linear_layer():
    module = nn.Module()
    module.weight_packed, module.weight_zero_point = words(64, 16), words(8, 4)
    module.weight_scale = nn.Parameter(torch.rand(64, 4), requires_grad=False)
    _, compare = marlin()(module)
    codes = of_sglang("unpack_cols", module.weight_zero_point.data.t(), 4, 4, 64)
    zeros = of_sglang("marlin_zero_points", codes, size_k=4, size_n=64, num_bits=4)
    module.weight_zero_point = nn.Parameter(zeros, requires_grad=False)
    module.weight_packed = nn.Parameter(marlin_weight(module.weight_packed.data.t()), requires_grad=False)
    module.weight_scale = nn.Parameter(marlin_scales(module.weight_scale.data.t())[0], requires_grad=False)
    assert list(compare()) == []


def test_another_kernels_layout_and_columns_in_activation_order_are_not_taken_for_marlins():
    """SGLang sorts columns by their groups while it repacks, which `marlin_weight` does not."""
    module = Packed()
    assert layout(module)(module)[0]
    module.scheme.actorder = "group"
    with pytest.raises(CannotCheck, match="CompressedTensorsWNA16MoE"):
        compared(module)
    module.scheme = nn.Identity()
    with pytest.raises(CannotCheck, match="layout"):
        compared(module)
    assert layout(nn.Linear(2, 2)) is None


def compared(module):
    return list(layout(module)(module)[1]())
