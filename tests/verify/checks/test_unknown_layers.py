"""Models that ckptkit does not know: layers that differ on purpose are not taken for layers that lost something."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import models
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from ckptkit.formats.hf.reader import INDEX
from verify.report import Report
from verify.run import verify

LAYERS, EACH = 12, 6  # every sixth layer has full attention


def save_gemma4(path: Path, *, keys_as_values: bool, sharing: int) -> Path:
    """A small Gemma 4 as transformers saves it: keys as values in full attention, layers without their own."""
    config = Gemma4TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        layer_types=["full_attention" if (layer + 1) % EACH == 0 else "sliding_attention" for layer in range(LAYERS)],
        attention_k_eq_v=keys_as_values,
        num_kv_shared_layers=sharing,
        hidden_size_per_layer_input=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path, max_shard_size="100KB")
    stated = json.loads((path / "config.json").read_text()) | {"model_type": "gemma_later"}  # Gemma 4 itself is known
    (path / "config.json").write_text(json.dumps(stated))
    return path


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the 31B: keys for values in the layers of full attention."""
    return save_gemma4(tmp_path_factory.mktemp("gemma4") / "release", keys_as_values=True, sharing=0)


def in_int4(path: Path, spared: Iterable[str] = ()) -> None:
    """Packs every projection, in groups of 16, but those of modules that begin so: only the names count here."""
    spared = tuple(spared)
    weight_map: dict[str, str] = {}
    for file in sorted(path.glob("*.safetensors")):
        content: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            module = name.removesuffix(".weight")
            if not module.endswith("_proj") or module.startswith(spared or ("\0",)):
                content[name] = tensor
                continue
            rows, columns = tensor.shape
            content[f"{module}.weight_packed"] = torch.randint(0, 2**31 - 1, (rows, columns // 8), dtype=torch.int32)
            content[f"{module}.weight_scale"] = torch.rand(rows, columns // 16).bfloat16()
            content[f"{module}.weight_shape"] = torch.tensor([rows, columns])
        save_file(content, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(content, file.name)
    total = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in models.tensors(path).values())
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def without(path: Path, names: Iterable[str]) -> None:
    """The directory less these tensors, in shard and index."""
    names = list(names)
    for name in names:
        models.edit(path, name, None)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in names}
    (path / INDEX).write_text(json.dumps(index))


def missing(report: Report) -> list[str | None]:
    return [finding.tensor for finding in report.findings if finding.code == "CK104"]


def test_keys_that_are_used_as_values_are_no_lost_values(gemma4: Path, copy_of: Callable[[Path], Path]) -> None:
    names = {
        f"model.layers.{layer}.self_attn.v_proj.weight" in models.tensors(gemma4)
        for layer in range(EACH - 1, LAYERS, EACH)
    }
    assert names == {False}
    assert missing(verify(gemma4)) == []
    path = copy_of(gemma4)
    in_int4(path)
    assert missing(verify(path)) == []


def test_one_layer_that_is_left_unquantized_lost_nothing(gemma4: Path, copy_of: Callable[[Path], Path]) -> None:
    path = copy_of(gemma4)
    in_int4(path, ["model.layers.3."])
    assert missing(verify(path)) == []


def test_layers_that_share_the_keys_of_an_earlier_one_lost_nothing(tmp_path: Path) -> None:
    """As the E2B that transformers saves: no k_proj, v_proj and k_norm in the last layers."""
    path = save_gemma4(tmp_path / "release", keys_as_values=False, sharing=4)
    stored = models.tensors(path)
    assert [f"model.layers.{layer}.self_attn.k_proj.weight" in stored for layer in (7, 8)] == [True, False]
    assert missing(verify(path)) == []


def test_values_that_one_layer_lost_are_named(gemma4: Path, copy_of: Callable[[Path], Path]) -> None:
    path = copy_of(gemma4)
    in_int4(path)
    without(path, [f"model.layers.7.mlp.up_proj.weight_{part}" for part in ("packed", "scale", "shape")])
    assert missing(verify(path)) == ["layers.7.mlp.up_proj.weight"]
