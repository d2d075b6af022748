"""Converts HF <-> Megatron checkpoints, quantizes them to INT4, and proves what Megatron and SGLang loaded.

`convert`, `quantize`, `inspect`, `make_manifest`, `lint`, `verify`, `preflight`, `diff` and `triage` return data and
raise `CkptkitError`; the command line is a thin cover over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import CkptkitError

if TYPE_CHECKING:
    from ckptkit.app.api import convert, make_manifest, quantize
    from ckptkit.app.inspection import inspect
    from quant.lint.lint import lint
    from verify.diff.diff import diff
    from verify.launch.preflight import preflight
    from verify.run import verify
    from verify.triage.triage import triage

__all__ = [
    "CkptkitError",
    "convert",
    "diff",
    "inspect",
    "lint",
    "make_manifest",
    "preflight",
    "quantize",
    "triage",
    "verify",
]

_HOME = {
    "convert": "ckptkit.app.api",
    "diff": "verify.diff.diff",
    "inspect": "ckptkit.app.inspection",
    "lint": "quant.lint.lint",
    "make_manifest": "ckptkit.app.api",
    "preflight": "verify.launch.preflight",
    "quantize": "ckptkit.app.api",
    "triage": "verify.triage.triage",
    "verify": "verify.run",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `import ckptkit` stays cheap, and the layers below can import ckptkit.core.
    if name not in _HOME:
        raise AttributeError(f"module 'ckptkit' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
