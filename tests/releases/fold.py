"""Folds names for a record: `python -m releases.fold config.json` prints those that transformers would save.

What transformers leaves out (draft layers, unknown vision towers, scales of a quantized release) is added by hand.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from ckptkit.core.specs import fold


def saved_by_transformers(config):
    """Names and shapes that `save_pretrained` would write, without weights: tied tensors once, experts one by one."""
    fields = {
        key: value for key, value in config.items() if key not in ("model_type", "auto_map", "quantization_config")
    }
    parsed = AutoConfig.for_model(config["model_type"], **fields)
    auto = AutoModelForImageTextToText if "vision_config" in fields else AutoModelForCausalLM
    with torch.device("meta"):
        built = auto.from_config(parsed, attn_implementation="eager")
    tensors = dict(built.state_dict())
    for tied in (built._tied_weights_keys or {}) if parsed.tie_word_embeddings else ():
        del tensors[tied]
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(built, tensors).items()}


def main():
    by_shape = defaultdict(list)
    for name, shape in saved_by_transformers(json.loads(Path(sys.argv[1]).read_text())).items():
        by_shape[shape].append(name)
    print(json.dumps({"BF16 " + "x".join(map(str, shape)): fold(names) for shape, names in by_shape.items()}, indent=1))


if __name__ == "__main__":
    main()
