"""Shards, indexes, pickles, zips and `.metadata` that lie about what they hold."""

import io
import json
import pickle
import struct
import zipfile
from functools import partial

from hostile.case import RAN, Case, put

_INDEX = "model.safetensors.index.json"
_FIRST = "model-00001-of-00005.safetensors"


def _header(change, root, more=b""):
    content = (root / _FIRST).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    put(root / _FIRST, struct.pack("<Q", len(text)) + text + content[8 + length :] + more)


def _first(header):
    return next(entry for name, entry in header.items() if name != "__metadata__")


def _second(header):
    return [entry for name, entry in header.items() if name != "__metadata__"][1]


HEADERS = {
    "offsets of 2^63": lambda header: _first(header).update(data_offsets=[0, 1 << 63]),
    "offsets turned round": lambda header: _first(header).update(data_offsets=_first(header)["data_offsets"][::-1]),
    "no offsets": lambda header: _first(header).pop("data_offsets"),
    "two tensors in one place": lambda header: _second(header).update(data_offsets=_first(header)["data_offsets"]),
    "dtype that is a list": lambda header: _first(header).update(dtype=["BF16"]),
    "shape beyond 2^64": lambda header: _first(header).update(shape=[1 << 40, 1 << 40, 1 << 40]),
    "shape of true": lambda header: _first(header).update(shape=[True]),
    "shape of 100000 axes": lambda header: _first(header).update(shape=[1] * 100_000),
    "metadata that is a list": lambda header: header.update(__metadata__=[1]),
    "name of 40000000 characters": lambda header: header.update({"x" * 40_000_000: dict(_first(header))}),
    "name of 5000 numbers": lambda header: header.update({".0" * 5_000: dict(_first(header))}),
    "name with a newline": lambda header: header.update({"a\nb\x1b[2J": dict(_first(header))}),
}


def _raw(content, root):
    put(root / _FIRST, content)


def _trailing(root):
    put(root / _FIRST, (root / _FIRST).read_bytes() + bytes(64))


def _cut(root):
    put(root / _FIRST, (root / _FIRST).read_bytes()[:-1])


RAW = {
    "length of 2^64 - 1": b"\xff" * 8 + b"{}",
    "three bytes": b"\1\2\3",
    "a header of spaces": struct.pack("<Q", 1000) + b" " * 1000,
    "nested header": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "UTF-16 header": (lambda text: struct.pack("<Q", len(text)) + text)('{"a": {}}'.encode("utf-16")),
    "50000 entries": (lambda text: struct.pack("<Q", len(text)) + text)(
        b"{" + b",".join(b'"%d":{}' % number for number in range(50_000)) + b"}"
    ),
}


def _weight_map(change, root):
    index = json.loads((root / _INDEX).read_bytes())
    change(index)
    put(root / _INDEX, json.dumps(index))


def _home(file):
    def change(index):
        index["weight_map"][next(iter(index["weight_map"]))] = file

    return change


INDEXES = {
    "parent folder": _home("../outside/secret.safetensors"),
    "NUL": _home("model\0.safetensors"),
    "dot": _home("."),
    "name of 10000 characters": _home("x" * 10_000),
    "list": _home(["model"]),
    "missing shard": _home("model-99999-of-00005.safetensors"),
    "control characters": _home("\x1b]0;owned\x07.safetensors"),
    "weight_map is absent": lambda index: index.pop("weight_map"),
    "weight_map is text": lambda index: index.update(weight_map="model"),
    "empty weight_map": lambda index: index.update(weight_map={}),
    "tensor name of 5000 numbers": lambda index: index["weight_map"].update({".0" * 5_000: _FIRST}),
    "ghost names": lambda index: index["weight_map"].update({f"ghost.{n}\x1b[2J": _FIRST for n in range(10_000)}),
}


# Pickles. Each would make the file RAN where a machine runs it, or never end.


def _global(module, name, argument):
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"X" + struct.pack("<I", len(argument)) + argument.encode()


_TOUCH = f"touch {RAN}"
_WRITE = f"open('{RAN}', 'w')"
PICKLES = {
    "os.system by REDUCE": _global("os", "system", _TOUCH) + b"\x85R.",
    "eval by REDUCE": _global("builtins", "eval", _WRITE) + b"\x85R.",
    "subprocess by NEWOBJ": _global("subprocess", "Popen", _TOUCH) + b"\x85\x81.",
    "os.system by INST": b"(X" + struct.pack("<I", len(_TOUCH)) + _TOUCH.encode() + b"ios\nsystem\n.",
    "setstate by BUILD": b"\x80\x02cos\nenviron\n}X\x01\x00\x00\x00aX\x01\x00\x00\x00bsb.",
    "persistent id of text": b"Pos.system\n.",
    "memo index of 2^31": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "hash of nested tuples": b"\x80\x04}" + b")" + b"\x94h\x00\x86" * 200 + b"Ns.",
    "billion laughs": b"\x80\x04]\x94" + b"".join(b"]\x94(h%ch%ch%ch%ce" % ((n,) * 4) for n in range(60)) + b".",
    "text of 2^63 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 63) + b".",
    "nested 100000 deep": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "list in itself": b"\x80\x04]\x94h\x00a.",
    "no STOP": b"\x80\x02N",
    "10000 names": b"\x80\x02(" + b"".join(b"cm%d\nn\n" % number for number in range(10_000)) + b"t.",
    "a number": pickle.dumps(7),
}


def _zip(data, entries=None, method=zipfile.ZIP_STORED):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        for name, content in ({"data.pkl": data, "byteorder": b"little", "version": b"3\n"} | (entries or {})).items():
            archive.writestr(f"archive/{name}", content)
    return made.getvalue()


_PLAIN = pickle.dumps({"args": None, "iteration": 1}, 2)
_GOOD = _zip(_PLAIN)


def _twice():
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in ("archive/data.pkl", "archive/data.pkl2"):
            archive.writestr(name, _PLAIN)
    return made.getvalue().replace(b"data.pkl2", b"data.pkl\0")


ZIPS = {
    "compressed": _zip(_PLAIN, method=zipfile.ZIP_DEFLATED),
    "a bomb": _zip(bytes(1 << 26), method=zipfile.ZIP_DEFLATED),
    "no data.pkl": _GOOD.replace(b"data.pkl", b"dota.pkl"),
    "one name twice": _twice(),
    "parent folder": _GOOD.replace(b"archive/data.pkl", b"../../../out/ran"),
    "big endian": _zip(_PLAIN).replace(b"little", b"biggie"),
    "cut off": _GOOD[:-30],
    "entry beyond the file": _GOOD.replace(struct.pack("<II", len(_PLAIN), len(_PLAIN)), b"\xff\xff\xff\x7f" * 2),
    "directory of 4 GiB": _GOOD[:-10] + b"\xff\xff\xff\xfe" + _GOOD[-6:],
}


def _common(content, root):
    put(root / "release" / "common.pt", content)


def _legacy(content, root):
    (root / "mp_rank_00").mkdir()
    put(root / "mp_rank_00" / "model_optim_rng.pt", content)


def _metadata(content, root):
    put(root / "release" / ".metadata", content)


def _dcp(change, root):
    file = root / "release" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    put(file, pickle.dumps(metadata))


def _entry(metadata):
    return metadata.state_dict_metadata[_weight(metadata)]


def _weight(metadata):
    return next(key for key, entry in metadata.state_dict_metadata.items() if len(getattr(entry, "size", ())) == 2)


def _info(metadata):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == _weight(metadata))


def _set(target, **values):
    for name, value in values.items():
        object.__setattr__(target, name, value)


def _chunks(metadata, change):
    entry = _entry(metadata)
    _set(entry, chunks=change(list(entry.chunks)))


METADATA = {
    "chunk twice": lambda found: _chunks(found, lambda chunks: chunks * 2),
    "no chunks": lambda found: _chunks(found, lambda chunks: []),
    "10000 chunks in one place": lambda found: _chunks(found, lambda chunks: chunks * 10_000),
    "chunks that are numbers": lambda found: _chunks(found, lambda chunks: [1, 2]),
    "negative chunk": lambda found: _set(_entry(found).chunks[0], offsets=(-1, 0)),
    "size of 2^62": lambda found: _set(_entry(found), size=(1 << 62, 1 << 62)),
    "size None": lambda found: _set(_entry(found), size=None),
    "file outside": lambda found: _set(_info(found), relative_path="../../outside/secret.distcp"),
    "file with NUL": lambda found: _set(_info(found), relative_path="a\0b"),
    "file with control characters": lambda found: _set(_info(found), relative_path="\x1b[2J.distcp"),
    "file that is the directory": lambda found: _set(_info(found), relative_path="."),
    "offset of 2^63": lambda found: _set(_info(found), offset=1 << 63),
    "length of 2^59": lambda found: _set(_info(found), length=1 << 59),
    "length text": lambda found: _set(_info(found), length="1"),
    "places None": lambda found: _set(found, storage_data=None),
    "no entries": lambda found: found.state_dict_metadata.clear(),
    "key of 5000 numbers": lambda found: found.state_dict_metadata.update({".0" * 5_000: _entry(found)}),
    "key that is a number": lambda found: found.state_dict_metadata.update({7: _entry(found)}),
    "key that is a path": lambda found: found.state_dict_metadata.update({"../../x": _entry(found)}),
}
# More objects than are read, in few bytes: the memory for them is not to be taken.
FLOODS = {
    "lists": b"]" * 20_000_001,
    "tuples in one another": b"N" + b"\x85" * 20_000_001,
    "instances": b"ca\nb\nq\0" + b"h\0)\x81" * 1_000_000 + b"]" * 19_000_001,
}
_OBJECTS = "objects.* 20000000"
# Values of every other instruction, which stay on the stack.
STACKS = {"None": b"N", "copies": b"2", "values below marks": b"(" + b"N" * 999}
_STACK = "1000000 values"
ROOTS = {"None": None, "a pair": (1, 2), "a dict": {}}
_MEGATRON = ("inspect", "convert", "verify", "preflight", "after_save")


def cases():
    few, shard = ("inspect", "convert", "verify", "after_write"), "model-00001"
    for what, change in HEADERS.items():
        yield Case(f"shard with {what}", "hf", partial(_header, change), shard, few)
    for what, content in RAW.items():
        yield Case(f"shard of {what}", "hf", partial(_raw, content), shard, few)
    yield Case("shard with trailing bytes", "hf", _trailing, shard, few)
    yield Case("shard without its last byte", "hf", _cut, shard, few)
    for what, change in INDEXES.items():
        yield Case(
            f"index with {what}",
            "hf",
            partial(_weight_map, change),
            _INDEX + "|shard|model-99999|owned|png|secret|" + _FIRST,
            (*few, "quantize"),
        )
    for what, content in PICKLES.items():
        yield Case(f".metadata: {what}", "megatron", partial(_metadata, content), r"\.metadata", _MEGATRON)
        yield Case(f"legacy rank: {what}", "legacy", partial(_legacy, _zip(content)), "model_optim_rng|mp_rank")
    for what, content in FLOODS.items():
        flood = b"\x80\x04" + content + b"."
        yield Case(f".metadata: a flood of {what}", "megatron", partial(_metadata, flood), _OBJECTS, _MEGATRON)
        yield Case(f"legacy rank: a flood of {what}", "legacy", partial(_legacy, _zip(flood)), _OBJECTS)
        yield Case(
            f"common.pt: a flood of {what}", "megatron", partial(_common, _zip(flood)), _OBJECTS, ("inspect", "verify")
        )
    for what, content in STACKS.items():
        flood = b"\x80\x02Nq\0" + content * (1_400_000 // (1000 if len(content) > 99 else 1)) + b"."
        yield Case(f".metadata: a stack of {what}", "megatron", partial(_metadata, flood), _STACK, _MEGATRON)
        yield Case(f"legacy rank: a stack of {what}", "legacy", partial(_legacy, _zip(flood)), _STACK)
    for what, root in ROOTS.items():
        content = pickle.dumps(root)
        said = rf"\.metadata contains {type(root).__name__} instead of .*Metadata"
        yield Case(f".metadata that is {what}", "megatron", partial(_metadata, content), said, _MEGATRON)
        said, verbs = rf"common state is {type(root).__name__}, not a dict", ("inspect", "verify")
        if not isinstance(root, dict):
            yield Case(f"common.pt that is {what}", "megatron", partial(_common, _zip(content)), said, verbs)
    for what, content in ZIPS.items():
        yield Case(
            f"common.pt is a zip: {what}", "megatron", partial(_common, content), "common", ("inspect", "verify")
        )
        yield Case(f"legacy rank is a zip: {what}", "legacy", partial(_legacy, content), "model_optim_rng")
    for what, change in METADATA.items():
        said = r"\.metadata|release|distcp"
        # inspect opens no file of weights.
        yield Case(f".metadata with {what}", "megatron", partial(_dcp, change), said, _MEGATRON, ("inspect",))
