"""Engines for tests of weight updates: servers that answer as SGLang's and vLLM's do, and a model kept as they keep it.

How Qwen3-MoE is fused and cut is written out here by hand, one rank after another, and shares nothing with ckptkit.
"""

import hashlib
import json
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from support.remote_servers import SilentHandler, serving

LAYERS, HIDDEN, HEADS, GROUPS, SIZE, EXPERTS, INTER, VOCAB = 3, 8, 4, 2, 4, 4, 8, 100


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def sha256(tensor):
    return hashlib.sha256(raw(tensor)).hexdigest()


def digest(tensor):
    return sha256(tensor)[:16]


@contextmanager
def served(answer):
    """The address of a server; `answer` gives status and JSON for a path and a request's JSON."""

    class Handler(SilentHandler):
        def do_GET(self):  # noqa: N802
            self._reply({})

        def do_POST(self):  # noqa: N802
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body):
            status, found = answer(self.path.strip("/"), {**body, "headers": dict(self.headers)})
            self.answer(status, json.dumps(found).encode())

    with serving(Handler) as address:
        yield address


def weights(seed, layers=LAYERS):
    """A Qwen3-MoE under HF names in BF16; its first layer is dense."""
    random = torch.Generator().manual_seed(seed)

    def made(*shape):
        return torch.randn(shape, generator=random).bfloat16()

    found = {"model.embed_tokens.weight": made(VOCAB, HIDDEN)}
    for layer in range(layers):
        base = f"model.layers.{layer}"
        found[f"{base}.input_layernorm.weight"] = made(HIDDEN)
        for name, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            found[f"{base}.self_attn.{name}_proj.weight"] = made(heads * SIZE, HIDDEN)
        found[f"{base}.self_attn.o_proj.weight"] = made(HIDDEN, HEADS * SIZE)
        blocks = [f"{base}.mlp"]
        if layer:
            found[f"{base}.mlp.gate.weight"] = made(EXPERTS, HIDDEN)
            blocks = [f"{base}.mlp.experts.{expert}" for expert in range(EXPERTS)]
        for block in blocks:
            found[f"{block}.gate_proj.weight"] = made(INTER, HIDDEN)
            found[f"{block}.up_proj.weight"] = made(INTER, HIDDEN)
            found[f"{block}.down_proj.weight"] = made(HIDDEN, INTER)
    return found | {"model.norm.weight": made(HIDDEN), "lm_head.weight": made(VOCAB, HIDDEN)}


class FakeEngine:
    """Holds what it was given last under each name, and shows it as ranks of SGLang 0.5.16 keep it."""

    def __init__(self, tp=1, ep=1, **changes):
        self.tp, self.ep, self.version = tp, ep, "default"
        self.held: dict[str, Tensor] = {}
        self.asked: list[str] = []
        self.info: dict[str, Any] = {"tp_size": tp, "ep_size": ep, "version": "0.5.16", "quantization": None, **changes}

    def load(self, given, version):
        self.held |= given
        self.version = str(version)

    def rank(self, rank):
        def rows(tensor, size, index):
            each = tensor.shape[0] // size
            return tensor[index * each : (index + 1) * each]

        def columns(tensor, size, index):
            return rows(tensor.T, size, index).T

        def padded(tensor):
            return torch.cat([tensor, torch.zeros(128 - VOCAB, HIDDEN, dtype=tensor.dtype)])

        held, tp = self.held, self.tp
        copies = max(tp // GROUPS, 1)  # ranks that hold the same heads of k and v
        found = {name: rows(padded(held[name]), tp, rank) for name in ("model.embed_tokens.weight", "lm_head.weight")}
        found["model.norm.weight"] = held["model.norm.weight"]
        for layer in range(LAYERS):
            base = f"model.layers.{layer}"
            found[f"{base}.input_layernorm.weight"] = held[f"{base}.input_layernorm.weight"]
            q, k, v, o = (held[f"{base}.self_attn.{name}_proj.weight"] for name in "qkvo")
            groups = min(tp, GROUPS)
            parts = [rows(q, tp, rank), rows(k, groups, rank // copies), rows(v, groups, rank // copies)]
            found[f"{base}.self_attn.qkv_proj.weight"] = torch.cat(parts)
            found[f"{base}.self_attn.o_proj.weight"] = columns(o, tp, rank)
            if not layer:
                gate, up, down = (held[f"{base}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
                found[f"{base}.mlp.gate_up_proj.weight"] = torch.cat([rows(gate, tp, rank), rows(up, tp, rank)])
                found[f"{base}.mlp.down_proj.weight"] = columns(down, tp, rank)
                continue
            found[f"{base}.mlp.gate.weight"] = held[f"{base}.mlp.gate.weight"]
            etp = tp // self.ep
            block, index = rank // etp, rank % etp
            first, second = [], []
            for expert in range(block * EXPERTS // self.ep, (block + 1) * EXPERTS // self.ep):
                name = f"{base}.mlp.experts.{expert}"
                gate, up, down = (held[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
                first.append(torch.cat([rows(gate, etp, index), rows(up, etp, index)]))
                second.append(columns(down, etp, index))
            found[f"{base}.mlp.experts.w13_weight"] = torch.stack(first)
            found[f"{base}.mlp.experts.w2_weight"] = torch.stack(second)
        return found

    def checksums(self, rank):
        return {name: digest(tensor) for name, tensor in self.rank(rank).items()}

    def answer(self, path, body):
        """What SGLang 0.5.16's `entrypoints/http_server.py` answers."""
        self.asked.append(path)
        if path == "server_info":
            return 200, self.info
        if path == "model_info":
            return 200, {"model_path": "/hf", "weight_version": self.version}
        assert (path, body["action"]) == ("weights_checker", "checksum")
        sizes = {"dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "size": self.tp}
        ranks = [
            {
                "checksums": self.checksums(rank),
                "per_gpu_checksum": "",
                "parallelism_info": {"tp_rank": rank, "tp_size": self.tp, "rank": rank, **sizes},
            }
            for rank in range(self.tp)
        ]
        return 200, {"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": ""}


class FakeVllm(FakeEngine):
    """The same as ranks of vLLM 0.33 keep it, in one pipeline stage or two.

    Without `checker` it answers as 0.31 and older do, by a worker extension, unless it has no `reader` either.
    """

    def __init__(self, tp=1, pp=1, *, checker=True, reader=True, **changes):
        super().__init__(tp)
        self.pp, self.checker, self.reader = pp, checker, reader
        sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, **changes}
        self.info = {"vllm_config": {"parallel_config": sizes, "model_config": {"quantization": None}}}

    def stage(self, stage, rank):
        """The parameters of a rank of a stage: the first has the first layer and the embeddings, the last the rest."""
        found = self.rank(rank)
        early = ("model.embed_tokens.", "model.layers.0.")
        return {
            name.replace(".experts.", ".experts.routed_experts."): tensor
            for name, tensor in found.items()
            if self.pp == 1 or name.startswith(early) == (stage == 0)
        }

    def workers(self, digest):
        """What vLLM's `compute_weight_checksums` gives, of each worker, or `WeightReader`."""
        return [
            {f"dp0:pp{stage}:pcp0:tp{rank}:{name}": digest(one) for name, one in self.stage(stage, rank).items()}
            for stage in range(self.pp)
            for rank in range(self.tp)
        ]

    def rpc(self, method):
        """As `collective_rpc` of an engine that is no server."""
        self.asked.append(method)
        return [self.info["vllm_config"]] if method == "ckptkit_setup" else self.workers(mixed)

    def answer(self, path, body):
        self.asked.append(path)
        match path:
            case "server_info?config_format=json":
                return 200, self.info
            case "weight_info" if self.checker:
                return 200, {"weight_version": self.version}
            case "weight_checker" if self.checker:
                assert body["action"] == "checksum"
                return 200, {"checksums": {key: one for worker in self.workers(sha256) for key, one in worker.items()}}
            case "collective_rpc" if self.reader:
                assert body["method"] == "ckptkit_weights"
                return 200, {"results": self.workers(mixed)}
            case "collective_rpc":
                return 500, {"detail": "Method 'ckptkit_weights' is not implemented."}
            case _:
                return 404, {"detail": "Not Found"}


def mixed(tensor):
    """As ckptkit's worker extension computes it: splitmix64 of each word of 8 bytes with its place, summed."""
    found = bytearray(raw(tensor))
    size, mask, total = len(found), (1 << 64) - 1, len(found)
    found += bytes(-size % 8)
    for place in range(len(found) // 8):
        word = int.from_bytes(found[place * 8 : place * 8 + 8], "little") ^ place * 0x9E3779B97F4A7C15 & mask
        for factor, shift in ((0xBF58476D1CE4E5B9, 27), (0x94D049BB133111EB, 31)):
            word = word * factor & mask
            word ^= (word - (word >> 63 << 64)) >> shift & mask  # the sign goes along, as in int64
        total += word
    return f"{total & mask:016x}"
