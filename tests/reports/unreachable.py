"""Reports of formats that ckptkit names and does not judge, and of what is in no file."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from mutations.edits import edit_config, names, replace, tensor
from support.fsdp_saves import save_fsdp
from torch import Tensor

from reports.files import number_files
from reports.report import Change, Report

VERIFY = "ckptkit verify CKPT"
UPDATE = "a live update of an engine: nothing of it is in files"
TRAINER = "the trainer's own code: settings and checkpoints are right"


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


REPORTS = (
    Report(
        "auto-round#1464",
        "2026-02",
        "Experts in AutoRound's GPTQ layout end in a KeyError of `w2_weight.0.qweight`.",
        VERIFY,
        "qwen3_moe/hf",
        names=("quantized format of AWQ or AutoRound",),
        prepare=GPTQ,
        verdict="named",
        reason="weights in GPTQ's and AWQ's layout are not judged; `triage` knows the line",
    ),
    Report(
        "Megatron-Bridge#1211",
        "2025-11",
        "A checkpoint of Megatron-FSDP (fsdp_dtensor) cannot be exported by what reads torch_dist.",
        "ckptkit verify CKPT --source RELEASE",
        "qwen3_moe/megatron",
        prepare=_fsdp,
        verdict="sound",
        reason="ckptkit reads it and exports it to HF",
    ),
    *(
        Report(thread, month, what, verdict="beyond", reason=reason)
        for thread, month, what, reason in (
            ("verl#7904", "2026-09", "vLLM sleeps and resumes: token soup from the second update on.", UPDATE),
            (
                "vllm#56689",
                "2026-09",
                "The last pipeline stage keeps its old tied output layer after an update.",
                UPDATE,
            ),
            ("trl#5312", "2026-07", "Sleep level 2 of vLLM drops weights that no update brings back.", UPDATE),
            ("SkyRL#1680", "2026-05", "An update goes into experts that vLLM has repacked.", UPDATE),
            (
                "slime#2280",
                "2026-08",
                "Experts cut by expert tensor parallelism are sent without their other parts.",
                UPDATE,
            ),
            ("slime#2091", "2026-06", "Garbled from the second rollout on, with one release of SGLang.", UPDATE),
            (
                "slime#1127",
                "2025-12",
                "FP8 rollouts of GLM-4.6 are gibberish after the trainer's first update.",
                UPDATE,
            ),
            ("sglang#30749", "2026-07", "FP8 weights loaded a second time are taken for repacked ones.", UPDATE),
            (
                "sglang#30761",
                "2026-07",
                "Matrices that an engine derives of FP8 kv_b_proj are not made again after an update.",
                UPDATE,
            ),
            (
                "verl#7443",
                "2026-08",
                "The trainer's quantizer skips fused experts, whose names do not end in `.weight`.",
                "the trainer's own code: its names are in no file",
            ),
            (
                "miles#2014",
                "2026-06",
                "Whether the indexer's key weight is FP8 in the engine depends on the GPU.",
                "the engine's own choice; `lint` says which tensors each trainer packs",
            ),
            ("slime#1558", "2026-02", "--load restores the weights, and the rollout loop counts from 0.", TRAINER),
            ("slime#2243", "2026-07", "--ref-ckpt-step stays in force for the actor's own checkpoint.", TRAINER),
            ("NeMo-RL#3523", "2026-08", "A setting of the router's bias is validated and reaches nothing.", TRAINER),
            (
                "MarinFold#184",
                "2026-07",
                "transformers 4 ignores rope_parameters, and takes a base of 10000.",
                "the config is what transformers 5 writes; which release reads it is in no file",
            ),
            (
                "sglang#37133",
                "2026-08",
                "SGLang rounds a float32 selection bias to bfloat16 where the model is quantized.",
                "the engine's own dtype: `verify --against-sglang` compares what it holds (CK504)",
            ),
            (
                "KDFlow#9",
                "2026-06",
                "One release of SGLang does not find the vision weights of Qwen3-VL under their prefix.",
                "a release of an engine: `verify --against-sglang` with that release (CK502)",
            ),
            (
                "vllm#57446",
                "2026-09",
                "A class of vLLM returns no set of loaded names, which turns its check of completeness off.",
                "an engine's own class, and vLLM is not asked to load",
            ),
        )
    ),
)
