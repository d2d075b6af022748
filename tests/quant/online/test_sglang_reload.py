"""Opening and closing a weight update inside an engine; with SGLang's own layers in test_online_sglang.py."""

import pytest
import torch
from support.messages import refusal
from torch import nn

from ckptkit.quant.online.sglang_reload import begin, end


class Scheme:
    """Notes what SGLang's scheme for packed experts would do with their layer."""

    def __init__(self):
        self.calls: list[str] = []

    def restore_weights_before_loading(self, layer):
        self.calls.append("restore")
        layer.is_marlin_converted = False

    def process_weights_after_loading(self, layer):
        self.calls.append("process")
        layer.is_marlin_converted = True
        layer.workspace = "new"


EXPERTS = "CompressedTensorsWNA16MoE"


def engine_model(*kinds):
    model = nn.Module()
    model.add_module("plain", nn.Linear(2, 2))
    for place, kind in enumerate(kinds):
        layer = nn.Module()
        layer.scheme, layer.workspace, layer.is_marlin_converted = type(kind, (Scheme,), {})(), "old", True
        name = "weight_packed" if kind == "CompressedTensorsWNA16" else "w13_weight_packed"
        layer.register_parameter(name, nn.Parameter(torch.zeros(1)))
        model.add_module(f"layer{place}", layer)
    return model


def test_an_engine_opens_and_closes_every_packed_layer_and_keeps_the_workspace():
    """CUDA graphs hold the address of the workspace. A draft model without packed experts is left alone."""
    for model in (engine_model(EXPERTS, EXPERTS), engine_model()):
        before = model.plain.weight.clone()
        begin(model, [])
        end(model, [])
        assert torch.equal(model.plain.weight, before)
        packed = [layer for name, layer in model.named_children() if name != "plain"]
        assert all(layer.scheme.calls == ["restore", "process"] and layer.workspace == "old" for layer in packed)


@pytest.mark.parametrize("kind", ["CompressedTensorsWNA16", "CompressedTensorsWNA16TritonMoE"])
def test_an_engine_refuses_other_layers_before_it_touches_any(kind):
    model = engine_model(EXPERTS, kind)
    refusal(rf"layer1 .*\({kind}\)", begin, model, [])
    assert [model.layer0.scheme.calls, model.layer1.scheme.calls] == [[], []]
