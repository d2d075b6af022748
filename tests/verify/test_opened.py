"""`ckptkit.open`, held against what other programs read of the same files: safetensors, transformers, Megatron."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support import models, quantized
from support.deltas import publish_chain
from support.megatron_saves import SAVES
from support.processes import python
from transformers import AutoModelForCausalLM

import ckptkit
from ckptkit import CkptkitError
from ckptkit.verify import opened

LEAD = "model.layers.3."


def agree(found, truth):
    """Holds names, shapes, dtypes and every bit of the values against tensors of another source."""
    assert set(found) == set(truth)
    for name, tensor in truth.items():
        lazy, read = found[name], found[name].read()
        assert (lazy.shape, lazy.torch_dtype, lazy.nbytes) == (tuple(tensor.shape), tensor.dtype, tensor.nbytes)
        assert (read.shape, read.dtype, read.is_contiguous()) == (tensor.shape, tensor.dtype, True)
        assert torch.equal(read.view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def test_hf_tensors_are_those_that_transformers_loads(releases):
    truth = AutoModelForCausalLM.from_pretrained(releases("qwen2-untied"), dtype="auto").state_dict()
    agree(ckptkit.open(releases("qwen2-untied")), truth)


def test_hf_tensors_and_their_files_are_those_of_safetensors(releases):
    checkpoint = ckptkit.open(releases("glm4_moe"))
    agree(checkpoint, models.tensors(releases("glm4_moe")))
    assert checkpoint.format == "hf"
    assert checkpoint.config["model_type"] == "glm4_moe"
    for name in checkpoint:
        (file,) = checkpoint[name].files
        with safe_open(file, "pt") as shard:
            assert name in shard.keys()  # noqa: SIM118 - safe_open is not a mapping


def test_layers_are_the_decoders_under_the_names_there(releases, converted):
    hf, megatron = ckptkit.open(releases("glm4_moe")), ckptkit.open(converted("glm4_moe"))
    count = hf.config["num_hidden_layers"]
    assert hf.layers == megatron.layers == [*range(count)]
    assert set(hf.layer(3)) == {name for name in hf if name.startswith(LEAD)}
    assert set(megatron.layer(3)) == {name for name in megatron if name.startswith("decoder.layers.3.")}
    assert set(megatron.as_hf().layer(3)) == set(hf.layer(3))
    with pytest.raises(KeyError, match=f"has no layer {count}; its layers are {{0..{count - 1}}}"):
        hf.layer(count)
    with pytest.raises(KeyError, match="has no tensor 'model.norm'"):
        hf["model.norm"]


def test_layers_of_a_vision_tower_are_not_the_decoders(tmp_path):
    """A model_type that no family has: names alone tell."""
    names = ("model.language_model.layers.0.norm.weight", "model.visual.layers.1.norm.weight", "lm_head.weight")
    save_file({name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "of no family"}')
    checkpoint = ckptkit.open(tmp_path)
    assert (checkpoint.layers, list(checkpoint.layer(0))) == ([0], [names[0]])


@pytest.mark.parametrize("save", ["one key a layer", "legacy, two chunks a stage", "hybrid, experts"])
def test_what_megatron_saved_has_the_tensors_of_its_release(saved, releases, save):
    """These three were loaded from the release and saved by megatron-core itself, on several ranks."""
    release = releases(SAVES[save][0])
    checkpoint = ckptkit.open(saved / save, hf=release)
    assert checkpoint.format == ("legacy" if "legacy" in save else "torch_dist")
    assert "decoder.final_layernorm.weight" in checkpoint or "decoder.final_norm.weight" in checkpoint
    agree(checkpoint.as_hf(), models.tensors(release))
    assert all(Path(file).is_relative_to(saved / save) for name in checkpoint for file in checkpoint[name].files)


def test_experts_are_fused_where_the_release_fuses_them(saved, releases):
    release = releases("glm4_moe", fused=True)
    agree(ckptkit.open(saved / "one key a layer", hf=release).as_hf(), models.tensors(release))


# Keeps the model of a file that holds classes of megatron-core: torch alone reads what it writes.
MODEL = """
import sys, torch
state = torch.load(sys.argv[1], weights_only=False)["model"]
torch.save({name: one for name, one in state.items() if torch.is_tensor(one) and "_extra" not in name}, sys.argv[2])
"""


def test_megatrons_view_is_what_megatron_itself_saves(saved, releases, tmp_path):
    """Of one rank without any parallelism, whose file torch reads."""
    (file,) = (saved / "legacy").rglob("model_optim_rng.pt")
    done = python("-W", "ignore", "-c", MODEL, file, tmp_path / "model.pt")
    assert done.returncode == 0, done.stderr
    # Megatron's own layers have norms by themselves, which Transformer Engine's have in the linear layer behind.
    attention, mlp = "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"
    truth = {
        name.replace("input_layernorm.", attention).replace("pre_mlp_layernorm.", mlp): tensor
        for name, tensor in torch.load(tmp_path / "model.pt").items()
    }
    view = ckptkit.open(releases("qwen2-tied")).as_megatron()
    truth["embedding.word_embeddings.weight"] = truth["embedding.word_embeddings.weight"][: view.config["vocab_size"]]
    agree(view, truth)
    assert set(view.as_hf()) == set(models.tensors(releases("qwen2-tied")))
    assert set(view.as_megatron()) == set(view)


INT4 = {"strategy": "group", "group_size": 32}
FORMATS = {
    "int4": (quantized.int4(symmetric=True, **INT4), quantized.compressed_config("pack-quantized", **INT4)),
    "int4, asymmetric": (
        quantized.int4(symmetric=False, **INT4),
        quantized.compressed_config("pack-quantized", symmetric=False, **INT4),
    ),
    "fp8": (
        quantized.fp8_blocks(128, 128),
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
}


@pytest.mark.parametrize("form", FORMATS)
def test_quantized_weights_are_dequantized_as_they_are_read(releases, tmp_path, form):
    """INT4 by compressed-tensors' own compressor and decompressor, FP8 by a formula of the tests."""
    quantizer, config = FORMATS[form]
    meant = quantized.write(
        releases("qwen2-untied"),
        tmp_path / "quantized",
        lambda name: name.endswith("_proj.weight"),
        quantizer,
        lambda plain: plain | {"quantization_config": config},
    )
    checkpoint = ckptkit.open(tmp_path / "quantized")
    agree(checkpoint, meant)
    assert "quantization_config" not in checkpoint.config
    assert checkpoint.words.endswith("dequantized")
    merged = checkpoint.as_megatron()["decoder.layers.3.mlp.linear_fc1.weight"].read()
    assert torch.equal(merged, torch.cat([meant[f"{LEAD}mlp.{one}_proj.weight"] for one in ("gate", "up")]))


def test_deltas_are_replayed_onto_their_base(releases, tmp_path):
    *_, truth = publish_chain(tmp_path / "deltas", releases("qwen2-untied"), ["xor", "overwrite"])
    checkpoint = ckptkit.open(tmp_path / "deltas", hf=releases("qwen2-untied"))
    assert checkpoint.format == "deltas"
    agree(checkpoint, truth)


def test_several_are_read_at_once_and_what_they_share_once(converted, releases, monkeypatch):
    truth = models.tensors(releases("glm4_moe"))
    layer = ckptkit.open(converted("glm4_moe")).as_hf().layer(3)
    calls = []
    read = opened.TorchDistCheckpoint.read

    def counted(self, names, reader=None):
        calls.append(list(names))
        return read(self, names, reader)

    monkeypatch.setattr(opened.TorchDistCheckpoint, "read", counted)
    found = layer.read()
    assert {name: torch.equal(tensor, truth[name]) for name, tensor in found.items()} == dict.fromkeys(layer, True)
    sources = [name for names in calls for name in names]
    assert len(sources) == len(set(sources)) < len(layer)
    chosen = [f"{LEAD}self_attn.v_proj.weight", f"{LEAD}self_attn.q_proj.weight"]
    assert list(layer.read(chosen)) == chosen
    with pytest.raises(KeyError, match=r"layer 3 has no tensor 'lm_head\.weight'"):
        layer.read(["lm_head.weight"])


SLICES = (slice(2, 5), slice(None), slice(-3, None), slice(0, 8, 3), slice(4, 4), slice(7, 2), slice(100, None))


@pytest.mark.parametrize("rows", SLICES, ids=str)
def test_rows_are_those_of_safetensors(releases, converted, rows):
    names = ("model.embed_tokens.weight", "model.norm.weight", f"{LEAD}self_attn.k_proj.weight")
    hf, megatron = ckptkit.open(releases("qwen2-untied")), ckptkit.open(converted("qwen2-untied"))
    fused = hf.as_megatron()["decoder.layers.3.mlp.linear_fc1.weight"]
    for name in names:
        with safe_open(hf[name].files[0], "pt") as shard:
            truth = shard.get_tensor(name)[rows]
        assert torch.equal(hf[name][rows], truth)
        assert torch.equal(megatron.as_hf()[name][rows], truth)
    assert torch.equal(fused[rows], fused.read()[rows])


def test_no_more_is_read_than_the_rows(tmp_path, monkeypatch):
    tensor = torch.arange(3_000_000, dtype=torch.int32).reshape(1000, 3000)
    save_file({"odd": torch.ones(3, dtype=torch.uint8), "big": tensor}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    sizes = []
    read = opened.read_new

    def counted(wanted):
        sizes.append(wanted.end - wanted.begin)
        return read(wanted)

    monkeypatch.setattr(opened, "read_new", counted)
    big = ckptkit.open(tmp_path)["big"]
    assert torch.equal(big[990:], tensor[990:])
    assert torch.equal(big[:500], tensor[:500])
    assert sizes == [10 * 12_000, 500 * 12_000]
    with pytest.raises(TypeError, match="slice"):
        big[3]


def test_a_file_that_was_cut_short_meanwhile_is_an_error(tmp_path):
    save_file({"a": torch.ones(100, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    lazy = ckptkit.open(tmp_path)["a"]
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-8])
    with pytest.raises(CkptkitError, match="a ends before its 1600 bytes"):
        lazy.read()
    with pytest.raises(CkptkitError, match="a is truncated"):
        lazy[98:]


def test_what_cannot_be_opened_is_an_error(releases, converted, copy_of):
    with pytest.raises(CkptkitError, match="does not exist"):
        ckptkit.open("nowhere")
    with pytest.raises(CkptkitError, match="effect"):
        ckptkit.open(releases("qwen2-tied"), hf=releases("qwen2-tied"))
    megatron = copy_of(converted("qwen2-tied"))
    shutil.rmtree(megatron / "hf")
    without = ckptkit.open(megatron)
    assert "decoder.final_layernorm.weight" in without
    assert without.layers == [*range(ckptkit.open(releases("qwen2-tied")).config["num_hidden_layers"])]
    with pytest.raises(CkptkitError, match="stored"):
        without.as_hf()
    assert set(ckptkit.open(megatron, hf=releases("qwen2-tied")).as_hf()) == set(ckptkit.open(releases("qwen2-tied")))


# Opens what the arguments name and looks at everything but the values; then says whether torch was imported.
LOOK = """
import sys
import ckptkit
light = len(sys.modules)
for path in sys.argv[1:]:
    checkpoint = ckptkit.open(path)
    assert all(tensor.nbytes and tensor.files for tensor in checkpoint.as_hf().layer(1).values())
print(light, "torch" in sys.modules, "numpy" in sys.modules)
"""


def test_opening_and_looking_imports_no_torch(releases, converted):
    done = python("-c", LOOK, str(releases("glm4_moe")), str(converted("glm4_moe")))
    assert done.returncode == 0, done.stderr
    light, *heavy = done.stdout.split()
    assert int(light) < 200  # `import ckptkit` alone
    assert heavy[0] == "False"


# What a user writes, as mypy --strict is to see it: the comments are the types.
TYPED = """
from typing import assert_type, Literal
from collections.abc import Mapping
import torch
import ckptkit

checkpoint = ckptkit.open("/hf/qwen3", hf=None)
assert_type(checkpoint.format, Literal["hf", "torch_dist", "legacy", "deltas"])
weights: Mapping[str, ckptkit.LazyTensor] = checkpoint.as_hf().layer(3)
for name, tensor in weights.items():
    assert_type(name, str)
    assert_type(tensor.shape, tuple[int, ...])
    assert_type(tensor.read(), torch.Tensor)
    assert_type(tensor[:16], torch.Tensor)
assert_type(checkpoint.layer(0).read(), dict[str, torch.Tensor])
report = ckptkit.verify("/hf/qwen3", against=frozenset({"sglang"}))
assert_type(report.status, Literal["passed", "failed", "inconclusive"])
report.write("report.html")
"""


@pytest.mark.nightly
def test_users_types_hold_under_mypy_strict(tmp_path):
    (tmp_path / "user.py").write_text(TYPED)
    root = Path(ckptkit.__file__).parent.parent
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent"]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "user.py")],
        cwd=tmp_path,
        env={"MYPYPATH": str(root), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
