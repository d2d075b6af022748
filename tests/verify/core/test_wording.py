"""The wording of chosen findings, as a user reads it. No other test repeats it (`test_layout.py`)."""

from __future__ import annotations

import pytest

from ckptkit.verify.evidence.moved import Stages, moved_layers, repeated

ORDER = "layers {0,4,7} stand in another order: 0 holds the values of 4, 4 those of 7, 7 those of 0"


def weights(layer: int) -> list[str]:
    return [f"model.layers.{layer}.{rest}.weight" for rest in ("self_attn.o_proj", "mlp.experts.3.up_proj")]


@pytest.mark.parametrize(
    ("origin", "text"),
    [
        ({7: 3}, "layer 7 holds the values of layer 3"),
        ({5: 3, 9: 7}, "layers {5,9} hold the values of layers {3,7}"),
        ({0: 4, 4: 7, 7: 0}, ORDER),
        (
            {layer: layer - 6 for layer in range(6, 12)},
            "layers {6..11} hold the values of layers {0..5}, which are stages 1 and 0 of a pipeline of 2",
        ),
    ],
)
def test_layers_in_the_wrong_place(origin: dict[int, int], text: str) -> None:
    whose = {
        mine: its for layer, other in origin.items() for mine, its in zip(*map(weights, (layer, other)), strict=True)
    }
    (found,) = moved_layers(whose, Stages(12))
    assert found.text == text


def test_layers_of_one_stage_in_both() -> None:
    (found,) = repeated([[weights(layer)[0], weights(layer + 6)[0]] for layer in range(6)], Stages(12))
    assert found.text == "layers {0..5} and {6..11} hold the same bytes; they are stages 0 and 1 of a pipeline of 2"
