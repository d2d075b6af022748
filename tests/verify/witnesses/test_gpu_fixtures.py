"""The models that tests/gpu builds, compared without a GPU with the sizes and the rules that its tests assume."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from families import HF_CASES
from gpu import (
    test_online_gpu,
    test_sglang_formats_gpu,
    test_sglang_gpu,
    test_sglang_logits_gpu,
    test_vllm_logits_gpu,
    test_weight_sync_gpu,
)
from support import engine_models, sglang_families, vllm_formats

from ckptkit.converters.registry import FAMILIES
from ckptkit.core.specs import TensorSpec
from ckptkit.quant.ignore.tiles import unloadable
from ckptkit.quant.ignore.tree import class_tree

ENGINE = {name: config() for name, (_, config) in engine_models.MODELS.items()}
VLLM = {name: config() for name, (_, config) in vllm_formats.MODELS.items()}
FP8_BLOCK = 128
# Configs in INT4 that SGLang's kernels multiply with, and their groups.
PACKED = [
    *((config, 32) for config in (*test_sglang_gpu.CONFIGS.values(), test_sglang_gpu.DENSE)),
    *((test_online_gpu.CONFIGS[name], scheme.group_size) for name, scheme in test_online_gpu.SCHEMES.items()),
    *((ENGINE["moe"], group) for group in (32, 64, 128)),
    *((ENGINE[name], 32) for name in ("dense", "glm")),
]
IN_FP8 = [test_sglang_gpu.CONFIGS["qwen3_moe"], ENGINE["dense"], ENGINE["moe"]]
IN_FP8 += [VLLM[label.partition(",")[0]] for label in vllm_formats.CLEAN if label.endswith("FP8")]


def specs_of(config):
    """The matrices of attention, of a dense MLP and of an expert, under names of the last layer."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hasattr(config, "kv_lora_rank"):
        rows = config.qk_nope_head_dim + config.v_head_dim
        shapes = {"q_a": (config.q_lora_rank, hidden), "kv_b": (heads * rows, config.kv_lora_rank)}
        shapes |= {"q_b": (heads * config.qk_head_dim, config.q_lora_rank), "o": (hidden, heads * config.v_head_dim)}
    else:
        size = getattr(config, "head_dim", None) or hidden // heads
        shapes = dict.fromkeys("kv", (config.num_key_value_heads * size, hidden))
        shapes |= {"q": (heads * size, hidden), "o": (hidden, heads * size)}
    shapes = {f"self_attn.{name}": shape for name, shape in shapes.items()}
    blocks = {"mlp.": config.intermediate_size, "mlp.experts.0.": getattr(config, "moe_intermediate_size", None)}
    for block, inner in blocks.items():
        if inner is not None:
            shapes |= {f"{block}gate": (inner, hidden), f"{block}up": (inner, hidden), f"{block}down": (hidden, inner)}
    layer = f"model.layers.{config.num_hidden_layers - 1}."
    return [TensorSpec(f"{layer}{name}_proj.weight", shape, "bfloat16") for name, shape in shapes.items()]


def fault(config, group):
    content = config.to_dict()
    return unloadable(specs_of(config), class_tree(content), content, group, 1, 1)


def test_marlins_tiles_and_groups_divide_what_sglang_multiplies():
    for config, group in PACKED:
        assert fault(config, group) is None
    assert fault(ENGINE["narrow"], 32) is not None


def test_blocks_of_fp8_divide_every_side():
    odd = [spec for config in IN_FP8 for spec in specs_of(config) if any(side % FP8_BLOCK for side in spec.shape)]
    assert odd == []
    kept = test_sglang_gpu.FP8["modules_to_not_convert"]
    assert all(config.vocab_size % FP8_BLOCK == 0 or "lm_head" in kept for config in IN_FP8)


def test_groups_divide_the_features_of_vllms_models():
    labels = {*vllm_formats.CLEAN, *vllm_formats.MISORDERED, *vllm_formats.REFUSED, *test_vllm_logits_gpu.PACKED}
    groups = [(label, int(found[1])) for label in labels if (found := re.search(r"groups of (\d+)", label))]
    assert len(groups) > 20
    for label, group in groups:
        assert [spec for spec in specs_of(VLLM[label.partition(",")[0]]) if spec.shape[1] % group] == [], label


def test_sglang_refuses_rows_of_queries_keys_and_values_that_its_tile_does_not_divide():
    labels = [label for label in test_sglang_formats_gpu.IN_INT4 if label.startswith("groups") and "step3" not in label]
    refused = set()
    for label in labels:
        config = HF_CASES[label.partition(" ")[2]].config()
        text = getattr(config, "text_config", config)
        if not hasattr(text, "kv_lora_rank") and not hasattr(text, "linear_num_key_heads"):
            rows = sum(spec.shape[0] for spec in specs_of(text) if re.search(r"\.[qkv]_proj", spec.name))
            refused |= {label} if rows % 64 else set()
    assert refused == {*test_sglang_formats_gpu.REFUSED}


def test_layers_are_as_many_as_expected():
    for name, config in test_online_gpu.CONFIGS.items():
        layers = range(getattr(config, "first_k_dense_replace", 0), config.num_hidden_layers)
        assert test_online_gpu.PACKED[name] == layers
        assert test_sglang_gpu.CONFIGS[name].num_hidden_layers == layers.stop
        assert test_sglang_gpu.ROUTERS[name] == f"model.layers.{{{layers.start}..{layers.stop - 1}}}.mlp.gate.weight"
    assert ENGINE["moe"].num_hidden_layers == test_weight_sync_gpu.LAYERS


@pytest.mark.sglang
def test_sglang_has_a_class_of_every_family_that_it_is_given():
    """Read from the source of the installed release, since importing it takes long."""
    folder = Path(find_spec("sglang").origin).parent / "srt/models"
    entries = [file.read_text().rpartition("EntryClass = ")[2] for file in folder.glob("*.py")]
    classes = set(re.findall(r"\w+", " ".join(entries)))
    names = {*sglang_families.CLEAN, *test_sglang_logits_gpu.COMPUTED}
    types = {HF_CASES[name].config().model_type for name in names}
    without = {kind for kind in types if not classes & {*FAMILIES[kind].architectures}}
    # SGLang has no seed_oss; the thinker is loaded and as a part of the class of the complete model.
    assert without == {"seed_oss", "qwen3_omni_moe_thinker"}
