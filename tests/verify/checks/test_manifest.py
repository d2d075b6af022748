"""Manifests: digests computed independently, written by every verb, and CK120, which proves a copy with them."""

import json

import pytest
import torch
from blake3 import blake3
from mutations.edits import replace, tensor
from support import models
from support.messages import text_with

from ckptkit.app.api import convert, make_manifest, quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.transfer.manifest import read_manifest
from ckptkit.verify.run import verify

UP = "model.layers.3.mlp.up_proj.weight"


def digest_of(tensor):
    return blake3(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def promised(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def manifests(releases, tmp_path_factory):
    root = tmp_path_factory.mktemp("manifests")

    def manifest(name):
        path = root / f"{name}.json"
        return path if path.exists() else make_manifest(releases(name), path)

    return manifest


def test_the_manifest_of_a_release(releases, manifests):
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


def test_what_is_converted_has_a_manifest(releases, tmp_path):
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


def test_what_is_quantized_has_a_manifest_that_tells_its_source(releases, tmp_path):
    sources = set()
    for name in ("qwen2-tied", "qwen2-untied"):
        quantize(releases(name), tmp_path / name, QuantScheme(32, "qmax7"))
        content = promised(tmp_path / name / "ckptkit.json")
        assert {key: entry[2] for key, entry in content["tensors"].items()} == {
            key: digest_of(tensor) for key, tensor in models.tensors(tmp_path / name).items()
        }
        assert content["lineage"]["digest_of"] == "headers"
        sources.add(content["lineage"]["digest"])
    assert len(sources) == 2


READ_BY_LOADERS = (
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "special_tokens_map.json"),
    *("added_tokens.json", "tokenizer.json", "tokenizer.tiktoken", "preprocessor_config.json", "modeling_x.py"),
    *("pkg/evil.py", "custom_generate/a/b.py", "custom_generate/generate.py", "adapter_config.json"),
)
READ_BY_NONE = ("README.md", "LICENSE", "trainer_state.json", "ckptkit.json", ".cache/x.py", "figures/plot.txt")


def test_every_difference_from_the_manifest_is_found(manifests, fresh, alone):
    path = fresh("qwen2-tied")
    new = {UP: tensor(path, UP).half(), "lm_head.weight": torch.ones(352, 128, dtype=torch.bfloat16)}
    replace(path, new, ["model.norm.weight"])
    edited, removed = path / "tokenizer_config.json", path / "generation_config.json"
    edited.write_text(edited.read_text() + " ")
    removed.unlink()
    for name in (*READ_BY_LOADERS, *READ_BY_NONE):
        (path / name).parent.mkdir(exist_ok=True, parents=True)
        (path / name).write_text("{}")
    _, findings = alone("CK120", path, manifest=manifests("qwen2-tied"))
    assert {finding.severity for finding in findings} == {"error"}
    assert {finding.tensor or finding.file: finding.actual for finding in findings} == {
        UP: text_with("[288, 128] float16 [288, 128] bfloat16"),
        "lm_head.weight": text_with("manifest"),
        "model.norm.weight": "missing",
        str(edited): text_with("bytes"),
        str(removed): "missing",
        **{str(path / name): text_with("file") for name in READ_BY_LOADERS},
    }


def test_file_added_to_the_hf_files_of_a_megatron_checkpoint_is_found(fresh_megatron, tmp_path, alone):
    path = fresh_megatron("qwen2-tied")
    manifest = make_manifest(path, tmp_path / "manifest.json")
    (path / "hf" / "modeling_x.py").write_text("x")
    (path / "notes.py").write_text("no loader looks here")
    _, (finding,) = alone("CK120", path, manifest=manifest)
    assert finding.file == str(path / "hf" / "modeling_x.py")


@pytest.mark.parametrize("side", ["fused", "megatron"])
def test_names_on_disk_are_compared_whatever_the_source(side, releases, converted, tmp_path, alone):
    path = releases("glm4_moe", fused=True) if side == "fused" else converted("glm4_moe")
    manifest = make_manifest(path, tmp_path / "manifest.json")
    result, findings = alone("CK120", path, manifest=manifest, source_path=releases("glm4_moe"))
    assert findings == []
    assert result.tensors_compared == len(promised(manifest)["tensors"])


def test_manifests_that_are_malformed_are_refused(manifests, tmp_path):
    sound, path = promised(manifests("qwen2-tied")), tmp_path / "manifest.json"
    wrong = (
        ({"schema": "something/2"}, "something/2"),
        ({"tensors": {}}, "digests"),
        ({"files": {"config.json": "short"}}, r"config\.json.* BLAKE3"),
        ({"tensors": {"x": ["bfloat16", [1], "0" * 63]}}, "entry of x"),
        ({"tensors": {"x": ["bfloat16", [1.5], "0" * 64]}}, "entry of x"),
    )
    for change, message in wrong:
        path.write_text(json.dumps(sound | change))
        with pytest.raises(CkptkitError, match=message):
            read_manifest(path)


def test_a_manifest_replaces_nothing_and_has_no_name_that_loaders_read(fresh):
    model = fresh("qwen2-tied")
    before = models.content(model)
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        with pytest.raises(CkptkitError, match=name):
            make_manifest(model, model / name)
    with pytest.raises(CkptkitError, match="absent does not exist"):
        make_manifest(model, model / "absent" / "manifest.json")
    assert models.content(model) == before
    file = make_manifest(model)
    assert file == model / "ckptkit.json"
    for content in (file.read_bytes(), b'{"notes": "of a user"}'):
        file.write_bytes(content)
        with pytest.raises(CkptkitError, match="exists"):
            make_manifest(model)
        assert file.read_bytes() == content
