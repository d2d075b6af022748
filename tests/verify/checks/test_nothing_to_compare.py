"""Directories in which checks find nothing to look at: the true cause is the one finding, never a request to report."""

import shutil

import pytest
import torch
from huggingface_hub.file_download import repo_folder_name
from mutations.edits import INDEX, edit_index
from safetensors.torch import save_file
from support import models
from support.messages import text_with

from ckptkit.app.api import convert, inspect
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.verify.core.check import Check
from ckptkit.verify.core.run import run_checks
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

SINGLE = "model.safetensors"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


def without(path, pattern):
    for file in path.glob(pattern):
        file.unlink()
    return path


SHARDS, WEIGHTS = "*.safetensors", "*.safetensors*"
NO_TENSORS = '{"metadata": {}, "weight_map": {}}'
# What is done to a release, the check that must find it, and words of it.
BROKEN = {
    "no shards": (lambda path: without(path, SHARDS), "CK102", "missing"),
    "pointers of Git LFS": (lambda path: [file.write_text(LFS) for file in path.glob(SHARDS)], "CK102", "git lfs pull"),
    "an empty file": (lambda path: (without(path, WEIGHTS) / SINGLE).touch(), "CK102", "0 bytes"),
    "no tensors": (lambda path: save_file({}, without(path, WEIGHTS) / SINGLE, {"format": "pt"}), "CK102", "no tensor"),
    "an empty index": (lambda path: (without(path, SHARDS) / INDEX).write_text(NO_TENSORS), "CK103", "empty"),
    "no weights": (lambda path: without(path, WEIGHTS), "CK103", "weights"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_true_cause_is_the_one_finding(what, fresh, only):
    change, code, words = BROKEN[what]
    path = fresh("qwen2-tied")
    change(path)
    for report in (verify(path), preflight(hf_checkpoint=path)):
        finding = only(report)
        assert (finding.code, report.status) == (code, "failed")
        assert words in finding.actual
        assert "report this" not in finding.hint
    (path / "config.json").unlink()
    if what == "no weights":  # nothing tells that this was a checkpoint
        with pytest.raises(CkptkitError, match="contains no checkpoint"):
            verify(path)
    else:
        assert [one.code for one in verify(path).findings] == ["CK101", code]


@pytest.mark.parametrize(
    ("file", "content"), [("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}}}'), ("vocab.json", "{}")]
)
def test_tokenizer_without_a_token(file, content, fresh, only):
    path = fresh("qwen2-tied")
    (path / file).write_text(content)
    finding = only(verify(path))
    assert (finding.code, finding.actual) == ("CK706", text_with("files"))


def no_keys(metadata):
    metadata.state_dict_metadata.clear()
    metadata.storage_data.clear()


def of_an_optimizer(metadata):
    entries, storage = metadata.state_dict_metadata, metadata.storage_data
    for key in list(entries):
        entries[f"optimizer.state.exp_avg.{key}"] = entries.pop(key)
    for index in list(storage):
        storage[type(index)(f"optimizer.state.exp_avg.{index.fqn}", index.offset, index.index)] = storage.pop(index)


@pytest.mark.parametrize(
    ("change", "actual"), [(no_keys, "no weights"), (of_an_optimizer, "no weights, only optimizer.state.")]
)
def test_megatron_checkpoint_without_weights(change, actual, fresh_megatron, only):
    path = fresh_megatron("qwen2-tied")
    models.edit_metadata(path / "release", change)
    finding = only(verify(path))
    assert (finding.code, finding.expected) == ("CK111", text_with("weights"))
    assert finding.actual.startswith(actual)
    shutil.rmtree(path / "hf")
    assert only(verify(path)).actual == finding.actual


OTHER_FORMATS = {
    "pytorch_model.bin": "pickle",
    "model-Q4_K_M.gguf": "llama.cpp",
    "onnx/model.onnx": "ONNX Runtime",
    "flax_model.msgpack": "Flax",
    "tf_model.h5": "TensorFlow",
    "consolidated.00.pth": "authors",
    "consolidated.safetensors": "Mistral",
    "adapter_model.safetensors": "LoRA",
    "adapter_model.bin": "LoRA",
    "model_world_size_8_rank_0.pt": "verl",
}


def test_other_formats_are_named_and_not_judged(fresh, tmp_path):
    path = without(fresh("qwen2-tied"), WEIGHTS)
    for file, named in OTHER_FORMATS.items():
        (path / file).parent.mkdir(exist_ok=True)
        if file.endswith(".safetensors"):
            save_file({"base_model.model.x.lora_A.weight": torch.ones(2)}, path / file)
        else:
            (path / file).write_bytes(b"GGUF")
        for verb in (verify, inspect, lambda where: convert(where, tmp_path / "out")):
            with pytest.raises(UnsupportedError) as refused:
                verb(path)
            assert named in str(refused.value.hint)
        report = preflight(hf_checkpoint=path)
        assert (report.findings, report.status) == ([], "inconclusive"), file
        assert any(named in reason for reason in report.reasons), file
        (path / file).unlink()


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
def test_adapter_without_a_config_of_a_model_is_named(file, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2)}, tmp_path / file)
    with pytest.raises(CkptkitError, match="contains no checkpoint") as refused:
        convert(tmp_path, tmp_path / "out")
    assert f"{file} is an adapter (LoRA)" in str(refused.value.hint)
    report = verify(tmp_path)
    if file.endswith(".bin"):
        assert (report.findings, report.status) == ([], "inconclusive")
        with pytest.raises(UnsupportedError, match=r"adapter_model\.bin is a pickle"):
            inspect(tmp_path)
    else:
        assert {finding.code for finding in report.findings} == {"CK131"}
        assert inspect(tmp_path)["tensors"] == 1


# Snapshots of the Hub's cache, whose blobs are gone


@pytest.fixture
def snapshot(releases, tmp_path):
    root = tmp_path / repo_folder_name(repo_id="org/some-model", repo_type="model")
    path, blobs = root / "snapshots" / "0123abcd", root / "blobs"
    path.mkdir(parents=True)
    shutil.copytree(releases("qwen2-tied"), blobs)
    for file in blobs.iterdir():
        (path / file.name).symlink_to(f"../../blobs/{file.name}")
    return path


def blobs_of(path):
    return path.parent.parent / "blobs"


@pytest.mark.parametrize("pattern", ["*", "config.json", INDEX, "model-00002-*"])
def test_links_that_lead_nowhere_are_one_finding(pattern, snapshot, only):
    assert verify(snapshot).findings == []
    gone = sorted(blobs_of(snapshot).glob(pattern))
    for file in gone:
        file.unlink()
    finding = only(verify(snapshot))
    assert (finding.code, finding.severity, finding.count) == ("CK102", "error", len(gone))
    assert f"{gone[0].name} to ../../blobs/{gone[0].name}" in finding.actual
    assert "`hf download org/some-model --revision 0123abcd`" in finding.hint


@pytest.mark.parametrize(
    ("file", "severity", "status"), [("tokenizer.json", "error", "failed"), ("README.md", "warning", "passed")]
)
def test_link_to_nothing_is_an_error_where_loaders_follow_it(file, severity, status, snapshot, only):
    (snapshot / file).symlink_to(f"../../blobs/{file}")
    report = verify(snapshot)
    assert (only(report).code, only(report).severity, report.status) == ("CK102", severity, status)


@pytest.mark.parametrize("file", ["config.json", "model-00002-of-00015.safetensors"])
def test_other_verbs_say_where_the_link_leads(file, snapshot, tmp_path, only):
    (blobs_of(snapshot) / file).unlink()
    for verb in (inspect, lambda path: convert(path, tmp_path / "out")):
        with pytest.raises(CkptkitError, match=f"../../blobs/{file}") as refused:
            verb(snapshot)
        assert "hf download org/some-model" in str(refused.value.hint)
    if file == "config.json":
        finding = only(preflight(hf_checkpoint=snapshot))
        assert (finding.code, finding.actual) == ("CK714", text_with("../../blobs/config.json"))
        assert "hf download org/some-model" in finding.hint


def test_check_that_looks_at_nothing_fails_only_where_nothing_else_did(releases):
    one = Check("CK999", "nothing", "", "", lambda subject, result: iter(()), "headers")
    subject = Subject(releases("qwen2-tied"))
    (failed,) = run_checks(subject, [one]).checks
    assert failed.status == "failed"
    (skipped,) = run_checks(subject, [one], "CK102").checks
    assert (skipped.status, skipped.reason) == ("skipped", text_with("CK102"))


def test_names_of_an_index_are_compared_before_its_shards_are_there(fresh):
    path = without(fresh("qwen2-tied"), SHARDS)
    assert {one.code: one.status for one in verify(path).checks}["CK104"] == "passed"
    edit_index(path, lambda weight_map: weight_map.pop("model.norm.weight"))
    assert ("CK104", "model.norm.weight") in [(one.code, one.tensor) for one in verify(path).findings]
