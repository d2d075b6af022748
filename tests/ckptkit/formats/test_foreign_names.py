"""What real Megatron would unpickle is refused before it starts, unless megatron-core and torch write such names.

That all which real Megatron saves is let through: test_megatron_written.py, which has such saves.
"""

from __future__ import annotations

import argparse
import collections
import enum
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fixture_types import CopyOf, PathOf
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, MetadataIndex

from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.formats.torch_dist.foreign_names import refuse_foreign_names
from ckptkit.formats.torch_dist.reader import read_metadata
from verify.run import verify


class Evil:
    """Pickles as a call of os.system."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


@pytest.fixture
def release(converted: PathOf, copy_of: CopyOf) -> Path:
    return copy_of(converted("qwen2-tied")) / "release"


def test_training_arguments_are_let_through(release: Path) -> None:
    args = argparse.Namespace(params_dtype=torch.bfloat16, seed=1, more=collections.OrderedDict(a=torch.zeros(2)))
    torch.save({"args": args, "iteration": 1}, release / "common.pt")
    refuse_foreign_names(release)


def test_a_call_in_common_pt_is_refused_before_megatron_starts(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"args": Evil()}, release / "common.pt")
    with pytest.raises(CkptkitError, match=r"common\.pt holds posix\.system, which is not plain data"):
        refuse_foreign_names(release)
    report = verify(release.parent, against=frozenset({"megatron"}))
    assert {finding.code for finding in report.findings} == {"CK701"}  # the arguments are not those of the model
    assert any("posix.system" in reason for reason in report.reasons)
    torch.save({"extra": Evil()}, release / "common.pt")
    assert verify(release.parent, against=frozenset({"megatron"})).status == "inconclusive"
    assert not (tmp_path / "ran").exists()


def test_a_call_in_metadata_is_refused(release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    metadata = pickle.loads((release / ".metadata").read_bytes())
    metadata.planner_data = Evil()
    (release / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CkptkitError, match=r"\.metadata names posix\.system, which torch does not write"):
        refuse_foreign_names(release)
    assert not (tmp_path / "ran").exists()


class AsPython3112(pickle.Pickler):
    """Pickles an enum's member as Python 3.11.2 does, which is Debian 12's: as an attribute of its class."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


class Attribute:
    """Pickles as a call of getattr."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.arguments


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        (None, None),
        (Attribute(_MEM_FORMAT_ENCODING, "mro"), r"_MEM_FORMAT_ENCODING\.mro"),
        (Attribute(_MEM_FORMAT_ENCODING, "__class__"), r"_MEM_FORMAT_ENCODING\.__class__"),
        (Attribute(MetadataIndex, "__init__"), r"MetadataIndex\.__init__"),
        (Attribute(5, "real"), r"builtins\.getattr"),
    ],
)
def test_metadata_that_python_3_11_2_pickled_is_let_through(release: Path, more: object, refused: str | None) -> None:
    before = read_metadata(release)
    metadata = pickle.loads((release / ".metadata").read_bytes())
    metadata.planner_data = more
    with (release / ".metadata").open("wb") as file:
        AsPython3112(file).dump(metadata)
    assert b"getattr" in (release / ".metadata").read_bytes()
    if refused:
        with pytest.raises(UnsupportedError, match=rf"\.metadata names .*{refused}, which torch does not write"):
            refuse_foreign_names(release)
    else:
        refuse_foreign_names(release)
        assert read_metadata(release).tensors == before.tensors


@pytest.mark.parametrize(
    ("state", "refused"),
    [
        (None, False),
        ([None], False),
        (io.BytesIO(), False),
        (torch.empty(0, dtype=torch.uint8), False),
        ([io.BytesIO(b"\x80\x02N.")], True),
        (io.BytesIO(b"\x80\x02N."), True),
        (torch.ones(4, dtype=torch.uint8), True),
        (b"x", True),
    ],
)
def test_an_extra_state_with_a_pickle_inside_is_refused(release: Path, state: object, refused: bool) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    key = "decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1"
    torch.save(state, release / "extra.distcp")
    metadata = pickle.loads((release / ".metadata").read_bytes())
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    size = (release / "extra.distcp").stat().st_size
    metadata.storage_data[MetadataIndex(key)] = _StorageInfo("extra.distcp", 0, size)
    (release / ".metadata").write_bytes(pickle.dumps(metadata))
    if refused:
        with pytest.raises(CkptkitError, match="Transformer Engine would unpickle"):
            refuse_foreign_names(release)
    else:
        refuse_foreign_names(release)
