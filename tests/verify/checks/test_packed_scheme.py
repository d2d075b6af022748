"""CK3xx: an INT4 checkpoint is broken in one way; the bound of CK305 holds for compressed-tensors' own output."""

import json
import shutil

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from mutations.edits import edit_quantization, replace, tensor
from mutations.int4 import in_awq_order, unpack
from support import models, quantized
from support.messages import text_with
from support.quantized import small_groups_allowed

from ckptkit.app.api import quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.packing import to_sglang_zero_points
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.ignore.lint import lint
from ckptkit.verify.evidence.packed import Int4Format
from ckptkit.verify.evidence.rounding import bound_in_steps, group_distances
from ckptkit.verify.run import verify

WEIGHTS = ("config_groups", "group_0", "weights")
EXPERT_11, ATTENTION = "model.layers.5.mlp.experts.11", "model.layers.3.self_attn"
DOWN, SHARED = "model.layers.5.mlp.experts.{}.down_proj", "model.layers.{}.mlp.shared_experts.gate_proj"


@pytest.fixture(scope="session")
def int4(releases, tmp_path_factory):
    path = tmp_path_factory.mktemp("int4") / "glm4_moe"
    quantize(releases("glm4_moe"), path, QuantScheme(32, "qmax7"))
    return path


def test_int4_checkpoint_without_defect_has_no_finding(int4, releases, converted, passes):
    """Every family is in test_clean_families.py."""
    for source in (releases("glm4_moe"), converted("glm4_moe")):
        report = verify(int4, source=source)
        assert report.findings == []
        assert {check.status for check in report.checks} == {"passed"}
        assert {f"CK30{digit}" for digit in range(1, 6)} <= {check.code for check in report.checks}
    passes("CK305", int4, 12 * 4 + 2 * 3 + 10 * 13 * 3, source_path=releases("glm4_moe", fused=True))
    # q, k, v of 12 layers, gate and up of 2 dense layers and 10 shared experts, 10 x 12 x 3 of experts twice.
    passes("CK306", int4, 12 * 3 + 12 * 2 + 2 * 360)
    passes("CK308", int4, 444)  # all that are packed


def test_a_config_that_declares_int4_and_leaves_every_layer_out(int4, fresh, only):
    path = fresh("glm4_moe")
    config = json.loads((int4 / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["re:.*"]
    (path / "config.json").write_text(json.dumps(config))
    finding = only(verify(path))
    assert (finding.code, finding.severity, finding.file) == ("CK302", "error", str(path / "config.json"))
    report = lint(path)
    assert (report.failed, report.packed) == (True, 0)
    assert [one.kind for one in report.findings if one.severity == "error"] == ["nothing packed"]


@pytest.mark.parametrize("like", ["release", "no list", "fp8", "ignored"])
def test_quantizing_nothing_to_int4_is_refused(like, int4, releases, fresh, edit_json, tmp_path):
    reference = fresh("glm4_moe")
    if like == "no list":
        shutil.copy(int4 / "config.json", reference)
    elif like == "fp8":
        declared = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
        edit_json(reference / "config.json", quantization_config=declared)
    scheme = QuantScheme(32, "qmax7", ignore=("re:.*",) if like == "ignored" else ())
    options = {} if like == "ignored" else {"like": reference}
    for dry_run in (False, True):
        with pytest.raises(CkptkitError, match="--like has no INT4 weights" if options else "quantize"):
            quantize(releases("glm4_moe"), tmp_path / "out", scheme, dry_run=dry_run, **options)
    assert not (tmp_path / "out").exists()


def args(symmetric, group):
    return QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=group)


def compressed(weight, *, symmetric, group=32):
    grouped = weight.reshape(len(weight), -1, group)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args(symmetric, group))
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    scheme = QuantizationScheme(targets=["Linear"], weights=args(symmetric, group))
    return {f"m.{part}": tensor for part, tensor in PackedQuantizationCompressor.compress(state, scheme).items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_bound_holds_for_what_compressed_tensors_writes_and_is_tight(dtype, symmetric):
    torch.manual_seed(3)
    form = Int4Format(4, 32, symmetric)
    steps = []
    for spread in (1e-3, 0.02, 1.0):
        weight = (torch.randn(512, 256) * spread).to(dtype)
        weight[::2] = weight[::2].abs()
        parts = compressed(weight, symmetric=symmetric)
        steps.append(group_distances(parts, "m", form, weight).worst_steps)
    limit = bound_in_steps(dtype, symmetric)
    assert max(steps) <= limit
    assert max(steps) > 0.45
    assert limit < (0.6 if symmetric else 0.7)


def decompressed(parts, *, symmetric=True, group=32):
    scheme = QuantizationScheme(targets=["Linear"], weights=args(symmetric, group), format="pack-quantized")
    state = {f"weight_{name.rpartition('weight_')[2].removeprefix('_')}": one for name, one in parts.items()}
    return PackedQuantizationCompressor.decompress(state, scheme)["weight"]


@pytest.mark.parametrize("layout", ["symmetric", "asymmetric", "asymmetric, as SGLang reads experts"])
def test_dequantization_agrees_with_compressed_tensors_in_every_group(layout):
    """Of 204 rows, of which eight share a word of zero points, one weight is 3 steps off."""
    torch.manual_seed(5)
    symmetric, turned, rows = layout == "symmetric", layout.endswith("experts"), 208 if "SGLang" in layout else 204
    parts = compressed(torch.randn(rows, 2048) + torch.linspace(-2, 2, rows)[:, None], symmetric=symmetric, group=128)
    weight = decompressed(parts, symmetric=symmetric, group=128).float()
    parts = {name.replace("m.", "m.experts.0."): tensor for name, tensor in parts.items()}
    if turned:
        zero = parts["m.experts.0.weight_zero_point"]
        parts["m.experts.0.weight_zero_point"] = to_sglang_zero_points(zero, rows, "m.experts.0")
    weight[-1, -1] += 3 * parts["m.experts.0.weight_scale"][-1, -1]
    steps = group_distances(parts, "m.experts.0", Int4Format(4, 128, symmetric, turned), weight).steps
    assert float(steps.flatten()[:-1].max()) < 1e-4
    assert float(steps[-1, -1]) == pytest.approx(3, abs=1e-3)


# CK306 to CK309, and what CK305 finds of scales and zero points.


@pytest.mark.parametrize(
    "modules",
    [
        [f"{ATTENTION}.k_proj"],
        [f"{EXPERT_11}.down_proj"],
        [DOWN.format(expert) for expert in range(12)],
        [SHARED.format(layer) for layer in range(2, 12)],
    ],
)
def test_fused_layer_packed_in_part_is_found(modules, int4, copy_of, alone):
    path = copy_of(int4)
    unpack(path, modules)
    found = alone("CK306", path)[1]
    # Of gate and up either may be the odd one.
    odd = {name.replace("gate_proj", "up_proj") for finding in found for name in finding.names}
    assert odd == {f"{module}.weight".replace("gate_proj", "up_proj") for module in modules}
    packed = "packed integers" if ".experts." in modules[0] else "INT4, groups of 32, scales in bfloat16"
    assert all({one.actual, one.expected.split(", like ")[0]} == {"unquantized", packed} for one in found)


def test_fused_layer_wholly_unpacked_has_no_finding(int4, copy_of, alone):
    path = copy_of(int4)
    parts = [DOWN.replace("down", part) for part in ("gate", "up", "down")]
    experts = (part.format(expert) for expert in range(12) for part in parts)
    unpack(path, [*(f"{ATTENTION}.{part}_proj" for part in "qkv"), *experts])
    assert alone("CK306", path)[1] == []


@pytest.mark.usefixtures("kernel_tiles")
def test_layers_that_no_kernel_runs_are_found_without_tensor_parallelism(int4, alone):
    """Experts of 96 features, and a down projection of 288 columns: an engine ends at its first prompt."""
    _, findings = alone("CK307", int4)
    actual = {one.tensor: one.actual for one in findings}
    assert actual["model.layers.{0..1}.mlp.down_proj.weight"] == text_with("128 288 tiles 128 64 64 128")
    assert any(text == text_with("96 features 64") for text in actual.values())
    assert {(one.severity, "--reader vllm" in one.hint) for one in findings} == {("error", True)}
    assert alone("CK307", int4, readers=("vllm",)) == (None, [])


def test_scales_that_differ_by_a_little_are_normal(int4, copy_of, alone):
    """Those that differ by more are mutations."""
    path, name = copy_of(int4), f"{EXPERT_11}.down_proj.weight_scale"
    replace(path, {name: tensor(path, name) * 16})
    assert alone("CK308", path)[1] == []


def requantized(original, factor):
    """Parts with scales that are too large by a factor: every weight is still within half a step."""
    scale = (original.float().unflatten(1, (-1, 32)).abs().amax(-1) / 7 * factor).bfloat16()
    codes = (original.float() / scale.float().repeat_interleave(32, 1)).round().clamp(-8, 7).to(torch.int8)
    return {"weight_scale": scale, "weight_packed": pack_to_int32(codes, 4)}


@pytest.mark.parametrize(("factor", "named"), [(2.0, True), (2.0, False), (1.0, True)])
def test_quantization_steps_too_large_for_the_named_grid_are_found(factor, named, int4, copy_of, releases, alone):
    path, module = copy_of(int4), f"{EXPERT_11}.up_proj"
    parts = requantized(models.tensors(releases("glm4_moe"))[f"{module}.weight"], factor)
    replace(path, {f"{module}.{part}": one for part, one in parts.items()})
    if not named:
        edit_quantization(path, (*WEIGHTS, "observer_kwargs"), {})
    found = [(one.tensor, one.actual) for one in alone("CK305", path, source_path=releases("glm4_moe"))[1]]
    assert found == ([(f"{module}.weight_scale", text_with("101%"))] if factor == 2 and named else [])


def unpacked_codes(words):
    return unpack_from_int32(words, 4, torch.Size((len(words), words.shape[1] * 8)))


def moved(words):
    """Every 32nd code three steps nearer to zero, as GPTQ may move it to make up for others."""
    codes = unpacked_codes(words)
    codes[:, ::32] -= 3 * codes[:, ::32].sign()
    return pack_to_int32(codes, 4)


@pytest.mark.parametrize("actorder", ["static", "weight", None])
@pytest.mark.parametrize("change", [moved, in_awq_order])
def test_weights_of_gptq_are_judged_by_the_distance_of_their_rows(actorder, change, int4, copy_of, releases, alone):
    path, name = copy_of(int4), f"{EXPERT_11}.up_proj.weight_packed"
    replace(path, {name: change(tensor(path, name))})
    edit_quantization(path, (*WEIGHTS, "actorder"), actorder)
    assert alone("CK302", path)[1] == []
    found = [(one.tensor, one.expected) for one in alone("CK305", path, source_path=releases("glm4_moe"))[1]]
    expected = text_with("rows 50% norm") if actorder else text_with("0.547 quantization steps")
    assert found == ([] if actorder and change is moved else [(f"{EXPERT_11}.up_proj.weight", expected)])


@pytest.fixture(scope="module")
def asymmetric(releases, tmp_path_factory):
    """glm4_moe with zero points, those of routed experts as SGLang reads them, shared ones in BF16. Read only."""
    path = tmp_path_factory.mktemp("int4") / "glm4_moe"
    scheme = QuantScheme(32, "minmax", (r"re:.*\.mlp\.shared_experts\..*",), symmetric=False)
    with small_groups_allowed():
        quantize(releases("glm4_moe"), path, scheme, readers=("sglang",))
    return path


def test_zero_points_as_sglang_reads_them(asymmetric, releases, passes):
    # every packed weight: 4 of attention in 12 layers, 3 of 2 dense layers, 3 of 12 experts in 10
    for code, compared in (("CK303", None), ("CK305", 12 * 4 + 2 * 3 + 10 * 12 * 3), ("CK306", None)):
        passes(code, asymmetric, compared, source_path=releases("glm4_moe"))


@pytest.mark.parametrize("change", [lambda zero: zero.flip(0), lambda zero: zero.bitwise_not()])
def test_zero_points_of_other_groups(change, asymmetric, copy_of, releases, alone):
    path, name = copy_of(asymmetric), f"{EXPERT_11}.up_proj.weight_zero_point"
    models.edit(path, name, change(models.tensors(path)[name]).contiguous())
    _, (finding,) = alone("CK305", path, source_path=releases("glm4_moe"))
    assert finding.tensor == f"{EXPERT_11}.up_proj.weight"


@pytest.mark.parametrize("reader", ["sglang", "vllm"])
def test_zero_points_of_experts_suit_the_reader_that_they_were_written_for(reader, releases, tmp_path, alone):
    """One scale a row."""
    path = tmp_path / "own"
    scheme = QuantScheme(None, "minmax", (r"re:.*\.mlp\.shared_experts\..*",), symmetric=False)
    quantize(releases("glm4_moe"), path, scheme, readers=(reader,))
    experts = [f"model.layers.{{2..11}}.mlp.experts.{{0..11}}.{part}_proj" for part in ("down", "gate", "up")]
    wrong = [(f"{expert}.weight_zero_point", "error") for expert in experts] if reader == "vllm" else []
    for readers in ((), ("vllm", "sglang")):
        result, found = alone("CK309", path, readers=readers or None)
        assert (result.status, result.tensors_compared > 0) == ("failed" if wrong else "passed", True)
        assert sorted((one.tensor, one.severity) for one in found) == wrong
    assert alone("CK309", path, readers=("vllm",)) == (None, [])
    assert alone("CK309", path, against=frozenset({"vllm"})) == (None, [])


# CK304 and CK305 of negative scales: AutoRound's symmetric grid passes, and faults in it are found.


MODULE = "model.layers.3.mlp.up_proj"
SYMMETRIC = {"strategy": "group", "group_size": 32, "symmetric": True}


def autoround(weight, *, trained):
    """AutoRound's symmetric grid: the largest weight becomes -8, whatever its sign, and the other end at most 7.

    Its training moves the rounding by half a step to either side, and learned a factor for each end of a range.
    Source: AutoRound `quant_tensor_sym`.
    """
    draw = torch.Generator().manual_seed(7)
    groups = weight.float().unflatten(1, (-1, 32))
    factor = 1 - trained * torch.rand((2, *groups.shape[:2]), generator=draw) / 2
    least, most = -groups.amin(-1).clamp(max=0) * factor[0], groups.amax(-1).clamp(min=0) * factor[1]
    scale = (torch.where(most < least, least, -most) / 8).to(weight.dtype)
    moved = trained * (torch.rand(groups.shape, generator=draw) - 0.5)
    stored = (groups / scale.float().unsqueeze(-1) + moved).round().clamp(-8, 7).to(torch.int8).flatten(1)
    return {"_packed": pack_to_int32(stored, 4), "_scale": scale, "_shape": torch.tensor(weight.shape)}


@pytest.fixture(scope="module")
def exported(releases, tmp_path_factory):
    """`exported(trained=...)`: qwen2 as AutoRound writes it for compressed-tensors. Read only."""
    release, root = releases("qwen2-tied"), tmp_path_factory.mktemp("autoround")
    ignore = ["re:.*embed_tokens", "re:.*norm", "lm_head"]
    content = quantized.compressed_config("pack-quantized", **SYMMETRIC) | {"ignore": ignore}

    def write(*, trained=False):
        path = root / f"trained {trained}"
        if not path.exists():

            def quantizer(weight):
                parts = autoround(weight, trained=trained)
                return parts, decompressed(parts)

            quantized.write(
                release, path, is_packed, quantizer, lambda config: config | {"quantization_config": content}
            )
        return path

    return write


def is_packed(name):
    return name.endswith("_proj.weight")


@pytest.mark.parametrize("trained", [False, True])
def test_what_autoround_writes_passes(trained, exported, releases):
    path = exported(trained=trained)
    report = verify(path, source=releases("qwen2-tied"))
    assert (report.findings, report.status) == ([], "passed")
    (note,) = [note for note in report.facts["notes"] if note.startswith("CK304")]
    scales = [tensor for name, tensor in models.tensors(path).items() if name.endswith("_scale")]
    assert f"{sum(int((one < 0).sum()) for one in scales)} of {sum(one.numel() for one in scales)} " in note


@pytest.fixture
def autoround_copy(exported, copy_of):
    return copy_of(exported())


def with_element(factor):
    def change(scale):
        scale[5, 1] *= factor
        return scale

    return change


@pytest.mark.parametrize(
    ("change", "code", "name"),
    [
        (with_element(-1), "CK305", ""),
        (torch.abs, "CK305", ""),
        (lambda scale: scale * 1.25, "CK305", ""),
        (with_element(0), "CK304", "_scale"),
    ],
)
def test_faults_of_signed_scales_are_found(change, code, name, autoround_copy, releases, alone):
    path = autoround_copy
    models.edit(path, f"{MODULE}.weight_scale", change(models.tensors(path)[f"{MODULE}.weight_scale"]))
    _, found = alone(code, path, source_path=releases("qwen2-tied"))
    assert [finding.tensor for finding in found] == [f"{MODULE}.weight{name}"]


@pytest.mark.parametrize("code", [3, 7])
def test_a_wrong_code_is_found_although_the_end_of_the_grid_may_be_far(code, autoround_copy, releases, alone):
    """In the place of -8, the largest weight of a group."""
    path, name = autoround_copy, f"{MODULE}.weight_packed"
    codes = unpacked_codes(models.tensors(path)[name])
    row, column = (codes == -8).nonzero()[0].tolist()
    codes[row, column] = code
    models.edit(path, name, pack_to_int32(codes, 4))
    _, (finding,) = alone("CK305", path, source_path=releases("qwen2-tied"))
    assert (finding.tensor, finding.expected) == (f"{MODULE}.weight", text_with("1.094 quantization steps"))


def test_a_negative_scale_among_positive_ones_is_a_fault(exported, releases, tmp_path, alone):
    """llm-compressor's grid has none, though its config names no grid."""
    content = json.loads((exported() / "config.json").read_text())["quantization_config"]
    quantized.write(
        releases("qwen2-tied"),
        tmp_path / "int4",
        is_packed,
        quantized.int4(**SYMMETRIC),
        lambda config: config | {"quantization_config": content},
    )
    name = f"{MODULE}.weight_scale"
    models.edit(tmp_path / "int4", name, with_element(-1)(models.tensors(tmp_path / "int4")[name]))
    _, (finding,) = alone("CK304", tmp_path / "int4")
    assert (finding.tensor, finding.expected) == (name, "scales above zero")
