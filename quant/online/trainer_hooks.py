"""What slime and miles call in the place of their own INT4 quantizer: once a parameter or once a bucket, with nothing kept in between.

docs/online.md has the lines to change there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ckptkit.formats.hf.reader import read_json
from quant.formats.part_names import packed_in
from quant.formats.scheme import Grid
from quant.online.quantizer import Bucket, Named, OnlineQuantizer, check_complete


def quantize_params(converted_named_params: Named, checkpoint: str | Path, grid: Grid | None = None) -> Bucket:
    """These HF tensors as the engine takes them; all that are packed come from one launch. `checkpoint`: the directory it serves.

    `grid`: as for `OnlineQuantizer`. Raises CkptkitError as it does; the first call reads the checkpoint's names, the others nothing.
    """
    return _quantizer(str(checkpoint), grid).quantize(converted_named_params)


class UpdateCheck:
    """Counts what one update sent to an engine that serves `checkpoint`: `saw` every bucket, then `finish`."""

    def __init__(self, checkpoint: str | Path) -> None:
        self._packed = _quantizer(str(checkpoint), None).served.packed
        self._sent: set[str] = set()

    @property
    def delivered(self) -> frozenset[str]:
        """The packed weights seen so far."""
        return frozenset(self._sent)

    def saw(self, named: Named) -> None:
        """Notes a bucket, as `quantize_params` made it."""
        self._sent.update(f"{module}.weight" for module in packed_in(name for name, _ in named))

    def finish(self, elsewhere: Iterable[str] = ()) -> None:
        """Raises CkptkitError naming every packed weight that neither this nor another rank (`elsewhere`: their `delivered`) sent."""
        check_complete(self._packed, self._sent, elsewhere)


@cache
def _quantizer(checkpoint: str, grid: Grid | None) -> OnlineQuantizer:
    return OnlineQuantizer(read_json(Path(checkpoint) / "config.json"), checkpoint, grid=grid)
