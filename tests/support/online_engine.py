"""Updates real SGLang engines on a GPU: `python -m support.online_engine ORDERS.json`, a line of REPORTS.jsonl a step.

A machine that never ran these kernels first compiles Marlin's for experts, which takes minutes on one thread; here it
runs on all of them, while the first engine starts.
"""

import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.online.quantizer import OnlineQuantizer
from support.online_runs import swapped, trainer
from support.processes import run_logged
from support.sglang_logits import PLAIN

BEGIN, END = "ckptkit.quant.online.sglang_reload.begin", "ckptkit.quant.online.sglang_reload.end"
PROMPTS = [[5, 17, 42, 256, 9, 31], [7, 7, 100, 3, 250]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
# Marlin's kernels in as many threads as there are cores, or as SGLang would compile them, should nvcc not know how.
COMPILE = """
import os, torch
from sglang.jit_kernel.moe_wna16_marlin import _jit_moe_wna16_marlin_module as module
os.environ["NVCC_APPEND_FLAGS"] = "-split-compile=0 -Xptxas -split-compile=0"
try:
    module(torch.bfloat16)
except RuntimeError:
    del os.environ["NVCC_APPEND_FLAGS"]
    module(torch.bfloat16)
"""


def start(model):
    import sglang

    return sglang.Engine(
        model_path=str(model),
        load_format="auto",
        dtype="bfloat16",
        **PLAIN,
        disable_shared_experts_fusion=True,
        mem_fraction_static=0.2,
        random_seed=0,
        watchdog_timeout=1500,
        custom_weight_loader=[BEGIN, END],
        log_level="info",
    )


def checksum(engine):
    """SGLang's own checksum of everything that it holds, and that of each tensor."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    asked = engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action="checksum"), None)
    success, message, ranks, total = engine.loop.run_until_complete(asked)
    assert success, message
    return {"total": total, "tensors": ranks[0]["checksums"]}


def generate(engine):
    return [answer["output_ids"] for answer in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]


def judged(engine):
    """What the model makes of each prompt: log-probabilities of its tokens but the first."""
    asked = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
    answers = [
        engine.generate(input_ids=prompt, sampling_params=asked, return_logprob=True, logprob_start_len=0)
        for prompt in PROMPTS
    ]
    return [[float(found[0]) for found in answer["meta_info"]["input_token_logprobs"][1:]] for answer in answers]


def send(engine, bucket, loader=None):
    success, message = engine.update_weights_from_tensor(bucket, load_format=loader, flush_cache=loader == END)[:2]
    assert success, message


def update(engine, online, weights):
    send(engine, [], BEGIN)
    for bucket in online.stream((name, tensor.cuda()) for name, tensor in weights):
        send(engine, bucket)
    send(engine, [], END)


def steps(order, compiled):
    bf16 = Path(order["bf16"])
    online = OnlineQuantizer(HfCheckpoint(order["int4"]).config, order["int4"])
    engine = start(Path(order["int4"]))
    try:
        yield "disk", checksum(engine)
        yield "compiled", compiled.wait()
        yield "tokens from disk", generate(engine)
        yield "judged from disk", judged(engine)
        for number in (1, 2):
            update(engine, online, trainer(bf16))
            yield f"update {number}", checksum(engine)
        yield "judged after updates", judged(engine)
        update(engine, online, trainer(bf16, swapped))
        yield "altered", checksum(engine)
        update(engine, online, trainer(bf16))
        yield "mended", checksum(engine)
    finally:
        engine.shutdown()


def run(root, orders):
    (root / "orders.json").write_text(json.dumps(orders))
    run_logged(root / "log", "support.online_engine", root / "orders.json", gpu=True)
    found = defaultdict(dict)
    reports = root / "reports.jsonl"
    for name, step, result in map(json.loads, reports.read_text().splitlines() if reports.exists() else []):
        found[name][step] = result
    return found, (root / "log").read_text(errors="replace")[-12000:]


def main():
    path = Path(sys.argv[1])
    compiled = subprocess.Popen([sys.executable, "-W", "ignore", "-c", COMPILE])
    began = time.monotonic()
    with (path.parent / "reports.jsonl").open("w") as reports:
        for order in json.loads(path.read_text()):
            for step, result in steps(order, compiled):
                print(f"== {order['name']}: {step} after {time.monotonic() - began:.0f} s", flush=True)
                reports.write(json.dumps([order["name"], step, result]) + "\n")
                reports.flush()


if __name__ == "__main__":
    main()
