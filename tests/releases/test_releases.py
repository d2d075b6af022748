"""Published releases pass every verb that answers from headers, with no finding but those that lie in the release."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.nightly import daily

from releases.record import models
from releases.verbs import LARGE, check_every_verb

# They are named as a smaller or another release of their kind, and have ten thousands of tensors.
NIGHTLY = (
    *("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-Coder-480B-A35B-Instruct"),
    *("Qwen/Qwen3-30B-A3B-FP8", "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"),
    *("Qwen/Qwen3.5-122B-A10B", "Qwen/Qwen3.5-397B-A17B"),
    *("zai-org/GLM-4.5", "zai-org/GLM-4.6", "zai-org/GLM-4.7", "zai-org/GLM-5-FP8"),
)
LARGE_DAILY = ("RedHatAI/Qwen3-30B-A3B-quantized.w4a16",)  # of those with the most tensors
SMALLER = [model for model in models() if model not in LARGE]


DAILY = [model for model in SMALLER if model not in NIGHTLY]


@pytest.mark.parametrize("model", [*daily(SMALLER, DAILY), *daily(LARGE, LARGE_DAILY)])
def test_release_as_published_has_no_finding(model: str, tmp_path: Path) -> None:
    check_every_verb(model, tmp_path)
