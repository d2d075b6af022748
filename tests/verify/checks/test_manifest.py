"""Manifests: digests computed independently, written by every verb, and CK120, which proves a copy with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from click.testing import CliRunner
from support import models
from support.fixture_types import CopyOf, PathOf, RunAlone
from support.messages import text_with
from torch import Tensor

from ckptkit.app.api import convert, make_manifest, quantize
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.storage.digest import TensorDigest
from ckptkit.transfer.manifest import read_manifest
from ckptkit.verify.evidence.extremes import extremes
from ckptkit.verify.run import verify

UP = "model.layers.3.mlp.up_proj.weight"


def digest_of(tensor: Tensor) -> str:
    """By way of numpy's own bytes."""
    return blake3(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_a_digest_is_blake3() -> None:
    """Of the three bytes `abc`, as other implementations have it."""
    expected = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    digest = TensorDigest.of(torch.tensor([97, 98, 99], dtype=torch.uint8))
    assert digest.to_json() == ["uint8", [3], expected]
    assert extremes(torch.tensor([97, 98, 99], dtype=torch.uint8)).digest.hex() == expected


def promised(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def manifests(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`manifests(name)`: the manifest of a release, kept apart."""
    root = tmp_path_factory.mktemp("manifests")

    def manifest(name: str) -> Path:
        path = root / f"{name}.json"
        return path if path.exists() else make_manifest(releases(name), path)

    return manifest


def test_the_manifest_of_a_release(releases: PathOf, manifests: PathOf) -> None:
    release = releases("glm4_moe")
    content = promised(manifests("glm4_moe"))
    assert content["schema"] == "ckptkit-manifest/2"
    expected = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest_of(tensor)]
        for name, tensor in models.tensors(release).items()
    }
    assert content["tensors"] == expected
    files = ("config.json", "generation_config.json", "tokenizer.model", "tokenizer_config.json")
    assert content["files"] == {name: blake3((release / name).read_bytes()).hexdigest() for name in files}


def test_what_is_converted_has_a_manifest(releases: PathOf, tmp_path: Path) -> None:
    release, there, back = releases("glm4_moe"), tmp_path / "megatron", tmp_path / "back"
    convert(release, there)
    convert(there, back)
    content = promised(there / "ckptkit.json")
    assert {"release/common.pt", "release/.metadata", "release/metadata.json", "hf/config.json"} <= content[
        "files"
    ].keys()
    embedding = models.tensors(release)["model.embed_tokens.weight"]
    assert content["tensors"]["embedding.word_embeddings.weight"] == ["bfloat16", [352, 128], digest_of(embedding)]
    assert promised(make_manifest(there, tmp_path / "again.json"))["tensors"] == content["tensors"]
    written = promised(back / "ckptkit.json")
    assert {name: entry[2] for name, entry in written["tensors"].items()} == {
        name: digest_of(tensor) for name, tensor in models.tensors(release).items()
    }
    digest = blake3((there / "ckptkit.json").read_bytes()).hexdigest()
    assert written["lineage"] == {"source": "megatron", "digest_of": "manifest", "digest": digest}
    for path in (there, back):
        assert verify(path, manifest=path / "ckptkit.json").findings == []


def test_what_is_quantized_has_a_manifest(releases: PathOf, tmp_path: Path) -> None:
    quantize(releases("qwen2-tied"), tmp_path / "int4", QuantScheme(32, "qmax7"))
    content = promised(tmp_path / "int4" / "ckptkit.json")
    assert {name: entry[2] for name, entry in content["tensors"].items()} == {
        name: digest_of(one) for name, one in models.tensors(tmp_path / "int4").items()
    }
    assert content["lineage"]["digest_of"] == "headers"


def test_the_headers_of_another_release_are_another_lineage(releases: PathOf, tmp_path: Path) -> None:
    found = []
    for name in ("qwen2-tied", "qwen2-untied"):
        convert(releases(name), tmp_path / name)
        found.append(promised(tmp_path / name / "ckptkit.json")["lineage"]["digest"])
    assert len(set(found)) == 2


def test_a_copy_is_proved_without_its_source(releases: PathOf, manifests: PathOf, fresh: PathOf) -> None:
    for name, count in (("qwen2-tied", 146), ("glm4_moe", len(models.tensors(releases("glm4_moe"))))):
        report = verify(fresh(name), manifest=manifests(name))
        assert report.findings == []
        (result,) = [check for check in report.checks if check.code == "CK120"]
        assert (result.status, result.tensors_compared) == ("passed", count)


def test_tensor_with_another_dtype_or_shape_than_the_manifest_is_found(
    manifests: PathOf, fresh: PathOf, alone: RunAlone
) -> None:
    path = fresh("qwen2-tied")
    models.edit(path, UP, models.tensors(path)[UP].half())
    _, (finding,) = alone("CK120", path, manifest=manifests("qwen2-tied"))
    assert finding.actual == "[288, 128] float16, in the manifest [288, 128] bfloat16"


def test_manifest_with_missing_or_extra_tensors_is_found(releases: PathOf, manifests: PathOf, alone: RunAlone) -> None:
    tied, untied, unknown = "qwen2-tied", "qwen2-untied", text_with("manifest")
    for name, other, actual in ((tied, untied, "missing"), (untied, tied, unknown)):
        _, findings = alone("CK120", releases(name), manifest=manifests(other))
        assert ("lm_head.weight", actual) in [(one.tensor, one.actual) for one in findings]


@pytest.mark.parametrize(("change", "actual"), [("edit", "its bytes differ"), ("remove", "missing")])
def test_side_file_changed_since_the_manifest_is_found(
    change: str, actual: str, manifests: PathOf, fresh: PathOf, alone: RunAlone
) -> None:
    path = fresh("qwen2-tied")
    file = path / "tokenizer_config.json"
    if change == "edit":
        file.write_text(file.read_text() + " ")
    else:
        file.unlink()
    _, (finding,) = alone("CK120", path, manifest=manifests("qwen2-tied"))
    assert (finding.file, finding.actual) == (str(file), actual)


ADDED = [
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.json",
    "tokenizer.tiktoken",
    "preprocessor_config.json",
    "modeling_x.py",
    "pkg/evil.py",
    "custom_generate/a/b.py",
    "custom_generate/generate.py",
    "adapter_config.json",
]


@pytest.mark.parametrize("name", ADDED)
def test_file_that_loaders_read_and_the_manifest_does_not_name_is_found(
    name: str, manifests: PathOf, fresh: PathOf, alone: RunAlone
) -> None:
    path = fresh("qwen2-tied")
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_text("{}")
    _, (finding,) = alone("CK120", path, manifest=manifests("qwen2-tied"))
    assert (finding.severity, finding.file) == ("error", str(path / name))
    assert "file" in finding.actual


def test_files_that_no_loader_reads_may_be_added(manifests: PathOf, fresh: PathOf, alone: RunAlone) -> None:
    path = fresh("qwen2-tied")
    for name in ("README.md", "LICENSE", "trainer_state.json", "ckptkit.json", ".cache/x.py", "figures/plot.txt"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("x")
    assert alone("CK120", path, manifest=manifests("qwen2-tied"))[1] == []


def test_file_added_to_the_hf_files_of_a_megatron_checkpoint_is_found(
    fresh_megatron: PathOf, tmp_path: Path, alone: RunAlone
) -> None:
    path = fresh_megatron("qwen2-tied")
    manifest = make_manifest(path, tmp_path / "manifest.json")
    (path / "hf" / "modeling_x.py").write_text("x")
    (path / "notes.py").write_text("no loader looks here")
    _, (finding,) = alone("CK120", path, manifest=manifest)
    assert finding.file == str(path / "hf" / "modeling_x.py")


@pytest.mark.parametrize("side", ["fused", "megatron"])
def test_names_on_disk_are_compared_whatever_the_source(
    side: str, releases: PathOf, converted: PathOf, tmp_path: Path, alone: RunAlone
) -> None:
    path = releases("glm4_moe", fused=True) if side == "fused" else converted("glm4_moe")
    manifest = make_manifest(path, tmp_path / "manifest.json")
    result, findings = alone("CK120", path, manifest=manifest, source_path=releases("glm4_moe"))
    assert findings == []
    assert result is not None
    assert result.tensors_compared == len(promised(manifest)["tensors"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "something/2"}, "schema 'something/2'"),
        ({"tensors": {}}, "has no digests"),
        ({"files": {"config.json": "short"}}, "the digest of config.json is not a BLAKE3"),
        ({"tensors": {"x": ["bfloat16", [1], "0" * 63]}}, "the entry of x is not"),
        ({"tensors": {"x": ["bfloat16", [1.5], "0" * 64]}}, "the entry of x is not"),
    ],
)
def test_manifest_that_is_malformed_is_refused(
    change: dict[str, Any], message: str, manifests: PathOf, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(promised(manifests("qwen2-tied")) | change))
    with pytest.raises(CkptkitError, match=message):
        read_manifest(tmp_path / "manifest.json")


def test_manifest_command_output_is_verified_by_the_verify_command(fresh: PathOf, tmp_path: Path) -> None:
    path = fresh("qwen2-tied")
    run = CliRunner().invoke
    made = run(cli, ["manifest", str(path), "--output", str(tmp_path / "kept.json")])
    assert (made.exit_code, made.output.strip()) == (0, str(tmp_path / "kept.json"))
    assert run(cli, ["verify", str(path), "--manifest", str(tmp_path / "kept.json")]).exit_code == 0
    models.edit(path, UP, models.tensors(path)[UP] + 1)
    assert run(cli, ["verify", str(path), "--manifest", str(tmp_path / "kept.json")]).exit_code == 1
    shutil.rmtree(path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_manifest_under_a_name_that_loaders_read_is_refused(fresh: PathOf, name: str) -> None:
    model = fresh("qwen2-tied")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    with pytest.raises(CkptkitError, match=name):
        make_manifest(model, model / name)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


@pytest.mark.parametrize("is_ours", [True, False])
def test_what_is_there_is_never_replaced_by_a_manifest(releases: PathOf, copy_of: CopyOf, is_ours: bool) -> None:
    model = copy_of(releases("qwen2-tied"))
    if is_ours:
        assert make_manifest(model) == model / "ckptkit.json"
    else:
        (model / "ckptkit.json").write_text('{"notes": "of a user"}')
    before = (model / "ckptkit.json").read_bytes()
    with pytest.raises(CkptkitError, match="exists"):
        make_manifest(model)
    assert (model / "ckptkit.json").read_bytes() == before


def test_manifest_into_a_directory_that_is_not_there_is_refused_before_the_work(
    releases: PathOf, tmp_path: Path
) -> None:
    with pytest.raises(CkptkitError, match="absent does not exist"):
        make_manifest(releases("qwen2-tied"), tmp_path / "absent/manifest.json")
