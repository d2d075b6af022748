"""The headers on which planning is measured hold what a release holds."""

from pathlib import Path
from typing import Any, get_args

import pytest

import ckptkit
from benchmarks import huge
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint

# One dense layer and two with experts.
SMALL = {"num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2}
ATTENTION, DENSE, SHARED, EXPERTS = 3 * 5, 3, 2 * 3, 2 * 4 * 3
# Four norms a layer; routers and their biases; embedding, last norm and output layer.
OTHERS = 3 * 4 + 2 * 2 + 3
PLAIN = ATTENTION + DENSE + SHARED + EXPERTS + OTHERS
COUNTS = {"bfloat16": PLAIN, "fp8": 2 * (ATTENTION + DENSE + SHARED + EXPERTS) + OTHERS, "int4": PLAIN + 2 * EXPERTS}
# Attention has eight tensors a layer, a dense MLP three (norm, fc1, fc2), and a routed one five and two of each expert
# (norm, router, bias, two shared). The same three others.
MEGATRON = 3 * 8 + 3 + 2 * (5 + 2 * 4) + 3


def small(form: huge.Form) -> dict[str, Any]:
    return huge.kimi_k2(form) | SMALL


@pytest.mark.parametrize("form", get_args(huge.Form))
def test_huge_hf_release_has_the_tensors_counted_by_hand(form: huge.Form, tmp_path: Path) -> None:
    huge.make_hf(tmp_path / "hf", small(form), form, shards=3)
    found = HfCheckpoint(tmp_path / "hf")
    assert len(found.specs) == COUNTS[form]
    assert len(found.shards) == 3
    # Embedding and output layer are 2 x 163840 x 7168 numbers of two bytes.
    assert sum(spec.nbytes for spec in found.specs.values()) > 4_697_620_480
    assert sum(file.stat().st_blocks * 512 for file in (tmp_path / "hf").iterdir()) < 1_000_000
    written = ckptkit.convert(tmp_path / "hf", tmp_path / "megatron", dry_run=True)
    assert written.tensors == MEGATRON


def test_huge_megatron_checkpoint_has_the_tensors_counted_by_hand(tmp_path: Path) -> None:
    huge.make_megatron(tmp_path / "megatron", small("bfloat16"))
    found = TorchDistCheckpoint(tmp_path / "megatron" / "release")
    assert len(found.specs) == MEGATRON
    assert len(found.metadata.tensors) == MEGATRON - 2 * 2 * 3  # four experts of a layer stand under one key
    assert (
        sum(len(stored.chunks) for stored in found.metadata.tensors.values()) == MEGATRON + 2 * 4
    )  # gate and up of an expert apart
    assert found.specs["decoder.layers.2.mlp.experts.experts.3.linear_fc1.weight"].shape == (4096, 7168)
    assert sum(file.stat().st_blocks * 512 for file in (tmp_path / "megatron" / "release").iterdir()) < 1_000_000
    assert ckptkit.convert(tmp_path / "megatron", tmp_path / "hf", dry_run=True).tensors == PLAIN


def test_sizes_are_those_published() -> None:
    plain, fp8, int4 = (
        sum(spec.nbytes for spec in huge.stored(huge.kimi_k2(form), form).values()) / 1e9
        for form in ("bfloat16", "fp8", "int4")
    )
    assert plain / 2 == pytest.approx(1026.4, abs=0.1)  # billions of parameters, as the model card says
    assert fp8 == pytest.approx(1029, rel=0.01)  # a little more than a byte a parameter
    assert int4 == pytest.approx(594, rel=0.01)  # its routed experts a little more than half of one
