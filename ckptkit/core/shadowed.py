"""Tells a file of the user's that hides one of the packages that come with ckptkit."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ckptkit.core.errors import CkptkitError

_ROOT = Path(__file__).resolve().parents[2]


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
