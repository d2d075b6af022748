"""What vLLM's own code makes of lists of `ignore` and targets, for `tests/quant/selection/test_vllm_reader.py`.

`python -m support.vllm_ignore FILE`, in vLLM's environment: FILE has the directories of models and configs of
quantization for each. It gets for each model what each config makes of each layer that the model's class asks about.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

# A layer's name in the release, the layer, and its model's config of quantization.
Asked = Mapping[str, tuple[Any, Any]]


def asked_of(path: Path) -> Asked:
    """The layers that vLLM's class asks about while it is built."""
    from verify.witnesses.loading.engine import Build
    from verify.witnesses.process.exit_report import PhaseLog
    from verify.witnesses.vllm import adapter, platform

    scratch = Path(tempfile.mkdtemp())
    platform.choose(scratch)
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    asked: dict[str, tuple[Any, Any]] = {}
    own = CompressedTensorsConfig.get_quant_method

    def recorded(config: Any, layer: Any, prefix: str) -> Any:
        if isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts)):
            asked[prefix] = (layer, config)
        return own(config, layer, prefix)

    with patch.object(CompressedTensorsConfig, "get_quant_method", recorded):
        adapter.build(Build(path, scratch), lambda *_: None, PhaseLog(scratch / "report"))
    return asked


def answers(asked: Asked, contents: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """What each of these configs makes of each layer."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    for content in contents:
        config = CompressedTensorsConfig.from_config(dict(content))
        yield {name: answer(name, layer, own, config) for name, (layer, own) in asked.items()}


def answer(name: str, layer: Any, own: Any, config: Any) -> str:
    """What a config makes of a layer; of experts by the three names that `get_moe_method` asks about."""
    config.packed_modules_mapping = own.packed_modules_mapping
    experts = name.endswith(".experts")
    if experts:
        config._add_fused_moe_to_target_scheme_map()
    names = [f"{name}.0.{one}_proj" for one in ("gate", "up", "down")] if experts else [name]
    try:
        packs = {config.get_scheme_dict(layer, one) is not None for one in names}
    except ValueError:
        return "refuses"
    return "refuses" if len(packs) > 1 else "packs" if packs.pop() else "keeps"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    models = json.loads(file.read_text())
    file.write_text(json.dumps([list(answers(asked_of(Path(path)), contents)) for path, contents in models]))
    sys.stdout.flush()
    os._exit(0)
