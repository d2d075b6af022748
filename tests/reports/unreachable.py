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
BY_GPU = "the engine's own choice; `lint` says which tensors each trainer packs"
LOUD = "the engine says so and stops: nothing of it is in files"
ANOTHER = "another thread about the fault of"
RELEASE = "a release"
FEATURE = "a decision or a feature of the project, no fault of a checkpoint"


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
                BY_GPU,
            ),
            (
                "verl#7014",
                "2026-07",
                "A sync reads merged weights after the merge was undone: it sends the base.",
                UPDATE,
            ),
            ("verl#6688", "2026-06", "Factors are views of a buffer that the next bucket overwrites.", UPDATE),
            (
                "verl#7117",
                "2026-08",
                "Beside the weights of a LoRA run lies PEFT's code in place of the model's.",
                "code and not weights: a loader that needs it says which file is missing",
            ),
            ("miles#1721", "2026-07", "Gradients of adapters are summed in another dtype than asked for.", TRAINER),
            ("miles#1915", "2026-07", "The attention backend that was asked for does not reach a LoRA run.", TRAINER),
            ("miles#1678", "2026-07", "A script for adapters of GLM-5.2 over a base in FP8.", FEATURE),
            ("miles#1745", "2026-07", "Several adapters are pushed to engines while they serve.", UPDATE),
            ("ms-swift#9077", "2026-04", "Factors alone are sent to engines.", UPDATE),
            (
                "ms-swift#6862",
                "2025-12",
                "A merge's logits are far from the model's: the adapter was named by the option for another format.",
                "both files are right; `verify MERGED --source BASE --adapter ADAPTER` says whether a merge took it",
            ),
            ("Megatron-Bridge#4221", "2026-06", "Adapters are exported by several ranks together.", FEATURE),
            ("prime-rl#2714", "2026-06", "vLLM's layerwise reload drops Nemotron-H's D: NaN after an update.", UPDATE),
            ("vllm#48284", "2026-07", "Nemotron-H answers otherwise once its own weights were loaded again.", UPDATE),
            ("vllm#54477", "2026-08", "88 steps after loading move or repack what an update writes to.", UPDATE),
            ("vllm#50723", "2026-08", "Sparse patches in place mark what is unchanged with NaN.", UPDATE),
            ("vllm#43416", "2026-05", "E8M0 exponents go into float32 parameters.", f"{ANOTHER} vllm#51946"),
            ("vllm#45320", "2026-06", "Experts without an input_scale.", f"{ANOTHER} vllm#45212"),
            (
                "vllm#41811",
                "2026-05",
                "Whether all parameters were loaded is not asked of quantized models, nor in #41086 and #39858.",
                "the engine's own check: `verify --against-vllm` asks it of each parameter",
            ),
            (
                "verl#7136",
                "2026-07",
                "A second FP8 update ends in an error: the engine has repacked its weights.",
                LOUD,
            ),
            ("verl#7978", "2026-09", "BF16 experts are repacked once and for all; an update fails, as in #7987.", LOUD),
            ("verl#6626", "2026-06", "MTP that was turned off never reaches the bridge.", TRAINER),
            ("miles#1483", "2026-06", "Arguments do not reach the bridge's provider.", TRAINER),
            ("miles#1505", "2026-06", "Which of the indexer's weights are FP8, as in miles#1928 and #2034.", BY_GPU),
            ("miles#1235", "2026-07", "Deltas are published to a disk; #1643 follows which engine has which.", FEATURE),
            ("vime#106", "2026-06", "Vision weights are sent under Megatron's names, as in vime#111.", UPDATE),
            ("vime#133", "2026-06", "FP8 scales are sent in the layout of another engine.", UPDATE),
            ("ms-swift#9475", "2026-06", "Rollouts of Qwen3.5 are garbled where a server takes the updates.", UPDATE),
            ("ms-swift#9877", "2026-08", "One release of transformers turns names back by another rule.", UPDATE),
            ("Automodel#3597", "2026-08", "Training starts from random weights: the load is skipped.", TRAINER),
            ("AReaL#1468", "2026-07", "Moments of the optimizer are not restored.", TRAINER),
            ("ISEEKYAN/Megatron-LM#104", "2026-07", "The optimizer's float32 weights are not restored.", TRAINER),
            ("radixark/Megatron-LM#94", "2026-09", "The trainer's class of Kimi K3 has no place for a norm.", TRAINER),
            ("Megatron-LM#6071", "2026-07", "GPTModel is deprecated, as in #5675, #5792 and Bridge #4510.", FEATURE),
            ("Megatron-LM#5895", "2026-07", "A converter of fsdp_dtensor without a GPU is wanted.", FEATURE),
            ("transformers#47410", "2026-07", "Packed experts start anew.", f"{ANOTHER} transformers#47407"),
            ("NeMo-RL#2124", "2026-03", "Layers of gpt-oss are not exported.", f"{ANOTHER} NeMo-RL#2249"),
            ("Megatron-Bridge#5714", "2026-08", "Quantized experts are exported in groups.", FEATURE),
            (
                "vllm-omni#1854",
                "2026-05",
                "NVFP4 of Qwen3-Omni takes in the towers, which hang below `thinker` too.",
                "list and files agree: whether a tower may be quantized is the engine's own",
            ),
            ("Automodel#2571", "2026-06", "A layer that is not tied in memory is left out as tied.", TRAINER),
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
            (
                "vime#351",
                "2026-07",
                "A trained MTP layer reaches the trainer's model alone: the engine's drafts go stale after each step.",
                UPDATE,
            ),
            (
                "verl-SpeCo#64",
                "2026-08",
                "A sync filters out the embedding and output layer that a P-EAGLE draft trains.",
                UPDATE,
            ),
            (
                "NeMo-RL#2999",
                "2026-07",
                "MTP weights arrive in several buffers, and vLLM misses the others after each.",
                UPDATE,
            ),
            (
                "vllm#46725",
                "2026-06",
                "Updates of weights never reach a draft model.",
                UPDATE,
            ),
            (
                "vllm#50158",
                "2026-07",
                "Each rank decides for itself whether a draft shares the target's embedding, and two disagree.",
                "the engine's own choice: the copy in the draft is compared by CK144",
            ),
            (
                "vllm#46994",
                "2026-06",
                "With pipeline stages a draft has no embedding, which the last stage never loads.",
                f"{RELEASE} of vLLM: the checkpoint is right",
            ),
            (
                "vllm#51758",
                "2026-08",
                "vLLM 0.27 builds DeepSeek-V4's draft layers in another FP8 than 0.26 did.",
                f"{RELEASE} of vLLM: the checkpoint is right",
            ),
            (
                "vllm#51269",
                "2026-08",
                "DSpark configs of speculators lack what vLLM adds to those of DFlash.",
                f"{RELEASE} of vLLM: the draft is right",
            ),
            (
                "vllm#53428",
                "2026-08",
                "DFlash2 drafts are built with the layers of DFlash, as in #53612.",
                f"{RELEASE} of vLLM: the draft is right",
            ),
            (
                "sglang#25368",
                "2026-05",
                "All three MTP layers of MiMo-V2.5 are loaded into the same parameters.",
                f"{RELEASE} of SGLang: the checkpoint is right",
            ),
            (
                "sglang#26640",
                "2026-05",
                "The image's transformers does not know the assistant of Gemma 4.",
                f"{RELEASE} of transformers, which is in no file",
            ),
            (
                "sglang#32459",
                "2026-07",
                "With EAGLE the prefixes of earlier turns are computed again.",
                "speed, and no fault of a checkpoint or launch",
            ),
            (
                "sglang#29781",
                "2026-06",
                "Quark's list names eh_proj, which the draft class asks for by another name.",
                f"{ANOTHER} sglang#36158",
            ),
            (
                "sglang#16581",
                "2026-01",
                "GLM-4.7 in NVFP4 with its MTP layer in BF16.",
                f"{ANOTHER} sglang#36158",
            ),
            (
                "vllm#50170",
                "2026-07",
                "A draft's config.json names no layers of the target; vLLM takes its default, and the draft others.",
                "nothing in the draft says which layers it was trained on",
            ),
            (
                "vllm#37667",
                "2026-03",
                "A quantized model whose MTP layer is not: vLLM builds it quantized.",
                f"{ANOTHER} vllm#53387",
            ),
            (
                "Megatron-Bridge#5706",
                "2026-08",
                "A save without the optimizer's state, as its settings say, ends the resumed run in a KeyError.",
                TRAINER,
            ),
            (
                "Megatron-LM#4378",
                "2026-04",
                "A save after a fault leaves a part of the state out that only the run itself looks for.",
                TRAINER,
            ),
        )
    ),
)
