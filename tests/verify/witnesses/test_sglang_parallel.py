"""Real SGLang on two ranks: experts shared out in every test model; experts cut, and attention whole, in some."""

import pytest
import torch
from support import models
from support.nightly import collected, daily
from support.sglang_families import (
    CLEAN,
    COMPUTED,
    DRAFTS,
    EXPERT,
    REFUSED_IN_PARALLEL,
    holds_draft,
    names_faults,
    unread,
)
from support.sglang_runs import LOST, LOST_OF_DRAFT, LOST_ON_RANK_1, answered, draft_of, refusal, reported, run_cases
from support.sglang_runs import Case as Load

from ckptkit.app.api import convert
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.loading.job import EngineSizes, LoadReport
from ckptkit.verify.witnesses.process.codec import load_record

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

SHARED_OUT, CUT, WHOLE = EngineSizes(2, 2), EngineSizes(2), EngineSizes(2, dp_attention=True)
SOME = ("qwen2-tied", "qwen3_moe", "deepseek_v3", "gpt_oss")
WANTED = {SHARED_OUT: CLEAN, CUT: SOME, WHOLE: SOME}
PARAMS = [(sizes, name) for sizes, names in WANTED.items() for name in names]
EVERY = [(sizes, name) for sizes, name in PARAMS if name not in REFUSED_IN_PARALLEL.get(sizes, {})]
# Of these, tensors are lost and exchanged, too: fused and plain experts, draft layers, vision, linear attention.
BROKEN = {
    *SOME,
    *(name for name in DRAFTS if name != "nemotron_h-latent"),
    "llama",
    "qwen3_vl_moe",
    "qwen3_next",
    "glm_moe_dsa",
}
ALSO_BROKEN = [(sizes, name) for sizes, name in EVERY if name in BROKEN]


def of_some(cases):
    return daily(cases, [one for one in cases if one[1] in SOME])


def id_of(case):
    return f"{case[0]}-{case[1]}"


@pytest.fixture(scope="module")
def wanted(request):
    return collected(request, "case") | {(sizes, name) for sizes, name in PARAMS if name in SOME}


@pytest.fixture(scope="module")
def root(wanted, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in {name for _, name in wanted}:
        models.save(name, root / name)
    return root


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {sizes: tmp_path_factory.mktemp("runs") for sizes in WANTED}


@pytest.fixture(scope="module")
def runs(root, folders, wanted):
    found = {}
    for sizes in WANTED:
        names = [name for name in WANTED[sizes] if (sizes, name) in wanted]
        cases = {name: Load(root / name) for name in names} | {
            f"{name} broken": Load(root / name, alter="lost_on_one_rank") for name in names if name in BROKEN
        }
        found[sizes] = run_cases(cases, folders[sizes], sizes=sizes)
    return found


@pytest.mark.parametrize("case", of_some(EVERY), ids=id_of)
def test_every_tensor_is_on_some_rank(case, root, runs):
    sizes, name = case
    report = reported(runs[sizes][name])
    assert (report.unwritten, report.dropped, report.differing, report.routers) == ((), (), (), ())
    assert report.computed == COMPUTED.get(name, ())
    tensors = models.tensors(root / name)
    left = unread(name, tensors, report)
    left |= {one for one in tensors if one.endswith((".mixer.A_log", ".mamba.A_log"))}
    left |= {one for one, tensor in tensors.items() if not tensor.dim()}
    assert report.equal == {one: tensor.nbytes for one, tensor in tensors.items() if one not in left}
    assert report.sizes == sizes
    if name in DRAFTS and name in BROKEN:
        draft = draft_of(runs[sizes][name])
        assert draft is not None, runs[sizes][name]
        holds_draft(draft, tensors)


@pytest.mark.parametrize("case", of_some(ALSO_BROKEN), ids=id_of)
def test_lost_and_exchanged_tensors_are_named_once(case, root, runs):
    sizes, name = case
    report = reported(runs[sizes][f"{name} broken"])
    tensors = models.tensors(root / name)
    on_one = [one for one in tensors if LOST_ON_RANK_1.fullmatch(one)]
    missing = [one for one in tensors if LOST.fullmatch(one)]
    assert sorted(one.tensor for one in report.unwritten) == sorted(missing + on_one)
    cut = [] if is_whole(sizes, name) else [one for one in on_one if "attn." in one]
    assert sorted(one.tensor for one in report.dropped) == sorted(missing + cut)
    exchanged = [one for one in tensors if EXPERT.search(one)]
    assert sorted({one.tensor for one in report.differing}) == sorted(exchanged)
    assert {one.rank for one in report.unwritten if one.tensor in missing and ".experts." not in one.tensor} == {None}
    of_expert = {one.rank for one in report.unwritten if ".experts." in one.tensor}
    assert of_expert <= ({"0", "1"} if sizes.ep == 2 else {None})
    # Of the queries each rank has a slice, unless it has the attention whole.
    assert {one.rank for one in report.unwritten if one.tensor in on_one} == {"1"}
    (size,) = (tensors[one].numel() for one in on_one if "norm" not in one)
    parts = [one.what for one in report.dropped if one.tensor in on_one]
    assert parts == [f"only {size // 2} of its {size} elements were written"] * (not is_whole(sizes, name))
    if name in DRAFTS:
        draft = draft_of(runs[sizes][f"{name} broken"])
        assert draft is not None, runs[sizes][f"{name} broken"]
        names_faults(draft, tensors, LOST_OF_DRAFT)


@pytest.mark.parametrize(
    "case", of_some([one for one in PARAMS if one[1] in REFUSED_IN_PARALLEL.get(one[0], {})]), ids=id_of
)
def test_what_sglang_cannot_share_out_is_quoted(case, runs):
    sizes, name = case
    run = runs[sizes][name]
    assert run.report is None
    assert REFUSED_IN_PARALLEL[sizes][name] in refusal(run)


def is_whole(sizes, name):
    return sizes.dp_attention and not name.startswith("qwen2")


def part_of(tensor, how, rank):
    if how == "words":  # a vocabulary of 352, filled up to a multiple of 64
        return tensor[192 * rank : 192 * (rank + 1)]
    if how in ("rows", "columns"):
        return tensor.chunk(2, dim=int(how == "columns"))[rank]
    return tensor if how in ("all", f"on {rank}") else tensor[:0]


L, EXPERTS = "model.layers.7", "model.layers.7.mlp.experts"
HELD = {
    CUT: {
        f"{L}.self_attn.q_proj.weight": "rows",
        f"{L}.self_attn.k_proj.weight": "rows",
        f"{L}.self_attn.o_proj.weight": "columns",
        f"{L}.mlp.gate.weight": "all",
        f"{EXPERTS}.5.up_proj.weight": "rows",
        f"{EXPERTS}.6.down_proj.weight": "columns",
        "model.embed_tokens.weight": "words",
        "lm_head.weight": "words",
    },
    SHARED_OUT: {
        f"{L}.self_attn.v_proj.weight": "rows",
        f"{EXPERTS}.5.up_proj.weight": "on 0",
        f"{EXPERTS}.6.down_proj.weight": "on 1",
    },
    WHOLE: {
        f"{L}.self_attn.q_proj.weight": "all",
        f"{L}.self_attn.o_proj.weight": "all",
        f"{EXPERTS}.5.gate_proj.weight": "rows",
        f"{EXPERTS}.6.down_proj.weight": "columns",
    },
}


@pytest.mark.parametrize("sizes", list(HELD), ids=str)
def test_which_part_a_rank_holds(sizes, root, folders, runs):
    number = list(runs[sizes]).index("qwen3_moe")
    tensors = models.tensors(root / "qwen3_moe")
    for rank in range(2):
        report = load_record(LoadReport, folders[sizes] / f"scratch-{number}" / f"report-{rank}.json")
        for name, how in HELD[sizes].items():
            numbers = torch.arange(tensors[name].numel()).view(tensors[name].shape)
            assert torch.equal(seen(report, name, numbers), part_of(numbers, how, rank).flatten()), (rank, name)


def seen(report, name, numbers):
    if name in report.partial:
        parts = [region.of(numbers) for region in report.partial[name][1]]
        return torch.cat([part.flatten() for part in parts])
    return numbers[:0].flatten() if any(one.tensor == name for one in report.dropped) else numbers.flatten()


@pytest.mark.usefixtures("served_sglang")
def test_verify_streams_a_megatron_checkpoint_to_a_process_a_rank(root, tmp_path):
    convert(root / "qwen3_moe", tmp_path / "megatron")
    report = verify(tmp_path / "megatron", root / "qwen3_moe", tp=2, ep=2, against=frozenset({"sglang"}))
    status = {check.code: check.status for check in report.checks}
    assert {status[f"CK50{number}"] for number in (1, 2, 3, 4, 5, 7)} == {"passed"}
    assert report.findings == []
    assert "tp 2, ep 2, on cpu" in report.facts["SGLang"][0]


def test_sizes_that_no_engine_has_are_not_taken_for_loaded(root, monkeypatch):
    answer = answered(LoadReport("0", "m", "cpu", "bfloat16", equal={"a": 1}))
    monkeypatch.setattr("ckptkit.verify.checks.witnesses.loading.run_engine_load", lambda subject, engine: answer)
    report = verify(root / "qwen3_moe", against=frozenset({"sglang"}), pp=2)
    assert [check.status for check in report.checks if check.code == "CK507"] == ["skipped"]
