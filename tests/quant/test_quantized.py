"""Whole checkpoints quantized: every byte against compressed-tensors' own compressor, and loaded by transformers."""

import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from support import models
from support.messages import refusal
from transformers import AutoModelForCausalLM

from ckptkit.app.api import convert, quantize
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.formats.scheme import QuantScheme, read_scheme
from ckptkit.quant.ignore.select import packed_modules
from ckptkit.quant.planner import quantized
from ckptkit.quant.schemes.interface import Request

PARTS = ("weight_packed", "weight_scale", "weight_shape")


@pytest.fixture(scope="module")
def int4(releases, tmp_path_factory):
    root = tmp_path_factory.mktemp("int4")

    def quantized_release(name, grid):
        path = root / f"{name}-{grid}"
        if not path.exists():
            quantize(releases(name), path, QuantScheme(32, grid))
        return path

    return quantized_release


def compressed(path):
    """Yields each packed module: its name, its tensors by local name, the scheme as compressed-tensors reads it."""
    content = json.loads((path / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(content).config_groups["group_0"]
    tensors = models.tensors(path)
    for name in tensors:
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
            yield module, {part: tensors[f"{module}.{part}"] for part in PARTS}, scheme


def test_transformers_unpacks_int4_to_the_compressors_weights(int4):
    path = int4("qwen2-untied", "qmax7")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    loaded = model.state_dict()
    assert not any(tensor.is_meta for tensor in loaded.values())
    modules = {module for module, _, _ in compressed(path)}
    assert {key.removesuffix(".weight_packed") for key in loaded if key.endswith(".weight_packed")} == modules
    for key, tensor in models.tensors(path).items():
        assert torch.equal(loaded[key], tensor), key
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert torch.isfinite(logits).all()
    assert logits.std() > 0


def test_the_result_says_how_much_smaller_it_is_and_how_far_from_its_source(releases, tmp_path):
    source = models.tensors(releases("glm4_moe"))
    packed = quantize(releases("glm4_moe"), tmp_path / "out", QuantScheme(32, "qmax7")).packed
    sums = dict.fromkeys(packed.kinds, (0, 0.0, 0.0))
    for module, stored, scheme in compressed(tmp_path / "out"):
        weight = source[f"{module}.weight"].double()
        read = PackedQuantizationCompressor.decompress(stored, scheme)["weight"].double()
        kind = next((f"{part}." for part in ("shared_experts", "experts") if f".{part}." in module), "")
        kind += module.rpartition(".")[2]
        count, error, norm = sums[kind]
        sums[kind] = count + 1, error + float(((read - weight) ** 2).sum()), norm + float((weight**2).sum())
    assert len(sums) == 4 + 3 * 3  # attention; dense, routed and shared MLPs
    assert {kind: one.matrices for kind, one in packed.kinds.items()} == {kind: one[0] for kind, one in sums.items()}
    for kind, (_, error, norm) in sums.items():
        assert packed.kinds[kind].relative_error == pytest.approx((error / norm) ** 0.5, rel=1e-3), kind
    total = sum(error for _, error, _ in sums.values()) / sum(norm for *_, norm in sums.values())
    assert packed.relative_error == pytest.approx(total**0.5, rel=1e-3)
    written = models.tensors(tmp_path / "out")
    assert packed.checkpoint_before == sum(tensor.nbytes for tensor in source.values())
    assert packed.checkpoint_after == sum(tensor.nbytes for tensor in written.values())
    assert packed.matrices == sum(name.endswith("_packed") for name in written)
    assert packed.before == sum(tensor.nbytes for name, tensor in source.items() if f"{name}_packed" in written)
    assert packed.after == sum(tensor.nbytes for name, tensor in written.items() if "weight_" in name)


@pytest.mark.parametrize("name", sorted(models.configs()))
def test_packed_modules_are_those_of_the_file(int4, name):
    checkpoint = HfCheckpoint(int4(name, "qmax7"))
    assert packed_modules(checkpoint.specs, checkpoint.config) == {
        key.removesuffix(".weight_packed") for key in checkpoint.specs if key.endswith("_packed")
    }
    assert read_scheme(checkpoint.config).grid == "qmax7"


def test_a_missing_linear_and_an_entry_that_covers_nothing_are_refused(releases):
    source, missing = HfCheckpoint(releases("glm4_moe")), "model.layers.3.mlp.experts.7.down_proj.weight"
    refusal("q_proj", quantized, source, QuantScheme(32, "qmax7", ("q_proj",)), Request("here"))
    del source.specs[missing]
    refusal(f"here .* 1 .*{missing}", quantized, source, QuantScheme(32, "qmax7"), Request("here"))


def test_from_megatron_and_from_fused_experts_the_bytes_are_the_same(releases, converted, int4, tmp_path):
    convert(converted("glm4_moe"), tmp_path / "from-megatron", quantize=QuantScheme(32, "qmax7"))
    assert models.unequal(tmp_path / "from-megatron", int4("glm4_moe", "qmax7")) == []
    quantize(releases("qwen3_moe", fused=True), tmp_path / "fused", QuantScheme(32, "qmax7"))
    assert models.unequal(tmp_path / "fused", int4("qwen3_moe", "qmax7")) == []
