"""What trainers' own online quantizers pack, tensor by tensor, against `ckptkit.quant.ignore.readers`.

`SLIME`, `MILES` and `VERL` name checkouts. Only the quantizers' files run, with a stand-in for the kernels.
"""

import ast
from types import SimpleNamespace

import pytest
import torch

from ckptkit.quant.ignore import matching, readers

_PROCESSORS = "backends/megatron_utils/megatron_to_hf/processors"
_ROOT = "module.module.decoder.layers.3"
_L = "model.layers.3"
# What trains under a Megatron name, and what the exporters call it.
EXPORTED = {
    f"{_ROOT}.self_attention.linear_qkv.weight": tuple(f"{_L}.self_attn.{one}_proj.weight" for one in "qkv"),
    f"{_ROOT}.self_attention.linear_proj.weight": (f"{_L}.self_attn.o_proj.weight",),
    f"{_ROOT}.self_attention.linear_q_proj.weight": (f"{_L}.self_attn.q_proj.weight",),
    f"{_ROOT}.self_attention.linear_q_down_proj.weight": (f"{_L}.self_attn.q_a_proj.weight",),
    f"{_ROOT}.self_attention.linear_q_up_proj.weight": (f"{_L}.self_attn.q_b_proj.weight",),
    f"{_ROOT}.self_attention.linear_kv_down_proj.weight": (f"{_L}.self_attn.kv_a_proj_with_mqa.weight",),
    f"{_ROOT}.self_attention.linear_kv_up_proj.weight": (f"{_L}.self_attn.kv_b_proj.weight",),
    f"{_ROOT}.self_attention.wq_b.weight": (f"{_L}.self_attn.indexer.wq_b.weight",),
    f"{_ROOT}.self_attention.wk.weight": (f"{_L}.self_attn.indexer.wk.weight",),
    f"{_ROOT}.self_attention.weights_proj.weight": (f"{_L}.self_attn.indexer.weights_proj.weight",),
    f"{_ROOT}.self_attention.q_layernorm.weight": (f"{_L}.self_attn.q_norm.weight",),
    f"{_ROOT}.self_attention.linear_qkv.layer_norm_weight": (f"{_L}.input_layernorm.weight",),
    **{
        f"{_ROOT}.self_attention.linear_attn.{one}.weight": (f"{_L}.linear_attn.{one}.weight",)
        for one in ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "in_proj_ba", "in_proj_a", "out_proj", "conv1d")
    },
    f"{_ROOT}.mlp.linear_fc1.weight": (f"{_L}.mlp.gate_proj.weight", f"{_L}.mlp.up_proj.weight"),
    f"{_ROOT}.mlp.linear_fc2.weight": (f"{_L}.mlp.down_proj.weight",),
    f"{_ROOT}.mlp.router.weight": (f"{_L}.mlp.gate.weight",),
    f"{_ROOT}.mlp.experts.linear_fc1.weight7": tuple(f"{_L}.mlp.experts.7.{one}_proj.weight" for one in ("gate", "up")),
    f"{_ROOT}.mlp.experts.linear_fc2.weight7": (f"{_L}.mlp.experts.7.down_proj.weight",),
    f"{_ROOT}.mlp.shared_experts.linear_fc1.weight": tuple(
        f"{_L}.mlp.shared_experts.{one}_proj.weight" for one in ("gate", "up")
    ),
    f"{_ROOT}.mlp.shared_experts.linear_fc2.weight": (f"{_L}.mlp.shared_experts.down_proj.weight",),
    f"{_ROOT}.mlp.shared_experts.gate_weight": (f"{_L}.mlp.shared_expert_gate.weight",),
    "module.module.mtp.layers.0.eh_proj.weight": ("model.layers.4.eh_proj.weight",),
    "module.module.mtp.layers.0.transformer_layer.self_attention.linear_proj.weight": (
        "model.layers.4.self_attn.o_proj.weight",
    ),
    "module.module.embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "module.module.output_layer.weight": ("lm_head.weight",),
}


EVERY = [name for several in EXPORTED.values() for name in several]


def functions_of(path, **stand_ins):
    """The functions and classes of a file, without what it imports of its own tool."""
    tree = ast.parse(path.read_text())
    own = ("slime", "miles", "verl")
    kept = [
        node
        for node in tree.body
        if not (isinstance(node, ast.ImportFrom) and (node.level or str(node.module).startswith(own)))
    ]
    names = {"__file__": str(path), "__name__": path.stem, **stand_ins}
    exec(compile(ast.Module(kept, []), str(path), "exec"), names)  # noqa: S102
    names.update(stand_ins)
    return names


def packed(name, tensor, *_):
    """A stand-in for `_quantize_param`: the weight and something beside it."""
    return [(name, tensor), (f"{name}_scale_inv", tensor)]


def chosen(quantize, content, args):
    found = {}
    for megatron, names in EXPORTED.items():
        back = [name for name, _ in quantize(args, megatron, [(one, torch.zeros(16, 16)) for one in names], content)]
        found |= {name: any(one != name and one.startswith(name) for one in back) for name in names}
    return found


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_slime_packs_by_its_list(checkout):
    file = checkout("SLIME") / "slime" / _PROCESSORS / "quantizer_fp8.py"
    own = functions_of(file, _quantize_param=packed)["quantize_params_fp8"]
    found = chosen(own, FP8, SimpleNamespace())
    assert found == {name: readers.slime_fp8(name, {}) for name in found}


@pytest.mark.parametrize("interleaved", [False, True])
def test_miles_packs_by_its_lists(checkout, interleaved):
    folder = checkout("MILES") / "miles" / _PROCESSORS
    args = SimpleNamespace(indexer_rope_interleave=interleaved)
    config = {"indexer_rope_interleave": interleaved}
    own = functions_of(folder / "quantizer_fp8.py", _quantize_param=lambda args, *given: packed(*given))[
        "quantize_params_fp8"
    ]
    found = chosen(own, FP8, args)
    assert found == {name: readers.miles_fp8(name, config) for name in found}
    own = functions_of(folder / "quantizer_mxfp8.py", _quantize_param=packed)["quantize_params_mxfp8"]
    found = chosen(own, {"quant_method": "mxfp8"}, args)
    assert found == {name: readers.miles_mxfp8(name, config) for name in found}


def test_miles_packs_nvfp4_less_its_list(checkout):
    file = checkout("MILES") / "miles" / _PROCESSORS / "quantizer_nvfp4.py"
    zeros = torch.zeros(1)
    names = functions_of(
        file,
        NVFP4_GROUP_SIZE=16,
        quantize_nvfp4=lambda weight: (weight, zeros, zeros),
        nvfp4_quantize_1d_pair=lambda gate, up: ((gate, zeros, zeros), (up, zeros, zeros)),
    )
    content = {"quant_algo": "NVFP4", "ignore": [], "quant_method": "modelopt"}
    back = {
        name: any(one == name.replace(".weight", ".weight_scale") for one, _ in made)
        for megatron, several in EXPORTED.items()
        for made in [
            names["quantize_params_nvfp4"](None, megatron, [(one, torch.zeros(16, 16)) for one in several], content)
        ]
        for name in several
    }
    assert back == {name: readers.miles_nvfp4(name, {}) for name in back}
    entries = [
        f"{_L}.mlp.experts",
        f"{_L}.",
        r"re:.*\.experts\.7\..*",
        f"{_L}.mlp.experts.7.down_proj.weight",
        "experts",
    ]
    assert [
        (name, entry)
        for name in EVERY
        for entry in entries
        if names["_is_ignored"](name, [entry]) != matching.parameter_prefix(entry)(name)
    ] == []


def test_verl_packs_by_parts_of_names(checkout):
    root = checkout("VERL") / "verl" / "utils"
    helper = functions_of(root / "fp8_utils.py")["FP8QuantizerHelper"](FP8)
    every = [*EVERY, f"{_L}.block_sparse_moe.experts.7.w1.weight", f"{_L}.self_attn.q_proj.bias"]
    assert [name for name in every if helper.should_quantize_param(name) != readers.verl_fp8(name, {})] == []
    matches = functions_of(root / "sglang" / "sglang_fp8_utils.py", FP8QuantizerHelper=object)["_matches_ignored_layer"]
    entries = [
        "mlp.gate",
        "self_attn",
        "model.layers.3.",
        r"re:.*linear_attn.*",
        "LM_HEAD",
        "layers.3.mlp.experts",
        "proj",
    ]
    assert [
        (name, entry) for name in every for entry in entries if matches(name, entry) != matching.verl_path(entry)(name)
    ] == []
