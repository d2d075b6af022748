"""Weight updates of real `vllm.LLM`s on a GPU: what arrived passes, what did not is named.

tests/ckptkit/app/job/test_weight_sync_vllm_cpu.py says of each step what it must say on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine_models import saved
from support.sync_vllm import LAYER, LOST, WAYS, outcomes

from verify.witnesses.process.interpreter import python_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
]


def test_updates_of_real_engines_are_told_apart(tmp_path: Path) -> None:
    paths = [saved(name, tmp_path) for name in ("dense", "moe")]
    found = outcomes(tmp_path, 1, paths, program=python_of("vllm", {}), gpu=True)
    for path in paths:
        for way in WAYS:
            for step in ("1", "2", "2 again", *(f"after {fault}" for fault in LOST)):
                assert found[f"{path.name}: {way}: {step}"]["raised"] == ""
            for fault in LOST:
                said = found[f"{path.name}: {way}: without {fault}"]
                assert any(f"layers.{LAYER}." in line or fault == "everything" for line in said["details"])
        assert "engines lost what they held" in found[f"{path.name}: lost"]["raised"]
