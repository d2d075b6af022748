"""What vLLM calls the layers of adapters, for `tests/verify/witnesses/test_adapter_managers.py`.

`python -m support.vllm_adapter_names FILE`, in vLLM's environment: FILE lists names of classes. Each gets what the name
of a pair becomes that was trained on the language model alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PAIR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def main(file: Path) -> None:
    """Writes the answers in place of the question."""
    from vllm.lora.utils import parse_fine_tuned_lora_name
    from vllm.model_executor.models.registry import ModelRegistry

    found = {}
    for name in json.loads(file.read_text()):
        model = ModelRegistry.models[name].load_model_cls()
        found[name] = parse_fine_tuned_lora_name(PAIR, getattr(model, "hf_to_vllm_mapper", None))[0]
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
