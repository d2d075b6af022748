"""miles' FSDP trainer builds the model from --hf-checkpoint, whatever --load and --megatron-to-hf-mode say."""

import pytest
from support.messages import text_with

from ckptkit.verify.launch.preflight import preflight

GPUS = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate"


def launched(hf, *words, backend="fsdp"):
    return preflight(arguments=f"{GPUS} --train-backend {backend} --hf-checkpoint {hf}".split() + list(words))


def saved(root, tracker="20"):
    (root / "iter_0000020" / "model").mkdir(parents=True)
    (root / "iter_0000020" / "model" / ".metadata").write_bytes(b"")
    (root / "latest_checkpointed_iteration.txt").write_text(tracker)
    return root


def found(report):
    return [(one.code, one.severity, one.actual) for one in report.findings]


def test_first_start_needs_no_ref_load_as_that_of_megatron_does(releases, tmp_path):
    new = str(tmp_path / "new")
    assert found(launched(releases("qwen3-untied"), "--load", new)) == []
    megatron = launched(releases("qwen3-untied"), "--load", new, backend="megatron")
    assert ("CK711", "error", "no such directory") in found(megatron)


def test_actor_is_built_from_hf_checkpoint(releases):
    hf = releases("qwen3-untied")
    for words in ((), ("--load", str(hf)), ("--ref-load", str(hf))):
        report = launched(hf, *words)
        assert (report.status, report.findings) == ("passed", [])
        line = f"{hf} HF FSDP --hf-checkpoint"
        assert report.facts["what would be loaded"][0] == text_with(line)


@pytest.mark.parametrize("words", [("--load",), ("--ckpt-step", "20", "--load")])
def test_iteration_that_fsdp_saved_is_not_looked_at(words, releases, tmp_path):
    load = saved(tmp_path / "run", "40" if len(words) > 1 else "20")
    report = launched(releases("qwen3-untied"), *words, str(load))
    assert (report.status, found(report)) == ("inconclusive", [])
    assert report.facts["not read"] == [text_with(f"--load {load} FSDP iter_0000020")]


def test_load_that_fsdp_passes_over_is_found(releases, converted, tmp_path):
    other = releases("qwen2-tied")
    for load in (other, saved(tmp_path / "run", "40"), converted("qwen2-tied")):
        report = launched(releases("qwen3-untied"), "--load", str(load))
        assert found(report) == [("CK711", "error", text_with("FSDP"))]


def test_reference_is_an_hf_directory(releases, converted):
    report = launched(releases("qwen3-untied"), "--ref-load", str(converted("qwen2-tied")))
    assert found(report) == [("CK712", "error", "a Megatron checkpoint")]
