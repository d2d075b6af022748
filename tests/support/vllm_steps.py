"""What must be true of vLLM's steps after loading, with CUDA and with stand-ins for its kernels."""

import re

import pytest

from support import models
from support.sglang_runs import Case, draft_of, refusal, reported
from support.vllm_faults import CASES, EXPERT, FEED, LINEAR, ROUTER, STEPS
from support.vllm_formats import CLEAN, MISORDERED, NO_GROUPS, REFUSED, write_all

LABELS = (*CLEAN, *REFUSED, *MISORDERED)
NOT_USED = "weight_shape"


def all_runs(root, run):
    paths = dict(write_all(root, LABELS))
    cases = {label: Case(path) for label, path in paths.items()}
    cases |= {f"{fault} in {label}": Case(paths[label], alter=fault) for fault, label in CASES}
    (root / "runs").mkdir()
    return paths, run(cases, root / "runs")


class Steps:
    """What is true of both; `made` is a fixture of the module, with what `all_runs` gives."""

    @pytest.mark.parametrize("label", CLEAN)
    def test_sound_checkpoints_stand_for_the_same(self, label, made):
        run = made[1][label]
        assert run.report is not None, run
        assert run.failure is None
        given = {name for name in models.tensors(made[0][label]) if not name.endswith(NOT_USED)}
        held = set()
        for report in filter(None, (run.report, draft_of(run))):
            assert (report.unwritten, report.differing, report.routers, report.computed) == ((), (), (), ())
            assert report.dropped == ()
            assert (report.repacked, report.unchecked) == ((), ())
            assert report.repacked_seen > 0
            held |= report.equal.keys()
        assert held >= given

    @pytest.mark.parametrize("label", REFUSED)
    def test_what_vllm_refuses_is_quoted(self, label, made):
        run = made[1][label]
        assert NO_GROUPS in refusal(run), run

    @pytest.mark.parametrize("label", MISORDERED)
    def test_scales_of_experts_no_wider_than_a_group_are_misordered(self, label, made):
        report = reported(made[1][label])
        assert (report.unwritten, report.dropped, report.differing, report.unchecked) == ((), (), (), ())
        assert {one.param for one in report.repacked or ()} == {
            f"model.layers.{layer}.mlp.experts.routed_experts.w13_weight_scale[{expert}]"
            for layer in range(4)
            for expert in range(8)
        }

    @pytest.mark.parametrize(("fault", "label"), CASES)
    def test_a_planted_fault_is_named(self, fault, label, made):
        """A fault of the feed by HF name, one of a step by vLLM's; nothing else is named."""
        report = reported(made[1][f"{fault} in {label}"])
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
        absorbed = ".W_U" if label.startswith("mla") else part  # what latent attention makes of a layer is wrong too
        wrong = {one.param for one in report.repacked}
        assert any(part in param for param in wrong)
        assert all(part in param or absorbed in param for param in wrong), wrong
