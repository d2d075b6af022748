"""CK1xx: a good checkpoint is broken in one way, and exactly that is found, with its name and file."""

import os

import pytest
import torch
from mutations.edits import edit_config, edit_header, edit_json, names, replace, shard_of, tensor
from mutations.torch_dist import padded
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from support import models
from support.messages import text_with

from ckptkit.app.api import convert
from ckptkit.core.errors import CkptkitError
from ckptkit.verify.reports.text import headline
from ckptkit.verify.run import verify

INDEX, NAME = "model.safetensors.index.json", "model.norm.weight"


def test_a_single_file_without_index_has_no_finding(tmp_path):
    models.save("qwen2-tied", tmp_path / "one", shard_size="1GB")
    assert not (tmp_path / "one" / INDEX).exists()
    report = verify(tmp_path / "one")
    assert report.findings == []
    assert [check.code for check in report.checks if check.status != "passed"] == []
    assert "CK106" not in {check.code for check in report.checks}


def test_tensors_per_layer_are_reported(releases):
    facts = verify(releases("glm4_moe")).facts["tensors per layer"]
    # dense: 2 norms, 4 projections, 3 biases, 2 q/k norms, 3 mlp; MoE: 11 + router and bias + 12 x 3 experts + 3 shared
    assert facts == ["dense layers {0..1}: 14 tensors each", "MoE layers {2..11}: 52 tensors each"]


def test_several_broken_files_are_all_listed(fresh):
    path = fresh("glm4_moe")
    shards = sorted(path.glob("*.safetensors"))
    shards[2].unlink()
    os.truncate(shards[5], 100)
    os.truncate(shards[9], shards[9].stat().st_size - 8)
    found = verify(path).findings
    assert [(finding.code, finding.file) for finding in found] == [("CK102", str(shards[at])) for at in (2, 5, 9)]


def test_a_model_of_no_known_class_is_inconclusive_and_the_rest_is_looked_at(fresh):
    """It may well be right. Under a known class the type is wrong, which the mutations have."""
    path = fresh("qwen2-tied")
    edit_config(path, model_type="qwen9", architectures=["Qwen9ForCausalLM"])
    report = verify(path)
    assert (report.status, report.findings) == ("inconclusive", [])
    assert any("CK541" in reason and "'qwen9'" in reason for reason in report.reasons)
    replace(path, {NAME: torch.zeros(128, dtype=torch.bfloat16)})
    assert [one.code for one in verify(path).findings] == ["CK205"]


@pytest.mark.parametrize(
    ("file", "name", "severity"),
    [
        ("consolidated.safetensors", "tok_embeddings.weight", "warning"),
        ("consolidated.safetensors", "model.norm.weight", "error"),  # a leftover that is only named like it
    ],
)
def test_what_mistral_publishes_beside_its_shards_is_a_warning(file, name, severity, fresh, only):
    path = fresh("qwen2-tied")
    save_file({name: torch.ones(8, 128, dtype=torch.bfloat16)}, path / file)
    report = verify(path)
    finding = only(report)
    assert (finding.code, finding.severity, finding.file) == ("CK104", severity, str(path / file))
    assert ("Mistral's own names" in finding.actual) == (severity == "warning")
    assert report.status == ("passed" if severity == "warning" else "failed")


def test_expert_missing_in_every_layer_without_a_usable_config_is_found(fresh):
    path = fresh("glm4_moe")
    edit_config(path, model_type="unheard_of")
    replace(path, {}, [f"model.layers.{layer}.mlp.experts.11.down_proj.weight" for layer in range(2, 12)])
    found = [(finding.code, finding.tensor, finding.actual) for finding in verify(path).findings]
    assert ("CK104", "experts.11.down_proj.weight", "missing") in found


# Megatron


@pytest.mark.parametrize("left", [0.0, 0.999999])
def test_a_distcp_file_that_is_truncated_is_one_finding(left, releases, fresh_megatron, only):
    path = fresh_megatron("qwen2-tied")
    file = path / "release" / "__0_0.distcp"
    os.truncate(file, int(file.stat().st_size * left))
    for source in (None, releases("qwen2-tied")):
        report = verify(path, source)
        finding = only(report)
        assert (finding.code, finding.file) == ("CK112", str(file))
        assert finding.count == len(finding.names) > 0
        assert headline(report).startswith("release/__0_0.distcp ")


def test_several_damaged_distcp_files_are_a_finding_each(releases, tmp_path):
    path = tmp_path / "megatron"
    convert(releases("qwen2-tied"), path, max_shard_size=600_000)
    gone, also, short, _, *_ = sorted((path / "release").glob("*.distcp"))
    for file in (gone, also):
        file.unlink()
    os.truncate(short, short.stat().st_size // 2)
    found = {finding.file: finding for finding in verify(path).findings}
    assert found.keys() == {str(path / "release"), str(short)}
    assert found[str(path / "release")].actual == text_with(f"{gone.name} 1 missing")


def test_many_entries_of_one_header_are_one_finding(fresh):
    path = fresh("qwen2-tied")
    shard = max(path.glob("*.safetensors"), key=lambda file: len(load_file(file)))
    odd = {*load_file(shard)} - {"model.norm.weight"}
    edit_header(shard, lambda header: [header[name].update(dtype="F16_OF_TOMORROW") for name in odd])
    finding = next(one for one in verify(path).findings if one.code == "CK102")
    assert (finding.file, finding.names) == (str(shard), odd)


def test_megatron_may_pad_the_vocabulary(fresh_megatron, releases):
    path = fresh_megatron("qwen2-tied")
    padded(path, "embedding.word_embeddings.weight", torch.zeros_like)
    assert verify(path, releases("qwen2-tied")).findings == []


def test_without_a_config_beside_megatron_what_needs_it_is_skipped(converted, copy_of):
    path = copy_of(converted("qwen2-tied") / "release")
    report = verify(path)
    skipped = {check.code: check.reason for check in report.checks if check.status == "skipped"}
    assert set(skipped) == {"CK101", "CK105", "CK209", "CK701"}
    assert "--hf" in (skipped["CK101"] or "")
    assert report.findings == []


def test_directories_without_a_checkpoint_are_bad_input(tmp_path, releases):
    for name in ("", "notes.txt", "pytorch_model.bin"):
        if name:
            (tmp_path / name).write_text("x")
        with pytest.raises(CkptkitError, match="contains no checkpoint"):
            verify(tmp_path)
    with pytest.raises(CkptkitError, match="does not exist"):
        verify(tmp_path / "nowhere")
    with pytest.raises(CkptkitError, match="does not exist"):
        verify(releases("qwen2-tied"), source=tmp_path / "nowhere")


# CK102, CK106, CK107 and CK201: headers read as strictly as safetensors does, dtypes that models compute in.


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (NAME, {"shape": [128.0]}, "128.0"),
        (NAME, {"dtype": "BF17"}, "BF17"),
        ("__metadata__", {"format": 1}, "__metadata__"),
    ],
)
def test_a_header_that_safetensors_refuses(key, value, said, fresh):
    """`tests/fuzz/test_same_as_others.py` compares the two readers."""
    path = fresh("qwen2-tied")
    shard = shard_of(path, NAME)
    edit_header(shard, lambda header: header[key].update(value))
    with pytest.raises(SafetensorError), safe_open(shard, "pt"):
        pass
    found = [one for one in verify(path).findings if one.code == "CK102" and one.tensor in (key, None)]
    assert {one.file for one in found} == {str(shard)}
    assert any(said in f"{one.expected} {one.actual}" for one in found)


@pytest.mark.parametrize("has_key", [False, True])
def test_a_header_without_metadata(has_key, fresh):
    path = fresh("qwen2-tied")
    edit_header(shard_of(path, NAME), lambda header: header.update(__metadata__=None))
    if not has_key:
        edit_header(shard_of(path, NAME), lambda header: header.pop("__metadata__"))
    assert verify(path).findings == []


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn])
def test_weights_in_a_dtype_that_nothing_computes_in(dtype, fresh):
    path = fresh("qwen2-tied")
    for layer, name in enumerate(names(path, "mlp.up_proj.weight"), 1):
        old = tensor(path, name)
        replace(path, {name: torch.arange(old.numel()).reshape(old.shape).mul(layer).remainder(97).to(dtype)})
    report = verify(path)
    found = [(finding.code, finding.tensor, finding.actual, finding.severity) for finding in report.findings]
    assert found == [("CK107", "model.layers.{0..11}.mlp.up_proj.weight", str(dtype).removeprefix("torch."), "error")]
    assert next(check.status for check in report.checks if check.code == "CK204") == "passed"


def test_eight_bits_that_the_config_announces(fresh):
    path = fresh("qwen2-tied")
    found = names(path, "mlp.up_proj.weight")
    replace(path, {name: tensor(path, name).to(torch.float8_e4m3fn) for name in found})
    edit_config(path, quantization_config={"quant_method": "fp8"})
    # The dtype is right; that no scale is there, and that gate is in BF16, is for others to say.
    codes = {finding.code for finding in verify(path).findings}
    assert "CK107" not in codes
    assert {"CK303", "CK306"} <= codes


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_config_of_another_dtype_is_a_warning(key, fresh, only):
    path = fresh("qwen2-tied")
    edit_config(path, **{key: "float16"})
    finding = only(verify(path))
    assert (finding.code, finding.severity) == ("CK107", "warning")
    assert (finding.expected, finding.actual) == (text_with(f"{key} bfloat16"), f"{key} float16")


def test_a_wrong_total_size_does_not_hide_values(fresh):
    path, name = fresh("qwen2-tied"), "model.layers.4.mlp.up_proj.weight"
    replace(path, {name: torch.zeros_like(tensor(path, name))})
    edit_json(path / INDEX, lambda index: index["metadata"].update(total_size=5))
    found = verify(path).findings
    assert [(finding.code, finding.severity) for finding in found] == [("CK106", "warning"), ("CK205", "error")]


def test_a_file_of_which_nothing_can_be_read_is_one_finding(fresh_megatron, only):
    path = fresh_megatron("qwen2-tied")
    file = path / "release" / "__0_0.distcp"
    file.write_bytes(b"\0" * file.stat().st_size)
    report = verify(path, source=path)
    finding = only(report)
    assert (finding.code, finding.actual.startswith(f"{file}: "), finding.count) == ("CK201", True, 146)
    reasons = {check.code: check.reason for check in report.checks if check.status == "skipped"}
    assert set(reasons) == {f"CK20{digit}" for digit in range(2, 10)}
    assert all("CK201" in (reason or "") for reason in reasons.values())
