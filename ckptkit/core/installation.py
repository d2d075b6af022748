"""The version and requirements of this installation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

_NAME = "ckptkit-verify"  # the distribution; `ckptkit` on the public index is another project
# Modules of the extra `convert`, which `pip install .` does not install.
_CONVERT_MODULES = ("compressed_tensors", "numba", "torch", "transformers")
INSTALL_CONVERT = "pip install '.[convert]' in a checkout"
_ROOT = Path(__file__).resolve().parents[2]


def program_version() -> str:
    """The installed version, or for a checkout the one in pyproject.toml with `+checkout`, or "unknown"."""
    try:
        return version(_NAME)
    except PackageNotFoundError:
        declared = _project().get("version")
        return f"{declared}+checkout" if declared else "unknown"


def package_release(package: str) -> tuple[int, ...]:
    """(major, minor, patch) of an installed package, or () if it is missing, which compares as the oldest release."""
    try:
        return tuple(int(part) for part in version(package).split("+")[0].split(".")[:3] if part.isdigit())
    except PackageNotFoundError:
        return ()


def requirements(extra: str | None = None) -> list[str]:
    """The requirements of ckptkit or one of its extras, in pip's syntax."""
    try:
        found = requires(_NAME) or []
    except PackageNotFoundError:
        project = _project()
        extras = project.get("optional-dependencies", {})
        return list(extras.get(extra, ()) if extra else project.get("dependencies", ()))
    if not extra:
        return [text for text in found if "extra ==" not in text]
    return [text.partition(";")[0].strip() for text in found if re.search(rf"extra == .{extra}\b", text)]


def missing_of_convert(error: BaseException) -> str | None:
    """The library of the extra `convert` that is missing according to an error, or None for any other error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return name if name in _CONVERT_MODULES else None


def _project() -> Mapping[str, Any]:
    """The project table of the checkout that contains this file, or empty without one."""
    import tomllib  # only a checkout needs it

    file = _ROOT / "pyproject.toml"
    project: Mapping[str, Any] = tomllib.loads(file.read_text()).get("project", {}) if file.is_file() else {}
    return project if project.get("name") == _NAME else {}
