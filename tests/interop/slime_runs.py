"""What the tests of slime and of miles share: test models, the runs of their tools, and what is true of both."""

import json
import shlex

import pytest
import torch
from families import CASES
from families.case import save
from support import models
from support.engine_models import saved

import ckptkit
from ckptkit.app.api import convert
from ckptkit.converters.megatron.arguments import launch_flags, megatron_args
from ckptkit.converters.planner import dims_of
from ckptkit.quant.kernels.floats import quantize_fp8
from ckptkit.quant.schemes.floats import FloatScheme
from ckptkit.quant.schemes.w4a16 import int4_scheme
from interop.scripts import Script

LOST = ["model.layers.12.embed_tokens.weight", "model.layers.12.shared_head.head.weight"]
OF_THEIR_OWN_MODULES = {"qwen3_next", "qwen3_5_moe", "minimax_m2", "deepseek_v32", "glm_moe_dsa"}
NO_GPU = (
    "--seq-length 64 --transformer-impl local --tokenizer-type NullTokenizer --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion --use-cpu-initialization "
    "--distributed-backend gloo"
)


def release(root, name):
    if not (root / name).exists():
        save(name, CASES[name], root / name, torch.bfloat16)
    return root / name


def megatron(root, name, dialect=None):
    """What `ckptkit convert` makes of it; without `dialect` in slime's where slime has modules of its own."""
    chosen = dialect or ("slime" if name in OF_THEIR_OWN_MODULES else "mcore")
    path = root / f"{name}-megatron-{chosen}"
    if not path.exists():
        convert(release(root, name), path, dialect=chosen)
    return path


def export(label, source, checkpoint, output):
    words = ["--input-dir", checkpoint / "release", "--output-dir", output, "--origin-hf-dir", source]
    return Script(label, "tools/convert_torch_dist_to_hf.py", list(map(str, words)))


def load(label, source, output):
    """HF to torch_dist, by slime's tool, with the flags of `ckptkit inspect --megatron-args`."""
    config = json.loads((source / "config.json").read_text())
    flags = [flag for flag in launch_flags(megatron_args(dims_of(config))) if flag != "--moe-grouped-gemm"]
    words = [word for flag in flags if not flag.startswith("#") for word in shlex.split(flag)]
    words += [*NO_GPU.split(), "--hf-checkpoint", str(source), "--save", str(output)]
    return Script(label, "tools/convert_hf_to_torch_dist.py", words)


def quantize(label, tool, source, output, *words):
    return Script(label, f"tools/{tool}", ["--model-dir", str(source), "--save-dir", str(output), *words])


def shared(root, names):
    """The scripts that both have: exports of these models, INT4, and FP8 of odd and of whole sides."""
    scripts = [
        export(f"{name}/export", release(root, name), megatron(root, name), root / f"{name}-export") for name in names
    ]
    source = release(root, "deepseek_v3")
    scripts.append(export("slime/export", source, megatron(root, "deepseek_v3", "slime"), root / "slime-export"))
    source, whole = release(root, "qwen3_moe"), saved("moe", root)
    block = ("--strategy", "block", "--block-size", "128", "128")
    scripts.append(quantize("fp8", "convert_hf_to_fp8.py", source, root / "fp8", *block))
    scripts.append(quantize("fp8 blocks", "convert_hf_to_fp8.py", whole, root / "fp8-blocks", *block))
    scripts.append(quantize("fp8 rows", "convert_hf_to_fp8.py", whole, root / "fp8-rows", "--strategy", "channel"))
    return scripts


def codes(path, source):
    return {finding.code for finding in ckptkit.verify(path, source=source).findings}


class Exports:
    """What is true of the tools of both; `runs` and `root` are fixtures of the module that tests one of them."""

    def test_export_leaves_out_the_copies_in_the_mtp_layer(self, runs, root):
        assert runs["glm4_moe-mtp/export"].code == 0
        assert models.unequal(root / "glm4_moe-mtp-export", root / "glm4_moe-mtp") == LOST
        assert "CK202" in codes(root / "glm4_moe-mtp-export", root / "glm4_moe-mtp")

    def test_export_refuses_names_of_the_local_spec_which_slimes_dialect_lacks(self, runs, root):
        assert runs["deepseek_v3/export"].code == 1
        refused = "self_attention.kv_layernorm.weight"
        assert f"Unknown parameter name: module.module.decoder.layers.0.{refused}" in runs["deepseek_v3/export"].log
        assert runs["slime/export"].code == 0, runs["slime/export"].log[-3000:]
        assert models.unequal(root / "slime-export", root / "deepseek_v3") == LOST

    def test_int4_is_what_ckptkit_quantizes(self, runs, root):
        assert runs["int4"].code == 0, runs["int4"].log[-3000:]
        ckptkit.quantize(
            root / "qwen3_moe", root / "int4-ckptkit", int4_scheme(reference=root / "int4"), like=root / "int4"
        )
        shapes = [name for name in models.tensors(root / "int4") if name.endswith("weight_shape")]
        assert len(shapes) == 12 * 12 * 3
        assert models.unequal(root / "int4-ckptkit", root / "int4", shapes) == []

    @pytest.mark.parametrize(("label", "scheme"), [("fp8 blocks", "fp8-block"), ("fp8 rows", "fp8-channel")])
    def test_fp8_is_what_ckptkit_quantizes(self, label, scheme, runs, root):
        assert runs[label].code == 0, runs[label].log[-3000:]
        ckptkit.quantize(root / "moe", root / f"{scheme}-ckptkit", FloatScheme(scheme, "slime"))
        assert models.unequal(root / f"{scheme}-ckptkit", root / label.replace(" ", "-")) == []

    def test_fp8_blocks_at_the_edges_are_what_ckptkit_rounds(self, runs, root):
        """No side of these matrices but the hidden size divides by 128."""
        assert runs["fp8"].code == 0, runs["fp8"].log[-3000:]
        found, source = models.tensors(root / "fp8"), models.tensors(root / "qwen3_moe")
        quantized = [name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn]
        assert len(quantized) == 12 * (4 + 12 * 3)
        for name in quantized:
            codes, scales = quantize_fp8(source[name], (128, 128), "slime", name)
            assert torch.equal(found[f"{name}_scale_inv"], scales), name
            assert torch.equal(found[name].view(torch.uint8), codes.view(torch.uint8)), name

    def test_fp8_against_its_source_passes_but_for_the_total_size(self, runs, root):
        assert runs["fp8"].code == 0, runs["fp8"].log[-3000:]
        assert codes(root / "fp8", root / "qwen3_moe") == {"CK106"}

    def test_fp8_converts_to_megatron(self, runs, root):
        assert runs["fp8"].code == 0, runs["fp8"].log[-3000:]
        convert(root / "fp8", root / "fp8-megatron")
        convert(root / "fp8-megatron", root / "fp8-back", hf=root / "qwen3_moe")
        found, wanted = models.tensors(root / "fp8-back"), models.tensors(root / "qwen3_moe")
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            # e4m3 has 3 bits behind the leading one: 1/16 of the value, or half a step of the smallest values.
            error = (found[name].float() - tensor.float()).abs()
            assert bool((error <= tensor.float().abs() / 15 + tensor.float().abs().max() / 448 / 512).all()), name
