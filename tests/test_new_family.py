"""docs/architecture.md: its two Python blocks are a whole family, and its table is that of the dataclasses' fields."""

import os
import re
import subprocess
import sys

from families.table import NEW_FAMILY, fields_table
from support.page_blocks import ROOT

# In a process of its own, whose registry finds a second folder of families.
RUN = """
import sys
from pathlib import Path
from ckptkit.converters import families
families.__path__.append(sys.argv[1])
import torch
from transformers import SmolLM3Config
from ckptkit.app.api import convert, quantize
from ckptkit.quant.formats.scheme import QuantScheme
from support import models
from ckptkit.verify.run import verify
from families.case import SIZES, Case, save
from families.gqa import CASES

exec(Path("case.py").read_text())
name = next(reversed(CASES))
save(name, CASES[name], Path("release"), torch.bfloat16)
convert("release", "megatron")
convert("megatron", "back")
assert models.unequal(Path("release"), Path("back")) == []
quantize("release", "int4", QuantScheme(32, "qmax7"))
found = [one for path in ("megatron", "int4") for one in verify(path, source="release").findings]
assert {one.code for one in found} <= {"CK307"}, found  # no kernel of SGLang has a tile for sizes so small
"""


def blocks():
    page = NEW_FAMILY.read_text().partition("\n## Adding a model family\n")[2]
    return re.findall(r"```python\n(.+?)```", page, re.DOTALL)


def test_the_pages_family_converts_both_ways_and_to_int4(tmp_path):
    family, case = blocks()[0], blocks()[-1]
    (tmp_path / "files").mkdir()
    (tmp_path / "files/smollm3.py").write_text(family)
    (tmp_path / "case.py").write_text(case)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    words = [sys.executable, "-W", "ignore", "-c", RUN, str(tmp_path / "files")]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_table_of_fields_is_that_of_the_dataclasses():
    assert fields_table() in NEW_FAMILY.read_text(), "run `make families`"
