"""Which stored weights are Linear layers: against compressed-tensors, on transformers' own classes of test models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from families import HF_CASES
from families.table import config_of
from safetensors.torch import load_file
from support.published import quantization
from torch import nn

from ckptkit.core.specs import TensorSpec
from converters.registry import FAMILIES
from quant.selection.matrices import Matrix, matrices_named, matrices_of
from quant.selection.reading import read_all
from quant.selection.tree import class_tree

CONFIGS = {name: config_of(case) for name, case in HF_CASES.items()}
# Vision and audio towers, and layers of other kinds than attention. Not where the release names tensors otherwise.
_OTHER_LAYERS = ("linear_conv_kernel_dim", "mamba_num_heads", "mamba_n_heads")
NAMES = [
    name
    for name, config in CONFIGS.items()
    if (release := FAMILIES[config["model_type"]].release) is not None
    and not release.own_tree
    and (release.nested or any(key in config for key in _OTHER_LAYERS))
    and config["model_type"] != "kimi_k25"  # transformers has no class for the whole model
]


def marked(name: str, path: Path) -> dict[str, tuple[TensorSpec, bool]]:
    """Each tensor that transformers saves, and whether compressed-tensors quantizes the module that it is of."""
    case = HF_CASES[name]
    scheme = {key: value for key, value in quantization([]).items() if key != "quantization_status"}
    with torch.device("meta"):
        classes = case.auto.from_config(case.config(), dtype=torch.float32)
    apply_quantization_config(classes, QuantizationConfig.model_validate(scheme))
    taken = {key for key, module in classes.named_modules() if getattr(module, "quantization_scheme", None) is not None}
    assert taken
    model = case.auto.from_config(case.config(), dtype=torch.float32)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.zero_()
    for key, module in model.named_modules():
        if key in taken:
            assert isinstance(module, nn.Linear)
            module.weight.data.fill_(1)
    model.save_pretrained(path, save_original_format=True)
    found = {}
    for file in path.glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            stored = case.renamed.get(key, key)
            found[stored] = (TensorSpec(stored, tuple(tensor.shape), "bfloat16"), bool(tensor.float().min() == 1))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_linear_layers_are_those_of_compressed_tensors(tmp_path: Path, name: str) -> None:
    """By shapes (`verify`, `quantize`) and by names alone (`lint`); a tied head shares the embedding's values."""
    stored, tree = marked(name, tmp_path), class_tree(CONFIGS[name])
    specs = {key: spec for key, (spec, _) in stored.items()}
    for matrices in (matrices_of(specs, tree, CONFIGS[name]), matrices_named(specs, tree, CONFIGS[name])):
        looked_at = [one for one in matrices if not one.expert and not one.module.endswith(("lm_head", "embed_tokens"))]
        differ = {one.tensor for one in looked_at if one.linear is not stored[one.tensor][1]}
        assert differ == set()
        judged = {one.tensor for one in matrices}
        assert {key for key, (_, is_linear) in stored.items() if is_linear and key not in judged} == set()


def test_models_with_towers_and_other_layers_are_compared() -> None:
    assert {CONFIGS[name]["model_type"] for name in NAMES} >= {
        *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "mistral3", "gemma3", "gemma4"),
        *("gemma4_unified", "qwen3_next", "nemotron_h", "granitemoehybrid"),
    }


def matrix(name: str, module: str, shape: tuple[int, ...]) -> Matrix:
    spec = TensorSpec(f"{module}.weight", shape, "bfloat16")
    (found,) = matrices_of({spec.name: spec}, class_tree(CONFIGS[name]), CONFIGS[name])
    return found


@pytest.mark.parametrize(
    ("name", "module", "shape", "linear"),
    [
        ("qwen3_vl-tied", "model.visual.patch_embed.proj", (32, 3, 2, 4, 4), False),
        ("qwen3_vl-tied", "model.visual.pos_embed", (16, 32), False),
        ("qwen3_vl-tied", "model.visual.blocks.0.attn.proj", (32, 32), True),
        ("qwen3_vl-tied", "model.visual.merger.linear_fc1", (64, 64), True),
        ("qwen3_5", "model.language_model.layers.0.linear_attn.conv1d", (64, 1, 4), False),
        ("qwen3_5", "model.language_model.layers.0.linear_attn.in_proj_z", (64, 64), True),
        ("qwen2_5_vl", "visual.patch_embed.proj", (32, 3, 2, 4, 4), False),
        ("qwen2_5_vl", "visual.merger.mlp.0", (64, 64), True),
        ("mistral3", "vision_tower.patch_conv", (32, 3, 4, 4), False),
        ("kimi_k25", "vision_tower.patch_embed.proj", (32, 3, 14, 14), False),
        ("kimi_k25", "vision_tower.patch_embed.pos_emb", (4, 4, 32), False),
        ("kimi_k25", "vision_tower.encoder.blocks.0.wqkv", (96, 32), True),
        ("kimi_k25", "mm_projector.proj.0", (64, 64), True),
        ("gemma4-small", "model.audio_tower.layers.0.lconv1d.depthwise_conv1d", (32, 1, 5), False),
        ("gemma4-small", "model.audio_tower.something_else", (32, 1, 5), False),  # no Linear has three axes
        ("step3p7", "vision_model.conv1", (24, 3, 14, 14), False),
        ("step3p7", "vision_model.vit_downsampler1", (48, 24, 3, 3), False),
        ("minimax_m3_vl", "vision_tower.vision_model.embeddings.patch_embedding", (64, 3, 2, 4, 4), False),
        ("minimax_m3_vl", "vision_tower.embeddings.proj", (64, 3, 2, 4, 4), False),
    ],
)
def test_modules_of_towers_one_by_one(name: str, module: str, shape: tuple[int, ...], linear: bool) -> None:
    config = CONFIGS[name]
    found = matrix(name, module, shape)
    assert found.linear is linear
    (by_name,) = matrices_named([f"{module}.weight"], class_tree(config), config)
    assert by_name.linear is (linear or module.endswith("something_else"))
    answers = {reader: one.answers[0] for reader, one in read_all(READERS, [found], [], config).items()}
    assert linear is (answers["compressed-tensors"] == "packs")
    if not linear:
        assert set(answers.values()) == {"keeps"}


READERS = ("compressed-tensors", "transformers", "vLLM 0.26", "vLLM 0.33", "SGLang 0.5.16", "SGLang 0.5.23")


@pytest.mark.parametrize("name", ["patch_ln1", "ln_q", "ln", "norm2", "final_layernorm", "post_ln_2"])
def test_norms_are_no_matrices_by_name(name: str) -> None:
    config: dict[str, Any] = CONFIGS["gemma4_unified"]
    assert matrices_named([f"model.vision_embedder.{name}.weight"], class_tree(config), config) == []
    assert len(matrices_named([f"model.vision_embedder.{name[:1]}in_proj.weight"], class_tree(config), config)) == 1


def test_a_module_of_a_tower_that_config_json_does_not_have_is_judged_by_its_name() -> None:
    config = {key: value for key, value in CONFIGS["qwen3_5"].items() if key != "vision_config"}
    tree, root = class_tree(config), "model.visual."
    names = ["patch_embed.proj", "pos_embed", "blocks.7.attn.qkv", "merger.linear_fc1"]
    found = matrices_named([f"{root}{name}.weight" for name in names], tree, config)
    assert [one.linear for one in found] == [False, False, True, True]
