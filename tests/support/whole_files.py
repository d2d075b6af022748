"""The smallest files that are what their names say: a config, weights without a model around them, a manifest."""

import io
import json
import pickle

import torch
from blake3 import blake3
from safetensors.torch import save
from torch.distributed.checkpoint.metadata import Metadata


def whole(name):
    """The content of a file of this name: of weights a sound one, of others a letter."""
    if name in ("config.json", "adapter_config.json"):
        return json.dumps({"model_type": "llama"} if name == "config.json" else {"peft_type": "LORA"}).encode()
    if name.endswith(".safetensors"):
        return save({"a": torch.zeros(2)})
    if name.endswith((".bin", ".pth", ".pt")):
        stream = io.BytesIO()
        torch.save({"a": torch.zeros(2)}, stream)
        return stream.getvalue()
    if name == ".metadata":
        return pickle.dumps(Metadata(state_dict_metadata={}, storage_data={}))
    return b"GGUF" if name.endswith(".gguf") else b"x"


def write(file, content=None):
    file.parent.mkdir(parents=True, exist_ok=True)
    text = content.encode() if isinstance(content, str) else content
    file.write_bytes(whole(file.name) if text is None else text)


def flip(file, offset=None):
    """Turns a bit of a file, by default in its middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if offset is None else offset] ^= 1
    file.write_bytes(content)


def write_files(folder, *names):
    for name in names:
        write(folder / name)


def write_manifest(root, *names, **more):
    files = {name: blake3((root / name).read_bytes()).hexdigest() for name in names}
    write(root / "ckptkit.json", json.dumps({"schema": "ckptkit-manifest/2", "files": files, "tensors": {}, **more}))
