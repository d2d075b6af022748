"""What a loader does with tensors, seen by `Trace` and followed back to them: loaders written here, without SGLang."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from families import HF_CASES
from support.messages import text_with
from torch import Tensor, nn

from ckptkit.verify.witnesses.loading.bits import difference, poison
from ckptkit.verify.witnesses.loading.compare import Loaded
from ckptkit.verify.witnesses.loading.engine import ModelBuild
from ckptkit.verify.witnesses.loading.job import LoadReport
from ckptkit.verify.witnesses.loading.placement import Placement
from ckptkit.verify.witnesses.loading.region import Region, covered
from ckptkit.verify.witnesses.loading.trace import Trace
from ckptkit.verify.witnesses.sglang import adapter

Weights = Iterator[tuple[str, Tensor]]
Loader = Callable[[dict[str, Tensor], Weights], object]


def given(*names: str, shape: tuple[int, ...] = (4, 6), dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Tensors of numbers that stand nowhere else."""
    size = torch.Size(shape).numel()
    return {name: torch.arange(100 * at, 100 * at + size).reshape(shape).to(dtype) for at, name in enumerate(names, 1)}


def placed(parameters: dict[str, Tensor], tensors: Mapping[str, Tensor], loader: Loader) -> Placement:
    """What was seen while `loader` loaded the tensors; each piece is held against the tensor that it came from."""
    poison(parameters.values())
    with Trace(parameters.values()) as trace:
        loader(parameters, trace.feed(tensors.items()))
    placement = Placement.of(trace, parameters)
    for name, pieces in placement.pieces.items():
        for piece in pieces:
            assert difference(piece.actual(parameters[piece.param]), piece.cast(piece.taken(tensors[name]))) is None
    return placement


def counts(placement: Placement, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """How many elements of each tensor stand in parameters."""
    return {name: covered(tensor.numel(), placement.parts(name)) for name, tensor in tensors.items()}


def rows(parameters: dict[str, Tensor], weights: Weights) -> None:
    """Tensors below each other."""
    for at, (_, tensor) in enumerate(weights):
        parameters["fused"].narrow(0, 4 * at, 4).copy_(tensor)


def transposed(parameters: dict[str, Tensor], weights: Weights) -> None:
    """The parameter has inputs first, and tensors beside each other."""
    for at, (_, tensor) in enumerate(weights):
        parameters["fused"].t()[4 * at : 4 * at + 4].copy_(tensor)


def joined(parameters: dict[str, Tensor], weights: Weights) -> None:
    """Kept until all are there, as loaders of latent attention do."""
    parameters["fused"].copy_(torch.cat([tensor for _, tensor in weights]))


def through_a_buffer(parameters: dict[str, Tensor], weights: Weights) -> None:
    buffer = torch.empty(8, 6)
    for at, (_, tensor) in enumerate(weights):
        buffer[4 * at : 4 * at + 4] = tensor
    parameters["fused"].copy_(buffer)


def interleaved(parameters: dict[str, Tensor], weights: Weights) -> None:
    """Row by row, by an index."""
    both = torch.cat([tensor for _, tensor in weights])
    parameters["fused"].copy_(both[torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])])


def in_threads(parameters: dict[str, Tensor], weights: Weights) -> None:
    with ThreadPoolExecutor() as pool:
        for at, (_, tensor) in enumerate(weights):
            pool.submit(parameters["fused"].narrow(0, 4 * at, 4).copy_, tensor).result()


def replaced(parameters: dict[str, Tensor], weights: Weights) -> None:
    """The parameter gets other memory."""
    parameters["fused"] = torch.cat([tensor for _, tensor in weights])


@pytest.mark.parametrize("loader", [rows, transposed, joined, through_a_buffer, interleaved, in_threads, replaced])
def test_every_element_is_followed_back(loader: Loader) -> None:
    fused = torch.empty(6, 8) if loader is transposed else torch.empty(8, 6)
    tensors = given("a", "b")
    placement = placed({"fused": fused}, tensors, loader)
    assert counts(placement, tensors) == {"a": 24, "b": 24}
    assert {piece.param for pieces in placement.pieces.values() for piece in pieces} == {"fused"}
    assert not placement.computed


def test_tensors_and_parameters_may_begin_anywhere_in_a_storage() -> None:
    """As those of a reader that reads whole pieces of a file."""
    storage = torch.arange(100.0)
    tensors = {"a": storage[10:34].view(4, 6), "b": storage[40:64].view(4, 6)}
    fused = torch.empty(80)[12:60].view(8, 6)
    placement = placed({"fused": fused}, tensors, rows)
    assert counts(placement, tensors) == {"a": 24, "b": 24}
    (piece,) = placement.pieces["b"]
    assert piece.taken(tensors["b"]).flatten().tolist() == list(range(40, 64))
    assert piece.actual(fused).flatten().tolist() == list(range(40, 64))


def test_a_regular_part_is_told_as_one() -> None:
    tensors = given("a", "b")
    placement = placed({"fused": torch.empty(8, 6)}, tensors, rows)
    (piece,) = placement.pieces["b"]
    assert (piece.into, piece.part) == (Region(24, (4, 6), (6, 1)), Region(0, (4, 6), (6, 1)))


def test_what_is_overwritten_no_longer_stands_there() -> None:
    def twice(parameters: dict[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            parameters["a"][2 if name == "b" else 0 :].copy_(tensor[: 2 if name == "b" else 4])

    tensors = given("a", "b")
    placement = placed({"a": torch.empty(4, 6)}, tensors, twice)
    assert counts(placement, tensors) == {"a": 12, "b": 12}
    assert len(placement.written["a"]) == 1


def test_casts_and_bits_in_another_dtype() -> None:
    def cast(parameters: dict[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            source = tensor.view(torch.int32) if name == "bits" else tensor.to(torch.bfloat16) * 1
            parameters[name].copy_(source if name == "bits" else tensor)

    parameters = {"bits": torch.empty(4, 6, dtype=torch.int32), "cast": torch.empty(4, 6, dtype=torch.bfloat16)}
    tensors = given("bits", "cast")
    assert counts(placed(parameters, tensors, cast), tensors) == {"bits": 24, "cast": 24}


def test_a_number_that_is_read_and_filled_in() -> None:
    def filled(parameters: dict[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            parameters[name].fill_(tensor.item())

    placement = placed({"a": torch.empty(3)}, given("a", shape=(1,)), filled)
    assert [piece.into.sizes for piece in placement.pieces["a"]] == [(3,)]


def test_what_is_computed_is_named() -> None:
    def computed(parameters: dict[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            parameters[name].copy_(-tensor.exp())

    placement = placed({"a": torch.empty(4, 6)}, given("a"), computed)
    assert placement.computed == {"a": frozenset({"a"})}
    assert not placement.pieces["a"]


def test_what_is_computed_of_one_of_two_is_named() -> None:
    def half(parameters: dict[str, Tensor], weights: Weights) -> None:
        (_, one), (_, other) = weights
        parameters["a"].copy_(torch.cat([one, other * 2]))

    tensors = given("x", "y")
    placement = placed({"a": torch.empty(8, 6)}, tensors, half)
    assert counts(placement, tensors) == {"x": 24, "y": 0}
    assert placement.computed == {"a": frozenset({"y"})}


def test_weights_that_are_joined_and_cut_into_views_are_followed_back() -> None:
    """As for kernels that multiply by both at once; the joint matrix ends with rows of zeros."""

    def loader(parameters: dict[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            parameters[name].copy_(tensor)
        both = torch.cat([parameters["a"], parameters["b"], parameters["a"].new_zeros(2, 6)])
        parameters["a"].data, parameters["b"].data = both[:4], both[4:8]

    tensors = given("a", "b")
    placement = placed({name: torch.zeros(4, 6) for name in tensors}, tensors, loader)
    assert counts(placement, tensors) == {"a": 24, "b": 24}
    assert [piece.param for name in tensors for piece in placement.pieces[name]] == ["a", "b"]
    assert placement.computed == {}


def test_what_is_written_into_a_view_of_joined_weights_stands_there() -> None:
    def loader(parameters: dict[str, Tensor], weights: Weights) -> None:
        first, second, third = (tensor for _, tensor in weights)
        both = torch.cat([first, second])
        parameters["a"].data, parameters["b"].data = both[:4], both[4:]
        parameters["b"].copy_(third)

    tensors = given("a", "b", "c")
    placement = placed({name: torch.zeros(4, 6) for name in "ab"}, tensors, loader)
    assert counts(placement, tensors) == {"a": 24, "b": 0, "c": 24}
    assert [piece.param for piece in placement.pieces["c"]] == ["b"]


@pytest.mark.parametrize(("behind", "wrong"), [(0, []), (1, [text_with("96 0 nowhere")])])
def test_zeros_behind_the_values_need_no_place(behind: float, wrong: list[str]) -> None:
    """Kimi K3 stores a number a head for 128, and has 96 heads. An engine may hold these alone."""
    name, config = "language_model.model.layers.0.self_attn.A_log", HF_CASES["kimi_k3"].config().to_dict()
    tensor = torch.arange(1, 129, dtype=torch.float32)
    tensor[96:] = behind
    parameters = {name: torch.zeros(96)}
    placement = placed(parameters, {name: tensor}, lambda held, weights: held[name].copy_(next(weights)[1][:96]))
    report = LoadReport("0", "m", "cpu", "float32")
    build = ModelBuild(Path(), Path(), config, reference=lambda: iter([(name, tensor)]))
    loaded = Loaded(adapter, build, nn.Module(), parameters, placement, {name: 128}, report)
    assert loaded.in_part == {}
    assert loaded.compare() == [name]
    assert [one.what for one in report.differing] == wrong


def test_memory_that_is_used_again_is_not_taken_for_what_lay_there() -> None:
    def reused(parameters: dict[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            buffer = torch.empty(4, 6)
            buffer.copy_(tensor)
            parameters[name].copy_(buffer)
            del buffer

    tensors = given("a", "b")
    assert counts(placed({"a": torch.empty(4, 6), "b": torch.empty(4, 6)}, tensors, reused), tensors) == {
        "a": 24,
        "b": 24,
    }


def experts(parameters: dict[str, Tensor], weights: Weights) -> None:
    for name, tensor in weights:
        _, layer, _, expert, which = name.split(".")
        parameters[f"layers.{layer}.w13"][int(expert), 4 * (which == "up") :][:4].copy_(tensor)


def test_the_place_of_a_missing_tensor_is_told_from_others() -> None:
    names = [
        f"layers.{layer}.experts.{expert}.{which}"
        for layer in (0, 1, 2)
        for expert in range(4)
        for which in ("gate", "up")
    ]
    missing = "layers.2.experts.3.up"
    tensors = given(*(name for name in names if name != missing))
    placement = placed({f"layers.{layer}.w13": torch.empty(4, 8, 6) for layer in (0, 1, 2)}, tensors, experts)
    assert placement.predicted(missing) == ("layers.2.w13", Region(3 * 48 + 24, (4, 6), (6, 1)))
    assert placement.predicted("layers.2.experts.3.down") is None


def zeroed(parameters: dict[str, Tensor], weights: Weights) -> None:
    """What a rank does with a bias that another one adds: made zero where it was given, then copied."""
    for at, (_, tensor) in enumerate(weights):
        parameters["fused"].narrow(0, 4 * at, 4).copy_(tensor.zero_() if at else tensor)


def like_zeros(parameters: dict[str, Tensor], weights: Weights) -> None:
    for at, (_, tensor) in enumerate(weights):
        parameters["fused"].narrow(0, 4 * at, 4).copy_(torch.zeros_like(tensor) if at else tensor)


@pytest.mark.parametrize("loader", [zeroed, like_zeros])
def test_zeros_in_the_place_of_a_tensor_are_not_computed_of_it(loader: Loader) -> None:
    tensors = given("a", "b")
    parameters = {"fused": torch.empty(8, 6)}
    placement = placed(parameters, tensors, loader)
    assert (counts(placement, tensors), placement.computed) == ({"a": 24, "b": 0}, {})


def test_what_is_covered_is_counted_once() -> None:
    halves = [Region(0, (4, 3), (6, 1)), Region(3, (4, 3), (6, 1))]
    assert covered(24, halves) == 24
    assert covered(24, halves[:1] * 2) == 12
    assert covered(24, [Region(0, (12,), (1,)), Region(6, (12,), (1,))]) == 18
    assert covered(24, [Region(0, (6, 4), (1, 6))]) == 24
    assert covered(24, [Region(5, (2, 3), (0, 1))]) == 3
    assert covered(24, [Region(0, (4,), (6,)), Region(7, (), ())]) == 5
    assert covered(0, []) == covered(7, []) == 0
