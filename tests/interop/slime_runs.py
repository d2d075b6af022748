"""What the tests of slime and of miles share: test models and the runs of their tools."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import torch
from families import CASES
from families.case import save

from ckptkit.app.api import convert
from converters.megatron.arguments import megatron_args
from converters.megatron.flags import launch_flags
from converters.planner import dims_of
from interop.scripts import Script

OF_THEIR_OWN_MODULES = {"qwen3_next", "qwen3_5_moe", "minimax_m2", "deepseek_v32", "glm_moe_dsa"}
NO_GPU = (
    "--seq-length 64 --transformer-impl local --tokenizer-type NullTokenizer --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion --use-cpu-initialization "
    "--distributed-backend gloo"
)


def release(root: Path, name: str) -> Path:
    """The HF directory of a test model."""
    if not (root / name).exists():
        save(name, CASES[name], root / name, torch.bfloat16)
    return root / name


def megatron(root: Path, name: str, dialect: str | None = None) -> Path:
    """What `ckptkit convert` makes of it; without `dialect` in slime's where slime has modules of its own."""
    chosen = dialect or ("slime" if name in OF_THEIR_OWN_MODULES else "mcore")
    path = root / f"{name}-megatron-{chosen}"
    if not path.exists():
        convert(release(root, name), path, dialect=chosen)
    return path


def export(label: str, source: Path, checkpoint: Path, output: Path) -> Script:
    """torch_dist to HF, by the tool of slime and miles."""
    words = ["--input-dir", checkpoint / "release", "--output-dir", output, "--origin-hf-dir", source]
    return Script(label, "tools/convert_torch_dist_to_hf.py", list(map(str, words)))


def load(label: str, source: Path, output: Path) -> Script:
    """HF to torch_dist, by slime's tool, with the flags of `ckptkit inspect --megatron-args`."""
    config = json.loads((source / "config.json").read_text())
    flags = [flag for flag in launch_flags(megatron_args(dims_of(config))) if flag != "--moe-grouped-gemm"]
    words = [word for flag in flags if not flag.startswith("#") for word in shlex.split(flag)]
    words += [*NO_GPU.split(), "--hf-checkpoint", str(source), "--save", str(output)]
    return Script(label, "tools/convert_hf_to_torch_dist.py", words)


def quantize(label: str, tool: str, source: Path, output: Path, *words: str) -> Script:
    """HF to INT4 or FP8."""
    return Script(label, f"tools/{tool}", ["--model-dir", str(source), "--save-dir", str(output), *words])
