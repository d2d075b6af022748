"""What real Megatron would unpickle is refused before it starts, unless megatron-core and torch write such names."""

import argparse
import collections
import enum
import io
import os
import pickle
import subprocess

import click
import numpy
import pytest
import torch
from support.messages import refusal
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, MetadataIndex

from ckptkit.app.api import convert
from ckptkit.core.errors import UnsupportedError
from ckptkit.formats.torch_dist.foreign_names import refuse_foreign_names
from ckptkit.formats.torch_dist.reader import read_metadata
from ckptkit.verify.run import verify


class Call:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


EVIL = Call(os.system, "touch ran")


@pytest.fixture
def release(converted, copy_of):
    return copy_of(converted("qwen2-tied")) / "release"


def test_training_arguments_are_let_through(release):
    args = argparse.Namespace(params_dtype=torch.bfloat16, seed=1, more=collections.OrderedDict(a=torch.zeros(2)))
    torch.save({"args": args, "iteration": 1}, release / "common.pt")
    refuse_foreign_names(release)


def test_a_call_in_common_pt_is_refused_before_megatron_starts(release, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"args": EVIL}, release / "common.pt")
    refusal(r"common\.pt.*posix\.system", refuse_foreign_names, release)
    report = verify(release.parent, against=frozenset({"megatron"}))
    assert {finding.code for finding in report.findings} == {"CK111", "CK701"}  # nor are these the model's arguments
    torch.save({"extra": EVIL}, release / "common.pt")
    assert {finding.code for finding in verify(release.parent).findings} == {"CK111"}
    assert not (tmp_path / "ran").exists()


CALLS = {
    "posix.system": EVIL,
    "builtins.eval": Call(eval, "open('ran', 'w')"),
    "subprocess.Popen": Call(subprocess.Popen, ["touch", "ran"]),
    "torch.serialization.load": Call(torch.load, "ran"),
    "numpy.load": Call(numpy.load, "ran", None, True),
}


@pytest.mark.parametrize(
    ("place", "name"),
    [
        *(("common.pt", name) for name in CALLS),
        ("arguments", "builtins.eval"),
        ("metadata", "posix.system"),
        ("object", "subprocess.Popen"),
    ],
)
def test_verify_names_what_a_trainer_would_run(release, tmp_path, monkeypatch, place, name):
    monkeypatch.chdir(tmp_path)
    common = torch.load(release / "common.pt", weights_only=False)
    if place == "metadata":
        metadata = pickle.loads((release / ".metadata").read_bytes())
        metadata.planner_data = {"x": CALLS[name]}
        (release / ".metadata").write_bytes(pickle.dumps(metadata))
    elif place == "object":
        add_object(release, "rng_state/shard_0_1", [CALLS[name]])
    else:
        changed = {"extra": CALLS[name]} if place == "common.pt" else {"args": argparse.Namespace(extra=CALLS[name])}
        torch.save({**common, **changed}, release / "common.pt")
    (finding,) = (one for one in verify(release.parent).findings if one.code == "CK111")
    assert finding.severity == "error"
    assert name.rpartition(".")[2] in finding.actual  # pickles spell some modules as Python 2 did
    assert not (tmp_path / "ran").exists()


def test_a_class_of_a_trainer_is_a_warning(release):
    common = torch.load(release / "common.pt", weights_only=False)
    common["args"].extra = Call(click.Option, ["--seed"])
    torch.save(common, release / "common.pt")
    (finding,) = (one for one in verify(release.parent).findings if one.code == "CK111")
    assert (finding.severity, "click" in finding.actual) == ("warning", True)


def test_nothing_of_the_training_state_reaches_what_convert_writes(release, tmp_path):
    torch.save({"extra": EVIL}, release / "common.pt")
    convert(release.parent, tmp_path / "hf")
    assert not [file for file in (tmp_path / "hf").rglob("*") if file.is_file() and b"system" in file.read_bytes()]
    assert verify(tmp_path / "hf").status == "passed"


def test_a_damaged_object_is_not_taken_for_a_call(release):
    add_object(release, "rng_state/shard_0_1", [1])
    (release / "extra.distcp").unlink()
    assert "CK111" not in {finding.code for finding in verify(release.parent).findings}


def add_object(release, key, value):
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    torch.save(value, release / "extra.distcp")
    metadata = pickle.loads((release / ".metadata").read_bytes())
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    size = (release / "extra.distcp").stat().st_size
    metadata.storage_data[MetadataIndex(key)] = _StorageInfo("extra.distcp", 0, size)
    (release / ".metadata").write_bytes(pickle.dumps(metadata))


class AsPython3112(pickle.Pickler):
    """Pickles an enum's member as Python 3.11.2 does, which is Debian 12's: as an attribute of its class."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        (None, None),
        (Call(getattr, _MEM_FORMAT_ENCODING, "mro"), r"_MEM_FORMAT_ENCODING\.mro"),
        (Call(getattr, _MEM_FORMAT_ENCODING, "__class__"), r"_MEM_FORMAT_ENCODING\.__class__"),
        (Call(getattr, MetadataIndex, "__init__"), r"MetadataIndex\.__init__"),
        (Call(getattr, 5, "real"), r"builtins\.getattr"),
    ],
)
def test_metadata_that_python_3_11_2_pickled_is_let_through(release, more, refused):
    before = read_metadata(release)
    metadata = pickle.loads((release / ".metadata").read_bytes())
    metadata.planner_data = more
    with (release / ".metadata").open("wb") as file:
        AsPython3112(file).dump(metadata)
    assert b"getattr" in (release / ".metadata").read_bytes()
    if refused:
        with pytest.raises(UnsupportedError, match=refused):
            refuse_foreign_names(release)
    else:
        refuse_foreign_names(release)
        assert read_metadata(release).tensors == before.tensors


def test_an_extra_state_with_a_pickle_inside_is_refused(release):
    key = "decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1"
    for empty in (None, [None], io.BytesIO(), torch.empty(0, dtype=torch.uint8)):
        add_object(release, key, empty)
        refuse_foreign_names(release)
    for state in ([io.BytesIO(b"\x80\x02N.")], io.BytesIO(b"\x80\x02N."), torch.ones(4, dtype=torch.uint8), b"x"):
        add_object(release, key, state)
        refusal("Transformer Engine would unpickle", refuse_foreign_names, release)
        assert "CK111" not in {finding.code for finding in verify(release.parent).findings}  # as trainers in FP8 save
