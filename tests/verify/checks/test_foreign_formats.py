"""MLX, bitsandbytes, GPTQ, AWQ, AutoRound, ModelOpt's AWQ, MXFP6: named once, and not judged by the rules of others."""

import shutil

import pytest
import torch
from mutations.edits import edit_config
from safetensors.torch import save_file
from support import models
from support.quantized import group_config
from torch import Tensor

from ckptkit.app.api import convert, quantize
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.ignore.lint import lint
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify


def mlx(module, weight):
    """4 bits, groups of 32. Source: mlx `quantize`, as mlx-lm's `save_model` stores it."""
    rows, columns = weight.shape
    packed = torch.randint(0, 2**31, (rows, columns // 8)).to(torch.uint32)
    side = {f"{module}.{part}": torch.randn(rows, columns // 32).bfloat16() for part in ("scales", "biases")}
    return {f"{module}.weight": packed} | side


def mlx_mxfp4(module, weight):
    """mlx-lm's mode mxfp4: scales of a byte, and no biases."""
    rows, columns = weight.shape
    packed = torch.randint(0, 2**31, (rows, columns // 8)).to(torch.uint32)
    return {f"{module}.weight": packed, f"{module}.scales": torch.randint(0, 255, (rows, columns // 32)).byte()}


def bitsandbytes(module, weight):
    """NF4 with nested scales, as transformers saves it."""
    state = torch.tensor(list(b'{"quant_type": "nf4"}'), dtype=torch.uint8)
    return {
        f"{module}.weight": torch.randint(0, 255, (weight.numel() // 2, 1), dtype=torch.uint8),
        f"{module}.weight.absmax": torch.randint(0, 255, (weight.numel() // 64,), dtype=torch.uint8),
        f"{module}.weight.nested_absmax": torch.rand(weight.numel() // 64 // 256 + 1),
        f"{module}.weight.nested_quant_map": torch.linspace(-1, 1, 256),
        f"{module}.weight.quant_map": torch.linspace(-1, 1, 16),
        f"{module}.weight.quant_state.bitsandbytes__nf4": state,
    }


def gptq(module, weight):
    """4 bits, groups of 32, symmetric: every zero point the same."""
    rows, columns = weight.shape
    return {
        f"{module}.qweight": torch.randint(0, 2**31 - 1, (columns // 8, rows), dtype=torch.int32),
        f"{module}.qzeros": torch.full((columns // 32, rows // 8), 0x77777777, dtype=torch.int32),
        f"{module}.scales": torch.rand(columns // 32, rows).half(),
        f"{module}.g_idx": torch.arange(columns, dtype=torch.int32) // 32,
    }


def awq(module, weight):
    return {name: tensor for name, tensor in gptq(module, weight).items() if not name.endswith(".g_idx")}


def modelopt_awq(module, weight):
    """NVFP4 of weights that were scaled first, as `export_hf_checkpoint` of nvidia-modelopt 0.47 saves it."""
    rows, columns = weight.shape
    return {
        f"{module}.weight": torch.randint(0, 255, (rows, columns // 2), dtype=torch.uint8),
        f"{module}.weight_scale": torch.rand(rows, columns // 16).to(torch.float8_e4m3fn),
        f"{module}.weight_scale_2": torch.tensor(0.5),
        f"{module}.pre_quant_scale": torch.rand(columns).bfloat16(),
    }


def mxfp6(module, weight):
    """Four codes in three bytes, groups of 32 with a power of two. Source: compressed-tensors `mxfp6/base.py`."""
    rows, columns = weight.shape
    return {
        f"{module}.weight_packed": torch.randint(0, 255, (rows, columns * 3 // 4), dtype=torch.uint8),
        f"{module}.weight_scale": torch.randint(110, 130, (rows, columns // 32), dtype=torch.uint8),
    }


def stated(method, **content):
    return {"quantization_config": {"quant_method": method, **content}}


def stated_mxfp6(form):
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights, "format": "mxfp6-quantized"}
    return {"quantization_config": group_config(form, group | {"input_activations": weights | {"dynamic": "local"}})}


# What config.json says: mlx-lm writes both keys.
FORMATS = {
    "MLX": (mlx, {"quantization": {"group_size": 32, "bits": 4}, "quantization_config": {"group_size": 32, "bits": 4}}),
    "MLX of before": (mlx, {"quantization": {"group_size": 32, "bits": 4}}),
    "MLX of mode mxfp4": (mlx_mxfp4, {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}),
    "bitsandbytes": (bitsandbytes, stated("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "GPTQ": (gptq, stated("gptq", bits=4, group_size=32, sym=True)),
    "AWQ or AutoRound": (awq, stated("awq", bits=4, group_size=32, version="gemm")),
    "NVIDIA ModelOpt's AWQ": (modelopt_awq, stated("modelopt", quant_algo="NVFP4_AWQ", ignore=["lm_head"])),
    "NVIDIA ModelOpt's AWQ of a plain config": (modelopt_awq, {}),
    "MXFP6": (mxfp6, stated_mxfp6("mxfp6-quantized")),
    "MXFP6 of a config that says mixed-precision": (mxfp6, stated_mxfp6("mixed-precision")),
}


def copied(release, path, content, form="pt"):
    shutil.copytree(release, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(dict(content), path / "model.safetensors", metadata={"format": form})
    return path


@pytest.mark.parametrize("form", FORMATS)
def test_every_verb_names_the_format_and_judges_nothing(form, releases, tmp_path):
    (parts, config), name = FORMATS[form], form.partition(" of ")[0]
    release, content = releases("qwen2-untied"), dict[str, Tensor]()
    for key, tensor in models.tensors(release).items():
        module = key.removesuffix(".weight")
        content |= parts(module, tensor) if module.endswith("_proj") else {key: tensor}
    path = copied(release, tmp_path / "release", content)
    edit_config(path, **config)
    for report in (verify(path), preflight(hf_checkpoint=path), verify(release, source=path)):
        assert (report.findings, report.status) == ([], "inconclusive")
        assert len([reason for reason in report.reasons if name in reason]) == 1
    method = config.get("quantization_config", {}).get("quant_method")
    error = CkptkitError
    words = method or "quantization_config"
    if method in ("compressed-tensors", "modelopt") or name == "MLX":
        error, words = UnsupportedError, name.partition("'s")[0]
    with pytest.raises(error, match=words):
        lint(path)
    with pytest.raises(UnsupportedError, match=name) as refused:
        convert(path, tmp_path / "megatron")
    assert "unquantized release" in str(refused.value.hint)
    with pytest.raises(UnsupportedError, match=name):
        quantize(path, tmp_path / "int4", QuantScheme(32, "qmax7"))
    assert not (tmp_path / "megatron").exists()
    assert not (tmp_path / "int4").exists()


def test_experts_as_mlx_stacks_them_are_named_without_a_quantized_format(releases, tmp_path):
    """mlx-lm's conversion to bfloat16: `switch_mlp` holds the experts of a layer in one tensor each."""
    content, experts = dict[str, Tensor](), dict[str, list[Tensor]]()
    for name, tensor in models.tensors(releases("qwen3_moe")).items():
        before, part, after = name.partition(".experts.")
        if part:
            experts.setdefault(f"{before}.switch_mlp.{after.partition('.')[2]}", []).append(tensor)
        else:
            content[name] = tensor
    content |= {name: torch.stack(tensors) for name, tensors in experts.items()}
    path = copied(releases("qwen3_moe"), tmp_path / "mlx", content, "mlx")
    for report in (verify(path), preflight(hf_checkpoint=path)):
        assert (report.findings, report.status) == ([], "inconclusive")
        assert len([reason for reason in report.reasons if "switch_mlp" in reason]) == 1
    with pytest.raises(UnsupportedError, match="MLX"):
        convert(path, tmp_path / "megatron")


def test_plain_weights_that_mlx_wrote_are_read(releases, tmp_path):
    release = releases("qwen2-untied")
    assert verify(copied(release, tmp_path / "mlx", models.tensors(release), "mlx")).findings == []
