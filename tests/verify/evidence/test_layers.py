"""Whole layers in the wrong place, with sentences written by hand."""

from __future__ import annotations

import pytest

from verify.evidence.layers import moved_layers, repeated_layers


def name(layer: int, rest: str) -> str:
    return f"model.layers.{layer}.{rest}"


def moved(origin: dict[int, int]) -> dict[str, str | None]:
    """Two tensors a layer, and whose values they hold."""
    return {
        name(layer, rest): name(other, rest)
        for layer, other in origin.items()
        for rest in ("self_attn.o_proj.weight", "mlp.experts.3.up_proj.weight")
    }


def test_a_stage_that_counts_from_zero_is_one_sentence() -> None:
    whose = moved({layer: layer - 6 for layer in range(6, 12)})
    (found,) = moved_layers(whose)
    assert found.text == "layers {6..11} hold the values of layers {0..5}"
    assert found.hint.startswith("the layers of a pipeline stage were numbered from another one")
    assert found.names == list(whose)


@pytest.mark.parametrize(
    ("origin", "text", "blamed"),
    [
        ({3: 4, 4: 3}, "layers 3 and 4 are exchanged", "names were exchanged"),
        ({2: 9, 9: 2}, "layers 2 and 9 are exchanged", "names were exchanged"),
        ({2: 9, 9: 2, 4: 11, 11: 4}, "layers {2,4} and {9,11} are exchanged", "names were exchanged"),
        ({layer: (layer + 6) % 12 for layer in range(12)}, "layers {0..5} and {6..11} are exchanged", "pipeline stage"),
        (
            {layer: (layer + 1) % 12 for layer in range(12)},
            "layers {0..11} are rotated: layer 0 holds the values of layer 1",
            "another start",
        ),
        (
            {layer: (layer - 1) % 12 for layer in range(12)},
            "layers {0..11} are rotated: layer 0 holds the values of layer 11",
            "another start",
        ),
        # 0, 1, 10, 11, 2, 3, ...: sorted as text
        (
            {2: 10, 3: 11} | {layer: layer - 2 for layer in range(4, 12)},
            "layers {2..11} are rotated: layer 2 holds the values of layer 10",
            "sorted as text",
        ),
        (
            {0: 4, 4: 7, 7: 0},
            (
                "layers {0,4,7} stand in another order: layer 0 holds the values of layer 4, layer 4 those of "
                "layer 7, layer 7 those of layer 0"
            ),
            "sorted as text",
        ),
        ({7: 3}, "layer 7 holds the values of layer 3", "again from the source"),
        ({5: 3, 9: 7}, "layers {5,9} hold the values of layers {3,7}", "again from the source"),
    ],
)
def test_moved_layers_are_blamed_on_what_moves_them_so(origin: dict[int, int], text: str, blamed: str) -> None:
    whose = moved({layer: other for layer, other in origin.items() if layer != other})
    (found,) = moved_layers(whose)
    assert found.text == text
    assert blamed in found.hint
    assert ("pipeline stage" in found.hint) == (blamed == "pipeline stage")
    assert sorted(found.names) == sorted(whose)


def test_layers_moved_by_two_mistakes_are_two_sentences() -> None:
    whose = moved({0: 1, 1: 0, 7: 3})
    assert [found.text for found in moved_layers(whose)] == [
        "layers 0 and 1 are exchanged",
        "layer 7 holds the values of layer 3",
    ]


def test_what_is_no_moved_layer_is_left_to_the_other_findings() -> None:
    single = {name(3, "a.weight"): name(4, "a.weight")}
    swapped_inside = {name(3, "gate.weight"): name(3, "up.weight"), name(3, "up.weight"): name(3, "gate.weight")}
    partly = {name(3, "a.weight"): name(4, "a.weight"), name(3, "b.weight"): None}
    from_two = {name(3, "a.weight"): name(4, "a.weight"), name(3, "b.weight"): name(5, "b.weight")}
    outside = {"lm_head.weight": "model.embed_tokens.weight", "model.norm.weight": None}
    for whose in (single, partly, from_two, outside):
        assert list(moved_layers(whose)) == []
    # same layer, but not the tensor of the same name
    assert list(moved_layers(swapped_inside)) == []


def test_repeated_layers() -> None:
    equal = [[name(layer, "q.weight"), name(layer + 6, "q.weight")] for layer in range(6)]
    equal += [[name(1, "k.weight"), name(7, "k.weight")], [name(2, "experts.0.w"), name(2, "experts.5.w")]]
    ((text, names),) = repeated_layers(equal)
    assert text == "layers {0..5} and {6..11} hold the same bytes"
    assert len(names) == 14
    assert list(repeated_layers([[name(2, "experts.0.w"), name(2, "experts.5.w")]])) == []
