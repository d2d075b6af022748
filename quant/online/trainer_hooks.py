"""Replaces the INT4 quantizers of slime and miles; docs/jobs.md shows the lines to change there."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ckptkit.formats.detect import require_own_files
from ckptkit.formats.hf.reader import read_json
from ckptkit.quant.formats.part_names import packed_in
from ckptkit.quant.formats.scheme import Grid
from ckptkit.quant.online.quantizer import Bucket, Named, OnlineQuantizer, check_complete


def quantize_params(converted_named_params: Named, checkpoint: str | Path, grid: Grid | None = None) -> Bucket:
    """Quantizes tensors like an `OnlineQuantizer` of the directory `checkpoint`, which only the first call reads."""
    return _quantizer(str(checkpoint), grid).quantize(converted_named_params)


class UpdateCheck:
    """Checks that one update of an engine serving `checkpoint` is complete: `record` every bucket, then `finish`."""

    def __init__(self, checkpoint: str | Path) -> None:
        self._packed = _quantizer(str(checkpoint), None).served.packed
        self._sent: set[str] = set()

    @property
    def delivered(self) -> frozenset[str]:
        """Names of the packed weights seen so far."""
        return frozenset(self._sent)

    def record(self, named: Named) -> None:
        """Records a bucket returned by `quantize_params`."""
        self._sent.update(f"{module}.weight" for module in packed_in(name for name, _ in named))

    def finish(self, elsewhere: Iterable[str] = ()) -> None:
        """Raises CkptkitError naming every packed weight that no rank sent; `elsewhere`: `delivered` of other ranks."""
        check_complete(self._packed, self._sent, elsewhere)


@cache
def _quantizer(checkpoint: str, grid: Grid | None) -> OnlineQuantizer:
    require_own_files(checkpoint)
    return OnlineQuantizer(read_json(Path(checkpoint) / "config.json"), checkpoint, grid=grid)
