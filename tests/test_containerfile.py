"""The Containerfile, which CI does not build: what it copies is there, and it installs as README and pyproject say."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES = [line for line in (ROOT / "Containerfile").read_text().splitlines() if line and not line.startswith("#")]
STEPS = [(word, rest) for word, _, rest in (line.partition(" ") for line in LINES)]
DEFAULTS = dict(rest.split("=", 1) for word, rest in STEPS if word == "ARG")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def given(text: str) -> str:
    """The text with its arguments replaced by their defaults."""
    return re.sub(r"\$\{(\w+)\}", lambda found: DEFAULTS[found[1]], text)


def of(kind: str) -> list[str]:
    return [given(rest) for word, rest in STEPS if word == kind]


def test_what_is_copied_is_there_and_is_all_that_the_build_takes() -> None:
    copied = [name for line in of("COPY") for name in line.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    packages = {name.removesuffix("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert set(copied) == {*packages, "pyproject.toml", "constraints.txt", "LICENSE", PROJECT["project"]["readme"]}


def test_install_command_is_that_of_readme() -> None:
    installs = [line for line in of("RUN") if line.startswith("pip ")]
    assert installs == ["pip install -c constraints.txt .[convert]"]
    assert f"`{installs[0]}`" in (ROOT / "README.md").read_text()


def test_base_is_a_python_that_the_project_supports() -> None:
    (base,) = of("FROM")
    version = re.fullmatch(r"python:(\d+\.\d+)-slim", base)
    assert version
    names = [
        re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", one) for one in PROJECT["project"]["classifiers"]
    ]
    supported = [found[1] for found in names if found]
    assert version[1] in supported
    assert PROJECT["project"]["requires-python"] == f">={supported[0]}"
    assert f"Python {' or '.join(supported)}" in (ROOT / "Containerfile").read_text()


def test_command_line_is_run_by_a_user_who_is_not_root() -> None:
    (entry,) = of("ENTRYPOINT")
    assert set(json.loads(entry)) <= PROJECT["project"]["scripts"].keys()
    (user,) = of("USER")
    assert f"useradd --create-home --uid 1000 {user}" in of("RUN")
    kinds = [kind for kind, _ in STEPS]
    assert kinds.index("USER") > max(at for at, kind in enumerate(kinds) if kind in ("RUN", "COPY"))
