"""Files of many tensors that torch.save wrote: read one at a time, by offset, with nothing run and damage found."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.torch_save import saved_file
from ckptkit.formats.torch_save.blob import Blob
from ckptkit.formats.torch_save.saved_file import SavedFile

BUFFER = torch.arange(3000, dtype=torch.float32)


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def read(path: Path, name: str) -> Tensor:
    file = SavedFile(path)
    return file.read(file.tensor(file.content[name], name))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24, dtype=torch.bfloat16).reshape(4, 6),
        torch.arange(24, dtype=torch.float16).reshape(4, 6).t(),
        BUFFER[100:124].view(4, 6),
        BUFFER[100:148].view(8, 6)[::2, 1:3],
        torch.tensor(3.0),
        torch.empty(0, 3),
        nn.Parameter(torch.arange(6.0)),
    ],
)
def test_a_tensor_is_what_torch_reads(tmp_path: Path, tensor: Tensor) -> None:
    path = save(tmp_path / "x.pt", {"before": torch.ones(7), "it": tensor, "buffer": BUFFER})
    found = read(path, "it")
    assert found.is_contiguous()
    assert found.dtype == tensor.dtype
    assert torch.equal(found, torch.load(path)["it"])


def test_a_modules_state_dict_with_its_metadata(tmp_path: Path) -> None:
    """torch hangs `_metadata` on the OrderedDict of a state dict."""
    module = nn.Linear(3, 4)
    path = save(tmp_path / "x.pt", module.state_dict())
    assert torch.equal(read(path, "weight"), module.weight)


def test_of_a_large_buffer_only_the_tensors_part_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "x.pt", {"first": BUFFER[:10], "second": BUFFER[10:30]})
    monkeypatch.setattr(saved_file, "_PIECE", 512)
    read_into, sizes = Blob.read_into, []

    def seen(self: Blob, info: zipfile.ZipInfo, buffer: memoryview, start: int = 0) -> None:
        if "/data/" in info.filename:
            sizes.append(buffer.nbytes)
        read_into(self, info, buffer, start)

    monkeypatch.setattr(Blob, "read_into", seen)
    file = SavedFile(path)
    assert torch.equal(file.read(file.tensor(file.content["first"], "first")), BUFFER[:10])
    assert (max(sizes), sum(sizes)) == (512, 3000 * 4 + 40)
    sizes.clear()
    assert torch.equal(file.read(file.tensor(file.content["second"], "second")), BUFFER[10:30])
    # The checksum of the buffer is known by now.
    assert sizes == [80]


@pytest.mark.parametrize("name", ["part", "whole"])
def test_a_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "x.pt", {"part": BUFFER[:10], "whole": BUFFER})
    content = bytearray(path.read_bytes())
    place = content.index(BUFFER[1000:1010].numpy().tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(CkptkitError, match="do not match their checksum"):
        read(path, name)


def test_a_file_that_is_cut_short_is_no_zip(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"it": BUFFER})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CkptkitError, match="missing or damaged"):
        read(path, "it")
    with pytest.raises(CkptkitError, match="No such file"):
        SavedFile(tmp_path / "y.pt")


def test_torchs_old_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"it": BUFFER}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CkptkitError, match="the format that torch wrote before 1.6"):
        SavedFile(path)


class Rebuilt:
    """Pickles as a tensor with arguments of our choice."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self.arguments


class Storage:
    """Pickles as storage 0 of bf16 numbers."""


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return ("storage", torch.BFloat16Storage, "0", "cpu", 12) if isinstance(value, Storage) else None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((Storage(), 0, (13,), (1,), False, {}), "the bytes of it are not in it"),
        ((Storage(), 6, (7,), (1,), False, {}), "the bytes of it are not in it"),
        ((Storage(), 0, (2, 2), (12, 1), False, {}), "the bytes of it are not in it"),
        ((Storage(), 0, (1 << 50,), (0,), False, {}), "the bytes of it are not in it"),
        ((Storage(), -1, (2,), (1,), False, {}), "in a way that torch does not write"),
        ((Storage(), 0, (2,), (1, 1), False, {}), "in a way that torch does not write"),
        ((Storage(), 0, ("2",), (1,), False, {}), "in a way that torch does not write"),
        (("no storage", 0, (2,), (1,), False, {}), "in a way that torch does not write"),
    ],
)
def test_descriptions_that_reach_beyond_the_file(tmp_path: Path, arguments: Any, said: str) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive, archive.open("x/data.pkl", "w") as stream:
        Pickler(stream, 2).dump({"it": Rebuilt(*arguments)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x/data/0", bytes(24))
    with pytest.raises(CkptkitError, match=said):
        read(path, "it")
