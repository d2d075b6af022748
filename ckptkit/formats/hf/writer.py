"""Writes the files of an HF checkpoint: safetensors shards (`ckptkit.formats.hf.shard`), and last their index."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.core.dtypes import SAFETENSORS_CODE
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.formats.files import FILE_BYTES, Piece
from ckptkit.formats.hf.reader import INDEX, SINGLE
from ckptkit.formats.hf.shard import read_shard
from ckptkit.storage.buffers import cuts
from ckptkit.storage.write import WrittenFile

if TYPE_CHECKING:
    from torch import Tensor


class SafetensorsFiles:
    """Shards in `folder` of the root. Raises CkptkitError unless `layout` names each tensor of `specs` once."""

    def __init__(self, specs: Mapping[str, TensorSpec], layout: Mapping[str, Sequence[str]], folder: str = "") -> None:
        self.specs = specs
        self.names = {f"{folder}/{file}" if folder else file: list(names) for file, names in layout.items() if names}
        self._folder = folder
        self._offset: dict[str, int] = {}
        self._size: dict[str, int] = {}
        self._header = {
            file: self._place(file, [specs[name] for name in names if name in specs])
            for file, names in self.names.items()
        }
        if set(self._offset) != set(specs) or sum(map(len, self.names.values())) != len(specs):
            wrong = sorted({name for names in layout.values() for name in names} ^ set(specs))
            message = f"the shard layout and the tensors to write differ: {summarize(wrong)}"
            raise CkptkitError(message, "pass the HF directory of this model with --hf")

    def _place(self, file: str, specs: Sequence[TensorSpec]) -> bytes:
        """The header of a file with these tensors. Stores their positions and the file's size."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begins, end = {}, 0
        for spec in specs:
            begins[spec.name], end = end, end + spec.nbytes
            entry = {"dtype": SAFETENSORS_CODE[spec.dtype], "shape": list(spec.shape)}
            header[spec.name] = {**entry, "data_offsets": [begins[spec.name], end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        data = 8 + len(text)
        self._offset |= {name: data + begin for name, begin in begins.items()}
        self._size[file] = data + end
        return len(text).to_bytes(8, "little") + text

    def size(self, file: str) -> int:
        return self._size[file]

    def extra_bytes(self, file: str) -> tuple[int, bytes]:
        return 0, self._header[file]

    def put(self, name: str, file: WrittenFile, piece: Piece) -> None:
        for begin, end in cuts(self._offset[name], self.specs[name].nbytes):
            file.write(piece(begin, end), self._offset[name] + begin)

    def read(self, file: str, root: Path) -> Iterator[tuple[str, Tensor]]:
        shard = read_shard(root / file)
        for name in shard.specs:
            yield name, shard.read(name)

    def prepare(self) -> None:
        """Does nothing."""

    def finish(self, root: Path) -> None:
        if [Path(file).name for file in self.names] == [SINGLE]:
            return
        total = sum(spec.nbytes for spec in self.specs.values())
        weight_map = {name: Path(file).name for file, names in self.names.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (root / self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def cut_shards(specs: Mapping[str, TensorSpec], limit: int = FILE_BYTES) -> dict[str, list[str]]:
    """A layout without a reference: tensors in order, in files of at most `limit` bytes, with HF's names."""
    shards: list[list[str]] = []
    size = math.inf
    for spec in specs.values():
        if size + spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(spec.name)
        size += spec.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors": names for index, names in enumerate(shards)}
