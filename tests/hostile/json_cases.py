"""JSON that is deep, huge, ambiguous or no JSON, and configs with values that no model has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hostile.case import Case, edit_json, put

TEXTS: dict[str, bytes] = {
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "closed nesting": b'{"a":' * 200 + b"1" + b"}" * 200,
    "integer of a million digits": b'{"vocab_size": ' + b"9" * 1_000_000 + b"}",
    "key twice": b'{"model_type": "qwen3_moe", "model_type": "qwen2"}',
    "lone surrogate": rb'{"model_type": "\ud800"}',
    "byte order mark": b'\xef\xbb\xbf{"model_type": "qwen3_moe"}',
    "UTF-16": '{"model_type": "qwen3_moe"}'.encode("utf-16"),
    "invalid UTF-8": b'{"model_type": "\xff\xfe"}',
    "NUL": b'{"model_type": "qwen3_moe"}\0',
    "a list": b"[1, 2]",
    "a number": b"1",
    "a string": b'"config"',
    "null": b"null",
    "unfinished": b'{"model_type": "qw',
    "million keys": b"{" + b",".join(b'"%d":1' % number for number in range(1_000_000)) + b"}",
    "million zeros": b"[" + b"0," * 999_999 + b"0]",
    "cut surrogates": b'{"a": "' + rb"\ud83d" * 1000 + b'"}',
    "comment": b'{"a": 1} // done',
    "single quotes": b"{'a': 1}",
    "64 MiB of spaces": b" " * (1 << 26) + b"{}",
    "control characters": b'{"a": "\x1b[2J"}',
    "python": b"__import__('os').system('touch ran')",
}
_NAMES = ("config.json", "model.safetensors.index.json")
VALUES: dict[str, Any] = {
    "layer_types": 7,
    "num_hidden_layers": -1,
    "hidden_size": 1 << 70,
    "intermediate_size": "128",
    "moe_intermediate_size": True,
    "num_attention_heads": 0,
    "num_key_value_heads": 0,
    "head_dim": -32,
    "vocab_size": [128],
    "num_experts": 1 << 63,
    "num_experts_per_tok": -5,
    "dtype": "os.system",
    "torch_dtype": {"a": 1},
    "rope_parameters": [1],
    "rms_norm_eps": "small",
    "architectures": {"a": 1},
    "model_type": "../../outside",
    "tie_word_embeddings": "maybe",
    "mlp_only_layers": "all",
    "decoder_sparse_step": 0,
    "norm_topk_prob": {"x": []},
    "hidden_act": 7,
    "max_position_embeddings": -1,
    "attention_bias": "yes",
    "sliding_window": "x",
    "text_config": [1],
}
_HARMLESS = {"norm_topk_prob", "sliding_window", "attention_bias", "max_position_embeddings", "hidden_act"}
QUANTIZATION: dict[str, Any] = {
    "a number": 7,
    "a list": [1],
    "empty": {},
    "unknown method": {"quant_method": "os.system"},
    "method is a list": {"quant_method": ["compressed-tensors"]},
}
WEIGHTS: dict[str, Any] = {
    "group_size 0": {"group_size": 0},
    "group_size -1 of groups": {"group_size": -2},
    "group_size 2^70": {"group_size": 1 << 70},
    "group_size text": {"group_size": "32"},
    "group_size 7": {"group_size": 7},
    "num_bits 10^30": {"num_bits": 10**30},
    "num_bits null": {"num_bits": None},
    "type is a list": {"type": ["int"]},
    "strategy is code": {"strategy": "__import__('os')"},
    "symmetric is text": {"symmetric": "false"},
}
_ONLINE = {"config_groups": {"u": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}
# By key of a quantization_config: values with which readers leave weights packed, or drop or misread a part.
SCHEMES: dict[str, list[Any]] = {
    "quantization_status": [
        "initialized",
        "calibration",
        "frozen",
        "decompressed",
        "COMPRESSED",
        None,
        7,
        [1],
        {"a": 1},
    ],
    "kv_cache_scheme": [
        {},
        {"num_bits": 8, "type": "float"},
        {"strategy": "attn_head"},
        {"strategy": "channel"},
        {"strategy": "group", "group_size": 32},
        {"strategy": ["tensor"]},
        {"symmetric": False},
        {"num_bits": 10**30},
        {"dynamic": "local"},
        {"dynamic": 0},
    ],
    "transform_config": [
        _ONLINE,
        7,
        "hadamard",
        [1],
        {"config_groups": 7},
        {"config_groups": {"a": 7}},
        {"config_groups": {"a": {"apply": {"location": "weight_input"}}}},
        {"config_groups": {"a": {"apply": [{"location": ["weight_input"]}]}}},
    ],
    "sparsity_config": [
        {"format": "sparse-24-bitmask"},
        {"format": "sparse-bitmask", "sparsity_structure": "unstructured"},
        {"format": ["dense"]},
        {"format": 7},
        "2:4",
    ],
}
# What stands in hf_quant_config.json beside INT4 of compressed-tensors.
SECOND: dict[str, bytes] = {
    "empty": b"{}",
    "a list": b"[]",
    "unfinished": b'{"quantization":',
    "of ModelOpt": b'{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}',
    "of ModelOpt without a key": b'{"quant_method": "modelopt", "quant_algo": "FP8"}',
    "a number inside": b'{"quantization": 7}',
    "nested lists": b'{"quantization": ' + b"[" * 100_000,
}
PATTERNS: dict[str, Any] = {
    "nested repetition": "re:(a+)+$",
    "nested alternatives": "re:(a|aa|a*)*b",
    "deep nesting": "re:" + "(" * 900 + "a" + ")" * 900,
    "repetition overflow": "re:a{99999999999999999999}",
    "nested counts": "re:((((a{1,99}){1,99}){1,99}){1,99})b",
    "back reference": r"re:(.*)(.*)(.*)\1\2\3",
    "lookbehind": "re:(?<=.*)a",
    "lookahead chain": "re:" + "(?=.*a.*b.*c)" * 100 + ".*x.*y",
    "no regular expression": "re:[",
    "unclosed group": "re:(",
    "empty regular expression": "re:",
    "longer than allowed": "re:" + "a" * 100_000,
    "wide range": "re:(?i)[\u0000-\U0010ffff]",
    "empty": "",
}
_MANY = 3_000
MANY: dict[str, str] = {
    "modules": "model.layers.{}.mlp.gate_proj",
    "parameters": "model.layers.{}.mlp.gate_proj.weight",
    "experts": "model.layers.1.mlp.experts.{}.up_proj",
    "prefixes": "model.layers.{}",
    "short": "x{}",
    "numbers": "{}",
    "another case": "MODEL.LAYERS.{}.MLP",
    "endings": "{}.mlp.gate_proj",
    "dots": "....{}....",
    "spaces": " {} ",
    "long": "a" * 500 + "{}",
    "NUL": "model\0{}",
    "newlines": "model\n{}",
    "beyond ASCII": "modèl.läyers.{}.\u0130",
}
ENTRIES: dict[str, Any] = {"a number": 7, "an object": {"a": 1}, "null": None, "a list": ["re:a"]}


def _text(name: str, content: bytes, root: Path) -> None:
    put(root / name, content)


def _value(key: str, value: Any, root: Path) -> None:
    edit_json(root / "config.json", **{key: value})


def _scheme(where: str, value: Any, root: Path) -> None:
    config = json.loads((root / "config.json").read_bytes())
    quantization = config["quantization_config"]
    if where == "weights":
        quantization["config_groups"]["group_0"]["weights"] |= value
    elif where == "targets":
        quantization["config_groups"]["group_0"]["targets"] = value
    else:
        quantization[where] = value
    edit_json(root / "config.json", quantization_config=quantization)


def _group_format(form: Any, root: Path) -> None:
    config = json.loads((root / "config.json").read_bytes())
    config["quantization_config"]["config_groups"]["group_0"]["format"] = form
    edit_json(root / "config.json", quantization_config=config["quantization_config"])


def _pattern(entry: str, root: Path) -> dict[str, str]:
    return {"pattern": entry}


def cases() -> Iterator[Case]:
    """JSON as config, index, tokenizer and manifest; values of a config; entries of ignore and targets."""
    for what, content in TEXTS.items():
        make = partial(_text, "config.json", content)
        yield Case(f"config.json is {what}", "hf", make, r"config\.json")
        few = ("inspect", "verify", "after_write")
        name = "model.safetensors.index.json"
        yield Case(f"index is {what}", "hf", partial(_text, name, content), name, few)
        yield Case(
            f"manifest is {what}", "manifest", partial(_text, "ckptkit.json", content), "ckptkit.json", ("verify",)
        )
    for what in ("nested lists", "key twice", "UTF-16", "python", "million zeros"):
        few = ("verify", "preflight")
        yield Case(f"tokenizer is {what}", "hf", partial(_text, "tokenizer.json", TEXTS[what]), "tokenizer", few, few)
    for key, value in VALUES.items():
        verbs = ("convert", "quantize", "arguments", "verify", "preflight", "after_init", "verl")
        passing = verbs if key in _HARMLESS else ()
        yield Case(f"{key} of {value!r:.20}", "hf", partial(_value, key, value), "config|" + key, verbs, passing)
    for what, value in QUANTIZATION.items():
        verbs = ("lint", "verify", "convert", "quantize", "fix")
        make = partial(_value, "quantization_config", value)
        yield Case(f"quantization_config is {what}", "int4", make, "quantization_config|config|quant", verbs)
    for what, value in WEIGHTS.items():
        make = partial(_scheme, "weights", value)
        yield Case(
            f"INT4 weights of {what}",
            "int4",
            make,
            "config|group|num_bits|type|strategy|symm|zero",
            ("verify", "convert"),
        )
    for key, values in SCHEMES.items():
        for number, value in enumerate(values):
            verbs = ("verify",) if key == "kv_cache_scheme" else ("verify", "lint")
            yield Case(f"{key} {number}: {value!r:.30}", "int4", partial(_scheme, key, value), key, verbs)
    for form in ("int-quantized", "float-quantized", "dense", "mixed-precision", 7, ["pack-quantized"]):
        make = partial(_group_format, form)
        yield Case(f"format of a group: {form!r}", "int4", make, "format|int-quantized", ("verify",))
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
    for what, value in ENTRIES.items():
        yield Case(
            f"ignore has {what}", "int4", partial(_scheme, "ignore", [value]), "ignore", ("lint", "verify", "fix")
        )
        yield Case(
            f"ignore is {what}",
            "int4",
            partial(_scheme, "ignore", value),
            "ignore",
            ("lint", "verify", "fix"),
            ("lint", "verify", "fix"),
        )
