"""MLX, bitsandbytes, GPTQ, AWQ, AutoRound, ModelOpt's AWQ, MXFP6: named once, and not judged by the rules of others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from mutations.edits import edit_config
from safetensors.torch import save_file
from support import models
from torch import Tensor

from ckptkit.app.api import convert, quantize
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.ignore.lint import lint
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

Parts = Callable[[str, Tensor], Mapping[str, Tensor]]


def mlx(module: str, weight: Tensor) -> Mapping[str, Tensor]:
    """4 bits, groups of 32. Source: mlx `quantize`, as mlx-lm's `save_model` stores it."""
    rows, columns = weight.shape
    packed = torch.randint(0, 2**31, (rows, columns // 8)).to(torch.uint32)
    side = {f"{module}.{part}": torch.randn(rows, columns // 32).bfloat16() for part in ("scales", "biases")}
    return {f"{module}.weight": packed} | side


def mlx_mxfp4(module: str, weight: Tensor) -> Mapping[str, Tensor]:
    """mlx-lm's mode mxfp4: scales of a byte, and no biases."""
    rows, columns = weight.shape
    packed = torch.randint(0, 2**31, (rows, columns // 8)).to(torch.uint32)
    return {f"{module}.weight": packed, f"{module}.scales": torch.randint(0, 255, (rows, columns // 32)).byte()}


def bitsandbytes(module: str, weight: Tensor) -> Mapping[str, Tensor]:
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


def gptq(module: str, weight: Tensor) -> Mapping[str, Tensor]:
    """4 bits, groups of 32, symmetric: every zero point the same."""
    rows, columns = weight.shape
    return {
        f"{module}.qweight": torch.randint(0, 2**31 - 1, (columns // 8, rows), dtype=torch.int32),
        f"{module}.qzeros": torch.full((columns // 32, rows // 8), 0x77777777, dtype=torch.int32),
        f"{module}.scales": torch.rand(columns // 32, rows).half(),
        f"{module}.g_idx": torch.arange(columns, dtype=torch.int32) // 32,
    }


def awq(module: str, weight: Tensor) -> Mapping[str, Tensor]:
    """The same without an order of the input features."""
    return {name: tensor for name, tensor in gptq(module, weight).items() if not name.endswith(".g_idx")}


def modelopt_awq(module: str, weight: Tensor) -> Mapping[str, Tensor]:
    """NVFP4 of weights that were scaled first, as `export_hf_checkpoint` of nvidia-modelopt 0.47 saves it."""
    rows, columns = weight.shape
    return {
        f"{module}.weight": torch.randint(0, 255, (rows, columns // 2), dtype=torch.uint8),
        f"{module}.weight_scale": torch.rand(rows, columns // 16).to(torch.float8_e4m3fn),
        f"{module}.weight_scale_2": torch.tensor(0.5),
        f"{module}.pre_quant_scale": torch.rand(columns).bfloat16(),
    }


def mxfp6(module: str, weight: Tensor) -> Mapping[str, Tensor]:
    """Four codes in three bytes, groups of 32 with a power of two. Source: compressed-tensors `mxfp6/base.py`."""
    rows, columns = weight.shape
    return {
        f"{module}.weight_packed": torch.randint(0, 255, (rows, columns * 3 // 4), dtype=torch.uint8),
        f"{module}.weight_scale": torch.randint(110, 130, (rows, columns // 32), dtype=torch.uint8),
    }


def stated(method: str, **content: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **content}}


def floats(form: str) -> dict[str, Any]:
    """What config.json says of MXFP6, in a whole of this format."""
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": weights | {"dynamic": "local"}}
    groups, own = {"group_0": group | {"format": "mxfp6-quantized"}}, {"format": form, "ignore": ["lm_head"]}
    return stated("compressed-tensors", quantization_status="compressed", config_groups=groups, **own)


# What config.json says: mlx-lm writes both keys.
FORMATS: dict[str, tuple[Parts, dict[str, Any]]] = {
    "MLX": (mlx, {"quantization": {"group_size": 32, "bits": 4}, "quantization_config": {"group_size": 32, "bits": 4}}),
    "MLX of before": (mlx, {"quantization": {"group_size": 32, "bits": 4}}),
    "MLX of mode mxfp4": (mlx_mxfp4, {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}),
    "bitsandbytes": (bitsandbytes, stated("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "GPTQ": (gptq, stated("gptq", bits=4, group_size=32, sym=True)),
    "AWQ or AutoRound": (awq, stated("awq", bits=4, group_size=32, version="gemm")),
    "NVIDIA ModelOpt's AWQ": (modelopt_awq, stated("modelopt", quant_algo="NVFP4_AWQ", ignore=["lm_head"])),
    "NVIDIA ModelOpt's AWQ of a config that says nothing": (modelopt_awq, {}),
    "MXFP6": (mxfp6, floats("mxfp6-quantized")),
    "MXFP6 of a config that says mixed-precision": (mxfp6, floats("mixed-precision")),
}


@pytest.fixture(params=sorted(FORMATS))
def foreign(request: pytest.FixtureRequest, releases: Callable[[str], Path], tmp_path: Path) -> tuple[str, Path]:
    """A release whose Linear layers are in the format: one file, as such releases of small models are."""
    parts, content_of_config = FORMATS[request.param]
    path = tmp_path / "release"
    release = releases("qwen2-untied")
    shutil.copytree(release, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    content: dict[str, Tensor] = {}
    for name, tensor in models.tensors(release).items():
        module = name.removesuffix(".weight")
        content |= parts(module, tensor) if module.endswith("_proj") else {name: tensor}
    save_file(content, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, **content_of_config)
    return str(request.param).partition(" of ")[0], path


def test_verify_names_the_format_once_and_judges_nothing(foreign: tuple[str, Path]) -> None:
    name, path = foreign
    for report in (verify(path), preflight(hf_checkpoint=path)):
        assert [str(finding) for finding in report.findings] == []
        assert report.status == "inconclusive"
        assert [f"{name}" in reason and "read" in reason for reason in report.reasons] == [True]


def test_lint_names_the_format_that_config_json_states(foreign: tuple[str, Path]) -> None:
    name, path = foreign
    method = json.loads((path / "config.json").read_text()).get("quantization_config", {}).get("quant_method")
    refused: type[CkptkitError] = CkptkitError
    words = "config.json has no quantization_config" if method is None else f"quant_method '{method}'"
    if method in ("compressed-tensors", "modelopt") or name == "MLX":
        named = name.partition("'s")[0]
        refused, words = UnsupportedError, f"quantized format of {named}"
    with pytest.raises(refused, match=words):
        lint(path)


def test_a_source_in_the_format_is_named_too(foreign: tuple[str, Path], releases: Callable[[str], Path]) -> None:
    name, path = foreign
    report = verify(releases("qwen2-untied"), source=path)
    assert (report.status, report.errors) == ("inconclusive", 0)
    assert any(f"quantized format of {name}" in reason for reason in report.reasons)


def test_convert_and_quantize_name_the_format(foreign: tuple[str, Path], tmp_path: Path) -> None:
    name, path = foreign
    with pytest.raises(UnsupportedError, match=f"quantized format of {name}") as refused:
        convert(path, tmp_path / "megatron")
    assert "unquantized release" in str(refused.value.hint)
    with pytest.raises(UnsupportedError, match=f"quantized format of {name}"):
        quantize(path, tmp_path / "int4", QuantScheme(32, "qmax7"))
    assert not (tmp_path / "megatron").exists()
    assert not (tmp_path / "int4").exists()


def test_experts_as_mlx_stacks_them_are_named_without_a_quantized_format(
    releases: Callable[[str], Path], tmp_path: Path
) -> None:
    """mlx-lm's conversion to bfloat16: `switch_mlp` holds the experts of a layer in one tensor each."""
    path, release = tmp_path / "mlx", releases("qwen3_moe")
    shutil.copytree(release, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    content: dict[str, Tensor] = {}
    apart: dict[str, list[Tensor]] = {}
    for name, tensor in models.tensors(release).items():
        before, experts, rest = name.partition(".experts.")
        if experts:
            apart.setdefault(f"{before}.switch_mlp.{rest.partition('.')[2]}", []).append(tensor)
        else:
            content[name] = tensor
    content |= {name: torch.stack(tensors) for name, tensors in apart.items()}
    save_file(content, path / "model.safetensors", metadata={"format": "mlx"})
    for report in (verify(path), preflight(hf_checkpoint=path)):
        assert (report.findings, report.status) == ([], "inconclusive")
        assert sum("experts stacked as MLX has them (switch_mlp)" in reason for reason in report.reasons) == 1
    with pytest.raises(UnsupportedError, match="as MLX has them"):
        convert(path, tmp_path / "megatron")


def test_plain_weights_that_mlx_wrote_are_read(releases: Callable[[str], Path], tmp_path: Path) -> None:
    path, release = tmp_path / "mlx", releases("qwen2-untied")
    shutil.copytree(release, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(models.tensors(release), path / "model.safetensors", metadata={"format": "mlx"})
    assert verify(path).findings == []
