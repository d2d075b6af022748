"""Logits by SGLang's own forward pass on the CPU, without kernels.

SGLang has torch paths for most of what its model classes compute. Ours is only the memory for keys and values, and
experts are told to take SGLang's torch path.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from families.case import tokens
from torch import Tensor, nn

from ckptkit.verify.witnesses.loading.engine import ModelBuild
from ckptkit.verify.witnesses.process.exit_report import ExitReport, describe_error
from ckptkit.verify.witnesses.sglang.adapter import build
from support.calls import call


def run(paths):
    """By name of the model's directory: logits of `families.case.tokens` [2, 16, vocabulary], or what SGLang raised."""
    return call("sglang", _answers, paths)


class Memory:
    """Keys and values of every layer [tokens, heads, size], as SGLang's pools hold them."""

    def __init__(self):
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def set_kv_buffer(self, layer, location, keys, values):
        """All tokens come at once, and lie in their order."""
        self.keys[layer.layer_id], self.values[layer.layer_id] = keys, values

    def get_key_buffer(self, layer):
        return self.keys[layer]

    def get_value_buffer(self, layer):
        return self.values[layer]


def logits_of(model, prompts):
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    class Attention(TorchNativeAttnBackend):
        """There are no tokens before the prompt, so what is given is all, whether or not the class wants it kept."""

        def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, **more):
            return super().forward_extend(q, k, v, layer, batch, **more)

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "forward_cpu"):
            method._forward_method = method.forward_cpu
    count, length = prompts.shape
    flat, lengths = prompts.flatten(), torch.full((count,), length)
    table = SimpleNamespace(req_to_token=torch.arange(flat.numel()).view(count, length))
    runner = SimpleNamespace(device="cpu", req_to_token_pool=table, token_to_kv_pool=Memory())
    positions = torch.arange(length).repeat(count)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=count,
        input_ids=flat,
        req_pool_indices=torch.arange(count),
        seq_lens=lengths,
        out_cache_loc=torch.arange(flat.numel()),
        seq_lens_sum=flat.numel(),
        seq_lens_cpu=lengths,
        positions=positions,
        extend_num_tokens=flat.numel(),
        extend_seq_lens=lengths,
        extend_prefix_lens=torch.zeros(count, dtype=torch.int64),
        extend_seq_lens_cpu=lengths.tolist(),
        extend_prefix_lens_cpu=[0] * count,
    )
    with torch.no_grad(), forward_context(ForwardContext(Attention(runner))):
        hidden = model.model(flat, positions, batch)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        result = nn.functional.linear(hidden, model.lm_head.weight)
    return result.float().view(count, length, -1)


def _answers(paths):
    found = {}
    with TemporaryDirectory() as folder:
        for path in paths:
            try:
                model = build(ModelBuild(path, Path(folder)), load_weights, ExitReport(Path(folder) / "report"))
                found[path.name] = logits_of(model, tokens())
            except Exception as error:  # noqa: BLE001 - it is the answer
                found[path.name] = describe_error(error)
    return found


def load_weights(model, weights, device):
    """A loader for an adapter's `build`."""
    model.load_weights(weights)
