"""Test models in sizes that INT4 kernels have tiles for, so that their INT4 is sound for an engine too."""

from dataclasses import replace

from families import ALL_CASES, CASES

_SIZES = {"intermediate_size": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}


def _sized(case, sizes=_SIZES):
    def config():
        whole = case.config()
        text = whole.get_text_config()
        for name, size in sizes.items():
            if hasattr(text, name):
                setattr(text, name, size)
        return whole

    return replace(case, config=config)


# Every test model, some of them again under `NAME-tiles`, and gpt-oss with square matrices, as its releases have them.
MODELS = ALL_CASES | {
    **{
        f"{name}-tiles": _sized(CASES[name])
        for name in ("qwen2-untied", "qwen3_moe", "qwen3_5", "qwen3_5_text-tied", "qwen3_next")
    },
    "gpt_oss-square": _sized(CASES["gpt_oss"], {"intermediate_size": 128}),
}
