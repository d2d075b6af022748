"""Logits by SGLang's own forward pass on the CPU, no kernels: `python -m support.sglang_cpu_logits MODELS OUT`.

MODELS has a model in each directory. For each, OUT gets NAME.pt, the logits of `families.case.tokens` in float32
[2, 16, vocabulary], or NAME.txt with what SGLang raised. SGLang has torch paths for most of what its model classes
compute. Ours is only the memory for keys and values, and experts are told to take SGLang's torch path. `run` starts it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from families.case import tokens
from torch import Tensor, nn

from ckptkit.verify.witnesses.loading.engine import ModelBuild
from ckptkit.verify.witnesses.process.exit_report import ExitReport, describe_error
from ckptkit.verify.witnesses.sglang.adapter import build
from support.forking import ran

Weights = Iterator[tuple[str, Tensor]]


def run(models, out, log):
    """The logits, or what was raised, by the name of the model's directory."""
    out.mkdir()
    assert ran("sglang", log, "support.sglang_cpu_logits", models, out), log.read_text(errors="replace")[-3000:]
    logits = {path.stem: torch.load(path) for path in out.glob("*.pt")}
    return logits | {path.stem: path.read_text() for path in out.glob("*.txt")}


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


def main():
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    for path in sorted(models.iterdir()):

        def loading(model, weights, device):
            model.load_weights(weights)

        try:
            model = build(ModelBuild(path, out), loading, ExitReport(out / "report"))
            torch.save(logits_of(model, tokens()), out / f"{path.name}.pt")
        except Exception as error:  # noqa: BLE001 - it is the answer
            (out / f"{path.name}.txt").write_text(describe_error(error))


if __name__ == "__main__":
    main()
