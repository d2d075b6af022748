"""Proves a checkpoint: checks as data, and real Megatron and real SGLang as witnesses in subprocesses."""

from __future__ import annotations


def load_checks() -> None:
    """Imports every module that registers checks."""
    from verify import check_files, check_megatron, check_quant, check_sglang, check_values  # noqa: F401
