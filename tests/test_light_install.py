"""`pip install .` alone: verbs that read headers and files run without torch, transformers and what comes with them."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.messages import text_with

from ckptkit.app.api import quantize
from ckptkit.quant.schemes.w4a16 import int4_scheme

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALL = "pip install '.[convert]' in a checkout"


def closure(texts):
    waiting, seen = list(texts), set[str]()
    while waiting:
        found = Requirement(waiting.pop())
        name = found.name.lower().replace("_", "-")
        if name in seen or (found.marker is not None and not found.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        yield name
        waiting += distribution(found.name).requires or []


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory with the requirements of the project, and not those of its extras."""
    folder = tmp_path_factory.mktemp("base")
    for name in closure(PROJECT["dependencies"]):
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            (folder / top).symlink_to(Path(str(installed.locate_file(top))))
    assert not {"torch", "transformers", "compressed_tensors", "numba"} & {path.name for path in folder.iterdir()}
    return folder


@pytest.fixture(scope="module", params=["checkout", pytest.param("wheel", marks=pytest.mark.nightly)])
def program(request, tmp_path_factory):
    """The checkout, or what pip installs of it."""
    if request.param == "checkout":
        return ROOT
    copy, installed = tmp_path_factory.mktemp("copy") / "checkout", tmp_path_factory.mktemp("installed")
    copy.mkdir()
    for name in ("ckptkit", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", installed, copy]
    done = subprocess.run([sys.executable, *map(str, pip)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return installed


def run(programs, base, *words):
    """The exit code of a command, and all that it prints. `programs`: where Python looks before the requirements."""
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, [*programs, base])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": os.environ["PATH"],
    }
    # Without `site`, nothing else that is installed can be imported.
    command = [sys.executable, "-S", "-m", "ckptkit", *map(str, words)]
    done = subprocess.run(
        command,
        cwd=base.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_headers_are_read_without_torch(program, base, releases, converted, tmp_path):
    source, packed, log = releases("qwen3_moe"), tmp_path / "int4", tmp_path / "job.log"
    quantize(source, packed, int4_scheme(group_size=32))
    log.write_text("step 1: loss 2.3\n")
    for words in (
        ["inspect", source],
        ["inspect", converted("qwen3_moe"), "--megatron-args"],
        ["inspect", packed],
        ["lint", packed, "--reader", "sglang"],
        ["explain", "CK305"],
        ["explain", "garbled"],
        ["triage", log],
        ["doctor"],
        ["preflight", "--hf-checkpoint", source, "--ref-load", converted("qwen3_moe")],
    ):
        code, text = run([program], base, *words)
        assert (code, "rror: " in text) == (0, False), (words, text)
    assert run([program], base, "--version")[1].startswith(f"ckptkit, version {PROJECT['version']}")


def test_what_computes_with_weights_names_the_line_that_installs_it(program, base, releases, tmp_path):
    source = releases("qwen3_moe")
    for words in (["convert", source, tmp_path / "out"], ["quantize", source, tmp_path / "out"]):
        code, text = run([program], base, *words)
        assert (code, f"next: {INSTALL}" in text) == (2, True), (words, text)
        assert "is not installed in" in text
    assert not (tmp_path / "out").exists()


def test_values_that_cannot_be_looked_at_are_inconclusive(program, base, releases):
    code, text = run([program], base, "verify", releases("qwen3_moe"))
    assert code == 2
    assert text == text_with(f"torch not installed {INSTALL}")
    assert "report it" not in text


def test_diff_compares_headers_and_says_that_it_read_no_values(program, base, releases, converted):
    moe = releases("qwen3_moe")
    code, text = run([program], base, "diff", moe, converted("qwen3_moe"))
    assert code == 2
    assert text == text_with(f"not read torch {INSTALL}")
    assert "INCONCLUSIVE  names and shapes" in text
    code, text = run([program], base, "diff", moe, releases("qwen2-tied"))
    assert code == 1
    assert "mlp.gate.weight" in text
    assert "\nDIFFERENT  " in text


def test_a_witness_that_is_not_installed_is_inconclusive(program, base, releases):
    code, text = run([program], base, "verify", releases("qwen3_moe"), "--against-sglang")
    assert code == 2
    assert "SGLang is not installed" in text


def test_doctor_says_what_is_left_to_install(program, base):
    code, text = run([program], base, "doctor", "convert")
    assert code == 2
    lines = text.splitlines()
    at = lines.index("  convert    not ready  convert, quantize, diff, and verify on values")
    assert lines[at + 1].split(maxsplit=1) == ["needed", INSTALL]
