"""Real Megatron, given converted weights, computes the logits that transformers computes from the originals.

A round trip cannot see a mapping that is wrong in both directions; this can. Float32, one process, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from families.case import far
from support import models
from support.installed import require_megatron
from support.megatron_runs import Case, in_megatron, logits_of
from torch import Tensor

from ckptkit.app.api import convert
from ckptkit.formats.hf.reader import HfCheckpoint
from converters.ops.basic import GateUp, Qkv
from converters.ops.shapes import cat
from converters.rules import ParamMapping

require_megatron()

TOLERANCE = 1e-4
Patch = Callable[[pytest.MonkeyPatch], None]
Expansion = Iterator[tuple[str, tuple[str, ...]]]


def gate_above_up_swapped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GateUp, "merge", lambda self, tensors: cat([tensors[1], tensors[0]]))


def grouped(order: tuple[int, int, int]) -> Patch:
    """Query, key and value in another order inside each group; all shapes stay legal."""

    def merge(self: Qkv, tensors: list[Tensor]) -> Tensor:
        rest = tensors[0].shape[1:]
        parts = [part.reshape(self.groups, -1, self.head_dim, *rest) for part in tensors]
        return cat([parts[index] for index in order], dim=1).reshape(-1, *rest)

    return lambda patch: patch.setattr(Qkv, "merge", merge)


def qkv_not_grouped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Qkv, "merge", lambda self, tensors: cat(list(tensors)))


def renamed(swap: Callable[[str, tuple[str, ...]], tuple[str, ...]]) -> Patch:
    """Rules that take their HF tensors from another name."""
    original = ParamMapping.expand

    def expand(self: ParamMapping, experts: int) -> Expansion:
        for megatron, names in original(self, experts):
            yield megatron, swap(megatron, names)

    return lambda patch: patch.setattr(ParamMapping, "expand", expand)


def exchanged(left: str, right: str) -> Patch:
    """Wherever an HF name has `left`, take `right` instead, and the other way round."""
    return renamed(
        lambda _, names: tuple(name.replace(left, "@").replace(right, left).replace("@", right) for name in names)
    )


MUTATIONS: dict[str, Patch] = {
    "gate and up swapped": gate_above_up_swapped,
    "key before query": grouped((1, 0, 2)),
    "key and value swapped": grouped((0, 2, 1)),
    "q, k, v one above the other": qkv_not_grouped,
    "two experts swapped": exchanged(".experts.4.", ".experts.5."),
    "q and k norm swapped": exchanged("q_norm", "k_norm"),
    "norms before attention and MLP swapped": exchanged("input_layernorm", "post_attention_layernorm"),
    "two layers swapped": exchanged("layers.7.", "layers.8."),
}

EDITS: dict[str, Callable[[Tensor], Tensor]] = {
    "router bias zeroed": torch.zeros_like,
    "router bias rounded to bfloat16": lambda bias: bias.bfloat16().float(),
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "rotary dimensions": (
        "glm4_moe",
        {"partial_rotary_factor": 1.0, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    ),
    "rotary base": ("qwen2-tied", {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}),
    "router scale": ("glm4_moe", {"routed_scaling_factor": 1.0}),
    "top k": ("qwen3_moe", {"num_experts_per_tok": 2}),
    "router normalization": ("qwen3_moe", {"norm_topk_prob": False}),
    "norm epsilon": ("qwen2-untied", {"rms_norm_eps": 1e-3}),
}


def tokens() -> Tensor:
    return torch.randint(0, 352, (2, 16), generator=torch.Generator().manual_seed(0))


@contextmanager
def patched(patch: Patch) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as context:
        patch(context)
        yield


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Logits by case: `hf NAME` by transformers, everything else by Megatron."""
    root = tmp_path_factory.mktemp("logits")
    found: dict[str, Tensor] = {}
    cases: dict[str, Case] = {}
    for name in models.configs():
        model = models.save(name, root / name, torch.float32)
        with torch.no_grad():
            found[f"hf {name}"] = model(tokens()).logits
        convert(root / name, root / f"{name}-megatron")
        cases[name] = Case(HfCheckpoint(root / name).config, checkpoint=root / f"{name}-megatron" / "release")
    glm = HfCheckpoint(root / "glm4_moe").config
    for label, patch in MUTATIONS.items():
        with patched(patch):
            cases[label] = Case(glm, in_megatron(root / "glm4_moe"))
    sound = in_megatron(root / "glm4_moe")
    cases["assigned"] = Case(glm, sound)
    for label, edit in EDITS.items():
        cases[label] = Case(
            glm, {name: edit(tensor) if name.endswith("expert_bias") else tensor for name, tensor in sound.items()}
        )
    for label, (name, change) in CONFIGS.items():
        cases[label] = Case({**cases[name].config, **change}, checkpoint=cases[name].checkpoint)
    return found | logits_of(cases, tokens())


@pytest.mark.parametrize("name", list(models.configs()))
def test_megatron_computes_the_logits_of_transformers(logits: dict[str, Tensor], name: str) -> None:
    assert far(logits[name], logits[f"hf {name}"]) < TOLERANCE


def test_weights_assigned_by_name_give_the_same_logits_as_a_checkpoint_loaded_by_megatron(
    logits: dict[str, Tensor],
) -> None:
    assert torch.equal(logits["assigned"], logits["glm4_moe"])


@pytest.mark.parametrize("label", [*MUTATIONS, *EDITS])
def test_wrong_mapping_changes_the_logits(logits: dict[str, Tensor], label: str) -> None:
    assert far(logits[label], logits["hf glm4_moe"]) > 10 * TOLERANCE


@pytest.mark.parametrize("label", list(CONFIGS))
def test_wrong_argument_changes_the_logits(logits: dict[str, Tensor], label: str) -> None:
    """The Megatron arguments stored with a checkpoint are what the model is built from."""
    assert far(logits[label], logits[f"hf {CONFIGS[label][0]}"]) > 10 * TOLERANCE
