"""INT4 and FP8 blocks of every model type into real vLLM: clean, or refused in words that are quoted here."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from families import CASES, OF_A_KIND
from mutations.edits import edit_json
from support.messages import text_with
from support.models import UNREAD
from support.nightly import collected, daily
from support.sglang_cells import BF16, FP8, INT4, Cell, checkpoint, troubles, values
from support.sglang_runs import Case, checked, clean, draft_of, refusal
from support.vllm_families import CLEAN, LEFT_OUT, NEWER
from support.vllm_runs import run_cases

from ckptkit.app.api import quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.core.report import CheckResult
from ckptkit.verify.witnesses.loading.job import LoadReport
from ckptkit.verify.witnesses.runner import Answer
from ckptkit.verify.witnesses.vllm.facts import VLLM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

FORMS = (FP8, *(form for form in INT4 if "qmax7" not in form))
KEY_OF_RELEASES = "qwen3_vl_moe"  # transformers 5 does not write `norm_topk_prob`, which its releases have
EVERY_FORM = ("qwen3-untied", "qwen3_moe", "deepseek_v3")
NO_EXPERTS_IN_ROWS = "compressed_tensors_moe_wna16.py"  # there 0.33 asserts that experts have groups
AT_ONCE = 36  # starting vLLM takes half a minute

MODELS = [name for name in CASES if name in CLEAN or name in LEFT_OUT or name == KEY_OF_RELEASES]
CELLS = {str(cell): cell for name in MODELS for form in FORMS for cell in [Cell(name, "wide", form, "HF")]}
DAILY = [
    one for one, cell in CELLS.items() if cell.model in EVERY_FORM or (cell.format == FP8 and cell.model in OF_A_KIND)
]


def refused(cell):
    words = {"gpt_oss": "experts", "qwen3_omni": "Linear"}
    return next((said for name, said in words.items() if cell.model.startswith(name) and cell.format != FP8), None)


@dataclass(frozen=True)
class Outcome:
    refusal: str = ""  # ckptkit's
    run: Answer[LoadReport] | None = None
    experts: bool = False  # it has routed experts
    wrong: Sequence[tuple[str, str]] = ()
    builds: CheckResult | None = None  # CK521


class Outcomes:
    def __init__(self, cells, root):
        self._left, self._root = list(cells), root
        self._found: dict[Cell, Outcome] = {}

    def of(self, cell):
        while cell not in self._found:
            some, self._left = self._left[:AT_ONCE], self._left[AT_ONCE:]
            self._found |= outcomes(some, self._root / f"{len(self._left)} left")
        return self._found[cell]


def outcomes(cells, root):
    (root / "runs").mkdir(parents=True)
    found = {}
    cases = {}
    for cell in cells:
        if cell.model == KEY_OF_RELEASES:
            edit_json(
                checkpoint(Cell(cell.model, cell.sizes, BF16, "HF"), root).checkpoint / "config.json", as_released
            )
        try:
            cases[cell] = checkpoint(cell, root, "vllm")
        except CkptkitError as error:
            found[cell] = Outcome(f"{error.message} ({error.hint})")
    runs = run_cases({str(cell): case for cell, case in cases.items()}, root / "runs")
    for cell, case in cases.items():
        run, unread = runs[str(cell)], UNREAD.get(cell.model, ())
        sizes = {name: size for name, size in values(case).items() if not name.startswith(unread)}
        wrong = [] if run.report is None else [*troubles(run.report, sizes, False), *troubles_of_draft(run)]
        experts = any(".experts." in name for name in sizes)
        found[cell] = Outcome("", run, experts, wrong, checked(case, run, VLLM)[0]["CK521"])
    shutil.rmtree(root)
    return found


def as_released(config):
    config["text_config"]["norm_topk_prob"] = True


def troubles_of_draft(run):
    """Names of multi-token prediction layers, and what is wrong with them; `weight_shape` is never used."""
    draft = draft_of(run)
    if run.report is None or draft is None:
        return []
    seen = (*draft.unwritten, *draft.dropped, *draft.differing, *draft.routers)
    missing = [one for one in run.report.draft if one not in draft.equal and not one.endswith("weight_shape")]
    return [*((one.tensor, one.what) for one in seen), *((one, "it was not compared") for one in missing)]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    chosen = collected(request, "label")
    return Outcomes([cell for label, cell in CELLS.items() if label in chosen], tmp_path_factory.mktemp("formats"))


@pytest.mark.parametrize("label", daily(CELLS, DAILY))
def test_every_part_is_where_vllm_keeps_it(label, found):
    cell = CELLS[label]
    outcome = found.of(cell)
    if words := refused(cell):
        assert words in outcome.refusal
        return
    assert outcome.run is not None, outcome
    if NEWER and cell.format == "INT4 rows minmax" and outcome.experts:
        # For an H100 it chooses a kernel that wants groups. Another GPU may have one for rows: not a verdict.
        assert (refusal(outcome.run), outcome.builds.status) == ("", "skipped")
        assert str(outcome.builds.reason) == text_with("building GPU")
        assert NO_EXPERTS_IN_ROWS in str(outcome.builds.reason)
        return
    if cell.model.startswith("mistral3") and cell.format == FP8:
        assert "There is no module or parameter named 'layers.0.mlp.down_proj.weight_scale'" in refusal(outcome.run)
        return
    assert outcome.run.report is not None, outcome.run
    assert (outcome.wrong, outcome.builds.status) == ([], "passed")
    assert outcome.run.failure is None


RL = ("qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2")


@pytest.fixture(scope="module")
def rl(tmp_path_factory):
    root = tmp_path_factory.mktemp("rl")
    for model in RL:
        release = checkpoint(Cell(model, "wide", BF16, "HF"), root).checkpoint
        quantize(release, root / model, QuantScheme(32, "qmax7"), preset="rl")
    (root / "runs").mkdir()
    return run_cases({model: Case(root / model) for model in RL}, root / "runs")


@pytest.mark.parametrize("model", RL)
def test_the_preset_for_rl_is_packed_as_vllm_reads_it(model, rl):
    report = clean(rl[model])
    packed = [name for name in report.equal if name.endswith("weight_packed")]
    assert any(".experts." in name for name in packed)
    assert not any("self_attn" in name for name in packed)
