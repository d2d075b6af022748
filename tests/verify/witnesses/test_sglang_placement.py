"""What a loader does with tensors, seen by `Trace` and followed back to them: loaders unlike those of real engines."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from families import HF_CASES
from support.messages import text_with
from torch import nn

from ckptkit.verify.witnesses.loading.bits import difference, poison
from ckptkit.verify.witnesses.loading.compare import Loaded
from ckptkit.verify.witnesses.loading.engine import ModelBuild
from ckptkit.verify.witnesses.loading.job import LoadReport
from ckptkit.verify.witnesses.loading.placement import Placement
from ckptkit.verify.witnesses.loading.region import Region, covered
from ckptkit.verify.witnesses.loading.trace import Trace
from ckptkit.verify.witnesses.sglang import adapter


def given(*names):
    return {name: torch.arange(100.0 * at, 100 * at + 24).reshape(4, 6) for at, name in enumerate(names, 1)}


def placed(parameters, tensors, loader):
    """What was seen while `loader` loaded the tensors; each piece is held against the tensor that it came from."""
    poison(parameters.values())
    with Trace(parameters.values()) as trace:
        loader(parameters, trace.feed(tensors.items()))
    placement = Placement.of(trace, parameters)
    for name, pieces in placement.pieces.items():
        for piece in pieces:
            assert difference(piece.actual(parameters[piece.param]), piece.cast(piece.taken(tensors[name]))) is None
    return placement


def counts(placement, tensors):
    return {name: covered(tensor.numel(), placement.parts(name)) for name, tensor in tensors.items()}


def rows(parameters, weights):
    for at, (_, tensor) in enumerate(weights):
        parameters["fused"].narrow(0, 4 * at, 4).copy_(tensor)


def in_threads(parameters, weights):
    with ThreadPoolExecutor() as pool:
        for at, (_, tensor) in enumerate(weights):
            pool.submit(parameters["fused"].narrow(0, 4 * at, 4).copy_, tensor).result()


def twice(parameters, weights):
    for name, tensor in weights:
        parameters["fused"][2 if name == "b" else 0 :].copy_(tensor[: 2 if name == "b" else 4])


def computed(parameters, weights):
    (_, one), (_, other) = weights
    parameters["fused"].copy_(torch.cat([one, other * 2]))


def into_a_view(parameters, weights):
    """Of joined weights, one of which is overwritten."""
    first, second, third = (tensor for _, tensor in weights)
    both = torch.cat([first, second])
    parameters["a"].data, parameters["b"].data = both[:4], both[4:]
    parameters["b"].copy_(third)


def reused(parameters, weights):
    """Memory that is used again, each time for another tensor."""
    for name, tensor in weights:
        buffer = torch.empty(4, 6)
        buffer.copy_(tensor)
        parameters[name].copy_(buffer)
        del buffer


def zeroed(parameters, weights):
    """What a rank does with a bias that another one adds: made zero where it was given, then copied."""
    for at, (_, tensor) in enumerate(weights):
        parameters["fused"].narrow(0, 4 * at, 4).copy_(tensor.zero_() if at else tensor)


FUSED, EACH, ALL = {"fused": (8, 6)}, {"a": (4, 6), "b": (4, 6)}, {"a": 24, "b": 24}
# Shapes of the parameters, how many elements of each tensor they hold then, and of what the others are computed.
LOADERS = {
    **dict.fromkeys((rows, in_threads), (FUSED, ALL, {})),
    twice: ({"fused": (4, 6)}, {"a": 12, "b": 12}, {}),
    computed: (FUSED, {"a": 24, "b": 0}, {"fused": {"b"}}),
    into_a_view: (EACH, {"a": 24, "b": 0, "c": 24}, {}),
    reused: (EACH, ALL, {}),
    zeroed: (FUSED, {"a": 24, "b": 0}, {}),
}


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
def test_every_element_is_followed_back(loader):
    shapes, held, of = LOADERS[loader]
    tensors = given(*held)
    placement = placed({name: torch.empty(shape) for name, shape in shapes.items()}, tensors, loader)
    assert (counts(placement, tensors), placement.computed) == (held, of)


def test_tensors_and_parameters_may_begin_anywhere_in_a_storage():
    """As those of a reader that reads whole pieces of a file."""
    storage = torch.arange(100.0)
    tensors = {"a": storage[10:34].view(4, 6), "b": storage[40:64].view(4, 6)}
    placement = placed({"fused": torch.empty(80)[12:60].view(8, 6)}, tensors, rows)
    assert counts(placement, tensors) == {"a": 24, "b": 24}
    (piece,) = placement.pieces["b"]
    assert (piece.into, piece.part) == (Region(24, (4, 6), (6, 1)), Region(0, (4, 6), (6, 1)))


def test_casts_and_bits_in_another_dtype():
    def cast(parameters, weights):
        for name, tensor in weights:
            parameters[name].copy_(tensor.view(torch.int32) if name == "bits" else tensor)

    parameters = {"bits": torch.empty(4, 6, dtype=torch.int32), "cast": torch.empty(4, 6, dtype=torch.bfloat16)}
    tensors = given("bits", "cast")
    assert counts(placed(parameters, tensors, cast), tensors) == {"bits": 24, "cast": 24}


@pytest.mark.parametrize(("behind", "wrong"), [(0, []), (1, [text_with("96 0 written")])])
def test_zeros_behind_the_values_need_no_place(behind, wrong):
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


def experts(parameters, weights):
    for name, tensor in weights:
        _, layer, _, expert, which = name.split(".")
        parameters[f"layers.{layer}.w13"][int(expert), 4 * (which == "up") :][:4].copy_(tensor)


def test_the_place_of_a_missing_tensor_is_told_from_others():
    each = ((layer, expert, part) for layer in range(3) for expert in range(4) for part in ("gate", "up"))
    names = [f"layers.{layer}.experts.{expert}.{part}" for layer, expert, part in each]
    missing = "layers.2.experts.3.up"
    tensors = given(*(name for name in names if name != missing))
    placement = placed({f"layers.{layer}.w13": torch.empty(4, 8, 6) for layer in (0, 1, 2)}, tensors, experts)
    assert placement.predicted(missing) == ("layers.2.w13", Region(3 * 48 + 24, (4, 6), (6, 1)))
    assert placement.predicted("layers.2.experts.3.down") is None


def test_what_is_covered_is_counted_once():
    halves = [Region(0, (4, 3), (6, 1)), Region(3, (4, 3), (6, 1))]
    assert covered(24, halves) == 24
    assert covered(24, halves[:1] * 2) == 12
    assert covered(24, [Region(0, (12,), (1,)), Region(6, (12,), (1,))]) == 18
    assert covered(24, [Region(0, (6, 4), (1, 6))]) == 24
    assert covered(24, [Region(5, (2, 3), (0, 1))]) == 3
    assert covered(24, [Region(0, (4,), (6,)), Region(7, (), ())]) == 5
    assert covered(0, []) == covered(7, []) == 0
