"""What must be true of vLLM's steps after loading, with CUDA and with stand-ins for its kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from support import models
from support.sglang_runs import Case
from support.vllm_faults import CASES, EXPERT, FEED, LINEAR, ROUTER, STEPS
from support.vllm_formats import CLEAN, MISORDERED, NO_GROUPS, REFUSED, write_all
from verify.witnesses.loading.run import LoadRun

Runs = Mapping[str, LoadRun]
LABELS = (*CLEAN, *REFUSED, *MISORDERED)
NOT_USED = "weight_shape"


def all_runs(root: Path, run: Callable[[Mapping[str, Case], Path], dict[str, LoadRun]]) -> tuple[dict[str, Path], Runs]:
    """Every checkpoint with its path, and what vLLM made of each, and of those with a fault planted."""
    paths = dict(write_all(root, LABELS))
    cases = {label: Case(path) for label, path in paths.items()}
    cases |= {f"{fault} in {label}": Case(paths[label], alter=fault) for fault, label in CASES}
    (root / "runs").mkdir()
    return paths, run(cases, root / "runs")


def is_clean(label: str, paths: Mapping[str, Path], runs: Runs) -> None:
    """Every tensor is where vLLM keeps it before its steps, and stands for the same after them."""
    run = runs[label]
    assert run.report is not None, run
    assert (run.draft_crash, run.draft_error) == (None, None)
    given = {name for name in models.tensors(paths[label]) if not name.endswith(NOT_USED)}
    held: set[str] = set()
    for report in filter(None, (run.report, run.draft)):
        assert (report.unwritten, report.differing, report.routers, report.computed) == ((), (), (), ())
        assert report.dropped == ()
        assert (report.repacked, report.unchecked) == ((), ())
        assert report.repacked_seen > 0
        held |= report.equal.keys()
    assert held >= given


def is_refused(label: str, runs: Runs) -> None:
    """vLLM's own words."""
    assert NO_GROUPS in (runs[label].crash or ""), runs[label]


def is_misordered(label: str, runs: Runs) -> None:
    """The scales of gate and up of every expert, and nothing else."""
    report = runs[label].report
    assert report is not None
    assert (report.unwritten, report.dropped, report.differing, report.unchecked) == ((), (), (), ())
    found = {one.param for one in report.repacked or ()}
    experts = range(8)
    assert found == {
        f"model.layers.{layer}.mlp.experts.routed_experts.w13_weight_scale[{expert}]"
        for layer in range(4)
        for expert in experts
    }


def names_fault(fault: str, label: str, runs: Runs) -> None:
    """A fault of the feed by HF name, one of a step by vLLM's; nothing else is named."""
    report = runs[f"{fault} in {label}"].report
    assert report is not None, runs[f"{fault} in {label}"]
    assert (report.unwritten, report.dropped, report.unchecked) == ((), (), ())
    if fault in FEED:
        wanted = {
            "experts 3 and 4 exchanged": re.escape(EXPERT).replace("3", "[34]") + r"\w+_proj\..*",
            "a scale of an expert halved": re.escape(EXPERT) + r"up_proj\.weight_scale(_inv)?",
            "a scale halved": re.escape(LINEAR) + r"weight_scale(_inv)?",
            "a router zeroed": re.escape(ROUTER),
        }[fault]
        assert report.differing
        assert all(re.fullmatch(wanted, one.tensor) for one in report.differing), report.differing
        assert [one.tensor for one in report.routers] == [ROUTER] * (fault == "a router zeroed")
        assert report.repacked == ()
        return
    part = STEPS[fault][1]
    assert (report.differing, report.routers) == ((), ())
    assert report.repacked
    absorbed = ".W_U" if label.startswith("mla") else part  # what latent attention makes of a layer is wrong with it
    wrong = {one.param for one in report.repacked}
    assert any(part in param for param in wrong)
    assert all(part in param or absorbed in param for param in wrong), wrong
