"""`ckptkit verify --against-megatron` at TP2 x PP2 against Megatron's plain load of the same checkpoint.

Both start four ranks on the CPU, which import Megatron once, join a gloo group, build the model and load it strictly
with `dist_checkpointing`. The plain load ends there; verify also poisons, reads the source and compares every value.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TP, PP = 2, 2


def rows() -> list[dict[str, Any]]:
    """Median seconds of whole commands, run in turn on files in the page cache, and ratios to the plain load."""
    # Not at the top: the part below runs with -P, which hides measure.py.
    from measure import ROUNDS, chosen

    if find_spec("megatron") is None:
        return []
    (size,) = chosen("BENCH_GB", ["1.14"], ["0.35"])  # ten layers, or two, which two stages divide
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        hf, megatron, report = Path(directory) / "hf", Path(directory) / "megatron", Path(directory) / "report.json"
        ckptkit = [sys.executable, "-m", "ckptkit"]
        subprocess.run([sys.executable, "models.py", size, str(hf)], check=True, cwd=HERE)
        subprocess.run([*ckptkit, "convert", str(hf), str(megatron)], check=True, stdout=subprocess.DEVNULL)
        sizes = ["--tp", str(TP), "--pp", str(PP)]
        verify = [*ckptkit, "verify", str(megatron), "--against-megatron", *sizes, "--report", str(report)]
        commands = {
            "plain load": [sys.executable, "-P", "-W", "ignore", __file__, str(megatron / "release")],
            "verify --against-megatron": verify,
            "verify --against-megatron --source": [*verify, "--source", str(hf)],
        }
        seconds: dict[str, list[float]] = {what: [] for what in commands}
        witness: dict[str, list[float]] = {what: [] for what in commands}
        for _ in range(ROUNDS):
            for what, command in commands.items():
                began = time.monotonic()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                seconds[what].append(time.monotonic() - began)
                witness[what].append(_witness_seconds(report) if what != "plain load" else seconds[what][-1])
        plain = statistics.median(seconds["plain load"])
        return [
            {
                "GB": size,
                "what": what,
                "seconds": round(statistics.median(found), 2),
                "ratio to the plain load": round(statistics.median(found) / plain, 2),
                "Megatron's part": round(statistics.median(witness[what]), 2),
                "its ratio": round(statistics.median(witness[what]) / plain, 2),
            }
            for what, found in seconds.items()
        ]


def _witness_seconds(report: Path) -> float:
    """Seconds of the checks of Megatron in a JSON report; the first of them runs it."""
    return sum(one["seconds"] for one in json.loads(report.read_text())["checks"] if one["code"].startswith("CK4"))


# What follows runs in the process of the plain load, which becomes those of its ranks.


def _rank(checkpoint: str, hf: str, store: str, rank: int) -> None:
    import torch

    from ckptkit.converters.megatron.parallel import ParallelSizes
    from ckptkit.converters.planner import dims_of
    from ckptkit.formats.hf.reader import read_json
    from ckptkit.verify.witnesses.megatron.model import MegatronBuild, build_chunks, connect
    from ckptkit.verify.witnesses.megatron.process import load_chunks

    sizes = ParallelSizes(tp=TP, pp=PP, etp=1)
    connect(sizes, rank, store)
    chunks = build_chunks(dims_of(read_json(Path(hf) / "config.json")), MegatronBuild(sizes, torch.bfloat16))
    _, missing, unexpected, refused = load_chunks(chunks, checkpoint)
    if unexpected or refused:
        raise SystemExit(f"rank {rank}: {unexpected} {refused} {missing}")
    torch.distributed.destroy_process_group()


def main(checkpoint: Path) -> None:
    """Loads a torch_dist directory in TP x PP forked ranks. Raises SystemExit where one fails."""
    import ckptkit.verify.witnesses.megatron.process  # noqa: F401 - imported once for all ranks

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as scratch:
        where = str(checkpoint), str(checkpoint.parent / "hf"), f"{scratch}/store"
        ranks = [context.Process(target=_rank, args=(*where, rank)) for rank in range(TP * PP)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
