"""Proves a checkpoint: checks as data, and real Megatron and real SGLang as witnesses in subprocesses."""

from __future__ import annotations


def load_checks() -> None:
    """Imports every module that registers checks."""
    from verify.checks.config import config as check_config  # noqa: F401
    from verify.checks.config import spellings as check_spellings  # noqa: F401
    from verify.checks.config import tokenizer as check_tokenizer  # noqa: F401
    from verify.checks.headers import dtypes as check_dtypes  # noqa: F401
    from verify.checks.headers import files as check_files  # noqa: F401
    from verify.checks.headers import megatron_keys as check_megatron_keys  # noqa: F401
    from verify.checks.headers import shards as check_shards  # noqa: F401
    from verify.checks.headers import torch_dist as check_torch_dist  # noqa: F401
    from verify.checks.launch import int4_training as check_qat  # noqa: F401
    from verify.checks.launch import tokenizer as check_launch_tokenizer  # noqa: F401
    from verify.checks.quantization import int4 as check_quant  # noqa: F401
    from verify.checks.quantization import scheme as check_scheme  # noqa: F401
    from verify.checks.values import magnitudes as check_magnitudes  # noqa: F401
    from verify.checks.values import manifest as check_manifest  # noqa: F401
    from verify.checks.values import tied as check_tied  # noqa: F401
    from verify.checks.values import values as check_values  # noqa: F401
    from verify.checks.witnesses import megatron as check_megatron  # noqa: F401
    from verify.checks.witnesses import sglang as check_sglang  # noqa: F401
    from verify.launch import preflight  # noqa: F401
