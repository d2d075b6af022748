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
try:
    importlib.metadata.version("ckptkit-verify")
except importlib.metadata.PackageNotFoundError:
    pass
else:
    sys.exit("the distribution is still found")
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
    source, quantized = str(releases("qwen2-untied")), str(tmp_path / "int4")
    verbs = (
        ["--version"],
        ["quantize", source, quantized, "--group-size", "32", "--ignore", r"re:.*\.mlp\.down_proj(\.weight)?$"],
        ["verify", quantized, "--json"],
        ["diff", source, source, "--json"],
        ["convert", source, str(tmp_path / "megatron")],
        ["doctor", "--json"],
    )
    done = python("-c", RUN, json.dumps(verbs))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [code for code, _ in results] == [0] * len(verbs), (results, done.stderr)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = f"{project['version']}+checkout"
    assert results[0][1] == f"ckptkit, version {wanted}\n"
    reports = [json.loads(results[index][1]) for index in (2, 3, 5)]
    assert [report["version"] for report in reports] == [wanted] * 3
    assert json.loads((tmp_path / "int4" / "ckptkit.json").read_text())["version"] == wanted
    listed = {one["name"] for one in reports[2]["packages"]}
    assert {text.partition(">")[0] for text in project["dependencies"]} <= listed
