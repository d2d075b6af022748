"""Reports of formats that ckptkit names and does not judge, and of Megatron-FSDP, which it reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from mutations.edits import edit_config, names, replace, tensor
from support.fsdp_saves import save_fsdp
from torch import Tensor

from reports.files import number_files
from reports.report import Case, Change


def _quantized(parts: tuple[tuple[str, torch.dtype, int], ...], content: dict[str, object]) -> Change:
    """Matrices of the decoder under names of another format: suffix, dtype, and by how much columns shrink."""

    def prepare(work: Path) -> None:
        path, new = work / "CKPT", {}
        old = names(path, "_proj.weight")
        for name in old:
            rows, columns = tensor(path, name).shape
            for suffix, dtype, factor in parts:
                shape = (rows, columns // factor) if factor else ()
                new[name.removesuffix("weight") + suffix] = _filled(shape, dtype)
        replace(path, new, [name for name in old if name not in new])
        number_files(path)
        edit_config(path, quantization_config=content)

    return prepare


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 1, dtype=torch.float32).to(dtype)


GPTQ = _quantized(
    (("qweight", torch.int32, 8), ("qzeros", torch.int32, 32), ("scales", torch.float16, 32)),
    {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "packing_format": "auto_round:auto_gptq"},
)


def _fsdp(work: Path) -> None:
    """What Megatron-FSDP leaves: torch's own save, without metadata.json and common.pt."""
    save_fsdp(work / "CKPT" / "release", work / "saved")
    shutil.move(work / "CKPT" / "hf", work / "saved" / "hf")
    shutil.rmtree(work / "CKPT")
    (work / "saved").rename(work / "CKPT")


CASES = {
    "auto-round#1464": Case("qwen3_moe/hf", ("quantized format of AWQ or AutoRound",), prepare=GPTQ),
    "Megatron-Bridge#1211": Case("qwen3_moe/megatron", prepare=_fsdp),
}
