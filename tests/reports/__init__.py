"""Public bug reports of lab/reports.md, each rebuilt as a small case with a sound twin."""

from reports import adapters, configs, drafts, exports, files, launches, lists, quantized
from reports.report import Case as Case
from reports.report import read

_SUBJECTS = (adapters, configs, drafts, exports, files, launches, lists, quantized)
CASES = {thread: case for subject in _SUBJECTS for thread, case in subject.CASES.items()}
REPORTS = tuple(read(CASES))
