"""A public bug report as data: what it was, the case that rebuilds it, and what ckptkit must say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Changes a case in place: a directory with `CKPT`, or with the launch `SCRIPT` and what it names.
Change = Callable[[Path], object]

# found: by the command, with the code and the words. named: ckptkit does not judge the format or model, and names it.
# sound: the checkpoint is right and one reader was wrong; nothing may be found in it. missed: it should be found and is
# not.
Verdict = Literal["found", "named", "sound", "missed"]

SOURCE = "RELEASE"  # what a case calls the release that its checkpoint was made from

_REPOSITORIES = {
    "ART": "OpenPipe/ART",
    "AReaL": "areal-project/AReaL",
    "Automodel": "NVIDIA-NeMo/Automodel",
    "ISEEKYAN/Megatron-LM": "ISEEKYAN/Megatron-LM",
    "LlamaFactory": "hiyouga/LlamaFactory",
    "MarinFold": "Open-Athena/MarinFold",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "Model-Optimizer": "NVIDIA/Model-Optimizer",
    "NeMo": "NVIDIA-NeMo/Speech",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "Qwen-VL-Series-Finetune": "2U1/Qwen-VL-Series-Finetune",
    "Qwen3-VL-Embedding": "QwenLM/Qwen3-VL-Embedding",
    "Relax": "redai-studio/Relax",
    "SkyRL": "NovaSky-AI/SkyRL",
    "VoiceStudio": "debpalash/VoiceStudio",
    "aprender": "paiml/aprender",
    "auto-round": "intel/auto-round",
    "colibri": "JustVugg/colibri",
    "compressed-tensors": "vllm-project/compressed-tensors",
    "gpustack": "gpustack/gpustack",
    "granite-switch": "generative-computing/granite-switch",
    "huggingface_hub": "huggingface/huggingface_hub",
    "imp": "kekzl/imp",
    "llm-compressor": "vllm-project/llm-compressor",
    "miles": "radixark/miles",
    "mlx-vlm": "Blaizzy/mlx-vlm",
    "ms-swift": "modelscope/ms-swift",
    "omlx": "jundot/omlx",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "sglang": "sgl-project/sglang",
    "slime": "THUDM/slime",
    "spark-vllm-docker": "eugr/spark-vllm-docker",
    "speculators": "vllm-project/speculators",
    "surogate": "invergent-ai/surogate",
    "swiss-ai/Megatron-LM": "swiss-ai/Megatron-LM",
    "tinker-cookbook": "thinking-machines-lab/tinker-cookbook",
    "training-gym": "modal-projects/training-gym",
    "transformers": "huggingface/transformers",
    "unsloth": "unslothai/unsloth",
    "unsloth-zoo": "unslothai/unsloth-zoo",
    "verl": "verl-project/verl",
    "vime": "vllm-project/vime",
    "vllm": "vllm-project/vllm",
    "vllm-omni": "vllm-project/vllm-omni",
}


@dataclass(frozen=True)
class Report:
    """One public report.

    `thread`: `REPOSITORY#NUMBER`. `month`: of the thread, `YYYY-MM`. `what`: what it turned out to be, in our words.
    `command`: what is run in the directory of the case. `start`: the sound checkpoint at `CKPT` there, a label of
    `mutations.starts`, with its release at `RELEASE`; where it ends with `/`, that alone is there. `prepare` completes
    the sound case, `damage` makes the report of it. `twin`: the command on the sound case, where it is another; then
    there may be no damage. `code` must be found, in a finding that has all of `names`. `reason`: of a report that is
    not found, why.
    """

    thread: str
    month: str
    what: str
    command: str = ""
    start: str = ""
    code: str = ""
    names: tuple[str, ...] = ()
    damage: Change | None = None
    prepare: Change | None = None
    twin: str = ""
    verdict: Verdict = "found"
    reason: str = ""

    @property
    def url(self) -> str:
        """Where the thread is."""
        repository, _, number = self.thread.partition("#")
        return f"https://github.com/{_REPOSITORIES[repository]}/issues/{number}"

    @property
    def key(self) -> str:
        """What tests call it."""
        return self.thread.replace("/", "-")
