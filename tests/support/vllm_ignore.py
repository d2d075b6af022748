"""What vLLM's own functions make of lists of `ignore`, for `tests/quant/selection/test_vllm_reader.py`.

`python -m support.vllm_ignore FILE`, in vLLM's environment: FILE has the layers, the lists and the shards of fused
layers, and gets the answers: packs, keeps or refuses, a list of them for each list of entries.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def answer(layer: str, ignore: Sequence[str], fused: Mapping[str, Sequence[str]]) -> str:
    """What vLLM makes of one layer; of experts by the three names that its `get_moe_method` asks about."""
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    experts = layer.endswith(".experts")
    names = [f"{layer}.0.{one}_proj" for one in ("gate", "up", "down")] if experts else [layer]
    try:
        ignored = {should_ignore_layer(name, ignore=ignore, fused_mapping=fused) for name in names}
    except ValueError:
        return "refuses"
    return "refuses" if len(ignored) > 1 else "keeps" if ignored.pop() else "packs"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    asked = json.loads(path.read_text())
    answers = [[answer(layer, one, asked["fused"]) for layer in asked["layers"]] for one in asked["lists"]]
    path.write_text(json.dumps(answers))
