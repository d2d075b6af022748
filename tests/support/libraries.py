"""Asks tokenizers and transformers in this process, as `ckptkit.verify.evidence.side` does in one of its own."""

from ckptkit.verify.evidence.side import processors, templates, texts
from ckptkit.verify.witnesses.process.exit_report import ExitReport, exit_report_of
from ckptkit.verify.witnesses.runner import Answer


def ask_here(monkeypatch, scratch):
    """Saves the seconds that a process takes to import transformers. Returns the jobs that are asked."""
    jobs = []

    def ask(job, module, *_):
        jobs.append(job)
        report = scratch / "report.json"
        run = {one.__name__: one for one in (texts, processors, templates)}[module].run
        try:
            with ExitReport(report) as phases:
                return Answer({0: run(job, phases)}, {})
        except Exception:  # noqa: BLE001 - a process would end with it
            return Answer({}, {0: exit_report_of(report)})

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(texts, "_PLANES", 0x3200)  # two seconds fewer a case; test_side_files.py has none above it
    for one in (texts, processors, templates):
        monkeypatch.setattr(one, "ask", ask)
    return jobs
