"""`doctor`: what is installed and usable here. And ckptkit from a checkout that is on PYTHONPATH and not installed."""

import importlib.metadata
import json
import os
import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.messages import refusal
from support.processes import python

from ckptkit.app import doctor as module
from ckptkit.app.cli import cli

ROOT = Path(__file__).resolve().parents[3]


def run(*words):
    done = CliRunner().invoke(cli, ["doctor", *words])
    return done.exit_code, done.output


@pytest.fixture
def without(monkeypatch):
    def version(name):
        if name == "sglang":
            raise PackageNotFoundError(name)
        return importlib.metadata.version(name)

    monkeypatch.setattr(module, "version", version)
    monkeypatch.setenv("PATH", "")


def test_every_requirement_of_the_project_is_listed_with_its_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {text.partition(">")[0] for text in project["dependencies"]}
    report = json.loads(run("--json")[1])
    listed = {one["name"]: one["version"] for one in report["packages"]}
    assert names <= listed.keys()
    assert all(listed[name] == importlib.metadata.version(name) for name in names)
    assert report["faults"] == []
    assert report["schema"] == "ckptkit-doctor/1"


@pytest.mark.usefixtures("without")
def test_what_is_missing_is_named_and_breaks_nothing_unless_it_is_asked_for():
    code, text = run()
    assert code == 0
    assert "no NVIDIA GPU" in text
    assert run("remote")[0] == 0
    assert [run(part)[0] for part in ("sglang", "engine")] == [2, 2]
    # Each part has what it needs and what was tested.
    lines = text.splitlines()
    at = lines.index("  sglang     not ready  verify --against-sglang")
    rows = dict(row.split(maxsplit=1) for row in lines[at + 1 : at + 4])
    assert list(rows) == ["devices", "needed", "tested"]
    assert "pip install sglang" in rows["needed"]
    assert "0.5.16" in rows["tested"].split(", ")
    assert any(re.fullmatch(r"  torch +2\.\S+ +>=2\.10", line) for line in lines)


@pytest.mark.usefixtures("without")
def test_named_parts_are_listed_alone():
    _, output = run("ray", "convert")
    listed = {line.split()[0] for line in output.splitlines() if "ready" in line}
    assert (listed, "numba" in output) == ({"ray", "convert"}, False)


def test_an_engine_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(module, "version", importlib.metadata.version)
    parts = {one.name: one for one in module.examine().parts}
    assert (parts["sglang"].usable, parts["engine"].usable) == (True, False)
    assert parts["engine"].missing == "an NVIDIA GPU and its driver"


def test_a_requirement_whose_module_is_gone_is_broken(monkeypatch):
    monkeypatch.setitem(module._MODULE, "blake3", "no_such_module")
    code, text = run()
    assert code == 2
    assert "blake3 is damaged" in text
    code, text = run("cuda")  # which is no part
    assert code == 2
    assert "parts: convert, megatron, sglang, vllm, engine, ray, remote" in text


def test_gpus_are_those_that_the_driver_lists(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert list(module.examine().gpus) == ["GPU 0: NVIDIA H100 80GB HBM3"]
    assert "(1 here); repacks INT4 and FP8" in run()[1]


def test_a_model_of_the_hub_is_pointed_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, words in enumerate((["inspect", "Qwen/Qwen3"], ["convert", "Meta/Llama", "out"])):
        refusal(f"hf://{words[1]}", cli.main, words, standalone_mode=False)
        (tmp_path / words[1]).parent.mkdir()
        refusal("next: check the path$", cli.main, words, standalone_mode=False)
        assert len(list(tmp_path.iterdir())) == number + 1


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


def test_a_checkout_that_is_not_installed_runs_and_states_the_version_of_its_project(releases, tmp_path):
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
