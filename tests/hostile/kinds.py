"""What is not a file in place of every kind of file: pipes, directories, devices, links, sockets, endless files."""

import os
import socket
from functools import partial
from pathlib import Path

from hostile.case import Case

_TERABYTE = 1 << 40
# Each file: its base, and the verbs that read it; those that may pass.
FILES = {
    "config": ("hf", "config.json", None, ()),
    "index": ("hf", "model.safetensors.index.json", None, ("arguments", "after_init")),
    "shard": (
        "hf",
        "model-00001-of-00005.safetensors",
        ("convert", "inspect", "quantize", "verify", "diff", "preflight", "manifest", "after_write"),
        (),
    ),
    "delta": ("deltas", "weight_v000001/model-00000-of-00002.safetensors", None, ()),
    "delta index": ("deltas", "weight_v000001/model.safetensors.index.json", None, ()),
    "tokenizer": ("hf", "tokenizer.json", ("convert", "quantize", "verify", "preflight", "manifest"), ()),
    "generation config": (
        "hf",
        "generation_config.json",
        ("convert", "quantize", "manifest", "verify", "preflight"),
        (),
    ),
    "INT4 config": ("int4", "config.json", ("lint", "like", "quantize", "fix"), ()),
    "tracker": ("megatron", "latest_checkpointed_iteration.txt", None, ()),
    "metadata": ("megatron", "release/.metadata", None, ()),
    "distcp": ("megatron", "release/__0_0.distcp", ("convert", "verify", "diff", "manifest"), ()),
    "common": ("megatron", "release/common.pt", ("inspect", "convert", "verify", "preflight"), ("convert",)),
    "manifest": ("manifest", "ckptkit.json", None, ()),
    "legacy rank": ("legacy", "mp_rank_00/model_optim_rng.pt", None, ()),
    "launch script": ("script", "run.sh", None, ()),
    "YAML": ("yaml", "job.yaml", None, ()),
    "log": ("log", "log.txt", None, ()),
    "rollout": ("rollout", "rollout.pt", None, ()),
}

# Files that no verb but those that copy and digest them looks into.
CARRIED = {
    "chat template": (
        "hf",
        "chat_template.jinja",
        ("convert", "quantize", "manifest", "verify", "preflight", "diff", "inspect"),
        (),
    ),
    "code": ("hf", "modeling_x.py", ("convert", "verify", "inspect"), ()),
    "adapter": ("hf", "adapter_config.json", ("convert", "verify", "inspect", "preflight"), ()),
    "side file of Megatron": ("megatron", "hf/x.json", ("convert", "verify", "diff", "manifest", "inspect"), ()),
}


def _socket(file):
    with socket.socket(socket.AF_UNIX) as one:
        folder = os.open(file.parent, os.O_RDONLY)
        one.bind(f"/proc/self/fd/{folder}/{file.name}")  # a socket's path has at most 107 bytes
        os.close(folder)


def _endless(file):
    with file.open("wb") as sparse:
        sparse.truncate(_TERABYTE)


KINDS = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "directory": Path.mkdir,
    "device": lambda file: file.symlink_to("/dev/zero"),
    "link to itself": lambda file: file.symlink_to(file.name),
    "link to nothing": lambda file: file.symlink_to("nowhere"),
    "terabyte of zeros": _endless,
    "empty file": Path.touch,
}
# What there may be without harm: an iteration without common.pt has its state elsewhere; an empty file of words.
_HARMLESS = {("empty file", "tokenizer"), ("empty file", "generation config"), ("empty file", "common")}
_HARMLESS |= {(kind, what) for kind in ("empty file", "directory") for what in CARRIED}
_HARMLESS |= {(kind, what) for kind in ("link to nothing", "link to itself", "terabyte of zeros") for what in CARRIED}


def _replaced(name, make, root):
    file = root / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    make(file)


def cases(files):
    for what, (base, name, verbs, passing) in files.items():
        for kind, make in KINDS.items():
            if (kind, what) in _HARMLESS:
                continue
            said = name.rpartition("/")[2].replace(".", r"\.")
            yield Case(f"{kind} as {what}", base, partial(_replaced, name, make), said, verbs, passing)
