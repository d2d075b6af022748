"""Samples of tensors: read at the right places whatever saved them, few and bounded, and compared across dtypes."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.megatron_saves import SAVES
from support.messages import text_with
from support.nightly import daily

from ckptkit.core.specs import TensorSpec
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.storage.read import FileExtent
from ckptkit.verify.evidence.files import HfFiles
from ckptkit.verify.evidence.samples import MAX_TENSORS, SamplePair, chosen, samples_of

TORCH_DIST = [label for label, (_, how) in SAVES.items() if not how.get("legacy")]


@dataclass(frozen=True)
class Flat:
    path: Path
    specs: Mapping[str, TensorSpec]

    def stretch(self, name, element):
        spec = self.specs[name]
        before = list(self.specs).index(name) * spec.nbytes
        size = spec.nbytes // math.prod(spec.shape)
        return FileExtent(self.path, before + element * size, spec.nbytes - element * size)


def flat(path, contents):
    path.write_bytes(b"".join(bytes(one.flatten().view(torch.uint8).numpy()) for one in contents.values()))
    return Flat(path, {name: TensorSpec(name, tuple(one.shape), str(one.dtype)[6:]) for name, one in contents.items()})


def check_stretches(name, whole, extents):
    content = whole.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    for element, extent in extents.items():
        assert extent is not None, name
        begin = element * whole.element_size()
        count = min(extent.nbytes, 4096)
        assert 0 < extent.nbytes <= len(content) - begin, (name, element)
        with extent.path.open("rb") as file:
            file.seek(extent.offset)
            assert file.read(count) == content[begin : begin + count], (name, element)


@pytest.mark.parametrize("label", daily(TORCH_DIST, TORCH_DIST[::2]))
def test_a_stretch_of_what_megatron_saved_is_at_its_element(label, saved):
    """Stacked layers and experts, and chunks that cut rows or columns. Other tests compare `read` with Megatron."""
    (path,) = (saved / label).glob("*/.metadata")
    checkpoint = TorchDistCheckpoint(path.parent)
    for name, whole in checkpoint.read(list(checkpoint.specs)).items():
        elements = {0, whole.numel() // 3, whole.numel() // 2 + 1, whole.numel() - 1} & set(range(whole.numel()))
        check_stretches(name, whole, {element: checkpoint.stretch(name, element) for element in elements})


def test_a_stretch_of_a_release_is_at_its_element(releases):
    files = HfFiles(releases("qwen3_moe"))
    for name, whole in files.checkpoint.read(list(files.specs)).items():
        check_stretches(name, whole, {element: files.stretch(name, element) for element in (0, whole.numel() - 1)})
    assert files.stretch("no.such.tensor", 0) is None


def test_every_layer_and_every_kind_is_among_the_chosen():
    kinds = ("input_layernorm", "self_attn.o_proj", "mlp.gate", *(f"mlp.experts.{one}.down_proj" for one in range(8)))
    names = [f"model.layers.{layer}.{kind}.weight" for layer in range(48) for kind in kinds]
    taken = chosen(["model.embed_tokens.weight", *names, "lm_head.weight"])
    assert len(taken) == len(set(taken)) == MAX_TENSORS
    assert taken[:2] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert {int(name.split(".")[2]) for name in taken[2:]} == set(range(48))
    found = [sum(f".{kind}." in name for name in taken) for kind in ("input_layernorm", "o_proj", "gate", "down_proj")]
    assert min(found) >= 15
    assert len({name.split(".")[5] for name in taken if ".experts." in name}) > 4


def test_bytes_read_are_bounded(tmp_path):
    """Two files of 4 GB, which are sparse; what the process reads is what the kernel counts."""
    path = tmp_path / "sparse"
    specs = {f"model.layers.{one}.x.weight": TensorSpec(f"{one}", (5120, 4096), "bfloat16") for one in range(100)}
    with path.open("wb") as file:
        file.truncate(100 * 5120 * 4096 * 2)
    side = Flat(path, specs)
    before = read_so_far()
    found = samples_of(side, side, [SamplePair(name, name) for name in specs])
    assert read_so_far() - before < 13 << 20
    assert (len(found.compared), found.nbytes, found.differing) == (64, 64 * 3 * (32 << 10), [])


def read_so_far():
    """Bytes that this process has read by now (proc(5))."""
    return int(Path(f"/proc/{os.getpid()}/io").read_text().split()[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_cast_gives_is_equal_and_nothing_else(dtype, tmp_path):
    odd = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3e38, 3.4e38, -1e39, 1e-40, 1e-7, 65519.0, 65520.0, math.nan]
    wide = torch.cat([torch.tensor(odd), torch.randn(50_000, generator=torch.Generator().manual_seed(1))])
    a, b = flat(tmp_path / "a", {"x": wide}), flat(tmp_path / "b", {"x": wide.to(dtype)})
    assert (
        samples_of(a, b, [SamplePair("x", "x")]).differing == samples_of(b, a, [SamplePair("x", "x")]).differing == []
    )
    bits = wide.to(dtype).view(torch.int16).clone()
    bits[3] ^= 1
    c = flat(tmp_path / "c", {"x": bits.view(dtype)})
    assert (
        samples_of(a, c, [SamplePair("x", "x")]).differing
        == samples_of(c, a, [SamplePair("x", "x")]).differing
        == ["x"]
    )


def test_what_cannot_be_compared_is_counted_with_its_reason(tmp_path):
    half = torch.ones(4, 4, dtype=torch.bfloat16)
    a = flat(tmp_path / "a", {"x": half, "y": half, "z": half})
    b = flat(tmp_path / "b", {"x": half.half(), "y": half[:2], "w": half})
    found = samples_of(a, b, [SamplePair("x", "x"), SamplePair("y", "y"), SamplePair("z", "z")])
    assert found.compared == []
    dtypes, shapes, sides = found.left_out
    assert (dtypes, shapes, sides) == (text_with("bfloat16 float16"), text_with("shapes"), text_with("side"))
    assert [*found.left_out.values()] == [1, 1, 1]
    # A padded vocabulary is compared as far as both have rows.
    assert samples_of(a, b, [SamplePair("y", "y", padded=True)]).compared == ["y"]


UP, NORM = "model.layers.3.mlp.up_proj.weight", "model.layers.3.input_layernorm.weight"


def test_an_element_that_differs_in_start_middle_or_end_is_found(tmp_path):
    whole = torch.arange(100_000, dtype=torch.float32).bfloat16()
    a = flat(tmp_path / "a", {"x": whole})
    assert samples_of(a, a, [SamplePair("x", "x")]).differing == []
    for element in (0, 50_000, 99_999):
        other = whole.clone()
        other[element] += 1024
        assert samples_of(a, flat(tmp_path / "b", {"x": other}), [SamplePair("x", "x")]).differing == ["x"]


@pytest.mark.parametrize(
    ("name", "shape", "drift", "dtype", "unrelated"),
    [
        (UP, (64, 96), 0.3, "bfloat16", False),  # more than any training in place
        (UP, (64, 96), 30.0, "bfloat16", True),
        (UP, (64, 96), 30.0, "float16", True),
        (UP, (64, 96), 30.0, "float32", True),
        (UP, (4, 60), 30.0, "bfloat16", False),  # too few to say
        (NORM, (6144,), 30.0, "bfloat16", False),
        ("model.embed_tokens.weight", (64, 96), 30.0, "float32", False),
        (UP, (64, 96), math.inf, "float32", False),
    ],
)
def test_matrices_that_no_training_makes_of_the_others_are_told(name, shape, drift, dtype, unrelated, tmp_path):
    """By the cosine of the two, which this drift takes away."""
    generator = torch.Generator().manual_seed(7)
    base, noise = (torch.randn(shape, generator=generator) for _ in range(2))
    here, there = base.to(getattr(torch, dtype)), (base + drift * noise).to(getattr(torch, dtype))
    sides = flat(tmp_path / "here", {name: here}), flat(tmp_path / "there", {name: there})
    found = samples_of(*sides, [SamplePair(name, name)])
    assert (found.differing, found.unrelated) == ([name], [name] if unrelated else [])
