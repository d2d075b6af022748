"""Asks the real SGLang which names it looks up in `ignore`: `python -m support.sglang_layers CONFIGS.json OUT.json`.

CONFIGS is {case: content of config.json}. Each model class is built on the meta device. `looked_up` starts that.
"""

import json
import sys
from pathlib import Path

import torch

from support.forking import ran
from support.sglang_runs import int4_config

# Everything is ignored, so that no layer asks for a kernel.
QUANTIZATION = int4_config(["re:.*"], 32)


def looked_up(configs, root):
    """For every case: `names` looked up, the model's `class`, and its declared `packed_modules_mapping`."""
    (root / "configs.json").write_text(json.dumps(configs))
    ended_well = ran("sglang", root / "log", "support.sglang_layers", root / "configs.json", root / "out.json")
    assert ended_well, (root / "log").read_text()[-2000:]
    return json.loads((root / "out.json").read_text())


def main(configs, out):
    """Builds all of them in this process, since starting SGLang is what takes time."""
    found = {}
    for name, config in json.loads(configs.read_text()).items():
        directory = configs.parent / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
        found[name] = _look_ups(directory)
    out.write_text(json.dumps(found))


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


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
