"""The safetensors reader and writer against the safetensors library, and every way a file can be broken."""

import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.messages import refusal

from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.hf.shard import read_shard
from ckptkit.formats.hf.writer import SafetensorsFiles, cut_shards
from ckptkit.storage.buffers import bytes_of
from ckptkit.transfer.files import FilesWriter

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.randn(5, 2, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 4),
    "fp8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
}


def same(left, right):
    as_bytes = [bytes(bytes_of(one.contiguous())) for one in (left, right)]
    return (left.shape, left.dtype) == (right.shape, right.dtype) and as_bytes[0] == as_bytes[1]


def test_reads_what_the_library_wrote(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors")
    shard = read_shard(tmp_path / "x.safetensors")
    assert set(shard.specs) == set(TENSORS)
    assert all(same(shard.read(name), tensor) for name, tensor in TENSORS.items())


def test_library_reads_what_it_writes(tmp_path):
    specs = {name: TensorSpec.of(name, tensor) for name, tensor in TENSORS.items()}
    shards = {"one.safetensors": ["b", "a"], "two.safetensors": ["scalar", "empty", "fp8"]}
    writer = FilesWriter(tmp_path, SafetensorsFiles(specs, shards))
    for name in reversed(TENSORS):
        writer.write(name, TENSORS[name])
    writer.finish()
    found = load_file(tmp_path / "one.safetensors") | load_file(tmp_path / "two.safetensors")
    assert all(same(found[name], tensor) for name, tensor in TENSORS.items())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 12 * 4 + 10 * 2 + 8 + 0 + 2
    assert index["weight_map"] == {name: file for file, names in shards.items() for name in names}


def test_writer_refuses_an_unwritten_tensor_a_second_write_and_a_wrong_one(tmp_path):
    writer = FilesWriter(
        tmp_path, SafetensorsFiles({"a": TensorSpec("a", (3, 4), "float32")}, {"model.safetensors": ["a"]})
    )
    refusal(r"1 tensor\(s\) were never written: a", writer.finish)
    refusal("written", writer.write, "a", TENSORS["a"].to(torch.bfloat16))
    writer.write("a", TENSORS["a"])
    refusal("written twice", writer.write, "a", TENSORS["a"])
    writer.finish()


def test_shards_are_cut_by_size_and_named_as_hf_does():
    specs = {name: TensorSpec(name, (100,), "uint8") for name in "abcde"}
    assert cut_shards(specs, limit=250) == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c", "d"],
        "model-00003-of-00003.safetensors": ["e"],
    }
    assert cut_shards(specs, limit=500) == {"model.safetensors": ["a", "b", "c", "d", "e"]}
    assert list(cut_shards(specs, limit=10)) == [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]


def header_of(content):
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def with_header(content, header):
    data = content[8 + int.from_bytes(content[:8], "little") :]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def change(key, field, value):
    def mutate(content):
        header = header_of(content)
        header[key][field] = value
        return with_header(content, header)

    return mutate


def written(path, text, data=bytes(4)):
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_a_name_longer_than_any_real_one_is_refused_by_its_beginning(tmp_path):
    for character in ("x", "é", "0."):
        name, file = (character * 4097)[:4097], tmp_path / "model.safetensors"
        entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        assert list(read_shard(written(file, json.dumps({name[:-1]: entry}).encode())).specs) == [name[:-1]]
        assert len(str(refusal("4097", read_shard, written(file, json.dumps({name: entry}).encode())))) < 500


def test_colons_in_names_are_no_second_key(tmp_path):
    for name, separators in product(('a":', "a:b", ":"), ((",", ":"), (" , ", " : "))):
        header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {'":': '":'}}
        path = written(tmp_path / "x.safetensors", json.dumps(header, separators=separators).encode())
        assert list(read_shard(path).specs) == list(load_file(path)) == [name]


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (lambda content: content[:-1], "truncated"),
        (lambda content: content + b"\0", "the file has trailing bytes"),
        (lambda content: content[:5], "header"),
        (lambda content: content[:40], "header"),
        (lambda content: (10**12).to_bytes(8, "little") + content[8:], "header"),
        (lambda content: content[:8] + b"{" * 20 + content[28:], "not JSON"),
        (lambda content: with_header(content, [1]), "not a JSON object"),
        (change("a", "dtype", "F99"), "F99"),
        (change("a", "shape", [3.0, 4]), "whole numbers"),
        (change("a", "shape", ["3", "4"]), "whole numbers"),
        (change("a", "data_offsets", [-48, 0]), "header entry for a is not valid"),
        (
            lambda content: with_header(content, header_of(content) | {"__metadata__": {"format": 1}}),
            "expected a __metadata__ of strings",
        ),
        (lambda content: content.replace(b'"b":', b'"a":'), "twice"),
        (change("a", "shape", [4, 4]), "entry spans 48"),
        (change("b", "data_offsets", [0, 24]), "b: data from byte 0: it overlaps"),
        (change("b", "data_offsets", [50, 74]), "b: data from byte 50: it leaves a hole"),
    ],
)
def test_broken_file_is_refused_and_named(tmp_path, mutate, message):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(3, 2)}, path)
    path.write_bytes(mutate(path.read_bytes()))
    assert str(path) in refusal(message, read_shard, path).message


def write_checkpoint(root, weight_map):
    """Two shards, `a` and `b`, with the given index."""
    save_file({"a": torch.zeros(2)}, root / "1.safetensors")
    save_file({"b": torch.zeros(2)}, root / "2.safetensors")
    (root / "config.json").write_text("{}")
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}, "1.*shard"),
        ({"a": "1.safetensors", "x": "2.safetensors"}, "no shard contains: x"),
        ({"a": "2.safetensors", "b": "1.safetensors"}, "wrong file for a, b"),
        ({"a": "1.safetensors", "b": "../2.safetensors"}, "directory"),
        ({"a": "1.safetensors", "b": "/etc/passwd"}, "directory"),
        ({"a": "1.safetensors", "b": "3.safetensors"}, "3.safetensors: No such file"),
    ],
)
def test_index_that_lies_is_refused(tmp_path, weight_map, message):
    write_checkpoint(tmp_path, weight_map)
    refusal(message, HfCheckpoint, tmp_path)


def test_tensor_missing_from_the_index_and_duplicate_tensor_are_refused(tmp_path):
    write_checkpoint(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    assert list(HfCheckpoint(tmp_path).specs) == ["a", "b"]
    for name, message in (("c", "1.*shards"), ("a", "shards")):
        save_file({"b": torch.zeros(2), name: torch.zeros(2)}, tmp_path / "2.safetensors")
        refusal(message, HfCheckpoint, tmp_path)
