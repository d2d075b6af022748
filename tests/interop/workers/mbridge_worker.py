"""Runs mbridge in its environment: HF to Megatron, and Megatron to HF.

The job file is a list of {"hf": DIR, "imported": DIR to make, "megatron": DIR, "exported": DIR to make}.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from megatron_on_cpu import load_torch_dist, one_rank, save_torch_dist


def convert(job):
    try:
        return both_ways(job)
    except (AssertionError, TypeError) as error:
        return {"refused": str(error)}


def both_ways(job):
    from mbridge import AutoBridge

    start = time.monotonic()
    bridge = AutoBridge.from_pretrained(job["hf"])
    bridge.set_extra_args(
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    (model,) = bridge.get_model(weight_path=job["hf"])
    save_torch_dist(unwrapped(model), Path(job["imported"]))
    middle = time.monotonic()
    load_torch_dist(unwrapped(model), Path(job["megatron"]))
    bridge.save_weights([model], job["exported"])
    return {"import": middle - start, "export": time.monotonic() - middle}


def unwrapped(model):
    return model.module


def main():
    jobs = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, one_rank(Path(folder) / "store"), torch.no_grad():
        results = [convert(job) for job in json.loads(jobs.read_text())]
    jobs.with_suffix(".results").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
