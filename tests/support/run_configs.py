"""Writes run_config.yaml of Megatron-Bridge for test models: `run_configs.py FOLDER MODEL...`, in a process of its own.

The settings are those of the real TransformerConfig that the witness builds, written by Megatron's own YAML where this
megatron-core has it (0.17 and later), else as that writes what is not plain data.
"""

import json
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import torch
import yaml
from families import CASES

from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.megatron.parallel import ParallelSizes
from ckptkit.converters.planner import MCORE, dims_of
from ckptkit.verify.witnesses.megatron.model import MegatronBuild, pretend_cuda, transformer_config


def bridge_settings(dims, args):
    """What Megatron-Bridge's GPTModelProvider has besides TransformerConfig. Source: its `models/gpt_provider.py`."""
    yarn = args.get("position_embedding_type") == "yarn"
    found = {
        "share_embeddings_and_output_weights": dims.tied,
        "position_embedding_type": args["position_embedding_type"],
        "rotary_percent": args.get("rotary_percent", 1.0),
        "rope_scaling": args.get("use_rope_scaling", False),
        "seq_length": args["seq_length"],
        "vocab_size": dims.vocab,
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 128,
        "hf_model_id": "org/model",
    }
    if not dims.mla:
        found["rotary_base"] = args.get("rotary_base", 10000)
    if yarn:
        found |= {name: args[name] for name in args if name.startswith("yarn_")}
        found |= {f"yarn_{name}": args[name] for name in ("mscale", "mscale_all_dim") if name in args}
        found["yarn_rotary_scaling_factor"] = args["rotary_scaling_factor"]
    return found


def run_config(name):
    dims = dims_of(CASES[name].config().to_dict())
    args = megatron_args(dims, MCORE)
    config = transformer_config(dims, args, MegatronBuild(ParallelSizes(tp=2), torch.bfloat16))
    values = {one.name: getattr(config, one.name) for one in fields(config) if not one.name.startswith("_")}
    model = {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        **values,
        **bridge_settings(dims, args),
    }
    return yaml_of({"_target_": "megatron.bridge.training.config.ConfigContainer", "model": model, "train": None})


def yaml_of(content):
    if find_spec("megatron.training") is not None:
        from megatron.training.config.yaml_utils import safe_yaml_representers

        with safe_yaml_representers():
            return str(yaml.safe_dump(content))
    # As that writes what is not plain data.
    return str(yaml.safe_dump(json.loads(json.dumps(content, default=_as_target))))


def _as_target(value):
    name = getattr(value, "__qualname__", None)
    text = str(value) if isinstance(value, torch.dtype) else f"{type(value).__module__}.{type(value).__qualname__}"
    return {"_target_": f"{value.__module__}.{name}" if name else text, "_call_": False}


if __name__ == "__main__":
    pretend_cuda()
    for model in sys.argv[2:]:
        (Path(sys.argv[1]) / f"{model}.yaml").write_text(run_config(model))
