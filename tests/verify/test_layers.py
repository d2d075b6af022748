"""Whole layers in the wrong place, with sentences written by hand."""

from __future__ import annotations

from verify.layers import moved_layers, repeated_layers


def name(layer: int, rest: str) -> str:
    return f"model.layers.{layer}.{rest}"


def test_a_stage_that_counts_from_zero_is_one_sentence() -> None:
    whose = {name(layer, rest): name(layer - 6, rest) for layer in range(6, 12) for rest in ("self_attn.o_proj.weight", "mlp.experts.3.up_proj.weight")}
    ((text, names),) = moved_layers(whose)
    assert text == "layers {6..11} hold the values of layers {0..5}"
    assert names == list(whose)


def test_two_exchanged_layers_are_two_sentences() -> None:
    whose = {name(layer, rest): name(7 - layer, rest) for layer in (3, 4) for rest in ("a.weight", "b.weight")}
    assert [text for text, _ in moved_layers(whose)] == ["layer 3 holds the values of layer 4", "layer 4 holds the values of layer 3"]


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
