"""Chosen ranks of GLM-4.5-Air at TP8 x PP8 x EP32, which is 256 ranks, on one machine.

The checkpoint has all its headers and its full size, 218 GB, and holds zeros, which its sparse files do not store. Run
are the checks of Megatron alone (CK401 to CK403): a rank poisons what it builds, loads it, and compares every element.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from measure import SMALLEST, run

from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.planner import dims_of, rules_of
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.torch_dist.writer import TorchDistFiles

# Published sizes: zai-org/GLM-4.5-Air.
_GLM_45_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "torch_dtype": "bfloat16",
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 46, "num_nextn_predict_layers": 1, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": 128, "n_shared_experts": 1, "n_routed_experts": 128, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 1000000, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
# The first rank has the embedding, the last the output layer and the multi-token prediction layer.
_RANKS = ["0", "100", "255", "0,100,255"]
if SMALLEST:
    _RANKS, _GLM_45_AIR = ["0"], _GLM_45_AIR | {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 16384}
_ZEROS = bytes(1 << 24)


def rows() -> list[dict[str, Any]]:
    """Seconds and the largest process for some ranks."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        path = Path(directory) / "megatron"
        # In a process of its own: a child's ru_maxrss starts from the size of the process that it was forked from.
        subprocess.run([sys.executable, __file__, "make", str(path)], check=True)
        found = []
        for ranks in _RANKS:
            # The kernel counts the processes that a process has waited for as its own.
            one = run([sys.executable, "-W", "ignore", __file__, "look", str(path), ranks])
            row = {"ranks": ranks, "seconds": round(one.seconds, 1), "largest process MiB": one.resident >> 20}
            found.append(row)
        return found


def make(path: Path, config: Mapping[str, Any]) -> int:
    """Makes a Megatron root whose tensors are all zeros, in sparse files; returns how many bytes they have."""
    (path / "release").mkdir(parents=True)
    (path / "hf").mkdir()
    (path / "hf" / "config.json").write_text(json.dumps(dict(config)))
    specs = {
        rule.megatron: TensorSpec(rule.megatron, rule.megatron_shape, "float32" if rule.mapping.fp32 else "bfloat16")
        for rule in rules_of(config)
    }
    files = TorchDistFiles(specs, megatron_args(dims_of(config)))
    for name, tensors in files.names.items():
        with (path / name).open("wb") as stream:
            stream.truncate(files.size(name))
            for part in (part for tensor in tensors for part in files._parts[tensor]):
                data = part.saved.data
                for place, content in (
                    (0, part.saved.header(_crc(data.size))),
                    (data.end, part.saved.trailer(_crc(data.size))),
                ):
                    stream.seek(part.begin + place)
                    stream.write(content)
            place, content = files.extra_bytes(name)
            if content:
                stream.seek(place)
                stream.write(content)
    files.finish(path)
    return sum(spec.nbytes for spec in specs.values())


@cache
def _crc(size: int) -> int:
    """CRC-32 of `size` zeros."""
    found = 0
    for begin in range(0, size, len(_ZEROS)):
        found = zlib.crc32(memoryview(_ZEROS)[: size - begin], found)
    return found


def look(path: Path, ranks: list[int]) -> None:
    """Runs the checks of Megatron. Raises SystemExit where one does not pass."""
    from ckptkit.verify.core.check import all_checks
    from ckptkit.verify.core.run import run_checks
    from ckptkit.verify.core.subject import Subject
    from ckptkit.verify.options import VerifyOptions

    asked = frozenset({"megatron"})
    subject = Subject(path, options=VerifyOptions(tp=8, pp=8, ep=32, against=asked, ranks=tuple(ranks)))
    outcome = run_checks(subject, [one for one in all_checks() if one.code in ("CK401", "CK402", "CK403")])
    print(*outcome.facts["megatron"], *outcome.facts["pipeline stages"], sep="\n", file=sys.stderr)
    wrong = [*outcome.findings, *(check.reason for check in outcome.checks if check.status != "passed")]
    if wrong:
        raise SystemExit("\n".join(map(str, wrong)))


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "make":
        print(f"{make(where, _GLM_45_AIR) / 1e9:.0f} GB", file=sys.stderr)
    else:
        look(where, [int(rank) for rank in sys.argv[3].split(",")])
