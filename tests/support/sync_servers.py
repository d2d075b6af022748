"""Updates real SGLang servers on GPUs and checks each: `python -m support.sync_servers ROOT TP`.

It writes a line of ROOT/reports.jsonl a check. ROOT has the models `moe`, `mla` and `int4`, of which the last is the
first in INT4. All servers start at once. Weights go as trainers send them: as handles of GPU memory in a request over
HTTP, in several buckets. `run` starts this.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from ckptkit import CkptkitError
from ckptkit.app.job.engines import waiting
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.hooks import WeightSyncCheck
from support import models
from support.processes import run_logged
from support.sync_engines import served

BEGIN, END = "quant.online.sglang_reload.begin", "quant.online.sglang_reload.end"
EXPERTS = [f"model.layers.3.mlp.experts.{expert}.up_proj.weight" for expert in (2, 5)]
LOST = "model.layers.4."  # what a dropped bucket would have held
Weights = Mapping[str, Tensor]
Steps = Iterator[tuple[str, Any]]


def run(root: Path, tp: int) -> tuple[dict[str, Any], str]:
    """Results by step, as far as it came, and the end of the logs."""
    run_logged(root / "log", "support.sync_servers", root, tp, gpu=True)
    reports = root / "reports.jsonl"
    found = dict(map(json.loads, reports.read_text().splitlines())) if reports.exists() else {}
    logs = [root / "log", *sorted(root.glob("server-*.log"))]
    return found, "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


class Server:
    """A running server that weights are sent to."""

    def __init__(self, url: str, tp: int) -> None:
        self.url, self._tp = url, tp

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})  # noqa: S310 - our server
        with waiting(f"{self.url}/{path}"), urlopen(request, timeout=300) as answer:  # noqa: S310
            answer.read()

    def send(self, pairs: Sequence[tuple[str, Tensor]], version: object, loader: str | None = None) -> None:
        from sglang.srt.utils import MultiprocessingSerializer

        handles = [MultiprocessingSerializer.serialize(list(pairs), output_str=True) for _ in range(self._tp)]
        body = {"serialized_named_tensors": handles, "weight_version": str(version), "flush_cache": False}
        self.ask("update_weights_from_tensor", {**body, "load_format": loader})
        torch.cuda.synchronize()


@contextmanager
def started(model: Path, tp: int, log: Path, *options: str) -> Iterator[Server]:
    """A server of this directory; not yet ready to answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--port", str(port), "--tp", str(tp), "--dtype", "bfloat16", "--skip-tokenizer-init", "--skip-server-warmup"),
        *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--disable-cuda-graph", "--disable-overlap-schedule", "--disable-radix-cache", "--random-seed", "0"),
        *("--max-total-tokens", "4096", "--max-running-requests", "4", "--mem-fraction-static", "0.3", *options),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield Server(f"http://127.0.0.1:{port}", tp)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait(server: Server, seconds: float = 200) -> None:
    """Until the server says what it serves."""
    end = time.monotonic() + seconds
    with waiting(f"{server.url} to start"):
        while True:
            try:
                return server.ask("model_info")
            except (HTTPError, URLError, OSError):
                if time.monotonic() > end:
                    raise
                time.sleep(1)


def weights(path: Path, version: int) -> dict[str, Tensor]:
    """What a trainer holds after this many steps."""
    return {name: (one.float() * (1 + version / 64)).to(one.dtype).cuda() for name, one in models.tensors(path).items()}


def exchanged(given: Weights) -> dict[str, Tensor]:
    one, other = EXPERTS
    return {**given, one: given[other], other: given[one]}


def buckets(pairs: Sequence[tuple[str, Tensor]], cuts_layers: bool) -> Iterator[list[tuple[str, Tensor]]]:
    """At least 64 tensors each, with whole layers, as trainers send them; or 64 each, which cuts layers."""
    bucket: list[tuple[str, Tensor]] = []
    for pair in pairs:
        same_layer = bucket and pair[0].split(".")[:3] == bucket[-1][0].split(".")[:3]
        if len(bucket) >= 64 and (cuts_layers or not same_layer):
            yield bucket
            bucket = []
        bucket.append(pair)
    yield bucket


def update(
    check: WeightSyncCheck,
    servers: Sequence[Server],
    version: int,
    sent: Weights,
    arrived: Weights | None = None,
    **how: Any,
) -> Any:
    """One update in buckets; what the check says of it, and what both took in seconds."""
    began = time.perf_counter()
    pairs = list((sent if arrived is None else arrived).items())
    for server in servers:
        for bucket in buckets(pairs, how.get("cuts_layers", False)):
            server.send(bucket, how.get("as_version", version))
    took = time.perf_counter() - began
    for name, tensor in sent.items():
        check.record(name, tensor)
    return {**outcome(check, version), "update_seconds": took}


def outcome(check: WeightSyncCheck, version: int) -> dict[str, Any]:
    try:
        result = check.after_update(version)
    except CkptkitError as error:
        return {"raised": error.message, "details": error.details}
    assert result is not None
    return {"raised": "", **vars(result)}


def of_bf16(path: Path, servers: Sequence[Server]) -> Steps:
    """Good updates of two engines of one model, and every way to spoil one."""
    check = WeightSyncCheck([server.url for server in servers])
    name = path.name
    yield f"{name}: 1", update(check, servers, 1, weights(path, 1))
    yield f"{name}: 2", update(check, servers, 2, weights(path, 2))
    sent = weights(path, 3)
    yield f"{name}: exchanged", update(check, servers, 3, sent, exchanged(sent))
    yield f"{name}: mended", update(check, servers, 4, weights(path, 4))
    sent = weights(path, 5)
    kept = {key: tensor for key, tensor in sent.items() if not key.startswith(LOST)}
    yield f"{name}: dropped bucket", update(check, servers, 5, sent, kept)
    yield f"{name}: mended again", update(check, servers, 6, weights(path, 6))
    yield f"{name}: old version", update(check, servers, 7, weights(path, 7), as_version=6)
    yield f"{name}: mended once more", update(check, servers, 8, weights(path, 8))
    if name == "mla":
        yield f"{name}: layers cut", update(check, servers, 10, weights(path, 10), cuts_layers=True)
    if len(servers) > 1:
        yield f"{name}: last engine", servers[-1].url
        yield f"{name}: last engine missed it", update(check, servers[:-1], 9, weights(path, 9))


def of_int4(int4: Path, bf16: Path, server: Server) -> Steps:
    """Experts repacked for Marlin's kernels: their checksums are not predicted, but change as what was sent does."""
    from quant.online import OnlineQuantizer

    check = WeightSyncCheck(server.url)
    online = OnlineQuantizer(HfCheckpoint(int4).config, int4)
    for version in (1, 2, 3):
        server.send([], version, BEGIN)
        for bucket in online.stream(weights(bf16, version).items()):
            server.send(list(bucket), version)
            for name, tensor in bucket:
                check.record(name, tensor)
        server.send([], version, END)
        yield f"int4: {version}", outcome(check, version)
    for name, tensor in (pair for bucket in online.stream(weights(bf16, 9).items()) for pair in bucket):
        check.record(name, tensor)
    server.ask("update_weight_version", {"new_version": "9", "abort_all_requests": False})
    yield "int4: new version, old weights", outcome(check, 9)


def cost_of_a_layer() -> dict[str, float]:
    """Seconds to look at the experts of a layer of Qwen3-30B-A3B on this GPU, once their number is known; and bytes.

    The engine that answers holds nothing, so this is the trainer's share alone.
    """
    version = 0

    def answer(path: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
        place = dict.fromkeys(("tp_rank", "dp_rank", "pp_rank"), 0) | dict.fromkeys(
            ("tp_size", "dp_size", "pp_size"), 1
        )
        return 200, {
            "server_info": {"tp_size": 1, "version": "0", "quantization": None},
            "model_info": {"weight_version": str(version)},
            "weights_checker": {"success": True, "ranks": [{"checksums": {}, "parallelism_info": place}]},
        }[path]

    shapes = {"gate_proj": (768, 2048), "up_proj": (768, 2048), "down_proj": (2048, 768)}
    sent = {
        f"model.layers.0.mlp.experts.{expert}.{name}.weight": torch.randn(shape, device="cuda").bfloat16()
        for expert in range(128)
        for name, shape in shapes.items()
    }
    times = []
    with served(answer) as url:
        check = WeightSyncCheck(url, room=1 << 34)
        for version in range(4):
            for name, tensor in sent.items():
                check.record(name, tensor)
            result = check.after_update(version)
            assert result is not None
            times.append(result.seconds)
    return {"seconds": min(times), "bytes": float(sum(tensor.nbytes for tensor in sent.values()))}


def steps(root: Path, tp: int) -> Steps:
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()  # as trainers do, so that handles name a GPU by its UUID
    plan = {"moe": [root / "moe"] * (2 if tp == 1 else 1), "mla": [root / "mla"], "int4": [root / "int4"] * (tp == 1)}
    with ExitStack() as stack:
        servers = {
            name: [
                stack.enter_context(
                    started(path, tp, root / f"server-{name}-{n}.log", "--custom-weight-loader", BEGIN, END)
                )
                for n, path in enumerate(paths)
            ]
            for name, paths in plan.items()
        }
        yield "a layer", cost_of_a_layer()
        for name in ("moe", "mla"):
            for server in servers[name]:
                wait(server)
            yield from of_bf16(root / name, servers[name])
        for server in servers["int4"]:
            wait(server)
            yield from of_int4(root / "int4", root / "moe", server)


def main() -> None:
    root, tp = Path(sys.argv[1]), int(sys.argv[2])
    began = time.monotonic()
    with (root / "reports.jsonl").open("w") as reports:
        for step, result in steps(root, tp):
            print(f"== {step} after {time.monotonic() - began:.0f} s", flush=True)
            reports.write(json.dumps([step, result]) + "\n")
            reports.flush()


if __name__ == "__main__":
    main()
