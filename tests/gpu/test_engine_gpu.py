"""`verify --update --release-resume --logits` with real engines on a GPU: sound models pass, broken ones do not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from families import CASES
from families.case import save
from installed import release
from sglang_runs import int4_config, online_int4, written
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from ckptkit.app.api import quantize
from quant.formats.scheme import QuantScheme
from verify.report import Report
from verify.run import verify

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.sglang,
    pytest.mark.timeout(1500),
]

ALL = frozenset({"engine", "update", "release-resume", "logits"})
# Marlin needs out features % 64 == 0 and in features % 128 == 0.
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 4608,
    "eos_token_id": 3,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
MODELS: Mapping[str, tuple[str, Callable[[], PretrainedConfig]]] = {
    "dense": ("qwen3-untied", partial(Qwen3Config, **SIZES, head_dim=64)),
    "moe": ("qwen3_moe", partial(Qwen3MoeConfig, **SIZES, **EXPERTS, head_dim=64, num_experts=16)),
    "mla": (
        "deepseek_v3",
        partial(
            DeepseekV3Config,
            **SIZES | {"num_key_value_heads": 4},
            **EXPERTS | {"num_experts_per_tok": 4},
            n_routed_experts=16,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            q_lora_rank=96,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
    ),
    "glm": (
        "glm4_moe-mtp",
        partial(
            Glm4MoeConfig,
            **SIZES,
            **EXPERTS,
            head_dim=64,
            n_routed_experts=16,
            n_shared_experts=1,
            first_k_dense_replace=1,
        ),
    ),
    "window": ("mistral", partial(MistralConfig, **SIZES, head_dim=64, sliding_window=5)),
}
ONLINE = ["lm_head", "model.embed_tokens"]
ATTENTION = r"re:.*\.self_attn\..*"
ROUTER = r"re:.*\.mlp\.gate$"


def saved(name: str, root: Path) -> Path:
    family, config = MODELS[name]
    save(name, replace(CASES[family], config=config), root / name, torch.bfloat16)
    return root / name


def verified(path: Path, against: frozenset[str] = ALL) -> Report:
    report = verify(path, against=against)
    if out := os.environ.get("OUT"):
        found = report.to_json()
        (Path(out) / f"{path.name}.json").write_text(json.dumps(found, indent=1))
    return report


def failed(report: Report) -> set[str]:
    return {finding.code for finding in report.findings if finding.severity == "error"}


def holds_draft(report: Report) -> bool:
    """Whether a second engine was read back, with many tensors of a draft model."""
    (held, *_) = report.facts.get("SGLang engine, with speculative decoding", ["0 of none"])
    return int(held.rpartition(", ")[2].split()[0]) > 10


def sound_in_int4(report: Report) -> bool:
    """Whether nothing is wrong, but for what SGLang before 0.5.23 cannot do: load packed experts again from disk."""
    assert not failed(report), report.findings
    assert not report.reasons
    warnings = [one.actual for one in report.findings if one.code == "CK512"]
    if release("sglang") >= (0, 5, 23):
        return not warnings
    return len(warnings) == 1 and "repacked INT4 layers" in warnings[0]


@pytest.mark.parametrize("name", ["dense", "moe", "mla"])
def test_updates_release_and_logits_of_sound_models_pass(name: str, tmp_path: Path) -> None:
    report = verified(saved(name, tmp_path))
    statuses = {check.code: (check.status, check.reason) for check in report.checks if check.code[:3] in ("CK5", "CK6")}
    assert statuses == dict.fromkeys(("CK511", "CK512", "CK513", "CK601"), ("passed", None)), report.findings
    assert holds_draft(report) == (name == "mla")  # which has a multi-token prediction layer


def test_an_int4_model_passes_where_sglang_can_load_it_again(tmp_path: Path) -> None:
    source = saved("moe", tmp_path)
    quantize(source, tmp_path / "int4", QuantScheme(32, "qmax7", (ATTENTION, ROUTER)))
    report = verified(tmp_path / "int4")
    assert sound_in_int4(report)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_zero_points_are_what_the_engine_computes_with(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path)
    scheme = QuantScheme(32, "minmax", (ATTENTION, *[ROUTER] * (name == "moe")), symmetric=False)
    quantize(source, tmp_path / f"{name}-zeros", scheme, readers=("sglang",))
    report = verified(tmp_path / f"{name}-zeros", frozenset({"engine", "logits"}))
    assert not failed(report), report.findings
    assert not report.reasons


def test_a_tensor_that_updates_leave_out_is_named(tmp_path: Path) -> None:
    lost = "model.layers.3.mlp.down_proj.weight"
    source = saved("dense", tmp_path)
    path = written(tmp_path, "lost", source, {k: v for k, v in models.tensors(source).items() if k != lost})
    report = verified(path, frozenset({"engine", "update", "release-resume"}))
    found = {(one.code, one.tensor) for one in report.findings if one.code.startswith("CK5")}
    assert found >= {("CK512", lost), ("CK513", lost)}
    assert {tensor for _, tensor in found} <= {lost, None}


def test_a_draft_model_is_updated_and_resumed_with_the_model(tmp_path: Path) -> None:
    report = verified(saved("glm", tmp_path), frozenset({"engine", "update", "release-resume"}))
    statuses = {check.code: (check.status, check.reason) for check in report.checks if check.code.startswith("CK51")}
    assert statuses == dict.fromkeys(("CK511", "CK512", "CK513"), ("passed", None)), report.findings
    assert holds_draft(report)


def test_a_draft_model_beside_experts_in_int4_is_updated_too(tmp_path: Path) -> None:
    """Its own layer is in BF16, as in releases."""
    source = saved("glm", tmp_path)
    kept = (ATTENTION, ROUTER, r"re:.*layers\.0\.mlp\..*", r"re:.*shared_experts.*")
    quantize(source, tmp_path / "glm-int4", QuantScheme(32, "qmax7", kept))
    report = verified(tmp_path / "glm-int4", frozenset({"engine", "update", "release-resume"}))
    assert sound_in_int4(report)
    assert holds_draft(report)


@pytest.mark.parametrize("lost", ["eh_proj.weight", "mlp.experts.5.down_proj.weight"])
def test_a_draft_tensor_that_updates_leave_out_is_named(lost: str, tmp_path: Path) -> None:
    source = saved("glm", tmp_path)
    tensors = {name: tensor for name, tensor in models.tensors(source).items() if name != f"model.layers.6.{lost}"}
    path = written(tmp_path, "lost", source, tensors)
    report = verified(path, frozenset({"engine", "update", "release-resume"}))
    param = "draft.model.decoder.mlp.experts.w2_weight" if "experts" in lost else "draft.model.eh_proj.weight"
    found = {(one.code, one.tensor) for one in report.findings if one.code.startswith("CK51")}
    assert found >= {("CK512", param), ("CK513", param)}, report.reasons
    assert {tensor for _, tensor in found} <= {param, param.removeprefix("draft.")}


def test_a_packed_router_is_no_sound_engine(tmp_path: Path) -> None:
    """SGLang builds the router unquantized, drops its packed weights, and serves with what memory held."""
    source = saved("moe", tmp_path)
    packed = online_int4(models.tensors(source), [*ONLINE, ATTENTION], 32)
    config = int4_config([*ONLINE, ATTENTION], 32)
    path = written(tmp_path, "router", source, packed, quantization_config=config)
    report = verified(path, frozenset({"engine", "logits"}))
    assert "CK511" in failed(report), report.findings


def test_a_window_that_sglang_ignores_is_many_times_the_noise(tmp_path: Path) -> None:
    report = verified(saved("window", tmp_path), frozenset({"engine", "logits"}))
    assert failed(report) == {"CK601"}, report.findings
