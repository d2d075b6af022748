"""Runs inside an engine's workers, as its `worker_extension_cls`: read-back, poison, and updates.

An update goes through vLLM's layerwise reload, as in its own transfer engines: begun once, then loaded in buckets, then
finished. Each worker reads the buckets itself, so no transport is tested. Source: vLLM 0.25.1,
`distributed/weight_transfer/ipc_engine.py`.
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

    # Its kernels keep copies of weights outside modules; torch's own use the weights themselves.
    ops._supports_onednn = False
    CPUFusedMOE.check_grouped_gemm = lambda self, layer: (False, "none")


_materialize = layerwise.materialize_layer


def _materialize_poisoned(layer: nn.Module, info: Any) -> None:
    """Allocates a layer that is loaded again, with poison, so that tensors without an update are found."""
    fresh = [name for name, tensor in layer._parameters.items() if tensor is not None and tensor.is_meta]
    _materialize(layer, info)
    poison(layer.get_parameter(name).detach() for name in fresh)


layerwise.materialize_layer = _materialize_poisoned


class LiveWorker:
    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: Any

    def live_held(self) -> dict[str, tuple[str, int]]:
        return describe_tensors(self.model_runner.get_model())

    def live_poison(self) -> None:
        fill(self.model_runner.get_model(), VLLM.has_default)

    def live_update(self, path: str) -> None:
        from vllm.config import set_current_vllm_config

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            layerwise.initialize_layerwise_reload(model)
            for bucket in buckets(HfCheckpoint(path)):
                model.load_weights((name, tensor.to(self.device)) for name, tensor in bucket)
            layerwise.finalize_layerwise_reload(model, self.model_config)
