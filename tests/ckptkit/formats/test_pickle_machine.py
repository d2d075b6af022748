"""The restricted unpickler builds what Python builds of plain data, runs nothing, and refuses what costs too much."""

import json
import math
import pickle
import pickletools
import re
import struct
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import gadget_pickles
from support.messages import refusal
from support.nightly import daily
from support.processes import python
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptkit.core.errors import CkptkitError, MissingError
from ckptkit.formats.torch_save import unpickle
from ckptkit.formats.torch_save.blob import Blob
from ckptkit.formats.torch_save.records import NotAllowed, Record, is_bounded, kind_of
from ckptkit.formats.torch_save.unpickle import MAX_NAMES, MAX_OBJECTS, Machine, _named

_KEYS = st.one_of(st.text(), st.integers(-(2**59), 2**59), st.booleans(), st.none(), st.binary(), st.tuples(st.text()))
_PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**200), 2**200),
        st.floats(allow_nan=False),
        st.text(),
        st.binary(max_size=300),
        st.frozensets(_KEYS),
        st.sets(_KEYS),
    ),
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner), st.tuples(inner, inner, inner, inner), st.dictionaries(_KEYS, inner)
    ),
)


@settings(max_examples=60, deadline=None)
@given(_PLAIN, st.sampled_from([4, 5]))
def test_plain_data_is_what_python_reads(value, protocol):
    assert unpickle.loads(pickle.dumps(value, protocol)) == value


def test_a_bytearray_of_protocol_5_and_the_call_that_older_ones_make_of_it():
    assert unpickle.loads(pickle.dumps(bytearray(b"ab"), 5)) == bytearray(b"ab")
    assert unpickle.loads(pickle.dumps(bytearray(b"ab"), 4)).kind == "builtins.bytearray"


def test_shared_and_cyclic_lists_keep_their_identity_and_ordered_dicts_are_dicts():
    cycle = [1]
    cycle.append(cycle)
    found = unpickle.loads(pickle.dumps([cycle, cycle], 2))
    assert found[0] is found[1]
    assert found[0][1] is found[0]
    assert unpickle.loads(pickle.dumps(OrderedDict(a=1, b=2), 2)) == {"a": 1, "b": 2}


def test_every_instruction_of_protocols_2_to_5_is_known_or_refused_by_number():
    refused = set()
    for instruction in pickletools.opcodes:
        code = instruction.code.encode("latin-1")
        try:
            unpickle.loads(b"\x80\x05" + code)
        except pickle.UnpicklingError as error:
            if "instruction" in str(error):
                refused.add(instruction.name)
    text = {"INT", "LONG", "STRING", "UNICODE", "FLOAT", "PUT", "GET", "PERSID"}  # of protocol 0
    old = {"BINSTRING", "SHORT_BINSTRING", "INST", "OBJ"}  # of protocol 1
    elsewhere = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
    assert refused == text | old | elsewhere


def _in_a_dict(key):
    return b"\x80\x04}" + key + b"K\x01s."


_HASH_BOMB = _in_a_dict(b")" + b"2\x86" * 40)  # DUP, TUPLE2: a pair of what was there, forty times


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(_HASH_BOMB, "too many parts", id="hash of 2^40 steps"),
        pytest.param(_in_a_dict(b"]"), "a key", id="list as key"),
        pytest.param(_in_a_dict(b"\x8a\x09" + b"\xff" * 8 + b"\x00"), "a key", id="key of 2^64 - 1"),
        pytest.param(b"\x80\x04\x8f(]\x90.", "element", id="list in a set"),
        pytest.param(b"\x80\x02\x8b" + struct.pack("<i", 10**6) + b"\1" * 10**6 + b".", "1000000 bytes", id="integer"),
        pytest.param(b"\x80\x02I" + b"9" * 100_000 + b"\n.", "instruction", id="integer in digits"),
        pytest.param(b"\x80\x04\x8c\x03\xed\xa0\x80.", "not UTF-8", id="surrogate"),
        pytest.param(b"\x80\x02X\xff\xff\xff\xff", "too early", id="string of 4 GiB"),
        pytest.param(b"\x80\x02a.", "damaged before byte 3", id="empty stack"),
        pytest.param(b"\x80\x02K\x01)R.", "calls int", id="call of a number"),
        pytest.param(b"\x80\x02ctorch\nSize\nK\x09\x85R.", "calls tuple", id="size of a number"),
        pytest.param(b"\x80\x02]}b.", "attributes of list", id="state of a list"),
        pytest.param(b"\x80\x02(K\x01d.", "without a value", id="odd dict"),
        pytest.param(b"\x80\x02]r\xff\xff\xff\xff0j\xff\xff\xff\xff.", "4294967295.*0", id="index of the memo"),
    ],
)
def test_what_no_real_pickle_has_is_refused(content, words):
    with pytest.raises(pickle.UnpicklingError, match=words):
        unpickle.loads(content)


_PIECES = [
    *(unpickle._NEW, unpickle._STATE, unpickle._SIZE, b"(", b")", b"\x81", b"}", b"\x94", b"u", b"b", b"R", b"t", b"N"),
    *(b"\x85", b"\x87", b"h\x00", b"h\x01", b"h\x05", b"q\x01", b"K\x01", b"M\x01\x02", b"\x8c\x01a", b"\x8c\x05state"),
    *(b"h\x00" + unpickle._NEW, b"\x8c\x01bK\x03" + unpickle._STATE, b"h\x01K\x02K\x03M\x00\x01" + unpickle._SIZE),
]
_CLASSES = b"\x80\x04cm\nn\n\x94ctorch\nSize\n\x94cm\nn\nctorch\nSize\n"


def _outcome(content):
    """What the pickle builds, with what the memo holds then, or what it is refused for."""
    machine = Machine(content, lambda module, name: _named(module, name, None))
    try:
        end = _written_out(machine.run())
    except pickle.UnpicklingError as error:
        return re.sub(r"byte \d+", "", str(error))
    return end, [_written_out(one) for one in machine._memo]


def _written_out(value):
    """A value with what its records hold; names of classes in place of them."""
    if isinstance(value, Record):
        return [value.kind, *(_written_out(part) for part in vars(value).items())]
    if isinstance(value, (list, tuple)):
        return type(value), [_written_out(part) for part in value]
    return [_written_out(part) for part in value.items()] if isinstance(value, dict) else kind_of(value), str(value)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(_PIECES), max_size=8))
def test_groups_of_instructions_do_what_each_of_them_does(pieces):
    content = _CLASSES + b"".join(pieces) + b"."
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_NEW", "_STATE", "_SIZE"):
            patch.setattr(unpickle, name, b"\0\0")
        expected = _outcome(content)
    assert _outcome(content) == expected


def test_more_names_than_a_pickle_has_are_refused():
    names = b"".join(b"cm\nn%d\n0" % index for index in range(MAX_NAMES + 1))
    with pytest.raises(pickle.UnpicklingError, match="4096 names"):
        unpickle.loads(b"\x80\x02" + names + b"N.")


def test_as_many_objects_as_the_bound_are_read_and_no_more(monkeypatch):
    monkeypatch.setattr(unpickle, "MAX_OBJECTS", 100)
    for made in (b"]", b"}", b"(", b"N\x85", b"NN\x86", b"NNN\x87", b"\x8c\x01a", b"h\0)\x81", b"h\0)R"):
        end = b"N." if made == b"(" else b"."
        count = 50 if made.startswith(b"h") else 100  # an instance counts twice
        assert unpickle.loads(b"\x80\x02cm\nn\nq\0" + made * count + end) is not NotImplemented
        with pytest.raises(pickle.UnpicklingError, match="10[12].*100"):
            unpickle.loads(b"\x80\x02cm\nn\nq\0" + made * (count + 1) + end)


def test_more_values_than_wait_in_any_pickle_are_refused(monkeypatch):
    monkeypatch.setattr(unpickle, "MAX_STACK", 100)
    monkeypatch.setattr(unpickle, "_PIECE", 8)
    for made in (b"N", b")", b"K\0", b"J\1\2\3\4", b"2", b"h\0", b"C\2ab", b"(NN"):
        begin, count = b"\x80\x02Nq\0", 50 if made.startswith(b"(") else 100
        assert unpickle.loads(begin + made * (count - 1) + b".") is not NotImplemented
        with pytest.raises(pickle.UnpicklingError, match="100.*stack"):
            unpickle.loads(begin + made * (count + 10) + b".")


def test_marks_and_a_memo_without_end_are_refused(monkeypatch):
    monkeypatch.setattr(unpickle, "_PIECE", 8)
    assert len(unpickle.loads(b"\x80\x02" + b"(" * 9_000 + b"l" * 9_000 + b".")) == 1
    with pytest.raises(pickle.UnpicklingError, match="stack"):
        unpickle.loads(b"\x80\x02" + b"(" * 10_010 + b"N.")
    monkeypatch.setattr(unpickle, "MAX_OBJECTS", 100)
    with pytest.raises(pickle.UnpicklingError, match="100.*memo"):
        unpickle.loads(b"\x80\x04N" + b"\x94" * 120 + b".")


@pytest.mark.parametrize("protocol", daily([2, 4, 5], [4]))
def test_containers_of_many_values_are_read(protocol):
    value = {"list": [None] * 1_500_000, "tuple": tuple(range(900_000))}
    value |= {"dict": dict.fromkeys(range(300_000), 1.5)}
    assert unpickle.loads(pickle.dumps(value, protocol)) == value
    numbers = [0, 255, 256, 65535, 65536, -1, -(2**31), 2**31, 2**63, -(2**100), math.inf, -0.0, 5e-324]
    assert unpickle.loads(pickle.dumps(numbers, protocol)) == numbers


def _containers(value):
    """How many containers there are in plain data; a set is as large as four others."""
    if not isinstance(value, list | tuple | dict | set | frozenset):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return (4 if isinstance(value, set) else len(value) > 0) + sum(map(_containers, inner))


@settings(max_examples=60, deadline=None)
@given(_PLAIN, st.sampled_from([4, 5]))
def test_no_object_is_left_out_of_the_count(value, protocol):
    assert unpickle.count_objects(pickle.dumps(value, protocol)) >= _containers(value)


def test_metadata_of_the_most_tensors_has_fewer_objects_than_the_bound():
    """As torch writes them, of 500,000 tensors: those are bounded elsewhere."""
    beginning = "chained_0.optimizer.state.exp_avg_sq.decoder.layers.mlp.experts.linear_fc1.weight"
    size = torch.Size((4096, 7168))
    chunk, properties = ChunkStorageMetadata(torch.Size((0, 0)), size), TensorProperties(torch.bfloat16)
    tensors = {
        f"{beginning}{n}": TensorStorageMetadata(properties, torch.Size((4096, 7168)), [chunk]) for n in range(200)
    }
    places = {
        MetadataIndex(name, torch.Size((0, 0)), 0): _StorageInfo(f"__{n}_0.distcp", n * 58_720_256, 58_721_000)
        for n, name in enumerate(tensors)
    }
    for protocol in (2, 4):
        content = pickle.dumps(Metadata(tensors, None, places), protocol)
        assert unpickle.count_objects(content) / 200 * 500_000 < MAX_OBJECTS


def test_one_name_is_one_class_whose_state_replaces_nothing_that_it_is_read_by():
    first, second = unpickle.loads(b"\x80\x02cm\nn\n)\x81cm\nn\n)\x81\x86.")
    assert type(first) is type(second)
    assert isinstance(first, Record)
    state = {"args": 1, "kind": 2, "set_state": 3, "kept": 4}
    content = b"\x80\x02cm\nn\n)\x81" + pickle.dumps(state, 2)[2:-1] + b"b" + b"}b."
    found = unpickle.loads(content)
    assert (found.args, found.kind, found.kept) == ((), "m.n", 4)


def _doubled(levels):
    value = [0, 0]
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("value", "bounded"),
    [
        pytest.param({"a": [1, (2, {"b": [3]})]}, True, id="arguments"),
        pytest.param([[0] * 100] * 1000, True, id="many parts"),
        pytest.param(_doubled(25), False, id="2^25 parts"),
        pytest.param(_doubled(100), False, id="2^100 parts"),
        pytest.param(unpickle.loads(b"\x80\x02]q\x00h\x00a."), False, id="holds itself"),
    ],
)
def test_values_without_an_end_are_told(value, bounded):
    assert is_bounded(value) is bounded


def test_an_attribute_of_a_dict_other_than_metadata_is_refused():
    kept = OrderedDict(a=1)
    kept._metadata = OrderedDict(version=1)
    assert unpickle.loads(pickle.dumps(kept)) == {"a": 1}
    kept.weight = 2
    with pytest.raises(pickle.UnpicklingError, match="_metadata"):
        unpickle.loads(pickle.dumps(kept))


def test_names_that_are_not_allowed_end_the_reading():
    content = b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R."
    with pytest.raises(NotAllowed) as error:
        unpickle.loads(content, {"posix.other"}.__contains__)
    assert error.value.kind == "posix.system"
    assert isinstance(unpickle.loads(content, {"posix.system"}.__contains__), Record)


def test_tensor_saved_by_torch_is_read_back_from_the_middle_of_a_file(tmp_path):
    tensor, file = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)[1:3, 2:5], tmp_path / "x"
    with file.open("wb") as stream:
        stream.write(b"some bytes before")
        torch.save(tensor, stream)
    blob = Blob(file, 17, file.stat().st_size - 17)
    assert torch.equal(blob.tensor("bfloat16", (2, 3)), tensor)
    for dtype, shape in (("float64", (2, 3)), ("bfloat16", (2, 3, 1))):
        refusal("metadata", blob.tensor, dtype, shape)


def test_object_where_a_tensor_should_be_and_truncation(tmp_path):
    file = tmp_path / "x"
    torch.save({"no": "tensor"}, file)
    with pytest.raises(CkptkitError, match="not a plain tensor"):
        Blob(file, 0, file.stat().st_size).tensor("float32", (1,))
    with pytest.raises(CkptkitError, match="missing or damaged"):
        Blob(file, 0, file.stat().st_size - 30).object()
    with pytest.raises(MissingError, match="absent is missing"):
        Blob(tmp_path / "absent", 0, 10).object()


def test_a_missing_checksum_is_accepted(tmp_path):
    tensor, file = torch.arange(1000, dtype=torch.float32), tmp_path / "x"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, file)
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(Blob(file, 0, file.stat().st_size).tensor("float32", (1000,)), tensor)


def test_every_gadget_is_an_inert_record_or_refused_and_imports_and_runs_nothing():
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
