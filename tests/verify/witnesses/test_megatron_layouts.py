"""Layouts of a training job: pipelines of every kind, context parallelism, more ranks than fit, some ranks only."""

import re
from dataclasses import replace

import pytest
from support import models
from support.megatron_layouts import CHECKS, judge
from support.messages import text_with
from support.nightly import daily

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.megatron import run as megatron_run
from ckptkit.verify.witnesses.megatron.job import Box, RankReport, TensorSeen
from ckptkit.verify.witnesses.megatron.run import run_megatron, sizes_of

in_megatron = pytest.mark.usefixtures("served")


@pytest.fixture(scope="session")
def model(converted, releases):
    return converted("glm4_moe-mtp"), releases("glm4_moe-mtp")


def subject_of(model, sizes, **options):
    asked = frozenset({"megatron"})
    return Subject(*model, options=VerifyOptions(**{"against": asked, **options, **sizes}))


# Of each layout: sizes, options, how many ranks, and the layers of each stage.
LAYOUTS = {
    "MTP alone on the last stage": (
        {"pp": 4},
        {"pipeline_layout": "Et*3|t*4|t*5|mL"},
        4,
        ["layers 0..2", "layers 3..6", "layers 7..11", "no layers, 1 for multi-token prediction"],
    ),
    "layout of two chunks a stage, embedding and output alone": (
        {"pp": 2, "ep": 2},
        {"pipeline_layout": "E|t*6|t*6|mL"},
        4,
        ["layers none and 6..11", "layers 0..5 and none, 1 for multi-token prediction"],
    ),
    "first and last stage shorter": (
        {"pp": 3},
        {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 3},
        3,
        ["layers 0..1", "layers 2..8", "layers 9..11, 1 for multi-token prediction"],
    ),
    "embedding and loss count, context parallel": (
        {"tp": 2, "pp": 2},
        {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True, "cp": 2},
        8,
        ["layers 0..5", "layers 6..11, 1 for multi-token prediction"],
    ),
}


@in_megatron
@pytest.mark.parametrize("label", daily(LAYOUTS, [*LAYOUTS][:2]))
def test_every_rank_of_a_layout_holds_its_slice(model, label):
    sizes, options, world, stages = LAYOUTS[label]
    subject = subject_of(model, sizes, **options)
    findings, results = judge(subject)
    assert findings == []
    assert results["CK403"].facts["pipeline stages"] == [f"pp rank {at}: {held}" for at, held in enumerate(stages)]
    assert len(run_megatron(subject).reports) == world
    assert f"{world} rank(s)" in results["CK401"].facts["megatron"][0]
    # 10 layers of 12 experts in two parts each, with 8 tensors of attention and norms, router, bias and shared experts;
    # 2 dense ones; 4 norms and a projection of multi-token prediction around one more layer.
    assert results["CK404"].tensors_compared > 150


@in_megatron
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tp": 2, "ep": 2}, {}),
        pytest.param({"pp": 2, "vpp": 2}, {}, marks=pytest.mark.nightly),
        pytest.param({"pp": 2}, {"pipeline_layout": "Et*9|t*3mL"}, marks=pytest.mark.nightly),
    ],
)
def test_ranks_alone_report_what_they_report_in_a_process_group(model, monkeypatch, sizes, options):
    together = run_megatron(subject_of(model, sizes, **options))
    monkeypatch.setattr(megatron_run, "fits_together", lambda world, each: False)
    alone = run_megatron(subject_of(model, sizes, **options))
    assert (together.device, alone.device) == (
        "gloo on the CPU, local spec",
        text_with(f"CPU {megatron_run.ranks_at_once(1 << 30)}"),
    )
    assert alone.reports == together.reports
    assert all(report.missing and report.asked and report.tensors for report in alone.reports)


@in_megatron
@pytest.mark.parametrize("name", daily(["glm4_moe-mtp", "kimi_k2"], ["kimi_k2"]))
def test_four_dimensional_layout_in_waves(name, converted, releases, monkeypatch):
    """TP2 PP2 EP4 VPP2: two stages of lcm(2, 4) ranks, each alone."""
    monkeypatch.setattr(megatron_run, "fits_together", lambda world, each: False)
    subject = subject_of((converted(name), releases(name)), {"tp": 2, "pp": 2, "ep": 4, "vpp": 2})
    findings, results = judge(subject)
    assert findings == []
    assert results["CK403"].facts["pipeline stages"][0] == "pp rank 0: layers 0..2 and 6..8"
    assert results["CK401"].facts["megatron"][0] == text_with("8 CPU")
    pattern = re.compile(r"decoder\.layers\.\d+\.mlp\.experts\.experts\.(\d+)\.")
    for report in run_megatron(subject).reports:
        experts = {int(match[1]) for tensor in report.tensors if (match := pattern.match(tensor.name))}
        assert experts == set(range(3 * (report.rank % 4), 3 * (report.rank % 4) + 3))


@pytest.mark.parametrize(
    ("world", "each", "free", "together", "at_once"),
    [
        (1, 100, 10, True, 1),
        (4, 30, 100, False, 3),
        (8, 10, 1000, True, 3),
        (16, 10, 1000, False, 3),
        (16, 60, 100, False, 1),
    ],
)
def test_ranks_that_run_at_once_fit_cores_and_memory(monkeypatch, world, each, free, together, at_once):
    monkeypatch.setattr(megatron_run, "cores", lambda: 3)
    monkeypatch.setattr(megatron_run, "free_memory", lambda: free)
    assert (megatron_run.fits_together(world, each), megatron_run.ranks_at_once(each)) == (together, at_once)


@in_megatron
def test_chosen_ranks_alone_are_looked_at_and_the_report_says_so(model):
    report = verify(*model, against=frozenset({"megatron"}), tp=2, pp=2, ranks=[3, 1, 3])
    assert (report.status, report.findings) == ("passed", [])
    assert text_with("--ranks 1,3 4") in report.facts["notes"]
    assert text_with("CK404: --ranks") in report.facts["not applicable"]
    assert ", ranks 1,3 of 4, " in report.facts["megatron"][0]
    assert {check.code: check.status for check in report.checks if check.code.startswith("CK4")} == dict.fromkeys(
        ("CK401", "CK402", "CK403"), "passed"
    )


@in_megatron
def test_value_wrong_in_one_slice_fails_at_the_ranks_that_hold_it(model, copy_of):
    """The last row of down_proj's expert 11 is held by the last expert parallel rank, at each stage's last layer."""
    release, name = copy_of(model[1]), "model.layers.9.mlp.experts.11.down_proj.weight"
    tensor = models.tensors(release)[name]
    tensor[-1, -1] += 1
    models.edit(release, name, tensor)
    for rank, findings in ((3, [("CK402", "rank 3")]), (0, [])):
        report = verify(model[0], release, against=frozenset({"megatron"}), pp=2, ep=2, ranks=[rank])
        assert [(one.code, one.rank) for one in report.findings if one.code == "CK402"] == findings


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"pp": 2}, {"pipeline_layout": "Et*12L"}, "the layout has 1 "),
        ({"pp": 2}, {"account_for_loss_in_pipeline_split": True}, "stages"),
        ({"pp": 2}, {"ranks": (0, 2)}, r"--ranks is 2, but TP1 PP2 has 2 rank\(s\)"),
    ],
)
def test_layouts_that_megatron_refuses_start_no_process(model, sizes, options, message):
    with pytest.raises(CkptkitError, match=message):
        sizes_of(subject_of(model, sizes, **options))


def test_layout_implies_the_number_of_chunks(model):
    assert sizes_of(subject_of(model, {"pp": 2}, pipeline_layout="E|t*6|t*6|mL")).vpp == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pipeline_layout": "EtL", "ranks": [0]}, "--pipeline-layout, --ranks"),
        ({"account_for_loss_in_pipeline_split": True}, "--account-for-loss-in-pipeline-split"),
    ],
)
def test_options_of_megatron_without_megatron_are_refused(model, options, said):
    with pytest.raises(CkptkitError, match=f"^{said}.*Megatron"):
        verify(model[0], **options)


# What follows needs no Megatron: reports of a load, changed by hand.


def seen(model):
    subject = subject_of(model, {})
    stored = subject.megatron_files.opened.metadata.tensors
    asked = {key: (Box((0,) * len(one.shape), one.shape, True),) for key, one in stored.items()}
    return subject, RankReport(0, "0", 0, 0, 0, (tuple(range(12)),), len(asked), (), (), (), (), (), (1,), asked)


def found(code, subject, *reports):
    subject._results[run_megatron,] = megatron_run.MegatronRun(sizes_of(subject), "no device", reports, {})
    return list(CHECKS[code](subject, CheckResult("", "")))


KEY = "decoder.layers.5.mlp.experts.experts.linear_fc2.weight"  # [12, 128, 96]
EMBEDDING = "embedding.word_embeddings.weight"  # [352, 128]


@pytest.mark.parametrize(
    ("key", "boxes", "said"),
    [
        (KEY, [((0, 0, 0), (12, 128, 96))], None),
        (KEY, [((0, 0, 0), (5, 128, 96)), ((5, 0, 0), (7, 128, 96))], None),
        (KEY, [((0, 0, 0), (5, 128, 96)), ((6, 0, 0), (6, 128, 96))], "12288 147456"),
        (KEY, [((0, 0, 0), (12, 128, 32)), ((0, 0, 64), (11, 128, 32)), ((11, 64, 64), (1, 64, 32))], "51200 147456"),
        (EMBEDDING, [((0, 0), (256, 128)), ((256, 0), (256, 128))], None),
        (EMBEDDING, [((0, 0), (256, 128))], "12288 45056"),
        (KEY, [((0, 0, 0), (7, 128, 96)), ((5, 0, 0), (7, 128, 96))], "overlap [0 0 0]"),
        (KEY, [((0, 0, 0), (12, 128, 96)), ((0, 0, 0), (6, 128, 96), False)], None),  # a replica saves nothing
    ],
)
def test_what_no_rank_reads_or_two_would_save_is_counted(model, key, boxes, said):
    subject, report = seen(model)
    parts = [Box(*(*box, True)[:3]) for box in boxes]
    # Each rank reads one of the parts, and everything else of the checkpoint.
    reports = [replace(report, rank=rank, asked={**report.asked, key: (part,)}) for rank, part in enumerate(parts)]
    actual = {one.tensor: one.actual for one in found("CK404", subject, *reports)}
    assert actual == ({} if said is None else {key: text_with(said)})


def test_a_stage_that_repeats_layers_is_a_finding(model):
    report = replace(seen(model)[1], layers=(tuple(range(6)),))
    assert len(found("CK403", subject_of(model, {"pp": 2}), report, replace(report, rank=1, pp=1))) == 1


def test_router_bias_that_megatron_rounds_is_a_finding(model):
    subject, report = seen(model)
    name = "decoder.layers.5.mlp.router.expert_bias"
    tensors = tuple(TensorSeen(one, one, "equal", 48, 12, dtype="bfloat16") for one in (name, "x"))
    findings = found("CK402", subject, replace(report, rank=2, tensors=tensors))
    held = [one for one in findings if one.expected == "float32"]
    assert [(one.code, one.tensor, one.rank) for one in held] == [("CK402", name, "rank 2")]
    assert "bfloat16" in held[0].actual


@in_megatron
def test_router_bias_stays_float32_through_the_cast_of_training(model):
    (report,) = run_megatron(subject_of(model, {})).reports
    biases = {tensor.dtype for tensor in report.tensors if tensor.name.endswith("expert_bias")}
    others = {tensor.dtype for tensor in report.tensors if not tensor.name.endswith("expert_bias")}
    assert (biases, others) == ({"float32"}, {"bfloat16"})


# 10 heads, so 5 sinks a rank, and 10 x 32 + 2 x 2 x 32 biases of q, k and v; summed outputs have whole biases.
HELD = {
    "self_attention.core_attention.softmax_offset": 5,
    "self_attention.linear_qkv.bias": 224,
    "self_attention.linear_proj.bias": 128,
    "mlp.router.bias": 12,
}


@in_megatron
def test_sinks_and_biases_over_two_ranks(converted, releases):
    subject = subject_of((converted("gpt_oss"), releases("gpt_oss")), {"tp": 2, "ep": 2})
    assert judge(subject)[0] == []
    for report in run_megatron(subject).reports:
        held = {seen.name: seen.elements for seen in report.tensors}
        assert {rest: held[f"decoder.layers.7.{rest}"] for rest in HELD} == HELD
        biases = {name for name in held if ".7.mlp.experts." in name and name.endswith("linear_fc1.bias")}
        own = range(6 * report.rank, 6 * report.rank + 6)
        assert biases == {f"decoder.layers.7.mlp.experts.experts.{expert}.linear_fc1.bias" for expert in own}


@pytest.mark.nightly
@in_megatron
def test_gate_above_up_and_norms_after_both_parts_of_a_layer_over_two_ranks(converted, releases):
    assert judge(subject_of((converted("glm4"), releases("glm4")), {"tp": 2}))[0] == []
