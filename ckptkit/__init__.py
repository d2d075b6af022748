"""Converts HF <-> Megatron checkpoints, quantizes them, and proves what Megatron, SGLang and vLLM loaded.

`open` returns any checkpoint as named, lazily read tensors. `convert`, `quantize`, `inspect`, `make_manifest`, `lint`,
`verify`, `preflight`, `diff` and `triage` return data and raise `CkptkitError`. `convert` and `quantize` take a scheme:
its name, the result of `int4_scheme`, or a `FloatScheme`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import CkptkitError as CkptkitError

if TYPE_CHECKING:
    from ckptkit.app.api import convert as convert
    from ckptkit.app.api import make_manifest as make_manifest
    from ckptkit.app.api import quantize as quantize
    from ckptkit.app.conversion import ConversionResult as ConversionResult
    from ckptkit.app.forecast import Forecast as Forecast
    from ckptkit.app.inspection import inspect as inspect
    from ckptkit.quant.formats.scheme import QuantScheme as QuantScheme
    from ckptkit.quant.ignore.lint import LintReport as LintReport
    from ckptkit.quant.ignore.lint import lint as lint
    from ckptkit.quant.schemes.floats import FloatScheme as FloatScheme
    from ckptkit.quant.schemes.w4a16 import int4_scheme as int4_scheme
    from ckptkit.verify.core.report import CheckResult as CheckResult
    from ckptkit.verify.core.report import Finding as Finding
    from ckptkit.verify.core.report import Report as Report
    from ckptkit.verify.diff.diff import diff as diff
    from ckptkit.verify.diff.result import Diff as Diff
    from ckptkit.verify.launch.preflight import preflight as preflight
    from ckptkit.verify.opened import LazyTensor as LazyTensor
    from ckptkit.verify.opened import LazyTensors as LazyTensors
    from ckptkit.verify.opened import OpenedCheckpoint as OpenedCheckpoint
    from ckptkit.verify.opened import open as open  # noqa: A004 - as `gzip.open`
    from ckptkit.verify.run import verify as verify
    from ckptkit.verify.triage.triage import Triage as Triage
    from ckptkit.verify.triage.triage import triage as triage

    __version__: str

_NAMES = {
    "ckptkit.app.api": ("convert", "make_manifest", "quantize"),
    "ckptkit.app.conversion": ("ConversionResult",),
    "ckptkit.app.forecast": ("Forecast",),
    "ckptkit.app.inspection": ("inspect",),
    "ckptkit.quant.formats.scheme": ("QuantScheme",),
    "ckptkit.quant.ignore.lint": ("LintReport", "lint"),
    "ckptkit.quant.schemes.floats": ("FloatScheme",),
    "ckptkit.quant.schemes.w4a16": ("int4_scheme",),
    "ckptkit.verify.diff.diff": ("diff",),
    "ckptkit.verify.diff.result": ("Diff",),
    "ckptkit.verify.launch.preflight": ("preflight",),
    "ckptkit.verify.opened": ("LazyTensor", "LazyTensors", "OpenedCheckpoint", "open"),
    "ckptkit.verify.core.report": ("CheckResult", "Finding", "Report"),
    "ckptkit.verify.run": ("verify",),
    "ckptkit.verify.triage.triage": ("Triage", "triage"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(["CkptkitError", "__version__", *_HOME])


def __getattr__(name: str) -> Any:
    # Imported on first use: `import ckptkit` stays cheap, and the layers below can import ckptkit.core.
    if name == "__version__":
        from ckptkit.core.installation import program_version

        return program_version()
    from importlib import import_module

    if name == "verify":  # the package, which can be called as its function
        return import_module("ckptkit.verify")
    if name not in _HOME:
        raise AttributeError(f"module 'ckptkit' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
