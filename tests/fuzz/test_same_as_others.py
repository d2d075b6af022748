"""What others read in a file is what ckptkit reads, or it is refused for a reason that is named here."""

import json
import pickle
import re
import struct

import pytest
import safetensors
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptkit.core import json_text
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.shard import scan_shard
from ckptkit.formats.torch_dist.reader import read_metadata
from ckptkit.verify.launch.settings.tree import parse_yaml

_FEW = settings(max_examples=250, deadline=None, derandomize=True, database=None)

# JSON, written in pieces so that most of it is none.
_JSON = st.lists(
    st.sampled_from(
        [
            *("{", "}", "[", "]", ",", ":", " ", "\n", "{}", "[[]]", '"a"', '"a":', '"b"', '"é"', "true", "null"),
            *('"\\ud83d"', '"\\ude00"', '"\\ud83d\\ude00"', "1", "-0", "1e5", "1e999", "NaN", "-Infinity", "0.25"),
        ]
    ),
    max_size=9,
).map("".join)
_REFUSED_JSON = re.compile(
    r"twice in one object|surrogates not allowed|an integer of \d+ digits|nested (too|more than 64 levels)"
)


def _value(inner):
    return st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: f"[{','.join(parts)}]"),
        st.lists(st.builds('"{}": {}'.format, st.sampled_from("abc"), inner), max_size=3).map(
            lambda parts: f"{{{', '.join(parts)}}}"
        ),
    )


_DEEP = st.recursive(st.sampled_from(["1", '"\\udc00"', "null", "-1.5", "9" * 99, "9" * 150]), _value, max_leaves=12)


@_FEW
@given(_JSON | _DEEP | st.integers(60, 70).map(lambda depth: "[" * depth + "]" * depth))
def test_json_is_what_python_reads_or_refused_by_a_bound(text):
    try:
        expected = repr(json.loads(text))
    except ValueError:
        expected = None
    found, refused = _read(lambda: repr(json_text.parse(text.encode())))
    assert found == expected if refused is None else expected is None or _REFUSED_JSON.search(refused), (text, refused)


def _read(read):
    try:
        return read(), None
    except (ValueError, CkptkitError) as error:
        return None, str(error)


_ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I64", "U8", "F8_E4M3", "BOOL", "F4", "C64", "f32", 1]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 3, -1, 1 << 61, True, 1.0]), max_size=3) | st.just([1] * 65),
        "data_offsets": st.just(None),
    },
    optional={"more": st.just(1)},
)
_SIZES = {"F32": 4, "BF16": 2, "I64": 8, "U8": 1, "F8_E4M3": 1, "BOOL": 1, "C64": 8}
_REFUSED_SHARD = re.compile(r"does not know|occurs twice|has .* twice|is not valid|of whole numbers")


@_FEW
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "a.b", "", "__metadata__"]), _ENTRY), max_size=3),
    st.sampled_from([0, 0, 0, 1, -1, 4]),
    st.sampled_from([0, 0, 0, 1]),
)
def test_a_shard_is_what_safetensors_reads_or_refused_by_name(scratch, entries, more, gap):
    end, pairs = 0, []
    for name, entry in entries:
        if name == "__metadata__":
            pairs.append('"__metadata__": {"format": "pt"}')
            continue
        elements = 1
        for axis in entry["shape"]:
            elements *= max(int(axis), 0)
        nbytes = min(elements * _SIZES.get(str(entry["dtype"]), 1), 100)
        pairs.append(f"{json.dumps(name)}: {json.dumps({**entry, 'data_offsets': [end, end + nbytes]})}")
        end += nbytes + gap
    header = f"{{{', '.join(pairs)}}}".encode()
    content = struct.pack("<Q", len(header)) + header + bytes(max(0, end + more))
    (scratch / "x").write_bytes(content)
    shard = scan_shard(scratch / "x")
    try:
        theirs = {name: tuple(one["shape"]) for name, one in safetensors.deserialize(content)}
    except safetensors.SafetensorError:
        assert shard.faults
        return
    if shard.faults:
        assert all(_REFUSED_SHARD.search(str(fault)) for fault in shard.faults[:1]), (header, shard.faults)
    else:
        assert {name: spec.shape for name, spec in shard.specs.items()} == theirs


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


_KINDS = st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64])
_AXES = st.lists(st.sampled_from([1, 3, 300, 70_000, 1 << 33]), max_size=4)


@st.composite
def _metadata(draw):
    """A DCP metadata as torch writes it: tensors in one or two chunks, and objects."""
    entries = {}
    storage = {}
    for number in range(draw(st.integers(0, 4))):
        key, shape = f"decoder.{number}", draw(_AXES)
        halves = [0, shape[0] // 2] if shape and shape[0] > 1 else [0]
        chunks = []
        for index, begin in enumerate(halves):
            end = halves[index + 1] if index + 1 < len(halves) else (shape[0] if shape else 0)
            offsets, sizes = [begin, *[0] * (len(shape) - 1)], [end - begin, *shape[1:]]
            chunks.append(ChunkStorageMetadata(torch.Size(offsets[: len(shape)]), torch.Size(sizes[: len(shape)])))
            where = _StorageInfo(f"__{index}_0.distcp", draw(st.integers(0, 1 << 50)), draw(st.integers(0, 1 << 40)))
            storage[MetadataIndex(key, chunks[-1].offsets, index)] = where
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=draw(_KINDS)), torch.Size(shape), chunks)
    for number in range(draw(st.integers(0, 2))):
        entries[f"extra/{number}"] = BytesStorageMetadata()
        storage[MetadataIndex(f"extra/{number}")] = _StorageInfo("__0_0.distcp", number, 7)
    return Metadata(entries, planner_data={"a": ("a", "b")}, storage_data=storage)


@settings(_FEW, max_examples=60)
@given(_metadata(), st.integers(2, 5))
def test_metadata_is_what_torch_reads(scratch, metadata, protocol):
    content = pickle.dumps(metadata, protocol)
    (scratch / ".metadata").write_bytes(content)
    theirs, ours = pickle.loads(content), read_metadata(scratch)
    for key, entry in theirs.state_dict_metadata.items():
        where = {index.offset: info for index, info in theirs.storage_data.items() if index.fqn == key}
        if isinstance(entry, BytesStorageMetadata):
            blobs, expected = [ours.objects[key]], list(where.values())
        else:
            stored = ours.tensors[key]
            assert (stored.shape, f"torch.{stored.dtype}") == (tuple(entry.size), str(entry.properties.dtype))
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            assert [(chunk.offsets, chunk.sizes) for chunk in stored.chunks] == boxes
            blobs = [chunk.blob for chunk in stored.chunks]
            expected = [where[chunk.offsets] for chunk in entry.chunks]
        found = [(blob.path.name, blob.offset, blob.length) for blob in blobs]
        assert found == [(info.relative_path, info.offset, info.length) for info in expected]
    assert ours.tensors.keys() | ours.objects.keys() == theirs.state_dict_metadata.keys()
    assert "torch.distributed.checkpoint.metadata.Metadata" in ours.names


# YAML in flow style, with anchors, aliases, merges and quoted words.
_WORDS = st.sampled_from(
    ["a", "'a'", '"b"', "~", "null", "''", "1", "yes", "0x1", '"\\n"', "é", "<<", "'<<'", "*x", "*y"]
)
_MERGES = st.sampled_from(["<<: {a: 1}", "<<: {a: 2, b: 3}", "<<: [{a: 4}, {a: 5}]", '"<<": {a: 6}'])
_KEYS = st.sampled_from(["a", "b", "'b'", "<<", '"<<"', "1", "null", "'null'", "'c': 1, a"])


def _flow(inner):
    return st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
        st.lists(st.builds("{}: {}".format, _KEYS, inner) | _MERGES, max_size=3).map(
            lambda parts: f"{{{', '.join(parts)}}}"
        ),
        st.builds("&{} {}".format, st.sampled_from("xy"), inner),
    )


class _Words(yaml.SafeLoader):
    """PyYAML's SafeLoader of which every value is a word, as it is written, and a null the word `null`."""


_Words.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if tag.endswith((":null", ":merge"))]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Words.add_constructor("tag:yaml.org,2002:null", lambda *_: "null")
_Words.add_constructor("tag:yaml.org,2002:merge", lambda *_: "<<")
_REFUSED_YAML = re.compile("twice in one mapping|not a string|not a mapping|levels deep|aliases expanded")


def _plain(tree):
    if isinstance(tree, dict):
        return {key: _plain(one) for key, one in tree.items()}
    return [_plain(one) for one in tree] if isinstance(tree, list) else tree.text


@settings(_FEW, max_examples=600)
@given(st.recursive(_WORDS, _flow, max_leaves=8).map("{{k: {}}}".format))
def test_yaml_is_what_pyyaml_reads_or_refused_by_a_named_rule(text):
    try:
        expected = yaml.load(text, _Words)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError:
        expected = None
    found, refused = _read(lambda: _plain(parse_yaml(text)))
    assert found == expected if refused is None else expected is None or _REFUSED_YAML.search(refused), (text, refused)
