"""The layers, with their parameters."""

import sys

import torch
from torch import nn

distributed, fp8, ops = (sys.modules[f"{__name__}.{name}"] for name in ("distributed", "fp8", "ops"))


def _parameter(*shape, params_dtype, device):
    # NaN shows where a weight was never written.
    return nn.Parameter(torch.full(shape, float("nan"), dtype=params_dtype, device=device))


class _Layer(nn.Module):
    """A layer whose extra state is empty, as without FP8."""

    fp8 = False
    fp8_calibration = False
    fp8_meta = {"fp8_checkpoint": False}  # noqa: RUF012

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        if state is not None and state.numel():
            raise ValueError("extra state of FP8 in a layer without FP8")

    def init_fp8_metadata(self, num_gemms=1):
        """Nothing to prepare without FP8."""


class Linear(_Layer):
    """`weight` [out, in] of this rank, cut along axis 0 (column parallel) or 1 (row parallel)."""

    def __init__(
        self,
        in_features,
        out_features,
        *,
        tp_size=1,
        parallel_mode=None,
        bias=True,
        params_dtype=torch.float32,
        device="cpu",
        **rest,
    ):
        super().__init__()
        self.parallel_mode = parallel_mode
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        self.in_features, self.out_features = columns, rows
        self._add("weight", rows, columns, params_dtype=params_dtype, device=device)
        if bias:
            self._add("bias", rows, params_dtype=params_dtype, device=device)
        self.use_bias = bias

    def _add(self, name, *shape, params_dtype, device):
        parameter = _parameter(*shape, params_dtype=params_dtype, device=device)
        parallel = self.parallel_mode == "column" or (self.parallel_mode == "row" and len(shape) == 2)
        parameter.tensor_model_parallel = parallel
        parameter.partition_dim = 1 if self.parallel_mode == "row" else 0
        parameter.partition_stride = 1
        self.register_parameter(name, parameter)


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, **kwargs):
        super().__init__(in_features, out_features, **kwargs)
        self.layer_norm_weight = _parameter(
            in_features, params_dtype=kwargs["params_dtype"], device=kwargs.get("device", "cpu")
        )


class GroupedLinear(Linear):
    def __init__(self, num_gemms, in_features, out_features, *, bias=True, **kwargs):
        super().__init__(in_features, out_features, bias=False, **kwargs)
        self.num_gemms = num_gemms
        self.use_bias = bias
        where = {"params_dtype": kwargs["params_dtype"], "device": kwargs.get("device", "cpu")}
        del self.weight
        for expert in range(num_gemms):
            self._add(f"weight{expert}", self.out_features, self.in_features, **where)
            if bias:
                self._add(f"bias{expert}", self.out_features, **where)


class RMSNorm(_Layer):
    def __init__(
        self,
        normalized_shape=None,
        *,
        hidden_size=None,  # its older name
        params_dtype=torch.float32,
        device="cpu",
        **rest,
    ):
        super().__init__()
        self.weight = _parameter(hidden_size or normalized_shape, params_dtype=params_dtype, device=device)


class LayerNorm(RMSNorm):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.bias = nn.Parameter(torch.full_like(self.weight, float("nan")))


class DotProductAttention(nn.Module):
    """No parameters. Megatron does not save its extra state, and Transformer Engine does not miss it."""

    def __init__(self, *arguments, **keywords):
        super().__init__()
