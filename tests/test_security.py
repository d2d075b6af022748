"""SECURITY.md states the bounds that the code has."""

from __future__ import annotations

import re
from pathlib import Path

from ckptkit.core import json_text, specs
from ckptkit.formats import detect
from ckptkit.formats.hf import shard, side_files
from ckptkit.formats.torch_dist import reader
from ckptkit.formats.torch_save import blob, machine, records
from ckptkit.transfer import signature

ROOT = Path(__file__).resolve().parent.parent
# Rows of the table in the order of the page: the bounds of each, in the order in which it names them.
BOUNDS = [
    (json_text.MOST_BYTES, json_text.MOST_VALUES, json_text.MOST_DEPTH, json_text.MOST_DIGITS),
    (shard.MAX_HEADER, json_text.MOST_VALUES, specs.MOST_AXES, shard._MOST_BYTES),
    (machine.MOST_NAMES, machine.MOST_INTEGER, machine._MOST_KEY, machine._KEY_PARTS, machine._KEY_DEPTH),
    (records._MOST_PARTS, records._MOST_DEPTH),
    (blob._MOST_READ, blob._MOST_DIRECTORY),
    (reader.MOST_METADATA, reader._MOST_NAMES, reader._MOST_COMPARED, specs.MOST_AXES, reader._MOST_BYTES),
    (detect._MOST_TRACKER, detect._MOST_DIGITS),
    (side_files.MOST_BYTES_BESIDE,),
    (signature._MOST_SIGNATURE, signature._MOST_KEY),
]


def test_the_page_states_every_bound_of_the_code() -> None:
    rows = re.findall(r"^\| (?!what|---)[^|]+\| ([^|]+) \| `([^`]+)` \|$", (ROOT / "SECURITY.md").read_text(), re.M)
    stated = [
        tuple(2 ** int(power) if power else int(plain) for power, plain in re.findall(r"2\^(\d+)|(\d+)", text))
        for text, _ in rows
    ]
    assert stated == BOUNDS
    assert [file for _, file in rows if not (ROOT / "ckptkit" / file).is_file()] == []
