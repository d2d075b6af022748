"""Runs Megatron-Bridge in its environment: its `AutoBridge.import_ckpt` and `export_ckpt`.

The job file is a list of {"hf": DIR, "imported": DIR to make, "megatron": DIR, "exported": DIR to make}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from megatron_on_cpu import pretend_cuda


def convert(job: dict[str, str]) -> dict[str, float]:
    """Both directions; the seconds that each took."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import temporary_distributed_context

    start = time.monotonic()
    with temporary_distributed_context("gloo"):  # which import_ckpt would start with NCCL
        AutoBridge.import_ckpt(job["hf"], job["imported"])
    middle = time.monotonic()
    AutoBridge.from_hf_pretrained(job["hf"]).export_ckpt(job["megatron"], job["exported"], show_progress=False)
    return {"import": middle - start, "export": time.monotonic() - middle}


def main() -> None:
    """Reads the job file and writes the result of each job beside it."""
    jobs = Path(sys.argv[1])
    pretend_cuda()
    results = [convert(job) for job in json.loads(jobs.read_text())]
    jobs.with_suffix(".results").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
