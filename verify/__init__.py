"""Proves a checkpoint: checks as data, and real Megatron and real SGLang as witnesses in subprocesses."""

from __future__ import annotations


def load_checks() -> None:
    """Imports every module that registers checks."""
    from verify import (  # noqa: F401
        check_config,
        check_dtypes,
        check_files,
        check_launch_tokenizer,
        check_magnitudes,
        check_manifest,
        check_megatron,
        check_megatron_keys,
        check_qat,
        check_quant,
        check_scheme,
        check_sglang,
        check_shards,
        check_spellings,
        check_tied,
        check_tokenizer,
        check_torch_dist,
        check_values,
        preflight,
    )
