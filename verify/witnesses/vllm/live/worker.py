"""Runs inside an engine's workers, as its `worker_extension_cls`: what they hold, poison, and updates.

An update goes through vLLM's layerwise reload, as that of its own transfer engines does: begun once, then loaded in
buckets, then finished. Each worker reads the buckets itself, so no transport is tried.
Source: vLLM 0.25.1, `distributed/weight_transfer/ipc_engine.py`.
"""

from __future__ import annotations

from typing import Any

import vllm._custom_ops as ops
from torch import nn
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform

from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.verify.witnesses.live.readback import describe_tensors, fill
from ckptkit.verify.witnesses.live.server import buckets
from ckptkit.verify.witnesses.loading.bits import poison
from ckptkit.verify.witnesses.vllm.facts import VLLM

if current_platform.is_cpu():
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    # Its kernels keep copies of weights that no module shows; torch's own take the weights themselves.
    ops._supports_onednn = False
    CPUFusedMOE.check_grouped_gemm = lambda self, layer: (False, "none")


_materialize = layerwise.materialize_layer


def _poisoned(layer: nn.Module, info: Any) -> None:
    """Takes memory for a layer that is loaded again: what never comes must not look like what was there before."""
    fresh = [name for name, tensor in layer._parameters.items() if tensor is not None and tensor.is_meta]
    _materialize(layer, info)
    poison(layer.get_parameter(name).detach() for name in fresh)


layerwise.materialize_layer = _poisoned


class LiveWorker:
    """What a worker is asked by `collective_rpc`."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: Any

    def live_held(self) -> dict[str, tuple[str, int]]:
        """Digest and bytes of everything that the model holds, by name."""
        return describe_tensors(self.model_runner.get_model())

    def live_poison(self) -> None:
        """Poisons every parameter."""
        fill(self.model_runner.get_model(), VLLM.has_default)

    def live_update(self, path: str) -> None:
        """The whole checkpoint, bucket by bucket."""
        from vllm.config import set_current_vllm_config

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            layerwise.initialize_layerwise_reload(model)
            for bucket in buckets(HfCheckpoint(path)):
                model.load_weights((name, tensor.to(self.device)) for name, tensor in bucket)
            layerwise.finalize_layerwise_reload(model, self.model_config)
