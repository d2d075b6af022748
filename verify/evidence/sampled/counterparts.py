"""Pairs the tensors that an HF and a Megatron checkpoint of one model store in the same way."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from converters.ops.basic import Copy
from converters.planner import dialect_of, dims_of, mappings_of
from converters.stored import as_stored


def copied(
    config: Mapping[str, Any], hf: Collection[str], megatron: Collection[str]
) -> Iterator[tuple[str, str, bool]]:
    """HF and Megatron name of every tensor that conversion copies as it is, and whether Megatron may add rows to it.

    `hf` and `megatron` are the names that the two checkpoints store. No pair follows from an empty config. Raises
    CkptkitError as `as_stored`.
    """
    if not config:
        return
    config = as_stored(config, hf)
    dialect = dialect_of(config, megatron)
    experts = dims_of(config).experts
    for mapping in mappings_of(config, dialect):
        if isinstance(mapping.op, Copy) and len(mapping.hf) == 1 and not mapping.upcast:
            for name, (other,) in mapping.expand(experts):
                yield other, name, mapping.vocab
