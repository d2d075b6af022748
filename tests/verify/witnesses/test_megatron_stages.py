"""The parts in which Megatron and transformers differ are named, whatever the fault and the family."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from support.megatron_stages import PLANTED, ROPE, SOUND, stages_of

from verify.witnesses.reference.residuals import Stage
from verify.witnesses.reference.teacher_forced import Unseen, decoder_of

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

DENSE, EXPERTS, LATENT = FAMILIES = ("qwen2-untied", "qwen3_moe", "deepseek_v3")
Found = dict[str, dict[str, list[Stage]]]


@pytest.fixture(scope="module")
def found() -> Found:
    return stages_of(FAMILIES)


def differing(stages: list[Stage]) -> list[str]:
    return [stage.name for stage in stages if stage.differs]


def both(*layers: int) -> list[str]:
    """After another attention, the MLP of that layer is given something else too."""
    return [f"the {part} of layer {layer}" for layer in layers for part in ("attention", "MLP")]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sound_model_differs_nowhere(found: Found, name: str) -> None:
    stages = found[name][SOUND]
    assert [stage.name for stage in stages] == [
        "the embedding",
        *both(*range(12)),
        "the final norm",
        "the output layer",
    ]
    assert differing(stages) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_every_fault_is_located_to_its_part(found: Found, name: str) -> None:
    experts = [] if name == DENSE else ["the MLP of layer 6"]  # two experts exchanged
    assert differing(found[name][PLANTED]) == [
        *both(2),  # the input norm of layer 9
        *both(3),  # exchanged with layer 8
        "the MLP of layer 4",  # gate and up swapped
        *both(5),  # q, k and v mixed
        *experts,
        "the MLP of layer 7",  # the norm before it of layer 9
        *both(8),
        "the final norm",
        "the output layer",
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_another_rotary_base_is_located_to_every_attention(found: Found, name: str) -> None:
    assert differing(found[name][ROPE]) == both(*range(12))


def test_a_few_tokens_with_other_experts_are_no_difference() -> None:
    """One of 200 is a near tie; 5 are not, unless transformers' own rounding sends as many elsewhere."""
    noise = [1e-7] * 200
    assert not Stage("a part", [0.1] + [3e-7] * 199, noise).differs
    assert Stage("a part", [0.1] * 5 + [3e-7] * 195, noise).differs
    assert not Stage("a part", [0.1] * 5 + [3e-7] * 195, [1e-7] * 198 + [0.1] * 2).differs
    assert Stage("a part", [float("nan")] * 5 + [3e-7] * 195, noise).differs


def test_a_model_without_a_list_of_layers_is_not_guessed_at() -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=3))
    decoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2)] * 2)})
    model = SimpleNamespace(config=config, get_decoder=lambda: decoder)
    with pytest.raises(Unseen, match="transformers' SimpleNamespace has 0 lists of 3 modules in its decoder"):
        decoder_of(model)
