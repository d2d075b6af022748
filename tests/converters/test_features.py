"""Each feature in which models differ puts the right HF rows into Megatron's tensors. Expectations are written by hand.

Sizes: 10 heads of 32 in 2 query groups, so 5 heads a group; 12 experts; decoder layers 0 to 11, MTP layer 12.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save
from support import models
from torch import Tensor

from ckptkit.app.api import convert
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from converters.open import open_checkpoint
from converters.planner import expected_hf, rules_of, to_megatron

Tensors = Mapping[str, Tensor]
H, M = "model.layers.4.", "decoder.layers.4."


def both(tmp_path: Path, name: str, *, fused: bool = False) -> tuple[Tensors, Tensors]:
    """A test model's HF tensors, as safetensors reads them, and its Megatron tensors in torch_dist."""
    save(name, CASES[name], tmp_path / "hf", torch.bfloat16, fused=fused)
    convert(tmp_path / "hf", tmp_path / "megatron")
    checkpoint = open_checkpoint(tmp_path / "megatron")
    return models.tensors(tmp_path / "hf"), checkpoint.read(list(checkpoint.specs))


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensors, Tensors]:
    return both(tmp_path_factory.mktemp("glm"), "glm4_moe-mtp")


def by_group(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Five heads, their key, their value; and again."""
    return torch.cat([query[:160], key[:32], value[:32], query[160:], key[32:], value[32:]])


def test_attention_biases(glm: tuple[Tensors, Tensors]) -> None:
    hf, megatron = glm
    expected = by_group(*(hf[H + f"self_attn.{part}_proj.bias"] for part in "qkv"))
    assert torch.equal(megatron[M + "self_attention.linear_qkv.bias"], expected)


def test_query_and_key_norms(glm: tuple[Tensors, Tensors]) -> None:
    hf, megatron = glm
    assert torch.equal(megatron[M + "self_attention.q_layernorm.weight"], hf[H + "self_attn.q_norm.weight"])
    assert torch.equal(megatron[M + "self_attention.k_layernorm.weight"], hf[H + "self_attn.k_norm.weight"])


def test_shared_experts(glm: tuple[Tensors, Tensors]) -> None:
    hf, megatron = glm
    gate, up, down = (hf[H + f"mlp.shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down"))
    assert torch.equal(megatron[M + "mlp.shared_experts.linear_fc1.weight"], torch.cat([gate, up]))
    assert torch.equal(megatron[M + "mlp.shared_experts.linear_fc2.weight"], down)


def test_fp32_router_bias(glm: tuple[Tensors, Tensors]) -> None:
    hf, megatron = glm
    bias = megatron[M + "mlp.router.expert_bias"]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, hf[H + "mlp.gate.e_score_correction_bias"])
    assert not torch.equal(bias.bfloat16().float(), bias)


def test_multi_token_prediction(glm: tuple[Tensors, Tensors]) -> None:
    hf, megatron = glm
    layer, at = "model.layers.12.", "mtp.layers.0."
    for name in ("enorm", "hnorm", "eh_proj"):
        assert torch.equal(megatron[at + f"{name}.weight"], hf[layer + f"{name}.weight"])
    assert torch.equal(megatron[at + "final_layernorm.weight"], hf[layer + "shared_head.norm.weight"])
    gate, up = (hf[layer + f"mlp.experts.7.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(
        megatron[at + "transformer_layer.mlp.experts.experts.7.linear_fc1.weight"], torch.cat([gate, up])
    )
    assert not [name for name in megatron if name.startswith("decoder.layers.12.")]


def test_tied_embeddings(tmp_path: Path) -> None:
    hf, megatron = both(tmp_path, "qwen2-tied")
    assert torch.equal(megatron["embedding.word_embeddings.weight"], hf["model.embed_tokens.weight"])
    assert "lm_head.weight" not in hf
    assert "output_layer.weight" not in megatron


def test_untied_embeddings(tmp_path: Path) -> None:
    hf, megatron = both(tmp_path, "qwen2-untied")
    assert torch.equal(megatron["output_layer.weight"], hf["lm_head.weight"])


def test_fused_experts(tmp_path: Path) -> None:
    hf, megatron = both(tmp_path, "qwen3_moe", fused=True)
    # [experts, gate rows above up rows, hidden], which is Megatron's order too.
    assert torch.equal(megatron[M + "mlp.experts.experts.11.linear_fc1.weight"], hf[H + "mlp.experts.gate_up_proj"][11])
    assert torch.equal(megatron[M + "mlp.experts.experts.11.linear_fc2.weight"], hf[H + "mlp.experts.down_proj"][11])


class Promised:
    """A checkpoint of which only config, names and shapes are looked at."""

    groups = ()

    def __init__(self, config: Mapping[str, object], specs: Mapping[str, TensorSpec]) -> None:
        self.config, self.specs = config, specs

    def read(self, names: object) -> dict[str, Tensor]:
        raise AssertionError("nothing may be read before the whole plan is sound")


@pytest.mark.parametrize("name", list(CASES))
def test_one_missing_and_one_unknown_tensor_are_refused_by_name(name: str) -> None:
    """For every rule of every family, before a byte is read."""
    config = CASES[name].edit(CASES[name].config().to_dict())
    specs = {key: TensorSpec(key, shape, "bfloat16") for key, shape in expected_hf(config).items()}
    firsts = {id(rule.mapping): next(iter(rule.hf)) for rule in reversed(list(rules_of(config)))}
    assert len(firsts) >= 8
    for first in firsts.values():
        with pytest.raises(CkptkitError, match="lacks 1 tensor.* that its config promises") as error:
            to_megatron(Promised(config, {key: spec for key, spec in specs.items() if key != first}), "the release")
        assert first in str(error.value)
    extra = next(key for key in specs if "layers.3." in key).replace("layers.3.", "layers.3.surprise.")
    with pytest.raises(CkptkitError, match="holds 1 tensor.* that no rule of this model family knows") as error:
        to_megatron(Promised(config, specs | {extra: TensorSpec(extra, (2, 2), "bfloat16")}), "the release")
    assert extra in str(error.value)
