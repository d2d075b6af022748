"""What a check costs beside a sync of 8 GB on a GPU: `python -m support.sync_cost sglang|vllm OUT [LAYERS]`.

A model of Qwen3-4B's shapes with random weights, 36 LAYERS unless given. The trainer holds them in this process. The
engine is another, which gets handles of GPU memory: of SGLang a server, in buckets; of vLLM the engine's own process,
in one layerwise reload. That is about the quickest sync there is, so the share of the check is at its largest. A line
of OUT a sync: its seconds, those of its check, and their ratio over ten where every tenth is checked.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from ckptkit.hooks import WeightSyncCheck
from support.vllm_logits import ON_GPU, SETTINGS

LAYERS, SYNCS, EVERY = 36, 6, 10
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Weights = dict[str, Tensor]
Sync = Callable[[Weights, int], None]


def made(path: Path, layers: int) -> Weights:
    """Writes config.json; the weights are on the device alone."""
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=151936 if layers == LAYERS else 1024,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    config.save_pretrained(path)
    with torch.device("meta"):
        named = Qwen3ForCausalLM(config).named_parameters()
    return {name: torch.randn(one.shape, device=DEVICE, dtype=torch.bfloat16) / 50 for name, one in named}


@contextmanager
def sglang(path: Path) -> Iterator[tuple[WeightSyncCheck, Sync]]:
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    from support.sync_servers import buckets, started, wait

    monkey_patch_torch_reductions()
    with started(path, 1, path.parent / "server.log", "--load-format", "dummy") as server:
        wait(server, 300)

        def sync(sent: Weights, version: int) -> None:
            for bucket in buckets(list(sent.items()), cuts_layers=False):
                server.send(bucket, version)

        yield WeightSyncCheck(server.url), sync


@contextmanager
def vllm(path: Path) -> Iterator[tuple[WeightSyncCheck, Sync]]:
    os.environ.update(SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"})
    sys.modules["deep_gemm"] = None  # type: ignore[assignment]
    from vllm import LLM

    llm = LLM(
        model=str(path),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=2,
        disable_log_stats=True,
        worker_extension_cls="support.vllm_kept.Updated",
        **(ON_GPU if DEVICE == "cuda" else {}),
    )

    def sync(sent: Weights, version: int) -> None:
        llm.collective_rpc("load_handles", args=(bytes(ForkingPickler.dumps(list(sent.items()))),))

    yield WeightSyncCheck(llm.collective_rpc, program="vllm"), sync
    llm.llm_engine.engine_core.shutdown()


def main() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    engine, out = {"sglang": sglang, "vllm": vllm}[sys.argv[1]], Path(sys.argv[2])
    path = out.parent / f"model-{sys.argv[1]}"
    sent = made(path, int(sys.argv[3]) if len(sys.argv) > 3 else LAYERS)
    with engine(path) as (check, sync), out.open("w") as lines:
        for version in range(1, SYNCS + 1):
            for tensor in sent.values():
                tensor.mul_(1 + 1 / 64)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            sync(sent, version)
            seconds = time.perf_counter() - began
            for name, tensor in sent.items():
                check.record(name, tensor)
            result = check.after_update(version if sys.argv[1] == "sglang" else None)
            assert result is not None
            row = {
                "bytes": sum(tensor.nbytes for tensor in sent.values()),
                "sync seconds": seconds,
                "check seconds": result.seconds,
                "ratio": result.seconds / EVERY / seconds,
                "by value": result.by_value,
                "unseen": result.unseen,
            }
            print(json.dumps(row), flush=True)
            print(json.dumps(row), file=lines, flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
