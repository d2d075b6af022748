"""Every cell of the matrix: a fault leaves the whole result or nothing, or a `.partial` from which --resume goes on."""

import json
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.models import content
from support.nightly import daily

from faults.cells import ASIDE, CELLS, FOUND, KEPT, NOTHING, REFUSED, RESUMABLE, WHOLE, WRITING, Cell
from faults.runs import Server, server

Content = dict[str, bytes]


@dataclass(frozen=True)
class Place:
    """Where runs happen: below `root` are `source`, with what is read, and the directory that each cell works in."""

    root: Path
    server: Server
    expected: dict[str, Content] = field(default_factory=dict)

    @property
    def source(self):
        return self.root / "source"

    def words(self, verb, work, source):
        hf, megatron = source / "hf", source / "megatron"
        return {
            "convert to Megatron": ["convert", hf, work / "out", "--max-shard-size", "300KB", "--workers", 1],
            "convert to HF": ["convert", megatron, work / "out", "--workers", 1],
            "quantize": ["quantize", hf, work / "out", "--group-size", 32, "--workers", 1],
            "verify": ["verify", megatron, "--source", hf, "--report", work / "report.json"],
            "diff": ["diff", megatron, hf],
            "inspect": ["inspect", hf],
            "manifest": ["manifest", megatron, "--output", work / "made.json", "--workers", 1],
            "lint --fix": ["lint", work / "int4", "--fix"],
            "preflight": ["preflight", "--hf-checkpoint", hf, "--ref-load", megatron],
            "triage": ["triage", source / "log"],
        }[verb]

    def prepare(self, cell, work):
        """Makes what the cell's run finds. Returns where its source is, and what is in `work`."""
        work.mkdir()
        work.chmod(0o777)
        if cell.verb == "lint --fix":
            shutil.copytree(self.source / "int4", work / "int4")
            (work / "int4").chmod(0o777)
        if not cell.changes:
            return self.source, content(work)
        shutil.copytree(self.source, work.parent / "changing")
        return work.parent / "changing", content(work)

    def whole(self, verb):
        if verb not in self.expected:
            cell = Cell("none", verb, "", WHOLE, 0)
            folder = Path(tempfile.mkdtemp(dir=self.root))
            folder.chmod(0o755)
            source, _ = self.prepare(cell, folder / "work")
            done = self.server.run(self.words(verb, folder / "work", source), folder)
            assert done.code == 0, done.stderr
            self.expected[verb] = content(folder / "work")
        return self.expected[verb]


@pytest.fixture(scope="module")
def place(releases):
    with tempfile.TemporaryDirectory(prefix="ckptkit-faults-", dir="/tmp") as folder:
        root = Path(folder)
        root.chmod(0o755)
        with server(root) as running:
            found = Place(root, running)
            shutil.copytree(releases("qwen3_moe"), found.source / "hf")
            for file in (found.source / "hf").iterdir():
                file.chmod(0o644)  # safetensors lets nobody else read what it writes
            (found.source / "log").write_text("nothing to see\n")
            for words in (
                ["convert", "hf", "megatron", "--max-shard-size", "300KB"],
                ["quantize", "hf", "int4", "--group-size", 32],
            ):
                done = running.run(words, found.source)
                assert done.code == 0, done.stderr
            for file in (found.source / "int4").glob("*.safetensors"):  # the list needs no weights
                file.unlink()
            config = json.loads((found.source / "int4/config.json").read_text())
            config["quantization_config"]["ignore"] = ["lm_head", "re:.*mlp.gate$"]
            (found.source / "int4/config.json").write_text(json.dumps(config))
            yield found


@pytest.mark.parametrize("cell", daily(CELLS, CELLS[::7]), ids=str)
def test_fault_leaves_what_its_cell_says(place, cell, tmp_path):
    whole = place.whole(cell.verb)
    with tempfile.TemporaryDirectory(prefix="cell-", dir=place.root) as folder:
        Path(folder).chmod(0o755)
        work = Path(folder, "work")
        source, before = place.prepare(cell, work)
        words = place.words(cell.verb, work, source)
        done = place.server.run(words, work, cell.injection, cell.given)
        assert done.code == cell.code, done
        assert cell.said in (done.stdout if cell.outcome == FOUND else done.stderr), done
        assert "Traceback" not in done.stderr
        assert "an error inside ckptkit" not in done.stderr
        assert cell.injection is None or done.met
        if cell.verb in WRITING:
            _check_written(place, cell, work, words, done, whole)
        else:
            _check_beside(cell, content(work), before, whole)


def _check_written(place, cell, work, words, done, whole):
    left = sorted(path.name for path in work.iterdir())
    if cell.outcome == NOTHING:
        assert left == [], done
        assert "was left behind" in done.stderr or "nothing" not in done.stderr
    elif cell.outcome == WHOLE:
        found, killed = content(work), done.code < 0
        assert left == ["out"] + ["out.partial.lock"] * killed
        assert done.code <= 0 or "complete" in done.stderr or "are written" in done.stderr
        if killed:
            del found["out.partial.lock"]
            resumed = place.server.run([*words, "--resume"], work)
            assert (resumed.code, "was already complete" in resumed.stdout) == (0, True), resumed
            assert content(work) == whole
        assert found == whole
    elif cell.outcome == ASIDE:
        assert left == ["out.partial"]
        assert re.search("out.partial .*rename", done.stderr)
        (work / "out.partial").rename(work / "out")
        assert content(work) == whole
    else:
        assert cell.outcome == RESUMABLE
        killed = cell.code < 0
        assert left == ["out.partial"] + ["out.partial.lock"] * killed
        assert killed or "--resume" in done.stderr
        resumed = place.server.run([*words, "--resume"], work)
        assert resumed.code == 0, resumed
        assert content(work) == whole


def _check_beside(cell, after, before, whole):
    """Of verbs that write no checkpoint: a killed one may leave a hidden file that nobody reads."""
    seen = {name: one for name, one in after.items() if cell.code >= 0 or not Path(name).name.startswith(".")}
    if cell.outcome in (WHOLE, FOUND):
        assert seen.keys() == whole.keys()
    elif cell.verb == "lint --fix":
        original = seen.pop("int4/config.json.orig", before["int4/config.json"])
        assert original == before["int4/config.json"]
        assert seen == before
    else:
        assert cell.outcome in (KEPT, REFUSED)
        assert seen == before
