"""The MTP layer of Qwen3-Next and Qwen3.5: SGLang's own classes decide the order of its projection's inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import sglang_mtp
import torch
from families import CASES
from families.case import build, tokens
from families.mtp import next_tokens
from torch import Tensor, nn

from converters.planner import rules_of


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_sglangs_own_class_computes_the_logits_of_the_reference(tmp_path: Path, name: str) -> None:
    """The reference is what Megatron is held against in test_families.py. slime swaps the halves of qwen3_next's `fc`: another model."""
    pytest.importorskip("sglang", reason="the witness is SGLang's own class")
    case = CASES[name]
    hf = build(name, case, torch.float32)
    added = case.added(hf, torch.float32)
    assert case.mtp is not None
    with torch.no_grad():
        expected = case.mtp(hf, added, tokens())[0]
        language = getattr(hf.model, "language_model", hf.model)
        hidden, embedded = language(input_ids=tokens()).last_hidden_state[0], language.embed_tokens(next_tokens(tokens()))[0]

        def far(tensors: dict[str, Tensor]) -> float:
            found = nn.functional.linear(sglang_mtp.run(tmp_path, name, hf.config, tensors, embedded, hidden), hf.lm_head.weight)
            return float((found - expected).abs().max() / expected.abs().max())

        assert far(dict(added)) < 1e-4
        assert far({**added, "mtp.fc.weight": added["mtp.fc.weight"].roll(hf.lm_head.weight.shape[1], dims=1)}) > 1e-1


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("dialect", ["mcore", "slime"])
def test_the_projection_is_copied_in_every_dialect(name: str, dialect: str) -> None:
    """Megatron concatenates embedding and hidden state in that order too."""
    config = CASES[name].edit(CASES[name].config().to_dict())
    (rule,) = [rule for rule in rules_of(config, dialect) if rule.megatron == "mtp.layers.0.eh_proj.weight"]
    whole = torch.arange(128 * 256.0).reshape(128, 256)
    assert list(rule.hf.items()) == [("mtp.fc.weight", (128, 256))]
    assert torch.equal(rule.mapping.op.merge([whole]), whole)
