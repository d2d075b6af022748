"""Weight updates of a live engine, with faults planted: `python -m support.live_faults ENGINE OUT PATH`.

OUT/FAULT gets the report of each fault that touches the model, and OUT/none that of none. `reports` starts this.
"""

import os
import re
import sys
from importlib import import_module
from pathlib import Path

from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.verify.witnesses.live import process
from ckptkit.verify.witnesses.live.job import EngineJob, EngineReport
from ckptkit.verify.witnesses.process.codec import load_record, save
from ckptkit.verify.witnesses.process.exit_report import ExitReport
from support import models
from support.processes import end_now, run_logged
from support.sync_faults import FAULTS, faults_of
from support.vllm_logits import SETTINGS, prepare_vllm

NONE = "none"
# The module that starts the engine, and the one that reads the buckets.
ADAPTERS = {
    "vllm": ("ckptkit.verify.witnesses.vllm.live.server", "ckptkit.verify.witnesses.vllm.live.worker"),
    "sglang": ("ckptkit.verify.witnesses.sglang.live.server",) * 2,
}


def reports(root, path, engine="vllm", *, program=sys.executable, gpu=False):
    words = (engine, root, path)
    ended = run_logged(root / "log", "support.live_faults", *words, gpu=gpu, limit_s=1200, program=program)
    assert ended, (root / "log").read_text(errors="replace")[-5000:]
    return {fault: load_record(EngineReport, root / fault) for fault in (NONE, *faults_of(models.tensors(path)))}


def mistakes(found):
    """The faults that are not named in the first two updates, which are by tensor, or that later ones keep."""
    wrong = []
    for fault, report in found.items():
        first, second, *disk = [[name.partition(" ")[2] for name in one.changed] for one in report.reloads]
        if fault == NONE:
            sound = not first and not second
        else:
            named = [name for name in second if re.search(FAULTS[fault].named, name)]
            sound = bool(named) and bool(first) != FAULTS[fault].again
        if not sound or any(disk):
            wrong.append(f"{fault}: {[one.changed[:9] for one in report.reloads]}")
    return wrong


def planted(whole, fault):
    """The buckets of two updates, of which the second has the fault, and where not `again` the first too."""
    updates = iter(range(99))

    def buckets(checkpoint):
        spoilt = fault is not None and next(updates) >= fault.again
        for bucket in whole(checkpoint):
            changed = [fault.change(*pair) if fault and spoilt else pair for pair in bucket]
            yield [pair for pair in changed if pair is not None]

    return buckets


def main():
    os.environ.update(SETTINGS)
    engine, root, path = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if engine == "vllm":
        prepare_vllm()
    starts, sends = ADAPTERS[engine]
    adapter = import_module(starts)
    job = EngineJob(str(path), [], report=str(root / "report"), update=True)
    server = adapter.serve(job, HfCheckpoint(str(path)))
    sender = import_module(sends)
    whole = sender.buckets
    for name, fault in {NONE: None, **faults_of(models.tensors(path))}.items():
        sender.buckets = planted(whole, fault)
        with ExitReport(root / "phases") as phases:
            *_, report = process._reports(job, server, phases, adapter.version())
        save(report, root / name)
        sender.buckets = whole
        server.update_by_tensor()


if __name__ == "__main__":
    main()
    end_now()
