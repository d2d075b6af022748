"""Updates real SGLang servers on GPUs and checks each: `python -m support.sync_servers ROOT TP`.

Weights go as trainers send them: as handles of GPU memory in a request over HTTP, in several buckets.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import torch

from ckptkit.hooks import WeightSyncCheck
from ckptkit.verify.weight_sync.messages import waiting
from support.processes import run_logged
from support.sync_faults import SLEEP, checked, lost, outcome, tensors_of, weights

BEGIN, END = "ckptkit.quant.online.sglang_reload.begin", "ckptkit.quant.online.sglang_reload.end"
INT4 = "int4"  # its experts are repacked, and opened again for each update


def run(root, tp):
    run_logged(root / "log", "support.sync_servers", root, tp, gpu=True)
    reports = root / "reports.jsonl"
    found = dict(map(json.loads, reports.read_text().splitlines())) if reports.exists() else {}
    logs = [root / "log", *sorted(root.glob("server-*.log"))]
    return found, "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


class Server:
    def __init__(self, url, tp):
        self.url, self._tp = url, tp

    def ask(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})  # noqa: S310 - our server
        with waiting(f"{self.url}/{path}"), urlopen(request, timeout=300) as answer:  # noqa: S310
            answer.read()

    def send(self, pairs, version, loader=None):
        from sglang.srt.utils import MultiprocessingSerializer

        handles = [MultiprocessingSerializer.serialize(list(pairs), output_str=True) for _ in range(self._tp)]
        body = {"serialized_named_tensors": handles, "weight_version": str(version), "flush_cache": False}
        self.ask("update_weights_from_tensor", {**body, "load_format": loader})
        torch.cuda.synchronize()


@contextmanager
def started(model, tp, log, *options):
    """A server of this directory; not yet ready to answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(model)),
        *("--port", str(port), "--tp", str(tp), "--dtype", "bfloat16", "--skip-tokenizer-init", "--skip-server-warmup"),
        *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--disable-cuda-graph", "--disable-overlap-schedule", "--disable-radix-cache", "--random-seed", "0"),
        *("--max-total-tokens", "4096", "--max-running-requests", "4", "--mem-fraction-static", "0.8"),
        *("--enable-memory-saver", *options),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield Server(f"http://127.0.0.1:{port}", tp)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait(server, seconds=200):
    end = time.monotonic() + seconds
    with waiting(f"{server.url} to start"):
        while True:
            try:
                return server.ask("model_info")
            except (HTTPError, URLError, OSError):
                if time.monotonic() > end:
                    raise
                time.sleep(1)


def buckets(pairs, cuts_layers):
    """At least 64 tensors each, with whole layers, as trainers send them; or 64 each, which cuts layers."""
    bucket = []
    for pair in pairs:
        same_layer = bucket and pair[0].split(".")[:3] == bucket[-1][0].split(".")[:3]
        if len(bucket) >= 64 and (cuts_layers or not same_layer):
            yield bucket
            bucket = []
        bucket.append(pair)
    yield bucket


class Sender:
    def __init__(self, path, servers):
        self.name, self.servers, self.tensors = path.name, servers, tensors_of(path)
        self.check = WeightSyncCheck([server.url for server in servers])

    def deliver(self, sent, version, *, cuts_layers=False):
        for server in self.servers:
            if not sent:  # nothing was applied, and yet the version counts on
                server.ask("update_weight_version", {"new_version": str(version), "abort_all_requests": False})
                continue
            if self.name == INT4:
                server.send([], version, BEGIN)
            for bucket in buckets(list(sent.items()), cuts_layers):
                server.send(bucket, version)
            if self.name == INT4:
                server.send([], version, END)

    def update(self, version, *, as_version=None, cuts_layers=False):
        sent = weights(self.tensors, version)
        began = time.perf_counter()
        self.deliver(sent, version if as_version is None else as_version, cuts_layers=cuts_layers)
        took = time.perf_counter() - began
        for name, tensor in sent.items():
            self.check.record(name, tensor)
        return {**outcome(self.check, version), "update_seconds": took}

    def sleep(self):
        """Memory of weights is given back and taken again, as between a rollout and the next."""
        for server in self.servers:
            for request in ("release_memory_occupation", "resume_memory_occupation"):
                server.ask(request, {"tags": ["weights"]})


def of_model(path, servers):
    sender, name = Sender(path, servers), path.name
    for step, said in checked(sender.check, sender.tensors, sender.deliver, versions=True):
        yield f"{name}: {step}", said
    yield f"{name}: old version", sender.update(97, as_version=96)
    yield f"{name}: after old version", sender.update(98)
    if name == "mla":
        yield f"{name}: layers cut", sender.update(99, cuts_layers=True)
        yield f"{name}: after layers cut", sender.update(100)
    yield f"{name}: resumed", lost(sender.check)
    sender.sleep()
    yield f"{name}: {SLEEP}", lost(sender.check)
    yield f"{name}: after {SLEEP}", sender.update(101)
    if len(servers) > 1:
        yield f"{name}: last engine", servers[-1].url
        sender.servers = servers[:-1]
        yield f"{name}: last engine missed it", sender.update(102)


def steps(root, tp):
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()  # as trainers do, so that handles name a GPU by its UUID
    paths = {path.name: path for path in sorted((root / "models").iterdir())}
    with ExitStack() as stack:
        servers = {
            name: [
                stack.enter_context(
                    started(path, tp, root / f"server-{name}-{n}.log", "--custom-weight-loader", BEGIN, END)
                )
                for n in range(2 if name == "moe" and tp == 1 else 1)
            ]
            for name, path in paths.items()
        }
        for name, path in paths.items():
            for server in servers[name]:
                wait(server)
            yield from of_model(path, servers[name])


def main():
    root, tp = Path(sys.argv[1]), int(sys.argv[2])
    began = time.monotonic()
    with (root / "reports.jsonl").open("w") as reports:
        for step, result in steps(root, tp):
            print(f"== {step} after {time.monotonic() - began:.0f} s", flush=True)
            reports.write(json.dumps([step, result]) + "\n")
            reports.flush()


if __name__ == "__main__":
    main()
