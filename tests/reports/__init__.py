"""Public bug reports, each rebuilt as a small case with a sound twin: lab/reports.md and its test are made of them."""

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
from reports.report import Report

REPORTS: tuple[Report, ...] = (
    *files.REPORTS,
    *indexes.REPORTS,
    *megatron.REPORTS,
    *names.REPORTS,
    *exports.REPORTS,
    *conversions.REPORTS,
    *configs.REPORTS,
    *quantized.REPORTS,
    *lists.REPORTS,
    *precision.REPORTS,
    *adapters.REPORTS,
    *adapter_files.REPORTS,
    *merges.REPORTS,
    *drafts.REPORTS,
    *launches.REPORTS,
    *other_formats.REPORTS,
)
