"""Public bug reports of lab/reports.md, each rebuilt as a small case with a sound twin."""

from __future__ import annotations

from reports import (
    adapter_files,
    adapters,
    configs,
    conversions,
    drafts,
    exports,
    files,
    indexes,
    launches,
    lists,
    megatron,
    merges,
    names,
    other_formats,
    precision,
    quantized,
)
from reports.report import Case, read

CASES: dict[str, Case] = (
    adapter_files.CASES
    | adapters.CASES
    | configs.CASES
    | conversions.CASES
    | drafts.CASES
    | exports.CASES
    | files.CASES
    | indexes.CASES
    | launches.CASES
    | lists.CASES
    | megatron.CASES
    | merges.CASES
    | names.CASES
    | other_formats.CASES
    | precision.CASES
    | quantized.CASES
)
REPORTS = tuple(read(CASES))
