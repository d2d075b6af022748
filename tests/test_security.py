"""SECURITY.md states the bounds that the code has."""

import re
from pathlib import Path

from ckptkit.core import json_text, specs
from ckptkit.formats import detect
from ckptkit.formats.hf import shard, side_files
from ckptkit.formats.torch_dist import reader
from ckptkit.formats.torch_save import blob, records, unpickle
from ckptkit.storage import tree

ROOT = Path(__file__).resolve().parent.parent
# Rows of the table in the order of the page: the bounds of each, in the order in which it names them.
BOUNDS = [
    (tree.MAX_FILES, tree.MAX_DEPTH),
    (specs.MAX_NAME,),
    (json_text.MAX_BYTES, json_text.MAX_VALUES, json_text.MAX_DEPTH, json_text.MAX_DIGITS),
    (shard.MAX_HEADER, json_text.MAX_VALUES, specs.MAX_AXES, shard._MAX_BYTES),
    (
        unpickle.MAX_OBJECTS,
        unpickle.MAX_STACK,
        unpickle.MAX_MARKS,
        unpickle.MAX_NAMES,
        unpickle.MAX_INTEGER,
        unpickle._MAX_KEY,
        unpickle._KEY_PARTS,
        unpickle._KEY_DEPTH,
    ),
    (records._MAX_PARTS, records._MAX_DEPTH),
    (blob._MAX_READ, blob._MAX_DIRECTORY),
    (reader.MAX_METADATA, reader._MAX_NAMES, reader._MAX_COMPARED, specs.MAX_AXES, reader._MAX_BYTES),
    (detect._MAX_TRACKER, detect._MAX_DIGITS),
    (side_files.MAX_SIDE_FILE_BYTES,),
]


def test_the_page_states_every_bound_of_the_code():
    rows = re.findall(r"^\| (?!what|---)[^|]+\| ([^|]+) \| `([^`]+)` \|$", (ROOT / "SECURITY.md").read_text(), re.M)
    stated = [
        tuple(2 ** int(power) if power else int(plain) for power, plain in re.findall(r"2\^(\d+)|(\d+)", text))
        for text, _ in rows
    ]
    assert stated == BOUNDS
    assert [file for _, file in rows if not (ROOT / "ckptkit" / file).is_file()] == []
