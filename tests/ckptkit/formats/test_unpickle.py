"""Nothing that a checkpoint's pickles name is ever run, whatever name it is of those that scanners list."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from support import gadget_pickles
from support.processes import python

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.torch_save import unpickle
from ckptkit.formats.torch_save.blob import Blob
from ckptkit.formats.torch_save.records import NotAllowed, Record


class Evil:
    """Pickles as a call of os.system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.path}'",)


def test_code_in_a_pickle_is_inert(tmp_path: Path) -> None:
    content = pickle.dumps({"x": Evil(tmp_path / "ran"), "kept": [1, 2.5, "text"]})
    found = unpickle.loads(content)
    assert found["kept"] == [1, 2.5, "text"]
    assert isinstance(found["x"], Record)
    assert not (tmp_path / "ran").exists()
    pickle.loads(content)
    assert (tmp_path / "ran").exists(), "the pickle is harmless: this test proves nothing"


def test_names_that_are_not_allowed_end_the_reading(tmp_path: Path) -> None:
    content = pickle.dumps({"x": Evil(tmp_path / "ran")})
    with pytest.raises(NotAllowed) as error:
        unpickle.loads(content, {"posix.other"}.__contains__)
    assert error.value.kind == "posix.system"
    assert isinstance(unpickle.loads(content, {"posix.system"}.__contains__)["x"], Record)
    assert not (tmp_path / "ran").exists()


def test_tensor_saved_by_torch_is_read_back_from_the_middle_of_a_file(tmp_path: Path) -> None:
    tensor, file = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)[1:3, 2:5], tmp_path / "x"
    with file.open("wb") as stream:
        stream.write(b"some bytes before")
        torch.save(tensor, stream)
    blob = Blob(file, 17, file.stat().st_size - 17)
    assert torch.equal(blob.tensor("bfloat16", (2, 3)), tensor)
    for dtype, shape in (("float64", (2, 3)), ("bfloat16", (2, 3, 1))):
        with pytest.raises(CkptkitError, match="the metadata says"):
            blob.tensor(dtype, shape)


def test_object_where_a_tensor_should_be_and_truncation(tmp_path: Path) -> None:
    file = tmp_path / "x"
    torch.save({"no": "tensor"}, file)
    with pytest.raises(CkptkitError, match="no plain tensor"):
        Blob(file, 0, file.stat().st_size).tensor("float32", (1,))
    with pytest.raises(CkptkitError, match="missing or damaged"):
        Blob(file, 0, file.stat().st_size - 30).object()
    with pytest.raises(CkptkitError, match="missing or damaged"):
        Blob(tmp_path / "absent", 0, 10).object()


def test_a_missing_checksum_is_accepted(tmp_path: Path) -> None:
    tensor, file = torch.arange(1000, dtype=torch.float32), tmp_path / "x"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, file)
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(Blob(file, 0, file.stat().st_size).tensor("float32", (1000,)), tensor)


def test_every_gadget_is_an_inert_record_or_refused_and_imports_and_runs_nothing() -> None:
    """In a process of its own: a hook of Python's audit cannot be removed again."""
    known = set(gadget_pickles.names())
    assert {("os", "run"), ("posix", "run"), ("subprocess", "run"), ("builtins", "eval")} <= known
    assert len(known) > 150
    done = python("-W", "error", gadget_pickles.__file__)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["imported"] == found["odd"] == []
    first, *_ = found["events"]  # the import that the process itself makes at its end, and nothing before it
    assert first == "pickle.find_class"
    # INST and both forms of OBJ are instructions of protocol 1, which are refused whatever they name.
    assert (found["read"], found["refused"]) == (8 * len(gadget_pickles.names()), 3 * len(gadget_pickles.names()))
