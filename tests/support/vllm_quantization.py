"""Asks vLLM which values of its `--quantization` it refuses: `python -m support.vllm_quantization FILE`.

The file is a list of [option, quantization_config]; it gets, for each, whether vLLM stops.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch


def stops(option: str, quantization: dict[str, Any], module: Any) -> bool:
    """Whether vLLM's own check of both raises. Of the platform nothing is asked, which is about the GPU."""
    config = module.ModelConfig.__new__(module.ModelConfig)
    object.__setattr__(config, "quantization", option)
    config.allow_deprecated_quantization = True
    config.hf_config = SimpleNamespace(model_type="qwen3_moe")
    config.model_arch_config = SimpleNamespace(quantization_config=quantization)
    try:
        with patch.object(type(module.current_platform), "verify_quantization"):
            module.ModelConfig._verify_quantization(config)
    except ValueError as error:
        if "does not match" not in str(error):
            raise
        return True
    return False


def main() -> None:
    """Reads and writes the file."""
    from vllm.config import model

    file = Path(sys.argv[1])
    file.write_text(json.dumps([stops(*case, model) for case in json.loads(file.read_text())]))


if __name__ == "__main__":
    main()
