"""Which tensors trainers pack on their way to an engine: the known cases, by hand from each tool's code."""

from __future__ import annotations

import pytest

from quant.lists.table import miles_fp8, miles_mxfp8, miles_nvfp4, slime_fp8, verl_fp8

L = "model.layers.3"
# A parameter, and whether it is packed by: slime FP8, miles FP8, miles MXFP8, miles NVFP4, verl FP8.
TABLE = [
    (f"{L}.self_attn.q_proj.weight", "11101"),
    (f"{L}.self_attn.o_proj.weight", "11101"),
    (f"{L}.mlp.gate_up_proj.weight", "11101"),
    (f"{L}.mlp.down_proj.weight", "11101"),
    (f"{L}.mlp.experts.17.gate_proj.weight", "11111"),
    (f"{L}.block_sparse_moe.experts.17.w1.weight", "11110"),
    (f"{L}.mlp.shared_experts.up_proj.weight", "11111"),
    (f"{L}.mlp.shared_expert.up_proj.weight", "11111"),
    # Routers and gates: verl's "mlp" takes in the gate of the shared expert.
    (f"{L}.mlp.gate.weight", "00000"),
    (f"{L}.block_sparse_moe.gate.weight", "00000"),
    (f"{L}.mlp.shared_expert_gate.weight", "00001"),
    # Latent attention: none of verl's parts is in these names, but of the output projection.
    (f"{L}.self_attn.q_a_proj.weight", "11100"),
    (f"{L}.self_attn.q_b_proj.weight", "11100"),
    (f"{L}.self_attn.kv_a_proj_with_mqa.weight", "11100"),
    (f"{L}.self_attn.kv_b_proj.weight", "11100"),
    # The indexer of sparse attention.
    (f"{L}.self_attn.indexer.wq_b.weight", "11100"),
    (f"{L}.self_attn.indexer.wk.weight", "11100"),
    (f"{L}.self_attn.indexer.weights_proj.weight", "00000"),
    # Linear attention: MXFP8 leaves all of it, FP8 what Qwen3-Next has fused.
    (f"{L}.linear_attn.in_proj_qkv.weight", "11000"),
    (f"{L}.linear_attn.in_proj_z.weight", "11000"),
    (f"{L}.linear_attn.out_proj.weight", "11000"),
    (f"{L}.linear_attn.in_proj_qkvz.weight", "00000"),
    (f"{L}.linear_attn.in_proj_ba.weight", "00000"),
    (f"{L}.linear_attn.in_proj_a.weight", "00000"),
    (f"{L}.linear_attn.conv1d.weight", "00000"),
    # Multi-token prediction: its layer as any other, what joins its inputs by nobody.
    (f"{L}.eh_proj.weight", "00000"),
    ("mtp.fc.weight", "00000"),
    ("mtp.layers.0.self_attn.q_proj.weight", "11101"),
    ("model.embed_tokens.weight", "00000"),
    ("lm_head.weight", "00000"),
    (f"{L}.input_layernorm.weight", "00000"),
    (f"{L}.self_attn.q_norm.weight", "00000"),
]
RULES = (slime_fp8, miles_fp8, miles_mxfp8, miles_nvfp4, verl_fp8)


@pytest.mark.parametrize(("parameter", "packed"), TABLE, ids=[name for name, _ in TABLE])
def test_each_trainer_packs_what_its_code_names(parameter: str, packed: str) -> None:
    assert "".join(str(int(rule(parameter, {}))) for rule in RULES) == packed


def test_miles_leaves_the_key_of_an_interleaved_indexer_in_bf16() -> None:
    name = f"{L}.self_attn.indexer.wk.weight"
    config = {"indexer_rope_interleave": True}
    assert [rule(name, config) for rule in RULES] == [True, False, False, False, False]
