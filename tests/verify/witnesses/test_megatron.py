"""Real Megatron as a witness: sound checkpoints pass at several parallel sizes, broken ones fail the right check."""

from importlib.util import find_spec

import pytest
import torch
from mutations import ranks
from mutations.edits import edit_json
from mutations.torch_dist import index_of, key_lost
from support import models
from support.megatron_layouts import judge
from support.messages import text_with
from support.processes import environment
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckptkit.app.api import convert
from ckptkit.core.errors import CkptkitError
from ckptkit.verify.checks.config.config import parallel_sizes_divide
from ckptkit.verify.checks.witnesses.megatron import right_slices, strict_load
from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses import runner
from ckptkit.verify.witnesses.megatron import run as megatron_run
from ckptkit.verify.witnesses.megatron.run import run_megatron
from ckptkit.verify.witnesses.process import interpreter

needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
in_megatron = pytest.mark.usefixtures("served")


@in_megatron
def test_tensor_and_pipeline_parallel(releases, converted):
    subject = Subject(converted("glm4_moe"), releases("glm4_moe"), options=VerifyOptions(tp=2, pp=2))
    findings, results = judge(subject)
    assert findings == []
    assert results["CK403"].facts["pipeline stages"] == ["pp rank 0: layers 0..5", "pp rank 1: layers 6..11"]
    assert "TP2 PP2 ETP2, 4 rank(s)" in results["CK401"].facts["megatron"][0]
    # Two stages, each on two ranks: 10 MoE layers x (12 experts x 2 + 6 attention + norm, router, bias + 2 shared),
    # 2 dense layers x (6 attention + norm + 2), and embedding, final norm and output layer.
    assert results["CK402"].tensors_compared == 2 * (10 * (24 + 6 + 3 + 2) + 2 * 9 + 3)
    by_rank = {report.rank: report for report in run_megatron(subject).reports}
    elements = {rank: {seen.name: seen.elements for seen in report.tensors} for rank, report in by_rank.items()}
    # An expert's linear_fc1 is [2 x 96, 128], of which a rank holds half; a norm is whole everywhere.
    assert elements[0]["decoder.layers.5.mlp.experts.experts.11.linear_fc1.weight"] == 96 * 128
    assert elements[3]["decoder.layers.11.pre_mlp_layernorm.weight"] == 128
    # The padded vocabulary has 512 rows: rank 0 holds 256 real ones, rank 1 the other 96.
    assert [elements[rank]["embedding.word_embeddings.weight"] for rank in (0, 1)] == [256 * 128, 96 * 128]


@in_megatron
def test_tied_embeddings_and_virtual_pipeline_stages_without_a_source(converted):
    findings, results = judge(
        Subject(converted("qwen2-tied"), options=VerifyOptions(pp=2, vpp=3, against=frozenset({"megatron"})))
    )
    assert findings == []
    assert results["CK403"].facts["pipeline stages"] == [
        "pp rank 0: layers 0..1 and 4..5 and 8..9",
        "pp rank 1: layers 2..3 and 6..7 and 10..11",
    ]


@in_megatron
def test_what_is_wrong_is_found(releases, copy_of, tmp_path):
    edited, broken = copy_of(releases("glm4_moe")), tmp_path / "broken"
    value = models.tensors(edited)["model.layers.9.mlp.experts.11.down_proj.weight"]
    value[3, 5] += 1
    models.edit(edited, "model.layers.9.mlp.experts.11.down_proj.weight", value)
    convert(edited, broken)
    ranks.layers_of(lambda layer: {4: 5, 5: 4}.get(layer, layer))(broken, "")
    gone, stray = "decoder.layers.7.mlp.router.expert_bias", "decoder.layers.12.self_attention.linear_proj.weight"

    def break_it(metadata):
        norm = "decoder.final_layernorm.weight"
        metadata.state_dict_metadata[stray] = metadata.state_dict_metadata[norm]
        metadata.storage_data[MetadataIndex(stray, torch.Size([0]), 0)] = metadata.storage_data[
            index_of(metadata, norm)
        ]
        key_lost(metadata, gone)

    models.edit_metadata(broken / "release", break_it)
    findings, _ = judge(Subject(broken, releases("glm4_moe")))
    by_tensor = {(finding.code, finding.tensor): finding.actual for finding in findings}
    assert by_tensor.pop(("CK401", gone))
    assert by_tensor.pop(("CK402", gone)) == text_with("loading values")
    assert by_tensor.pop(("CK401", stray)) == text_with("requests")
    changed = by_tensor.pop(("CK402", "decoder.layers.9.mlp.experts.experts.11.linear_fc2.weight"))
    assert changed == text_with("row 3 1 12288")
    (((code, tensor), swapped),) = by_tensor.items()
    assert (code, swapped) == ("CK402", "layers 4 and 5 are exchanged")
    assert "decoder.layers.{4..5}.mlp.router.weight" in str(tensor)


@in_megatron
def test_a_rank_that_crashes_is_a_finding(converted, copy_of):
    broken = copy_of(converted("qwen2-tied"))

    def other_shape(metadata):
        entry = metadata.state_dict_metadata["decoder.layers.3.mlp.linear_fc2.weight"]
        entry.size = entry.chunks[0].sizes = torch.Size([128, 200])

    models.edit_metadata(broken / "release", other_shape)
    subject = Subject(broken)
    (finding,) = strict_load(subject, CheckResult("", ""))
    assert (finding.code, finding.rank) == ("CK401", "rank 0")
    assert "Global shape mismatch" in finding.actual
    assert "decoder.layers.3.mlp.linear_fc2.weight" in finding.actual
    with pytest.raises(CannotCheck, match="CK401"):
        list(right_slices(subject, CheckResult("", "")))


@needs_megatron
def test_a_rank_that_hangs_is_inconclusive(converted, monkeypatch):
    monkeypatch.setattr(runner, "START_S", 0.5)
    for stages in (1, 2):
        subject = Subject(converted("qwen2-tied"), options=VerifyOptions(pp=stages))
        with pytest.raises(CannotCheck, match="0.*within.*1"):
            list(strict_load(subject, CheckResult("", "")))
        with pytest.raises(CannotCheck, match="within.*1"):
            list(right_slices(subject, CheckResult("", "")))


@in_megatron
@pytest.mark.parametrize(
    ("how", "phase", "error"),
    [
        ("own", "comparing", "KeyError: 'a defect of ours'"),
        ("kill", "process groups", "killed by SIGKILL"),
        pytest.param("import", "importing", "OSError: libcuda.so.1", marks=pytest.mark.nightly),
        pytest.param("signature", "which keys", "TypeError: ", marks=pytest.mark.nightly),
    ],
)
def test_a_witness_that_breaks_is_inconclusive(converted, monkeypatch, how, phase, error):
    monkeypatch.setattr(megatron_run, "_WITNESS", "support.broken_witness")
    monkeypatch.setenv("BREAK", how)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    report = verify(converted("qwen2-tied"), against=frozenset({"megatron"}))
    assert (report.status, report.findings) == ("inconclusive", [])
    (reason,) = report.reasons
    assert reason == text_with(f"CK401 CK402 CK403 CK404 0 {phase}")
    assert error in reason


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("qwen2-tied", {"tp": 4}, "10.*--tp 4"),
        ("qwen3_moe", {"etp": 5}, "96.*--etp 5"),
        ("qwen2-tied", {"ep": 2}, "--ep 2"),
    ],
)
def test_sizes_that_do_not_divide_start_no_process(converted, monkeypatch, name, sizes, message):
    monkeypatch.setattr(megatron_run, "ask_ranks", None)
    subject = Subject(converted(name), options=VerifyOptions(**sizes, against=frozenset({"megatron"})))
    with pytest.raises(CkptkitError, match=message):
        list(strict_load(subject, CheckResult("", "")))


def test_rows_of_experts_must_be_divided_by_etp_alone(copy_of, releases):
    """As Megatron divides them (tests/converters/megatron/test_parallel.py)."""
    odd = copy_of(releases("qwen3_moe"))
    edit_json(odd / "config.json", lambda config: config.update(moe_intermediate_size=95))
    whole, cut = (Subject(odd, options=VerifyOptions(tp=2, etp=etp)) for etp in (1, 2))
    assert list(parallel_sizes_divide(whole, CheckResult("", ""))) == []
    assert [finding.expected for finding in parallel_sizes_divide(cut, CheckResult("", ""))] == [
        "moe_intermediate_size divisible by etp = 2"
    ]


def test_what_cannot_be_witnessed_is_inconclusive_with_the_next_move(releases, converted, monkeypatch):
    with pytest.raises(CannotCheck, match="ckptkit convert"):
        list(strict_load(Subject(releases("qwen2-tied")), CheckResult("", "")))
    monkeypatch.setattr(interpreter, "find_spec", lambda name: None)
    with pytest.raises(CannotCheck, match="pip install megatron-core"):
        list(strict_load(Subject(converted("qwen2-tied")), CheckResult("", "")))
