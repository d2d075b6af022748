"""ckptkit from a checkout that is on PYTHONPATH and not installed."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from support.fixture_types import PathOf
from support.processes import python

ROOT = Path(__file__).resolve().parents[3]
# Hides ckptkit's metadata from importlib.metadata, as where nothing is installed; then runs each command.
RUN = """
import contextlib, importlib.metadata, io, json, sys
found = importlib.metadata.MetadataPathFinder.find_distributions

def hidden(context=importlib.metadata.DistributionFinder.Context()):
    return (one for one in found(context) if (one.metadata["Name"] or "").lower() not in ("ckptkit", "ckptkit-verify"))

importlib.metadata.MetadataPathFinder.find_distributions = staticmethod(hidden)
from ckptkit.app.cli import cli
results = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            code = cli.main(command, standalone_mode=False)
        except SystemExit as end:
            code = end.code
    results.append([code or 0, printed.getvalue()])
print(json.dumps(results))
"""


def test_a_checkout_that_is_not_installed_runs_and_states_the_version_of_its_project(
    releases: PathOf, tmp_path: Path
) -> None:
    source, out = str(releases("qwen2-untied")), str(tmp_path / "megatron")
    verbs = (["--version"], ["convert", source, out], ["verify", out, "--json"], ["doctor", "--json"])
    done = python("-c", RUN, json.dumps(verbs))
    assert done.returncode == 0, done.stderr
    version, converted, *reports = json.loads(done.stdout)
    assert [code for code, _ in (version, converted, *reports)] == [0] * len(verbs), done.stderr
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    expected = f"{project['version']}+checkout"
    assert version[1] == f"ckptkit, version {expected}\n"
    verified, examined = (json.loads(printed) for _, printed in reports)
    assert verified["version"] == examined["version"] == expected
    assert json.loads((tmp_path / "megatron" / "ckptkit.json").read_text())["version"] == expected
    assert {text.partition(">")[0] for text in project["dependencies"]} <= {one["name"] for one in examined["packages"]}
