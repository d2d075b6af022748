"""Rules that families share: attention, latent attention, experts, multi-token prediction."""

MAY_IMPORT = (
    "ckptkit.core",
    "converters.config",
    "converters.family",
    "converters.hf_names",
    "converters.ops",
    "converters.rules",
)
