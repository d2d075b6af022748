"""Opening and closing a weight update inside an engine; with SGLang's own layers in test_online_sglang.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckptkit.core.errors import CkptkitError
from ckptkit.quant.online.sglang_reload import begin, end


class Scheme:
    """What SGLang's scheme for packed experts does with their layer, noted."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        self.calls.append("restore")
        layer.is_marlin_converted = False

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.calls.append("process")
        layer.is_marlin_converted = True
        layer.workspace = "new"


def engine_model(**schemes: str) -> tuple[nn.Module, dict[str, Scheme]]:
    """A model with one packed layer a scheme, and the scheme objects."""
    model, made = nn.Module(), {}
    for name, kind in schemes.items():
        layer = nn.Module()
        made[name] = type(kind, (Scheme,), {})()
        layer.scheme, layer.workspace, layer.is_marlin_converted = made[name], "old", True
        layer.register_parameter(
            "weight_packed" if kind == "CompressedTensorsWNA16" else "w13_weight_packed", nn.Parameter(torch.zeros(1))
        )
        model.add_module(name, layer)
    model.add_module("plain", nn.Linear(2, 2))
    return model, made


def test_an_engine_opens_and_closes_every_packed_layer_and_keeps_the_workspace() -> None:
    """CUDA graphs hold the address of the workspace."""
    model, schemes = engine_model(one="CompressedTensorsWNA16MoE", two="CompressedTensorsWNA16MoE")
    begin(model, [])
    end(model, [])
    assert [scheme.calls for scheme in schemes.values()] == [["restore", "process"]] * 2
    assert model.one.workspace == model.two.workspace == "old"


@pytest.mark.parametrize("kind", ["CompressedTensorsWNA16", "CompressedTensorsWNA16TritonMoE"])
def test_an_engine_refuses_other_layers_before_it_touches_any(kind: str) -> None:
    model, schemes = engine_model(experts="CompressedTensorsWNA16MoE", other=kind)
    with pytest.raises(CkptkitError, match=rf"SGLang cannot load other again \({kind}\)"):
        begin(model, [])
    assert [scheme.calls for scheme in schemes.values()] == [[], []]


def test_a_draft_model_without_packed_experts_is_left_alone() -> None:
    model, _ = engine_model()
    before = model.plain.weight.clone()
    begin(model, [])
    end(model, [])
    assert torch.equal(model.plain.weight, before)
