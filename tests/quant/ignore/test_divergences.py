"""How readers of one config differ, each case on a concrete entry: all readers' verdicts and ckptkit's output.

The letters are those of `docs/lint.md`. Verdicts are written by hand: P packs, K keeps, R refuses the layer.
"""

import pytest
from support.published import KIMI, QWEN

from ckptkit.quant.ignore.names import matrices_named
from ckptkit.quant.ignore.readers import INT4_READERS
from ckptkit.quant.ignore.reading import read_all
from ckptkit.quant.ignore.select import default_ignore
from ckptkit.quant.ignore.tree import class_tree

QWEN2 = {key: value for key, value in QWEN.items() if key not in ("num_experts", "moe_intermediate_size")} | {
    "model_type": "qwen2",
    "num_hidden_layers": 12,
}
LINEAR_ATTENTION = {f"linear_{kind}_head_dim": 16 for kind in ("key", "value")}
LINEAR_ATTENTION |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
NEXT = {**QWEN, **LINEAR_ATTENTION, "model_type": "qwen3_next", "shared_expert_intermediate_size": 64}
VISION = {"model_type": "qwen3_vl_moe", "text_config": {**QWEN, "model_type": "qwen3_vl_moe_text"}}
MODELS = {"qwen3_moe": QWEN, "qwen2": QWEN2, "kimi": KIMI, "next": NEXT, "vl": VISION}

L3 = "model.layers.3"
PLAIN = ["lm_head", "model.embed_tokens"]
SHARDS = [f"{L3}.self_attn.{name}_proj" for name in "qkv"]
LATENT = [f"{L3}.self_attn.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa")]
# Model, list, module, and the verdicts of compressed-tensors, transformers, vLLM 0.26 and 0.33, SGLang 0.5.16 and
# 0.5.23, and slime.
VERDICTS = [
    # D1, D3: the router is a Linear to vLLM and slime alone, and only slime sees `.weight` behind the name.
    ("qwen3_moe", [*PLAIN, "re:.*mlp.gate$"], f"{L3}.mlp.gate", "KKKKKKP"),
    ("qwen3_moe", [*PLAIN, r"re:.*mlp\.gate\..*"], f"{L3}.mlp.gate", "KKPPKKK"),
    ("qwen3_moe", [*PLAIN, r"re:.*\.mlp\.gate(\.weight)?$"], f"{L3}.mlp.gate", "KKKKKKK"),
    # D2
    ("qwen2", [*PLAIN, "model.layers.1"], "model.layers.1.mlp.down_proj", "PPPPKPK"),
    ("qwen2", [*PLAIN, "model.layers.1"], "model.layers.11.mlp.down_proj", "PPPPKPK"),
    ("qwen2", [*PLAIN, "self_attn.o_proj"], f"{L3}.self_attn.o_proj", "PPPPKKP"),
    ("qwen2", [*PLAIN, f"{L3}.self_attn.o_proj"], f"{L3}.self_attn.o_proj", "KKKKKKK"),
    ("qwen2", [*PLAIN, "Linear"], f"{L3}.self_attn.o_proj", "KKPPPPP"),
    # D4: only some of SGLang's classes say what a fused layer is made of; vLLM's all do.
    ("qwen2", ["lm_head", *SHARDS], SHARDS[0], "KKKKPPK"),
    ("qwen3_moe", ["lm_head", *SHARDS], SHARDS[0], "KKKKKKK"),
    ("qwen3_moe", ["lm_head", SHARDS[0]], SHARDS[0], "KKRRRRK"),
    ("qwen2", ["lm_head", SHARDS[0]], SHARDS[0], "KKRRPPK"),
    ("qwen2", ["lm_head", r"re:.*\.self_attn\.(q|k|v|qkv)_proj(\.weight)?$"], SHARDS[0], "KKKKKKK"),
    ("kimi", ["lm_head", *LATENT], LATENT[0], "KKKKKKK"),
    # D5: expert 0 answers for all.
    ("qwen3_moe", [*default_ignore(QWEN), r"re:.*\.experts\.(5|6)\..*"], f"{L3}.mlp.experts.5.up_proj", "KKPPPPK"),
    ("qwen3_moe", [*default_ignore(QWEN), r"re:.*\.experts\.(5|6)\..*"], f"{L3}.mlp.experts.0.up_proj", "PPPPPPP"),
    ("qwen3_moe", [*default_ignore(QWEN), r"re:.*\.experts\.0\..*"], f"{L3}.mlp.experts.5.up_proj", "PPKKKKP"),
    # D9: a convolution has three axes.
    ("next", ["lm_head"], "model.layers.0.linear_attn.conv1d", "KKKKKKP"),
    # D11: SGLang turns the beginning of a plain entry into that of another class than the one that it builds.
    *(
        ("vl", [*default_ignore(VISION), entry], "model.language_model.layers.3.self_attn.o_proj", expected)
        for entry, expected in (
            ("model.language_model.layers.3.self_attn.o_proj", "KKKKPPK"),
            ("model.layers.3.self_attn.o_proj", "PPPPPPP"),
            (r"re:model\.layers\..*", "PPPPPPP"),
            (r"re:.*\.self_attn\.o_proj(\.weight)?$", "KKKKKKK"),
        )
    ),
    # D12: vLLM 0.33 lets an expression that matches the fused name decide for all parts, as SGLang does where its class
    # names none; vLLM 0.26 asks each part.
    ("qwen2", [*PLAIN, "re:.*v_proj$"], f"{L3}.self_attn.q_proj", "PPRKKKP"),
    ("qwen2", [*PLAIN, "re:.*v_proj$"], f"{L3}.self_attn.v_proj", "KKRKKKP"),
    ("qwen2", [*PLAIN, "re:.*qkv_proj"], f"{L3}.self_attn.q_proj", "PPPKKKP"),
    ("qwen2", [*PLAIN, "re:.*gate"], f"{L3}.mlp.up_proj", "PPRKKKP"),
]


@pytest.mark.parametrize("model", MODELS)
def test_each_reader_has_its_verdict(model):
    config = MODELS[model]
    tree = class_tree(config)
    matrices = matrices_named([f"{name}.weight" for name in [*tree.others, *sorted(tree.linears)]], tree, config)
    places = {matrix.module: place for place, matrix in enumerate(matrices)}
    for _, ignore, module, expected in (row for row in VERDICTS if row[0] == model):
        read = read_all(INT4_READERS, matrices, ignore, config).values()
        found = [reading.answers[places[module]] for reading in read]
        assert found == [{"P": "packs", "K": "keeps", "R": "refuses"}[letter] for letter in expected], ignore[-1]
    assert (r"re:.*\.linear_attn\..*" in default_ignore(config)) is (model == "next")
