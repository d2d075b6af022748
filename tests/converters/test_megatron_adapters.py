"""LoRA adapters as Megatron-Bridge saves them in torch_dist become PEFT's; what is not read is refused in words."""

import json
import warnings

import pytest
import torch
from families import HF_CASES, case
from safetensors.torch import load_file
from support import models
from support.messages import text_with
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save

from ckptkit.app.api import convert, inspect
from ckptkit.core.errors import DamagedError, UnsupportedError, UsageError
from ckptkit.verify.run import verify

LAYER = "decoder.layers.3.self_attention"


def with_adapters(path, alone):
    """A pair of `linear_proj`, and one of a part of `linear_qkv`; `alone`: as a run saves adapters, with no model."""
    names = [f"{LAYER}.linear_proj.adapter.linear_in.weight", f"{LAYER}.linear_proj.adapter.linear_out.weight"]
    names += [f"{LAYER}.linear_qkv.adapter.adapter_q.linear_{one}.weight" for one in ("in", "out")]

    def change(metadata):
        key = f"{LAYER}.linear_proj.weight"
        entry = metadata.state_dict_metadata[key]
        index = next(index for index in metadata.storage_data if index.fqn == key)
        stored = metadata.storage_data[index]
        if alone:
            metadata.state_dict_metadata.clear()
            metadata.storage_data.clear()
        for name in names:
            metadata.state_dict_metadata[name] = entry
            metadata.storage_data[type(index)(name, index.offset, 0)] = stored

    models.edit_metadata(path / "release", change)
    return path


@pytest.mark.parametrize(("alone", "words"), [(True, "without a base"), (False, "in addition to")])
def test_pairs_of_one_part_are_named_with_the_way_to_peft(alone, words, converted, copy_of, tmp_path):
    path = with_adapters(copy_of(converted("qwen2-tied")), alone)
    with pytest.raises(UnsupportedError) as refused:
        convert(path, tmp_path / "out")
    pairs = f"{LAYER}.linear_proj.adapter.linear_in.weight, {LAYER}.linear_qkv.adapter.adapter_q.linear_in.weight"
    assert refused.value.message == text_with(f"2 Megatron LoRA {words} {pairs}")
    assert "AutoBridge.save_hf_adapter" in str(refused.value.hint)
    assert not (tmp_path / "out").exists()
    assert [one.count for one in verify(path).findings if one.code == "CK110"] == [4]
    assert any(".adapter.linear_in.weight" in name for name in inspect(path)["names"])


RANK, LAYERS = 4, 12
RUN = f"peft:\n  _target_: megatron.bridge.peft.lora.LoRA\n  dim: {RANK}\n  alpha: 16\nmodel:\n  num_layers: {LAYERS}\n"
PARTS = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "base"
    case.save("qwen3-untied", HF_CASES["qwen3-untied"], path, torch.float32)
    return path


def block_of(part):
    return "mlp" if part in ("gate", "up", "down") else "self_attn"


def factors(base):
    """A and B of every layer by HF names; what Megatron fuses shares A."""
    torch.manual_seed(7)
    weights, found = models.tensors(base), dict[str, Tensor]()
    for layer in range(LAYERS):
        shared = {}
        for part in PARTS:
            module = f"model.layers.{layer}.{block_of(part)}.{part}_proj"
            rows, columns = weights[f"{module}.weight"].shape
            fused = "qkv" if part in "qkv" else "gate_up" if part in ("gate", "up") else part
            found[f"{module}.lora_A"] = shared.setdefault(fused, torch.randn(RANK, columns))
            found[f"{module}.lora_B"] = torch.randn(rows, RANK)
    return found


def fused_qkv(query, key, value, config):
    """Megatron's rows: of each query group its heads, then its key, then its value."""
    size, groups = config["head_dim"], config["num_key_value_heads"]
    heads = config["num_attention_heads"] // groups
    rows = []
    for group in range(groups):
        rows += [query[group * heads * size : (group + 1) * heads * size]]
        rows += [key[group * size : (group + 1) * size], value[group * size : (group + 1) * size]]
    return torch.cat(rows)


def saved(root, base, change=lambda state: None, settings=RUN):
    """What Megatron-Bridge leaves of a run that trained adapters: one key for all layers, alike in all of them."""
    config, own = json.loads((base / "config.json").read_text()), factors(base)
    layers = {}
    for layer in range(LAYERS):
        a = {part: own[f"model.layers.{layer}.{block_of(part)}.{part}_proj.lora_A"] for part in PARTS}
        b = {part: own[f"model.layers.{layer}.{block_of(part)}.{part}_proj.lora_B"] for part in PARTS}
        for module, first, out in (
            ("self_attention.linear_qkv", a["q"], fused_qkv(b["q"], b["k"], b["v"], config)),
            ("self_attention.linear_proj", a["o"], b["o"]),
            ("mlp.linear_fc1", a["gate"], torch.cat([b["gate"], b["up"]])),
            ("mlp.linear_fc2", a["down"], b["down"]),
        ):
            layers.setdefault(f"decoder.layers.{module}.adapter.linear_in.weight", []).append(first)
            layers.setdefault(f"decoder.layers.{module}.adapter.linear_out.weight", []).append(out)
    state = {name: torch.stack(parts) for name, parts in layers.items()}
    change(state)
    weights = root / "iter_0000005"
    weights.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # by torch 2.10's own writer
        save(state, storage_writer=FileSystemWriter(weights), no_dist=True)
    (weights / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    torch.save({}, weights / "common.pt")
    (weights / "run_config.yaml").write_text(settings)
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return root


def test_adapters_of_a_run_become_pefts(base, tmp_path):
    done = convert(saved(tmp_path / "run", base), tmp_path / "adapter", hf=base)
    expected = {f"base_model.model.{name}.weight": one for name, one in factors(base).items()}
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert models.unequal(found, expected) == []
    assert (done.format, done.tensors) == ("adapter", len(expected))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 16, "LORA")
    assert config["target_modules"] == sorted(f"{part}_proj" for part in PARTS)
    assert verify(tmp_path / "adapter", source=base).findings == []


def cut_short(state):
    del state["decoder.layers.mlp.linear_fc2.adapter.linear_out.weight"]


def of_experts(state):
    state["decoder.layers.mlp.experts.linear_fc1.adapter.linear_in.weight"] = torch.ones(LAYERS, 4, 4)


@pytest.mark.parametrize(
    ("change", "settings", "error", "words"),
    [
        (cut_short, RUN, DamagedError, "has no linear_out"),
        (of_experts, RUN, UnsupportedError, "an adapter of decoder.layers.0.mlp.experts.linear_fc1"),
        (lambda state: None, RUN.replace("dim: 4", "dim: 8"), DamagedError, r"not \[8, 128\] and"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(change, settings, error, words, base, tmp_path):
    with pytest.raises(error, match=words):
        convert(saved(tmp_path / "run", base, change, settings), tmp_path / "adapter", hf=base)
    assert not (tmp_path / "adapter").exists()


def test_options_of_models_are_refused(base, tmp_path):
    with pytest.raises(UsageError, match="LoRA"):
        convert(saved(tmp_path / "run", base), tmp_path / "adapter", hf=base, dtype="bfloat16")
