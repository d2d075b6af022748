"""Loads many checkpoints into real vLLM in one process a rank, as `sglang_runs` does into SGLang.

Also asks vLLM's own check which weights were not loaded: `DefaultModelLoader.track_weights_loading`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from support import sglang_runs
from support.processes import run_logged
from support.sglang_runs import Case, Weights
from verify.witnesses.loading.job import ONE_RANK, EngineSizes
from verify.witnesses.loading.run import LoadRun
from verify.witnesses.process.interpreter import Interpreter, python_of
from verify.witnesses.vllm.facts import VLLM

NOT_FOUND = "Following weights were not initialized from checkpoint"


@cache
def release() -> tuple[int, ...] | None:
    """The release of vLLM that tests ask; None where there is none."""
    found = Interpreter(python_of("vllm", {})).release("vllm")
    return tuple(map(int, found.split("+")[0].split(".")[:3])) if found else None


def run_cases(cases: Mapping[str, Case], root: Path, sizes: EngineSizes = ONE_RANK) -> dict[str, LoadRun]:
    """What vLLM made of every case, on the CPU."""
    start = partial(run_logged, program=python_of("vllm", {}), limit_s=840)
    return sglang_runs.run_cases(cases, root, sizes=sizes, engine=VLLM, start=start)


def found_by_vllm(run: LoadRun) -> bool:
    """Whether vLLM itself said of a load that weights were missing, or refused it."""
    return run.report is None or any(NOT_FOUND in line for line in run.report.log)


def load_and_ask(model: Any, weights: Weights) -> None:
    """Loads by the model's own method; what vLLM's loader then checks is logged and not raised.

    vLLM asks where nothing is quantized.
    """
    import logging

    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loaded = model.load_weights(weights)
    if get_current_vllm_config().model_config.quantization is not None or loaded is None:
        return
    try:
        DefaultModelLoader.track_weights_loading(None, model, set(loaded))
    except ValueError as error:
        logging.getLogger("vllm").warning("not found: %s", error)


if __name__ == "__main__":
    from verify.witnesses.vllm import adapter

    adapter.load = load_and_ask
    sglang_runs.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
