"""The version and requirements of this installation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

_NAME = "ckptkit-verify"  # the distribution; on the public index another project is called ckptkit
# What `pip install .` leaves out: distributions of the extra `convert`, and the modules that they bring.
_CONVERT_MODULES = ("compressed_tensors", "numba", "torch", "transformers")
INSTALL_CONVERT = "pip install '.[convert]' in a checkout"
_ROOT = Path(__file__).resolve().parents[2]


def program_version() -> str:
    """The installed version, or of a checkout the one in pyproject.toml with `+checkout`, or "unknown"."""
    try:
        return version(_NAME)
    except PackageNotFoundError:
        stated = _project().get("version")
        return f"{stated}+checkout" if stated else "unknown"


def package_release(package: str) -> tuple[int, ...]:
    """Returns (major, minor, patch) of an installed package; () where it is missing, which is before every release."""
    try:
        return tuple(int(part) for part in version(package).split("+")[0].split(".")[:3] if part.isdigit())
    except PackageNotFoundError:
        return ()


def requirements(extra: str | None = None) -> list[str]:
    """Returns what ckptkit itself requires, or one of its extras does, as pip is told."""
    try:
        found = requires(_NAME) or []
    except PackageNotFoundError:
        project = _project()
        of_extras = project.get("optional-dependencies", {})
        return list(of_extras.get(extra, ()) if extra else project.get("dependencies", ()))
    own = [text for text in found if "extra ==" not in text]
    of_extra = [text.partition(";")[0].strip() for text in found if re.search(rf"extra == .{extra}\b", text)]
    return of_extra if extra else own


def missing_of_convert(error: BaseException) -> str | None:
    """The library of the extra `convert` that an error says is not installed; None for any other error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return name if name in _CONVERT_MODULES else None


def _project() -> Mapping[str, Any]:
    """The project table of the checkout that this file lies in; empty without one."""
    import tomllib  # only a checkout needs it

    file = _ROOT / "pyproject.toml"
    project: Mapping[str, Any] = tomllib.loads(file.read_text()).get("project", {}) if file.is_file() else {}
    return project if project.get("name") == _NAME else {}
