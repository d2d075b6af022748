"""What the witness says of layers that their quantization methods change after loading: modules written here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import models
from torch import Tensor, nn

from verify.witnesses.loading.examine import Examination
from verify.witnesses.loading.job import Observation
from verify.witnesses.process.exit_report import PhaseLog
from verify.witnesses.sglang import adapter

Weights = Iterator[tuple[str, Tensor]]


class Method:
    """A quantization method."""

    def __init__(self, process: Callable[[nn.Module], None]) -> None:
        self.process_weights_after_loading = process


def nothing(layer: nn.Module) -> None:
    """Leaves the layer as it is."""


class Model(nn.Module):
    """Two layers and a norm, which has no method; `head` is the first layer's weight once more."""

    def __init__(self, process: Callable[[nn.Module], None], of_head: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
        self.norm, self.head = nn.LayerNorm(6, bias=False), nn.Linear(6, 4, bias=False)
        self.head.weight = self.one.weight
        self.one.quant_method = Method(nothing)  # type: ignore[assignment]
        self.two.quant_method = Method(process)  # type: ignore[assignment]
        self.head.quant_method = Method(of_head)  # type: ignore[assignment]

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def examined(
    tmp_path: Path, process: Callable[[nn.Module], None], of_head: Callable[[nn.Module], None] = nothing
) -> Examination:
    tensors = {"one.weight": torch.randn(4, 6), "two.weight": torch.randn(4, 6), "norm.weight": torch.randn(6)}
    with PhaseLog(tmp_path / "report") as phases:
        config = models.configs()["qwen2-tied"].to_dict()
        examination = Examination(adapter, config, tensors.items, lambda weights: weights, phases)
        examination(Model(process, of_head), iter(tensors.items()), torch.device("cuda"))
    assert list(examination.seen.equal) == list(tensors)
    return examination


def the_same(layer: nn.Module) -> None:
    """A parameter of its own with the same bits."""
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def in_place(layer: nn.Module) -> None:
    layer.weight.data[2, 3] = 7.0


def replaced(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous())


def cast(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().bfloat16())


def deleted(layer: nn.Module) -> None:
    del layer.weight


@pytest.mark.parametrize("process", [nothing, the_same])
def test_what_keeps_its_bits_is_fine(tmp_path: Path, process: Callable[[nn.Module], None]) -> None:
    examination = examined(tmp_path, process)
    assert (examination.seen.repacked, examination.seen.repacked_seen) == ((), 2)


@pytest.mark.parametrize(
    ("process", "what"),
    [
        (in_place, "1 of 24 elements differ, first at [2, 3]: 7.0 instead of"),
        (replaced, "elements differ"),
        (cast, "SGLang has made it [4, 6] bfloat16"),
        (deleted, "SGLang has taken it away"),
    ],
)
def test_what_changed_is_named(tmp_path: Path, process: Callable[[nn.Module], None], what: str) -> None:
    (found,) = examined(tmp_path, process).seen.repacked or ()
    assert isinstance(found, Observation)
    assert (found.tensor, found.param) == ("two.weight", "two.weight")
    assert what in found.what


def test_a_weight_that_two_layers_share_is_named_once(tmp_path: Path) -> None:
    (found,) = examined(tmp_path, nothing, of_head=in_place).seen.repacked or ()
    assert found.tensor == "one.weight"
