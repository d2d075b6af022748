"""Whole layers in the wrong place; what is found of them, by hand."""

import pytest
from support.messages import text_with

from ckptkit.verify.evidence.moved import Stages, explain_repeats, moved_layers

TWELVE = Stages(12)  # layers of a pipeline that nobody knows
HALVES = Stages(12, {0: [range(6)], 1: [range(6, 12)]})
CHUNKS = Stages(12, {0: [range(3), range(6, 9)], 1: [range(3, 6), range(9, 12)]})


def name(layer, rest):
    return f"model.layers.{layer}.{rest}"


def moved(origin):
    """Two tensors a layer, and whose values they hold."""
    return {
        name(layer, rest): name(other, rest)
        for layer, other in origin.items()
        for rest in ("self_attn.o_proj.weight", "mlp.experts.3.up_proj.weight")
    }


@pytest.mark.parametrize(
    ("origin", "text", "blamed"),
    [
        # A stage that counts from zero.
        ({layer: layer - 6 for layer in range(6, 12)}, "{6..11} {0..5} 1 0 2", "numbers"),
        ({2: 9, 9: 2}, "layers 2 and 9 are exchanged", "exchanged"),
        ({2: 9, 9: 2, 4: 11, 11: 4}, "layers {2,4} and {9,11} are exchanged", "exchanged"),
        (
            {layer: (layer + 6) % 12 for layer in range(12)},
            "layers {0..5} and {6..11} are exchanged, which are stages 0 and 1 of a pipeline of 2",
            "pipeline stage",
        ),
        # Neighbours that no stage of an even pipeline has: they begin in the middle of one, or twelve do not divide.
        ({3: 7, 4: 8, 7: 3, 8: 4}, "layers {3..4} and {7..8} are exchanged", "exchanged"),
        ({layer: (layer + 5) % 10 for layer in range(10)}, "layers {0..4} and {5..9} are exchanged", "exchanged"),
        ({layer: (layer + 1) % 12 for layer in range(12)}, "{0..11} 0 1 1 2 2 3", "another start"),
        # 0, 1, 10, 11, 2, 3, ...: sorted as text
        ({2: 10, 3: 11} | {layer: layer - 2 for layer in range(4, 12)}, "{2..11} 2 10 3 11 4 2", "text"),
        ({7: 3}, "7 values 3", "source"),
        ({5: 3, 9: 7}, "{5,9} {3,7}", "source"),
    ],
)
def test_moved_layers_are_blamed_on_what_moves_them_so(origin, text, blamed):
    whose = moved({layer: other for layer, other in origin.items() if layer != other})
    (found,) = moved_layers(whose, TWELVE)
    assert found.text == text_with(text)
    assert found.hint == text_with(blamed)
    assert sorted(found.names) == sorted(whose)


def test_what_is_no_moved_layer_is_left_to_the_other_findings():
    single = {name(3, "a.weight"): name(4, "a.weight")}
    swapped_inside = {name(3, "gate.weight"): name(3, "up.weight"), name(3, "up.weight"): name(3, "gate.weight")}
    partly = {name(3, "a.weight"): name(4, "a.weight"), name(3, "b.weight"): None}
    from_two = {name(3, "a.weight"): name(4, "a.weight"), name(3, "b.weight"): name(5, "b.weight")}
    outside = {"lm_head.weight": "model.embed_tokens.weight", "model.norm.weight": None}
    for whose in (single, partly, from_two, outside):
        assert list(moved_layers(whose, TWELVE)) == []
    # same layer, but not the tensor of the same name
    assert list(moved_layers(swapped_inside, TWELVE)) == []


@pytest.mark.parametrize(
    ("stages", "origin", "text", "hint"),
    [
        (
            HALVES,
            {layer: (layer + 6) % 12 for layer in range(12)},
            "layers {0..5} and {6..11} are exchanged, which are stages 0 and 1 of the pipeline",
            "numbers",
        ),
        # An even pipeline of four would have these; this one has two stages.
        (
            HALVES,
            {0: 3, 1: 4, 2: 5, 3: 0, 4: 1, 5: 2},
            "layers {0..2} and {3..5} are exchanged",
            "exchanged",
        ),
        (HALVES, {layer: layer - 1 for layer in range(7, 12)}, "{7..11} {6..10} 1 {6..11}", "inside"),
        (HALVES, {layer: layer - 1 for layer in range(6, 12)}, "{6..11} {5..10}", "save"),
        (CHUNKS, {6: 0, 7: 1, 8: 2}, "{6..8} {0..2} 0 1 0 0", "numbers"),
        (
            CHUNKS,
            {0: 3, 1: 4, 2: 5, 6: 9, 7: 10, 8: 11} | {3: 0, 4: 1, 5: 2, 9: 6, 10: 7, 11: 8},
            "layers {0..2,6..8} and {3..5,9..11} are exchanged, which are stages 0 and 1 of the pipeline",
            "numbers",
        ),
    ],
)
def test_a_known_pipeline_blames_its_own_stages_alone(stages, origin, text, hint):
    (found,) = moved_layers(moved(origin), stages)
    assert found.text == text_with(text)
    assert found.hint == text_with(hint)


def test_repeated_layers_and_experts():
    equal = [[name(layer, "q.weight"), name(layer + 6, "q.weight")] for layer in range(6)]
    equal += [[name(1, "k.weight"), name(7, "k.weight")], [name(2, "experts.0.w"), name(2, "experts.5.w")]]
    layers, experts = explain_repeats(equal, TWELVE)
    assert layers.text == text_with("{0..5} {6..11} 0 1 2")
    assert "pipeline stage" in layers.hint
    assert len(layers.names) == 14
    assert (experts.text, experts.names) == (text_with("0 5 bytes"), equal[-1])
    (two,) = explain_repeats([[name(4, "q.weight"), name(5, "q.weight")]], TWELVE)
    assert (two.text, two.hint) == (text_with("4 5 bytes"), text_with("release"))
    # Two mistakes.
    whose = moved({0: 1, 1: 0, 7: 3})
    assert [one.text for one in moved_layers(whose, TWELVE)] == [
        "layers 0 and 1 are exchanged",
        text_with("7 values 3"),
    ]
