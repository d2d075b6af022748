"""Changes of a sound checkpoint by rule: values, header entries, kinds of files and names."""

import json
import os
from dataclasses import dataclass

from hypothesis import strategies as st

from hostile.case import put

# What may stand where another value stood. Some are no JSON that others read.
VALUES = {
    "null": "null",
    "true": "true",
    "empty text": '""',
    "list": "[]",
    "object": "{}",
    "nested": '{"a": [{"b": null}]}',
    "text": '"words"',
    "number as text": '"3"',
    "zero": "0",
    "one": "1",
    "negative": "-3",
    "huge": "1" + "0" * 30,
    "too long for an integer": "9" * 200,
    "large float": "1e308",
    "infinite float": "1e999",
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "half": "0.5",
    "control characters": '"\\u001b[2J\\u0007\\u0000"',
    "right to left": '"\\u202egpj.\\u2066"',
    "half a pair": '"\\ud800"',
    "long": '"' + "x" * 5_000 + '"',
    "path": '"../../outside/x"',
    "markup": '"<img src=x onerror=alert(1)>\\n::error::x"',
}
NAMES = (
    *("", ".", "..", "../outside/x", "/etc/passwd", "a/b", "\x1b[2J", "x\ny", "\u202egpj", "\u0130\u0131", "é" * 40),
    *("x" * 200, "model.layers.0", "model.layers.99999999999999999999.mlp.up_proj.weight", "weight", "::error::x"),
    *("model.layers.-1.mlp.up_proj.weight", "model.layers.٣.mlp.up_proj.weight", "__metadata__"),
)
FILE_NAMES = tuple(name for name in NAMES if name.strip(".") and "/" not in name)
ENTRY_KEYS = ("dtype", "shape", "data_offsets", "shape 0", "data_offsets 0", "data_offsets 1")
KINDS = (
    *("gone", "directory", "pipe", "link to nothing", "link outside", "link to itself", "empty", "half", "longer"),
    *("zeros", "garbage", "pointer of Git LFS", "repeated"),
)


@dataclass(frozen=True)
class Mutation:
    """One change: what of which file, and into what. `place` counts keys, tensors or files, round and round."""

    kind: str
    place: int
    into: str

    def apply(self, root):
        """Makes it in a copy whose files are links to sound ones, which are not written into."""
        _APPLY[self.kind](root, self.place, self.into)


def mutations():
    place = st.integers(0, 9_999)
    one = st.one_of(
        st.builds(Mutation, st.just("value"), place, st.sampled_from([*VALUES, "delete", "duplicate", "rename"])),
        st.builds(Mutation, st.just("entry"), place, st.sampled_from([*VALUES, "delete", "duplicate"])),
        st.builds(Mutation, st.just("tensor name"), place, st.sampled_from(NAMES)),
        st.builds(Mutation, st.just("file"), place, st.sampled_from(KINDS)),
        st.builds(Mutation, st.just("file name"), place, st.sampled_from(FILE_NAMES)),
    )
    return st.lists(one, min_size=1, max_size=2).map(tuple)


def _files(root, ending=""):
    return sorted(path for path in root.rglob(f"*{ending}") if path.is_file() and not path.is_symlink())


def _places(content, path=()):
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _dump(content, place, into):
    """The content as JSON text, with a value changed. JSON libraries write neither a key twice nor most of VALUES."""
    holder = content
    for key in place[:-1]:
        holder = holder[key]
    key = place[-1]
    if into == "delete":
        del holder[key]
        return json.dumps(content)
    if into == "rename":
        if isinstance(holder, dict):
            holder["\x1b" + str(key)] = holder.pop(key)
        return json.dumps(content)
    value, mark = json.dumps(holder[key]), "of no other value"
    holder[key] = mark
    text = json.dumps(content)
    if into != "duplicate":
        return text.replace(json.dumps(mark), VALUES[into])
    twice = (
        f"{json.dumps(key)}: {value}, {json.dumps(key)}: {value}" if isinstance(holder, dict) else f"{value}, {value}"
    )
    return text.replace(
        f"{json.dumps(key)}: {json.dumps(mark)}" if isinstance(holder, dict) else json.dumps(mark), twice
    )


def _value(root, place, into):
    files = _files(root, ".json")
    if not files:
        return
    file = files[place % len(files)]
    try:
        content = json.loads(file.read_bytes())
    except ValueError:
        return  # another change has broken it
    if places := list(_places(content)):
        put(file, _dump(content, places[place % len(places)], into))


def _header(root, place, change):
    files = _files(root, ".safetensors")
    if not files:
        return
    file = files[place % len(files)]
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
    except ValueError:
        return
    names = [name for name in header if name != "__metadata__"]
    text = change(header, names[place % len(names)]).encode()
    put(file, len(text).to_bytes(8, "little") + text + content[8 + length :])


def _entry(root, place, into):
    key, _, item = ENTRY_KEYS[place % len(ENTRY_KEYS)].partition(" ")
    if into in ("delete", "duplicate"):
        _header(root, place, lambda header, name: _dump(header, (name,), into))
    else:
        _header(root, place, lambda header, name: _dump(header, (name, key, *([int(item)] if item else [])), into))


def _tensor_name(root, place, into):
    _header(root, place, lambda header, name: json.dumps({into if key == name else key: header[key] for key in header}))


def _file(root, place, into):
    files = _files(root)
    if not files:
        return
    file = files[place % len(files)]
    content = file.read_bytes()
    file.unlink()
    if into == "directory":
        file.mkdir()
    elif into == "pipe":
        os.mkfifo(file)
    elif into.startswith("link"):
        file.symlink_to({"link to nothing": "nowhere", "link outside": "../outside/x"}.get(into, file.name))
    elif into != "gone":
        half = content[: len(content) // 2]
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        made = {
            "empty": b"",
            "half": half,
            "longer": content + b"\0" * 7,
            "zeros": bytes(len(content)),
            "garbage": b"\xff\xfe\x00" * 99,
            "pointer of Git LFS": pointer,
            "repeated": content + content,
        }
        file.write_bytes(made[into])


def _file_name(root, place, into):
    files = _files(root)
    if files:
        file = files[place % len(files)]
        file.rename(file.with_name(f"{into[:100]}{file.suffix}"))


_APPLY = {"value": _value, "entry": _entry, "tensor name": _tensor_name, "file": _file, "file name": _file_name}
