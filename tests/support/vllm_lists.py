"""What vLLM's own configs make of lists of unquantized modules, for `tests/quant/lists/test_lists.py`.

`python -m support.vllm_lists FILE`, in vLLM's environment: FILE has for each question a method, a quantization_config,
and layers by name, each with the parts that vLLM fuses in it. It gets "packs", "keeps" or "refuses" for each layer.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch


def answers(method: str, content: Mapping[str, Any], layers: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """What `get_quant_method` of the config answers for a layer of each name."""
    fused = {
        name.rpartition(".")[2]: [part.rpartition(".")[2] for part in parts] for name, parts in layers.items() if parts
    }
    if method == "quark":
        return {name: in_quark(name, content["exclude"], fused) for name in layers}
    config = config_of(method, content)
    config.packed_modules_mapping = fused
    return {name: answer(method, config, name) for name in layers}


def in_quark(name: str, exclude: Sequence[str], fused: Mapping[str, list[str]]) -> str:
    """What vLLM's Quark makes of a layer, asked as its `get_quant_method` asks."""
    from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer

    try:
        ignored = should_ignore_layer(
            name, ignore=exclude, fused_mapping=fused, check_children=name.endswith(".experts")
        )
    except ValueError:
        return "refuses"
    return "keeps" if ignored else "packs"


def config_of(method: str, content: Mapping[str, Any]) -> Any:
    """vLLM's config of a method."""
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    classes = {
        "fp8": Fp8Config,
        "mxfp8": modelopt.ModelOptMxFp8Config,
        "modelopt fp8": modelopt.ModelOptFp8Config,
        "modelopt fp4": modelopt.ModelOptNvFp4Config,
    }
    return classes[method].from_config(dict(content))


def answer(method: str, config: Any, name: str) -> str:
    """Asks the config about a layer of the class that vLLM builds under this name."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import fp8, modelopt
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    kind = RoutedExperts if name.endswith(".experts") else ParallelLMHead if name == "lm_head" else LinearBase
    layer = kind.__new__(kind)
    object.__setattr__(layer, "moe_config", None)
    packed = SimpleNamespace(backend="", marlin_input_dtype=None)
    dense = UnquantizedLinearMethod()
    for key in ("FusedMoEMethodCls", "LinearMethodCls"):
        object.__setattr__(config, key, lambda *_, **__: packed)
    stand_ins = [
        patch.object(fp8, "Fp8LinearMethod", lambda *_, **__: packed),
        patch.object(fp8, "Fp8MoEMethod", lambda *_, **__: packed),
        patch.object(fp8, "UnquantizedFusedMoEMethod", lambda *_, **__: dense),
        patch.object(modelopt, "build_linear_method", lambda *_, **__: packed, create=True),
    ]
    for one in stand_ins:
        one.start()
    try:
        found = config.get_quant_method(layer, name)
    except ValueError:
        return "refuses"
    finally:
        patch.stopall()
    return "packs" if found is packed else "keeps"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(json.dumps([answers(*question) for question in json.loads(file.read_text())]))
    sys.stdout.flush()
    os._exit(0)
