"""Asks the real SGLang which names it looks up in `ignore`; each model class is built on the meta device."""

import json

import torch

from support.calls import call
from support.sglang_runs import int4_config

# Everything is ignored, so that no layer asks for a kernel.
QUANTIZATION = int4_config(["re:.*"], 32)


def looked_up(configs, root):
    """For every case: `names` looked up, the model's `class`, and its declared `packed_modules_mapping`."""
    for name, config in configs.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    return call("sglang", _all_look_ups, [root / name for name in configs])


def _all_look_ups(directories):
    return {directory.name: _look_ups(directory) for directory in directories}


def _look_ups(directory):
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors as module
    from sglang.srt.model_loader import loader

    from ckptkit.verify.witnesses.sglang.adapter import configure

    _, model_config = configure(directory, directory.parent, False)
    names = []
    original = module.should_ignore_layer

    def record(layer_name, ignore, fused_mapping):
        names.append(layer_name)
        return bool(original(layer_name, ignore, fused_mapping))

    module.should_ignore_layer = record
    try:
        quant_config = loader._get_quantization_config(model_config, LoadConfig())
        with torch.device("meta"):
            model = loader._initialize_model(model_config, LoadConfig(), quant_config)
    finally:
        module.should_ignore_layer = original
    return {
        "class": type(model).__name__,
        "names": names,
        "packed_modules_mapping": quant_config.packed_modules_mapping,
    }
