"""Public bug reports, each rebuilt as a small case with a sound twin: docs/reports.md and its test are made of them."""

from __future__ import annotations

from reports import adapters, configs, drafts, exports, files, launches, lists, megatron, names, quantized, unreachable
from reports.report import Report

REPORTS: tuple[Report, ...] = (
    *files.REPORTS,
    *megatron.REPORTS,
    *names.REPORTS,
    *exports.REPORTS,
    *configs.REPORTS,
    *quantized.REPORTS,
    *lists.REPORTS,
    *adapters.REPORTS,
    *drafts.REPORTS,
    *launches.REPORTS,
    *unreachable.REPORTS,
)
