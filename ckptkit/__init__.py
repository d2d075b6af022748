"""Converts HF <-> Megatron checkpoints, quantizes them to INT4 or FP8, and proves what Megatron and SGLang loaded.

`open` gives any checkpoint as named tensors that are read lazily. `convert`, `quantize`, `inspect`, `make_manifest`,
`lint`, `verify`, `preflight`, `diff` and `triage` return data and raise `CkptkitError`; the command line is a thin
cover over them. `int4_scheme` makes the `QuantScheme` that `convert` and `quantize` take, or a `FloatScheme` is one;
the other classes are what the functions return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import CkptkitError

if TYPE_CHECKING:
    from ckptkit.app.api import convert, make_manifest, quantize
    from ckptkit.app.conversion import ConversionResult
    from ckptkit.app.forecast import Forecast
    from ckptkit.app.inspection import inspect
    from quant.formats.scheme import QuantScheme
    from quant.lint.lint import LintReport, lint
    from quant.schemes.floats import FloatScheme
    from quant.schemes.w4a16 import int4_scheme
    from verify.diff.diff import diff
    from verify.diff.result import Diff
    from verify.launch.preflight import preflight
    from verify.opened import LazyTensor, LazyTensors, OpenedCheckpoint, open  # noqa: A004 - as `gzip.open`
    from verify.report import CheckResult, Finding, Report
    from verify.run import verify
    from verify.triage.triage import Triage, triage

    __version__: str

__all__ = [
    "CheckResult",
    "CkptkitError",
    "ConversionResult",
    "Diff",
    "Finding",
    "FloatScheme",
    "Forecast",
    "LazyTensor",
    "LazyTensors",
    "LintReport",
    "OpenedCheckpoint",
    "QuantScheme",
    "Report",
    "Triage",
    "__version__",
    "convert",
    "diff",
    "inspect",
    "int4_scheme",
    "lint",
    "make_manifest",
    "open",
    "preflight",
    "quantize",
    "triage",
    "verify",
]

_HOME = {
    "CheckResult": "verify.report",
    "ConversionResult": "ckptkit.app.conversion",
    "Diff": "verify.diff.result",
    "Finding": "verify.report",
    "Forecast": "ckptkit.app.forecast",
    "LazyTensor": "verify.opened",
    "LazyTensors": "verify.opened",
    "LintReport": "quant.lint.lint",
    "OpenedCheckpoint": "verify.opened",
    "FloatScheme": "quant.schemes.floats",
    "QuantScheme": "quant.formats.scheme",
    "Report": "verify.report",
    "Triage": "verify.triage.triage",
    "convert": "ckptkit.app.api",
    "diff": "verify.diff.diff",
    "inspect": "ckptkit.app.inspection",
    "int4_scheme": "quant.schemes.w4a16",
    "lint": "quant.lint.lint",
    "make_manifest": "ckptkit.app.api",
    "open": "verify.opened",
    "preflight": "verify.launch.preflight",
    "quantize": "ckptkit.app.api",
    "triage": "verify.triage.triage",
    "verify": "verify.run",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `import ckptkit` stays cheap, and the layers below can import ckptkit.core.
    if name == "__version__":
        from ckptkit.core.installation import program_version

        return program_version()
    if name not in _HOME:
        raise AttributeError(f"module 'ckptkit' has no attribute {name!r}")
    from importlib import import_module

    from ckptkit.core.installation import refuse_shadowed

    refuse_shadowed()
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
