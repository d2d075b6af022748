"""JSON that is deep, huge, ambiguous or no JSON, and configs with values that no model has."""

import json
from functools import partial

from hostile.case import Case, edit_json, put

TEXTS = {
    "nested lists": b"[" * 100_000,
    "closed nesting": b'{"a":' * 200 + b"1" + b"}" * 200,
    "integer of a million digits": b'{"vocab_size": ' + b"9" * 1_000_000 + b"}",
    "key twice": b'{"model_type": "qwen3_moe", "model_type": "qwen2"}',
    "lone surrogate": rb'{"model_type": "\ud800"}',
    "UTF-16": '{"model_type": "qwen3_moe"}'.encode("utf-16"),
    "invalid UTF-8": b'{"model_type": "\xff\xfe"}',
    "a list": b"[1, 2]",
    "unfinished": b'{"model_type": "qw',
    "million keys": b"{" + b",".join(b'"%d":1' % number for number in range(1_000_000)) + b"}",
    "million zeros": b"[" + b"0," * 999_999 + b"0]",
    "64 MiB of spaces": b" " * (1 << 26) + b"{}",
    "control characters": b'{"a": "\x1b[2J"}',
    "python": b"__import__('os').system('touch ran')",
}
QUANTIZATION = {"a number": 7, "empty": {}, "unknown method": {"quant_method": "os.system"}}
WEIGHTS = {
    "group_size 2^70": {"group_size": 1 << 70},
    "num_bits 10^30": {"num_bits": 10**30},
    "type is a list": {"type": ["int"]},
    "strategy is code": {"strategy": "__import__('os')"},
}
# What stands in hf_quant_config.json beside INT4 of compressed-tensors.
SECOND = {
    "a list": b"[]",
    "unfinished": b'{"quantization":',
    "of ModelOpt": b'{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}',
    "nested lists": b'{"quantization": ' + b"[" * 100_000,
}
PATTERNS = {
    "nested repetition": "re:(a+)+$",
    "deep nesting": "re:" + "(" * 900 + "a" + ")" * 900,
    "repetition overflow": "re:a{99999999999999999999}",
    "back reference": r"re:(.*)(.*)(.*)\1\2\3",
    "lookahead chain": "re:" + "(?=.*a.*b.*c)" * 100 + ".*x.*y",
    "unclosed group": "re:(",
    "longer than allowed": "re:" + "a" * 100_000,
}
_MANY = 3_000
MANY = {
    "modules": "model.layers.{}.mlp.gate_proj",
    "long": "a" * 500 + "{}",
    "newlines": "model\n{}",
    "beyond ASCII": "modèl.läyers.{}.\u0130",
}


def _text(name, content, root):
    put(root / name, content)


def _value(key, value, root):
    edit_json(root / "config.json", **{key: value})


def _scheme(where, value, root):
    quantization = json.loads((root / "config.json").read_bytes())["quantization_config"]
    if where == "weights":
        quantization["config_groups"]["group_0"]["weights"] |= value
    elif where == "targets":
        quantization["config_groups"]["group_0"]["targets"] = value
    else:
        quantization[where] = value
    edit_json(root / "config.json", quantization_config=quantization)


def _pattern(entry, root):
    return {"pattern": entry}


def cases():
    for what, content in TEXTS.items():
        make = partial(_text, "config.json", content)
        yield Case(f"config.json is {what}", "hf", make, r"config\.json")
        few, name = ("inspect", "verify", "after_write"), "model.safetensors.index.json"
        yield Case(f"index is {what}", "hf", partial(_text, name, content), name, few)
        yield Case(
            f"manifest is {what}", "manifest", partial(_text, "ckptkit.json", content), "ckptkit.json", ("verify",)
        )
    for what in ("nested lists", "key twice", "UTF-16", "python", "million zeros"):
        few = ("verify", "preflight")
        yield Case(f"tokenizer is {what}", "hf", partial(_text, "tokenizer.json", TEXTS[what]), "tokenizer", few, few)
    for what, value in QUANTIZATION.items():
        verbs = ("lint", "verify", "convert", "quantize", "fix")
        make = partial(_value, "quantization_config", value)
        yield Case(f"quantization_config is {what}", "int4", make, "quantization_config|config|quant", verbs)
    for what, value in WEIGHTS.items():
        make = partial(_scheme, "weights", value)
        said = "config|group|num_bits|type|strategy|symm|zero"
        yield Case(f"INT4 weights of {what}", "int4", make, said, ("verify", "convert"))
    for key in ("quantization_status", "kv_cache_scheme", "transform_config", "sparsity_config", "format"):
        yield Case(f"{key} is a list", "int4", partial(_scheme, key, [1]), key, ("verify",))
    for what, content in SECOND.items():
        make = partial(_text, "hf_quant_config.json", content)
        yield Case(f"hf_quant_config.json is {what}", "int4", make, r"hf_quant_config\.json", ("verify", "lint"))
    for what, value in PATTERNS.items():
        said = "re:|pattern|no ignore list"
        for key, verbs in (("ignore", ("lint", "verify", "fix")), ("targets", ("lint", "fix"))):
            make = partial(_scheme, key, [value])
            yield Case(f"{key} entry: {what}", "int4", make, said, verbs, ("fix",) if key == "ignore" else ())
        if value:
            yield Case(f"--ignore: {what}", "ignore", partial(_pattern, value), said)
    for what, entry in MANY.items():
        said = "ignore|entries|readers|READERS"
        for key, first in (("ignore", "lm_head"), ("targets", "Linear")):
            make = partial(_scheme, key, [first, *(entry.format(number) for number in range(_MANY))])
            verbs = ("lint", "verify", "fix")
            yield Case(f"{_MANY} {key}: {what}", "int4", make, f"{said}|targets", verbs, verbs)
    for what, value in {"a number": 7, "null": None, "a list": ["re:a"]}.items():
        verbs = ("lint", "verify", "fix")
        yield Case(f"ignore has {what}", "int4", partial(_scheme, "ignore", [value]), "ignore", verbs)
        yield Case(f"ignore is {what}", "int4", partial(_scheme, "ignore", value), "ignore", verbs, verbs)
