"""What is handed out: wheel and sdist, the same bytes from every clone, and what the Containerfile builds."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import ckptkit

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("ckptkit", "converters", "quant", "verify", "docs", "lab", ".ci")
FILES = (
    *("CHANGELOG.md", "Containerfile", "LICENSE", "MANIFEST.in", "README.md", "SECURITY.md"),
    *("CONTRIBUTING.md", "constraints.txt", "pyproject.toml"),
)
NAMES = ["ckptkit_verify-0.1.0-py3-none-any.whl", "ckptkit_verify-0.1.0.tar.gz"]


def git(*words):
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *map(str, words)], check=True, capture_output=True)


def build(clone, umask):
    command = [sys.executable, ".ci/dist.py", "made here"]
    done = subprocess.run(command, cwd=clone, umask=umask, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_bytes() for path in sorted((clone / "made here").iterdir())}


@pytest.fixture(scope="module")
def clones(tmp_path_factory):
    """Two clones of one commit, in other places, whose files have other times."""
    one, other = tmp_path_factory.mktemp("one") / "here", tmp_path_factory.mktemp("other") / "somewhere/else"
    one.mkdir()
    for name in SOURCES:
        shutil.copytree(ROOT / name, one / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, one)
    git("init", "-q", one)
    git("-C", one, "add", "-A")
    git("-C", one, "commit", "-qm", "one commit")
    git("clone", "-q", one, other)
    for path in other.rglob("*.py"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    (other / "ckptkit/untracked.py").write_text("")
    return one, other


def test_two_builds_of_one_commit_have_the_same_bytes(clones):
    first, second = build(clones[0], 0o022), build(clones[1], 0o077)
    assert list(first) == NAMES
    assert {name: hashlib.sha256(content).hexdigest() for name, content in first.items()} == {
        name: hashlib.sha256(content).hexdigest() for name, content in second.items()
    }


def test_wheel_and_sdist_hold_the_packages_and_nothing_of_the_machine(clones):
    made = clones[0] / "made here"
    if not made.exists():
        build(clones[0], 0o022)
    with zipfile.ZipFile(made / NAMES[0]) as wheel:
        in_wheel = {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(made / NAMES[1]) as sdist:
        members = sdist.getmembers()
        in_sdist = {
            one.name.removeprefix("ckptkit_verify-0.1.0/"): file.read()
            for one in members
            if (file := sdist.extractfile(one))
        }
    assert {name.partition("/")[0] for name in in_wheel} == {*("ckptkit", "ckptkit_verify-0.1.0.dist-info")}
    assert {"ckptkit/app/cli/__init__.py", "ckptkit/verify/reports/page.html"} <= in_wheel.keys()
    assert {
        f"ckptkit/verify/launch/options/names/{name}.txt" for name in ("slime", "sglang", "roll")
    } <= in_wheel.keys()
    assert {
        f"ckptkit/verify/{table}.toml" for table in ("core/catalogue", "triage/symptoms", "quirks/sglang")
    } <= in_wheel.keys()
    assert "ckptkit_verify-0.1.0.dist-info/licenses/LICENSE" in in_wheel
    assert "ckptkit/py.typed" in in_wheel
    assert {"pyproject.toml", "SECURITY.md", "LICENSE", "ckptkit/verify/reports/page.html"} <= in_sdist.keys()
    assert {(one.uid, one.gid, one.uname, one.gname) for one in members} == {(0, 0, "", "")}
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", in_sdist["README.md"].decode())
    assert len(linked) >= 10
    assert {link for link in linked if link not in in_sdist} == set()
    paths = [bytes(place) for place in (clones[0], clones[1], ROOT)]
    for name, content in {**in_wheel, **in_sdist}.items():
        assert not name.startswith(("tests/", "/")), name
        assert not any(place in content for place in paths), name


def test_changes_that_are_not_committed_are_not_built(clones):
    (clones[1] / "README.md").write_text("changed")
    command = [sys.executable, ".ci/dist.py", "made of changes"]
    done = subprocess.run(command, cwd=clones[1], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.partition("\n")[0]) == (1, "error: there are changes that are not committed")
    assert not (clones[1] / "made of changes").exists()


def test_no_text_installs_ckptkit_from_an_index():
    """There another project has this name."""
    wrong = re.compile(r"\b(?:pip3? install|uv add|uvx|pipx (?:install|run))\b[^\n`|;&#]*[\s'\"]ckptkit(?![\w./-])")
    assert wrong.search("pip install ckptkit[megatron]")
    assert wrong.search("`uv pip install -U 'ckptkit'`")
    assert not wrong.search("pip install '.[megatron]'  # ckptkit verify")
    texts = [
        path
        for folder in ("ckptkit", "converters", "quant", "verify", "docs", "lab", "tests", "benchmarks", ".ci")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".md", ".py", ".sh", ".yaml", ".html", ""}
    ]
    texts += [ROOT / name for name in (*FILES, "Makefile")]
    found = [
        str(path)
        for path in texts
        if path.is_file() and path != Path(__file__).resolve() and wrong.search(path.read_text(errors="replace"))
    ]
    assert found == []


def test_verify_is_a_package_that_can_be_called(releases):
    run = import_module("ckptkit.verify.run")
    assert import_module("ckptkit.verify") is ckptkit.verify
    found, same = ckptkit.verify(releases("qwen2-tied")), run.verify(releases("qwen2-tied"))
    assert (found.status, [one.code for one in found.checks]) == ("passed", [one.code for one in same.checks])


def test_every_name_of_the_package_is_found_and_listed():
    assert ckptkit.__version__ == version("ckptkit-verify")
    assert set(ckptkit.__all__) <= set(dir(ckptkit))
    for name in ckptkit.__all__:
        assert getattr(ckptkit, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        getattr(ckptkit, "absent")  # noqa: B009 - the attribute is not there for mypy either


# The Containerfile, which CI does not build.

LINES = [line for line in (ROOT / "Containerfile").read_text().splitlines() if line and not line.startswith("#")]
STEPS = [(word, rest) for word, _, rest in (line.partition(" ") for line in LINES)]
DEFAULTS = dict(rest.split("=", 1) for word, rest in STEPS if word == "ARG")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def given(text):
    return re.sub(r"\$\{(\w+)\}", lambda found: DEFAULTS[found[1]], text)


def of(kind):
    return [given(rest) for word, rest in STEPS if word == kind]


def test_what_is_copied_is_there_and_is_all_that_the_build_takes():
    copied = [name for line in of("COPY") for name in line.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    linked = {link.name for link in (ROOT / "ckptkit").iterdir() if link.is_symlink()}
    assert PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["ckptkit*"]
    assert set(copied) == {
        "ckptkit",
        *linked,
        "pyproject.toml",
        "constraints.txt",
        "LICENSE",
        PROJECT["project"]["readme"],
    }


def test_command_line_is_run_by_a_user_who_is_not_root():
    (entry,) = of("ENTRYPOINT")
    assert set(json.loads(entry)) <= PROJECT["project"]["scripts"].keys()
    (user,) = of("USER")
    assert f"useradd --create-home --uid 1000 {user}" in of("RUN")
    kinds = [kind for kind, _ in STEPS]
    assert kinds.index("USER") > max(at for at, kind in enumerate(kinds) if kind in ("RUN", "COPY"))
