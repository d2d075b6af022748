"""LoRA adapters that PEFT itself saves, merged: bit for bit what PEFT merges in float32."""

import json

import pytest
import torch
from families import HF_CASES, case
from safetensors.torch import save_file
from support import models
from support.adapters import KINDS, MLP, made
from support.nightly import daily

from ckptkit.app.api import convert, quantize
from ckptkit.converters.adapter import Adapter
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.formats.hf.adapter import AdapterFiles
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.verify.run import verify

pytestmark = [pytest.mark.usefixtures("peft_here"), pytest.mark.filterwarnings("ignore:(The following|Setting)")]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")

    def find(kind):
        if not (root / kind).exists():
            made(kind, root / kind)
        return root / kind

    return find


def opened(path, base="base"):
    return Adapter(AdapterFiles(path / "adapter"), HfCheckpoint(path / base), "adapter")


DAILY = ("dense", "dora", "experts one by one", "fused experts", "other names")


@pytest.mark.parametrize("kind", daily([kind for kind in KINDS if kind != "shared outer"], DAILY))
def test_merging_gives_what_peft_merges(kind, adapters):
    path = adapters(kind)
    adapter = opened(path)
    assert adapter.faults == []
    view, base = adapter.merged(), models.tensors(path / "base")
    found = {name: one for names in view.groups for name, one in view.read(names).items()}
    assert models.unequal(found, base | models.tensors(path / "merged")) == []
    paired = {spec.name for pair in adapter.pairs for spec in pair.targets.specs}
    assert set(models.unequal(found, base)) == paired | adapter.saved.keys()


def test_pairs_of_single_experts_are_merged_into_the_tensor_of_all(adapters, tmp_path):
    """As Megatron-Swift saves adapters for Qwen3.5, whose release has experts in one tensor a layer."""
    path = adapters("experts one by one")
    case.save("qwen3_moe", HF_CASES["qwen3_moe"], tmp_path / "fused", torch.float32, fused=True)
    merged = Adapter(AdapterFiles(path / "adapter"), HfCheckpoint(tmp_path / "fused"), "adapter")
    assert merged.faults == []
    expected, names = models.tensors(path / "merged"), [f"model.layers.{layer}.mlp.experts" for layer in range(12)]
    for block in names:
        gate, up, down = (torch.stack([expected[f"{block}.{one}.{part}.weight"] for one in range(12)]) for part in MLP)
        found = merged.merged().read([f"{block}.gate_up_proj", f"{block}.down_proj"])
        assert torch.equal(found[f"{block}.gate_up_proj"], torch.cat([gate, up], 1))
        assert torch.equal(found[f"{block}.down_proj"], down)
    assert verify(path / "adapter", source=tmp_path / "fused").status == "passed"


def test_a_merged_checkpoint_is_written_in_every_way(adapters, tmp_path):
    path = adapters("fused experts")
    adapter = path / "adapter"
    convert(path / "base", tmp_path / "hf", merge=adapter)
    assert (tmp_path / "hf" / "config.json").read_bytes() == (path / "base" / "config.json").read_bytes()
    convert(path / "base", tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back", merge=adapter)
    for found in ("hf", "back"):
        assert models.unequal(tmp_path / found, path / "merged") == []
    scheme = int4_scheme(group_size=32)
    convert(path / "base", tmp_path / "int4", merge=adapter, quantize=scheme)
    quantize(path / "merged", tmp_path / "two steps", scheme)
    assert models.unequal(tmp_path / "two steps", tmp_path / "int4") == []
    with pytest.raises(UsageError, match="--dtype.*--merge"):
        convert(path / "base", tmp_path / "other", merge=adapter, dtype="float32")
    with pytest.raises(UsageError, match="--merge"):
        convert(tmp_path / "megatron", tmp_path / "other", merge=adapter, dialect="slime")


@pytest.mark.parametrize(
    ("of_each", "target_modules"), [(1, ["experts"]), (12, ["gate_up_proj", "down_proj"]), (1, ["gate_proj", "w2"])]
)
def test_factors_with_an_axis_of_experts_fit_and_are_not_merged(of_each, target_modules, adapters, tmp_path):
    """One A for gate and up of all experts, one B for down, as SGLang reads them; PEFT merges to the base."""
    path, name = adapters("fused experts"), "model.layers.2.mlp.experts"
    inner, hidden = models.tensors(path / "base")[f"{name}.0.gate_proj.weight"].shape
    torch.manual_seed(2)
    sizes = {"gate_up_proj.lora_A": (of_each, 4, hidden), "gate_up_proj.lora_B": (12, 2 * inner, 4)}
    sizes |= {"down_proj.lora_A": (12, 4, inner), "down_proj.lora_B": (of_each, hidden, 4)}
    factors = {f"base_model.model.{name}.{key}.weight": torch.randn(*size) for key, size in sizes.items()}
    (tmp_path / "adapter").mkdir()
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": target_modules}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "base").symlink_to(path / "base")
    assert opened(tmp_path).faults == []
    with pytest.raises(UnsupportedError, match=rf"{name}\.down_proj\.lora_A\.weight"):
        convert(path / "base", tmp_path / "out", merge=tmp_path / "adapter")
    assert not (tmp_path / "out").exists()
