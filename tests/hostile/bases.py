"""The sound inputs that hostile ones are made of, and the commands that each is given to."""

import json
import os
import shutil
from dataclasses import replace

import torch
from families import CASES, case
from support.deltas import publish, trained
from support.models import tensors
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Qwen3MoeConfig

from ckptkit.app.api import convert, make_manifest, quantize
from ckptkit.quant.schemes.w4a16 import int4_scheme

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
# Words of each verb, run in the directory that has the input at `in`; `{sound}` is the directory with all sound inputs.
_ANY = {
    "inspect": "inspect in",
    "verify": "verify in",
    "diff": "diff in {sound}/hf",
    "manifest": "manifest in --output out/manifest.json",
}
COMMANDS = {
    "hf": {
        **_ANY,
        "inspect": "inspect in --json",
        "arguments": "inspect in --megatron-args",
        "convert": "convert in out/megatron",
        "quantize": "quantize in out/int4 --group-size 32",
        "preflight": "preflight --hf-checkpoint in",
        **{name: f"hook {name} in {{sound}}/hf" for name in ("after_init", "after_write", "verl")},
    },
    "deltas": {
        "inspect": "inspect in",
        "verify": "verify in --source {sound}/hf",
        "convert": "convert in out/full --hf {sound}/hf",
        "after_delta": "hook after_delta in/weight_v000001 {sound}/hf",
    },
    "int4": {
        **_ANY,
        "diff": "diff in {sound}/int4",
        "convert": "convert in out/megatron",
        "quantize": "quantize in out/int4",
        "like": "quantize {sound}/hf out/int4 --like in",
        "lint": "lint in",
        "fix": "lint in --fix",
        "preflight": "preflight --hf-checkpoint in",
    },
    "megatron": {
        **_ANY,
        "convert": "convert in out/hf",
        "pack": "convert in out/int4 --quantize w4a16 --group-size 32",
        "preflight": "preflight --load in",
        "source": "verify {sound}/megatron --source in",
        "after_save": "hook after_save in {sound}/hf",
    },
    "legacy": {"inspect": "inspect in", "convert": "convert in out/hf --hf {sound}/hf"},
    "manifest": {"verify": "verify in --manifest in/ckptkit.json", "convert": "convert in out/megatron"},
    "ignore": {"quantize": "quantize {sound}/hf out/int4 --group-size 32 --ignore {pattern}"},
    "script": {"preflight": "preflight in/run.sh"},
    "yaml": {"preflight": "preflight in/job.yaml"},
    "log": {"triage": "triage in/log.txt", "json": "triage in/log.txt --json"},
    "rollout": {"verify": "verify {sound}/hf --rollout-data in/rollout.pt"},
    "code": {"explain": "explain {code}"},
}
# What no sound input is made of here: a rollout is computed in a process of its own, and real Megatron saves `legacy`.
WITHOUT_CONTROL = ("rollout", "legacy", "code", "ignore")
SCRIPT = "A=1\npython3 train.py --hf-checkpoint {sound}/hf\n"


def make_bases(root):
    small = replace(CASES["qwen3_moe"], config=lambda: Qwen3MoeConfig(**_SIZES, norm_topk_prob=True))
    case.save("qwen3_moe", small, root / "hf", torch.bfloat16, shard_size="180KB")
    Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(root / "hf" / "tokenizer.json"))  # noqa: S106
    quantize(root / "hf", root / "int4", int4_scheme(group_size=32))
    convert(root / "hf", root / "megatron")
    old = tensors(root / "hf")
    publish(root / "deltas", 1, old, trained(old, 1))
    linked(root / "hf", root / "manifest")
    make_manifest(root / "manifest")
    job = json.dumps({"actor_rollout_ref": {"model": {"path": str(root / "hf")}}})
    texts = {"script/run.sh": SCRIPT.format(sound=root), "log/log.txt": "iteration 1\n", "yaml/job.yaml": job}
    for name, text in texts.items():
        (root / name).parent.mkdir()
        (root / name).write_text(text)
    for name in WITHOUT_CONTROL:
        (root / name).mkdir()


def linked(source, target):
    """Copies a directory by links to its files, which are replaced in it and never written into."""
    shutil.copytree(source, target, copy_function=os.link)


def commands(base, sound, **values):
    """The words of each verb that a base is given to."""
    return {
        verb: [word.format(sound=sound, **values) for word in words.split(" ")]
        for verb, words in COMMANDS[base].items()
    }
