"""What this installation is: its version and requirements, and whether a file of the user's hides its packages."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError

_NAME = "ckptkit"
_ROOT = Path(__file__).resolve().parents[2]


def program_version() -> str:
    """Returns the installed version; of a checkout that is not installed what its pyproject.toml has, `+checkout`.

    "unknown" where there is neither.
    """
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


def requirements() -> list[str]:
    """Returns what ckptkit requires, as pip is told; extras are marked. Of a checkout, without extras."""
    try:
        return requires(_NAME) or []
    except PackageNotFoundError:
        return list(_project().get("dependencies", ()))


def _project() -> Mapping[str, Any]:
    """The project table of the checkout that this file lies in; empty without one."""
    import tomllib  # only a checkout needs it

    file = _ROOT / "pyproject.toml"
    project: Mapping[str, Any] = tomllib.loads(file.read_text()).get("project", {}) if file.is_file() else {}
    return project if project.get("name") == _NAME else {}


def refuse_shadowed() -> None:
    """Raises CkptkitError where Python would import another `converters`, `quant` or `verify` than ckptkit's own."""
    for name in ("converters", "quant", "verify"):
        spec = find_spec(name)
        found = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        if found is None:
            raise CkptkitError(f"the package {name} of ckptkit is missing", "install ckptkit again")
        if _ROOT not in Path(found).resolve().parents:
            raise CkptkitError(
                f"{found} hides the package {name} of ckptkit", "rename it, or run from another directory"
            )
