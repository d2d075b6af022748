"""`diff` of hand-made checkpoints: every kind of difference, and the memory that it takes."""

import json
import weakref

import pytest
import torch
from support import models
from support.messages import text_with

from ckptkit.verify.diff.diff import compare_checkpoints
from ckptkit.verify.diff.sides import Sides
from ckptkit.verify.diff.text import diff_lines, verdict

UNKNOWN = {"model_type": "of no family"}
LAYER = "model.layers.{}.mlp.{}.weight"


def found_of(a, b, exact=False):
    return compare_checkpoints(Sides(a, b, ("HF", "HF"), ()), "a", "b", exact=exact)


def of(a, b, exact=False):
    return found_of(models.InMemory(UNKNOWN, a), models.InMemory(UNKNOWN, b), exact)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_equal_bits_are_equal_with_nan_and_signed_zero():
    tensor = torch.tensor([[0.0, -0.0], [float("nan"), 1.0]])
    found = of({"w": tensor, "e": torch.zeros(0, 3)}, {"w": tensor.clone(), "e": torch.zeros(0, 3)})
    assert found.status == "equal"
    assert list(found.equal) == ["w", "e"]
    assert verdict(found) == "EQUAL  2 tensors, bit for bit"


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("turned", [False, True])
def test_cast_of_a_wider_source_is_equal_unless_exact(narrow, turned):
    wide = random(8, 8)
    a, b = ({"w": wide}, {"w": wide.to(narrow)}) if not turned else ({"w": wide.to(narrow)}, {"w": wide})
    found = of(a, b)
    assert (found.status, [pair.name for pair in found.cast]) == ("equal", ["w"])
    assert of(a, b, exact=True).status == "different"
    assert "float32" in " ".join(diff_lines(found))


def test_float16_made_from_bfloat16_is_a_cast_and_a_wrong_element_is_not():
    brain = random(8, 8, dtype=torch.bfloat16)
    half = brain.to(torch.float16)
    assert of({"w": brain}, {"w": half}).counts["cast"] == 1
    assert of({"w": half}, {"w": brain}).counts["cast"] == 1
    half[0, 0] += 1
    assert of({"w": half}, {"w": brain}).counts["differing"] == 1


@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.int32])
def test_cast_to_float8_or_integers_is_a_difference(narrow):
    wide = torch.arange(16.0).reshape(4, 4)
    found = of({"w": wide}, {"w": wide.to(narrow)})
    assert (found.status, found.counts["differing"]) == ("different", 1)


def test_distances_are_those_of_hand_computed_numbers():
    a, b = torch.tensor([3.0, 4.0, -1.0, 2.0]), torch.tensor([3.0, 2.0, -1.0, 2.5])
    (pair,) = of({"w": a}, {"w": b}).differing
    far = pair.distance
    # |d| = 0 2 0 0.5; a.b = 9 + 8 + 1 + 5 = 23; a.a = 30; b.b = 9 + 4 + 1 + 6.25; the variance of a = 7.5 - 4
    assert (far.unequal, far.largest, far.mean) == (2, 2.0, 0.625)
    assert far.cosine == pytest.approx(23 / (30 * 20.25) ** 0.5)
    assert far.std == pytest.approx(3.5**0.5)
    assert far.relative == pytest.approx(0.625 / 3.5**0.5)


def test_nan_in_one_side_is_counted_and_leaves_finite_numbers():
    a = random(4, 4)
    b = a.clone()
    b[1, 2] = float("nan")
    b[0, 0] += 0.5
    found = of({"w": a}, {"w": b})
    far = found.differing[0].distance
    assert (far.unequal, far.not_finite) == (2, 1)
    assert far.largest == pytest.approx(0.5)
    (zero,) = of({"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([-0.0, 1.0])}).differing
    assert (zero.distance.unequal, zero.distance.largest, zero.distance.mean) == (1, 0.0, 0.0)
    json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert "\n".join(diff_lines(found)) == text_with("1 finite")


def test_worst_kind_comes_first_and_kinds_are_folded():
    a = {LAYER.format(layer, kind): random(4, 4, seed=layer) for layer in range(3) for kind in ("up_proj", "down_proj")}
    by = {"up_proj": 0.01, "down_proj": 1.0}
    b = {name: tensor + by[name.split(".")[-2]] for name, tensor in a.items()}
    found = of(a, b)
    assert [min(kind.names) for kind in found.kinds] == [LAYER.format(0, "down_proj"), LAYER.format(0, "up_proj")]
    assert [kind.largest for kind in found.kinds] == [pytest.approx(1.0), pytest.approx(0.01, rel=1e-3)]
    text = list(diff_lines(found))
    assert any("differing  model.layers.{0..2}.mlp.down_proj.weight (3 tensors)" in line for line in text)


def test_names_and_shapes_of_one_side_are_listed():
    shared, empty = random(4, 4), torch.zeros(0, 3)
    found = of({"w": shared, "x": random(2, 2, seed=1)}, {"w": shared, "y": random(2, 2, seed=2)})
    assert found.counts | {"equal": 1, "only_a": 1, "only_b": 1} == found.counts
    assert ([pair.name for pair in found.only_a], [pair.name for pair in found.only_b]) == (["x"], ["y"])
    assert verdict(found) == "DIFFERENT  1 only in A, 1 only in B, of 3 tensors"
    found = of({"w": random(4, 2), "e": empty}, {"w": random(2, 4), "e": empty.int()})
    assert found.counts["differing"] == 2
    assert "w: shape [4, 2] in A and [2, 4] in B" in "\n".join(diff_lines(found))


def test_same_bits_under_another_name_are_a_rename():
    names = [LAYER.format(layer, "up_proj") for layer in range(3)]
    a = {name: random(4, 4, seed=index) for index, name in enumerate(names)}
    found = of(a, {f"language_model.{name}": tensor for name, tensor in a.items()})
    assert (found.status, found.counts["moved"], sum(found.counts.values())) == ("different", 3, 3)
    (move,) = found.moves
    assert move.text == text_with("another name language_model.model.layers.{0..2}.mlp.up_proj.weight")


def test_constant_tensors_are_never_moved():
    ones, zeros = torch.ones(8), torch.zeros(8)
    found = of({"a.weight": ones, "b.weight": zeros}, {"a.weight": zeros, "b.weight": ones})
    assert (found.counts["moved"], found.counts["differing"]) == (0, 2)


def test_experts_of_another_rank_are_named():
    name = "model.layers.{}.mlp.experts.{}.up_proj.weight"
    b = {name.format(layer, expert): random(4, 4, seed=10 * layer + expert) for layer in (0, 1) for expert in range(8)}
    a = b | {
        name.format(layer, expert): b[name.format(layer, expert - 4)] for layer in (0, 1) for expert in range(4, 8)
    }
    assert [(move.text, len(move.names)) for move in of(a, b).moves] == [(text_with("{4..7} {0..3}"), 8)]


class Watched(models.InMemory):
    """Makes its tensors when they are read, and counts those that are still alive."""

    alive = 0
    most = 0

    def read(self, names):
        made = {name: self.tensors[name].clone() for name in names}
        for tensor in made.values():
            Watched.alive += 1
            Watched.most = max(Watched.most, Watched.alive)
            weakref.finalize(tensor, self.freed)
        return made

    @staticmethod
    def freed():
        Watched.alive -= 1


def test_memory_holds_a_few_groups_and_no_tensor_afterwards(monkeypatch):
    monkeypatch.setattr("ckptkit.verify.evidence.both_sides.cores", lambda: 2)
    a = {f"model.layers.{index}.w": random(4, 4, seed=index) for index in range(200)}
    b = {f"model.layers.{index}.w": random(4, 4, seed=(index + 3) % 400) for index in range(200)}
    found = found_of(Watched(UNKNOWN, a), Watched(UNKNOWN, b))
    assert found.counts["moved"] == 197
    assert Watched.most <= 6  # three threads, each with a tensor of either side
    assert Watched.alive == 0
