"""CK1xx: a good checkpoint is broken in one way, and exactly that is found, with its name and file."""

import os

import pytest
import torch
from mutations.edits import edit_config, edit_header, names, replace, shard_of, tensor
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from support.messages import text_with

from ckptkit.app.api import convert
from ckptkit.verify.run import verify

NAME = "model.norm.weight"


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
    assert ("Mistral" in finding.actual) == (severity == "warning")
    assert report.status == ("passed" if severity == "warning" else "failed")


def test_expert_missing_in_every_layer_without_a_usable_config_is_found(fresh):
    path = fresh("glm4_moe")
    edit_config(path, model_type="unheard_of")
    replace(path, {}, [f"model.layers.{layer}.mlp.experts.11.down_proj.weight" for layer in range(2, 12)])
    found = [(finding.code, finding.tensor, finding.actual) for finding in verify(path).findings]
    assert ("CK104", "experts.11.down_proj.weight", "missing") in found


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
