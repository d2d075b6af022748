"""How many ranks of Megatron fit on this machine at once."""

from __future__ import annotations

import re

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.transfer.copy import cores
from converters.config.dims import ModelDims
from converters.megatron.parallel import ParallelSizes
from verify.witnesses.process.memory import free_memory

_TOGETHER = 8  # ranks up to which a real process group is started
_PROCESS = 700 << 20  # bytes that a rank has of its own beside weights: torch, Megatron and their buffers
_COPIES = 2  # of a rank's weights, while Megatron puts gate and up together again
_LAYER = re.compile(r"decoder\.layers\.\d+\.")


def bytes_a_rank(checkpoint: Checkpoint, dims: ModelDims, sizes: ParallelSizes) -> int:
    """About the most memory that a rank takes. Of the stages the longest counts, with the embedding as well.

    A chunk on disk, and a tensor to compare with, are read whole.
    """
    longest = max(sum(map(len, chunks)) for chunks in sizes.pipeline(dims).stages) / dims.layers
    held, largest = 0.0, 0
    for name, spec in checkpoint.specs.items():
        cut = sizes.etp * sizes.ep if ".experts.experts." in name else sizes.tp
        held += spec.nbytes / cut * (longest if _LAYER.match(name) else 1)
        largest = max(largest, spec.nbytes)
    return int(_COPIES * held) + 2 * largest + _PROCESS


def ranks_at_once(each: int) -> int:
    """How many ranks of `each` bytes may run at a time: no more than there are cores, and at least one."""
    return max(1, min(cores(), free_memory() // each))


def fits_together(world: int, each: int) -> bool:
    """Whether all ranks may run at a time, in one process group."""
    return world == 1 or (world <= _TOGETHER and world * each <= free_memory())
