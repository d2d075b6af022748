"""`ckptkit verify` of a 1 GB checkpoint against its source, compared with `cat` of both; and header checks of a trillion parameters."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from convert import MAKE
from measure import Run, forget, remember, run

from ckptkit.safetensors_io import INDEX, SafetensorsWriter, cut_shards
from ckptkit.specs import TensorSpec

ROUNDS = 3
# Kimi K2's published sizes (moonshotai/Kimi-K2-Thinking): 61 layers, 384 experts, experts in INT4.
KIMI: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*mlp\\.gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False, "observer": "minmax"},
            }
        },
    },
}
SHARDS = 62
HEADERS = "import sys, pathlib, runpy; runpy.run_path('verify.py')['make_headers'](pathlib.Path(sys.argv[1]))"


def rows() -> list[dict[str, Any]]:
    """Seconds, the ratio to `cat` of both sides on files that are not in the page cache ("cold") or are ("warm"), and memory."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        return [*_values(Path(directory)), *_headers(Path(directory) / "kimi")]


def _values(work: Path) -> list[dict[str, Any]]:
    # In processes of their own: a child's ru_maxrss starts from the size of the process that it was forked from.
    ckptkit, hf, megatron = [sys.executable, "-m", "ckptkit"], work / "hf", work / "megatron"
    subprocess.run([sys.executable, "-c", MAKE, str(hf)], check=True)
    subprocess.run([*ckptkit, "convert", str(hf), str(megatron)], check=True, stdout=subprocess.DEVNULL)
    shutil.copytree(hf, work / "copy")
    found = []
    for name, checkpoint, pattern in (("an HF copy", work / "copy", "*.safetensors"), ("Megatron", megatron, "release/*.distcp")):
        files = sorted([*hf.glob("*.safetensors"), *checkpoint.glob(pattern)])
        commands = {f"cat of HF and {name}": ["cat", *map(str, files)], f"verify {name} against HF": [*ckptkit, "verify", str(checkpoint), "--source", str(hf)]}
        for state, prepare in (("cold", forget), ("warm", remember)):
            runs: dict[str, list[Run]] = {what: [] for what in commands}
            for _ in range(ROUNDS):
                for what, command in commands.items():
                    prepare(files)
                    runs[what].append(run(command))
            reading = statistics.median(one.seconds for one in next(iter(runs.values())))
            found += [_row(what, one, reading, state) for what, one in runs.items()]
    return found


def _headers(path: Path) -> list[dict[str, Any]]:
    subprocess.run([sys.executable, "-c", HEADERS, str(path)], check=True, cwd=Path(__file__).parent)
    command = [sys.executable, "-m", "ckptkit", "preflight", "--hf-checkpoint", str(path)]
    return [_row("header checks of Kimi K2 in INT4, 207,000 keys", [run(command) for _ in range(ROUNDS)], None, "warm")]


def _row(what: str, runs: list[Run], reading: float | None, state: str) -> dict[str, Any]:
    seconds = statistics.median(one.seconds for one in runs)
    memory = {"peak MiB": max(one.resident for one in runs) >> 20, "anonymous MiB": max(one.anonymous for one in runs) >> 20}
    return {"what": what, "page cache": state, "seconds": round(seconds, 2), "ratio to cat": round(seconds / reading, 2) if reading else "", **memory}


def make_headers(path: Path) -> None:
    """An HF directory with config, index and the headers of KIMI; its 62 shards have their full sizes and hold nothing (sparse files)."""
    from converters.planner import expected_hf

    path.mkdir()
    (path / "config.json").write_text(json.dumps(KIMI, indent=2))
    specs = {spec.name: spec for name, shape in expected_hf(KIMI).items() for spec in _stored(name, shape)}
    total = sum(spec.nbytes for spec in specs.values())
    layout = cut_shards(specs, math.ceil(total / (SHARDS - 1)))
    SafetensorsWriter(path, specs, layout).discard()
    weight_map = {name: file for file, names in layout.items() for name in names}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))


def _stored(name: str, shape: tuple[int, ...]) -> list[TensorSpec]:
    if ".mlp.experts." not in name:
        return [TensorSpec(name, shape, torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16)]
    rows, columns = shape
    parts = {"packed": ((rows, columns // 8), torch.int32), "scale": ((rows, columns // 32), torch.bfloat16), "shape": ((2,), torch.int32)}
    return [TensorSpec(f"{name}_{part}", size, dtype) for part, (size, dtype) in parts.items()]
