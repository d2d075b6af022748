"""The table of readers of unquantized modules, against each reader's own code and against verdicts written by hand."""

import re
import tomllib
import warnings
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.installed import before, release
from support.published import GLM, KIMI, QWEN
from support.vllm_answers import ask
from support.vllm_runs import release as vllm_release

from ckptkit.quant.ignore import matching as rules
from ckptkit.quant.ignore.names import matrices_named
from ckptkit.quant.ignore.readers import (
    KEYS,
    LISTS,
    Method,
    miles_fp8,
    miles_mxfp8,
    miles_nvfp4,
    readers_of_method,
    slime_fp8,
    verl_fp8,
)
from ckptkit.quant.ignore.reading import read_list
from ckptkit.quant.ignore.tree import class_tree

L3, L5 = "model.layers.3", "model.layers.5"
READERS = (
    rules.regex_from_start,  # transformers 5.12
    rules.regex_to_a_dot,  # transformers 5.24
    rules.whole_parts,  # SGLang fp8
    lambda entry: lambda name: rules.parts_only(entry)(name) or rules.glob(entry)(name),  # SGLang ModelOpt
    rules.exact,  # vLLM fp8
    lambda entry: lambda name: rules.exact(entry)(name) or rules.substring(entry)(name),  # vLLM ModelOpt
    rules.regex_or_exact,  # Quark
)
# entry, module, is it left unquantized by each of `READERS`
TABLE = [
    (f"{L3}.mlp.gate", f"{L3}.mlp.gate", "1111111"),
    (f"{L3}.mlp.gate", f"{L3}.mlp.gate_up_proj", "1000010"),
    ("mlp.gate", f"{L3}.mlp.gate", "1111010"),
    ("mlp.gate", f"{L3}.mlp.gate_proj", "0000010"),
    ("model.layers.1", "model.layers.1.mlp.down_proj", "1111010"),
    ("model.layers.1", "model.layers.11.mlp.down_proj", "1000010"),
    ("model.layers.0.", "model.layers.0.mlp.down_proj", "1111010"),
    ("q_b_proj", f"{L3}.self_attn.q_b_proj", "1111010"),
    ("b_proj", f"{L3}.self_attn.q_b_proj", "1100010"),
    (f"{L3}.self_attn.q_b_proj", "model.layers.4.self_attn.q_b_proj", "0001000"),
    (r"re:.*mlp\.gate$", f"{L3}.mlp.gate", "0000001"),
    ("mtp*", "mtp.layers.0.mlp.down_proj", "1101010"),
    ("model.layers.0.self_attn*", "model.layers.0.self_attn.o_proj", "1101010"),
    ("lm_head", "language_model.lm_head", "1111010"),
    (f"{L3}.mlp.gate.weight", f"{L3}.mlp.gate", "0000000"),
]


def test_entries_cover_modules_as_listed():
    for entry, module, expected in TABLE:
        assert "".join(str(int(rule(entry)(module))) for rule in READERS) == expected, (entry, module)


LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate", "mlp.down_proj")
ENTRIES = tomllib.loads(Path(__file__).with_name("entries.toml").read_text())
LISTS_ASKED = [
    [],
    *([entry] for entry, *_ in TABLE),
    *([entry] for entry in ENTRIES["floats"]),
    [f"model.layers.1.self_attn.{one}_proj" for one in "qkv"],
    ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"],
    [f"model.layers.{layer}.{name}" for layer in range(4) for name in ("mlp.gate", "input_layernorm")],
    ["model.layers.1.mlp.shared_experts.down_proj", "model.layers.1.mlp.shared_experts"],
    ["model.layers.1.self_attn.q_a_proj", "model.layers.1.self_attn.kv_a_proj_with_mqa"],
    [r"re:.*experts$", r"re:.*v_proj$"],
]
CONTENT = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "mxfp8": {"quant_method": "mxfp8", "activation_scheme": "dynamic"},
    "modelopt fp8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "modelopt fp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "quark": {"quant_method": "quark"},
}


def matrices_of(config):
    tree = class_tree(config)
    return matrices_named([f"{module}.weight" for module in [*tree.others, *sorted(tree.linears)]], tree, config)


@dataclass(frozen=True)
class Question:
    """Layers that a reader of this config asks about, with their parts, and what ckptkit predicts of each."""

    method: Method
    content: dict[str, Any]
    layers: dict[str, tuple[str, ...]]
    answers: dict[str, str]


def questions(reader):
    found = []
    methods = [one for one in CONTENT if not (one == "mxfp8" and reader.startswith("SGLang"))]  # the same class as fp8
    for config, method, entries in product((QWEN, GLM, KIMI), methods, LISTS_ASKED):
        row = readers_of_method(method)[reader]
        reading = read_list(row, matrices_of(config), entries, config)
        asked = [(names, answer) for names, answer in zip(reading.lookups, reading.answers, strict=True) if names]
        layers = {names[-1]: names[:-1] for names, _ in asked}
        answers = {names[-1]: answer for names, answer in asked}
        found.append(Question(method, {**CONTENT[method], row.keys[0]: entries}, layers, answers))
    return found


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm_takes_every_list_for_what_the_table_says(tmp_path):
    found = vllm_release()
    reader = "vLLM 0.33" if found is not None and found >= (0, 33) else "vLLM 0.26"
    asked = questions(reader)
    answers = ask("lists", [(one.method, one.content, one.layers) for one in asked], tmp_path)
    assert differing(asked, answers) == []


def differing(asked, answers):
    return [
        (one.method, one.content, layer, theirs[layer], ours)
        for one, theirs in zip(asked, answers, strict=True)
        for layer, ours in one.answers.items()
        if theirs[layer] != ours
    ]


SGLANG = "SGLang 0.5.23" if release("sglang") >= (0, 5, 23) else "SGLang 0.5.16"


@pytest.mark.sglang
def test_sglang_takes_every_list_for_what_the_table_says():
    asked = questions(SGLANG)
    assert differing(asked, [in_sglang(one.method, one.content, one.layers) for one in asked]) == []


def in_sglang(method, content, layers):
    """What SGLang's own configs answer for a layer of each name, asked by their `get_quant_method`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.layers.linear import LinearBase
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
        from sglang.srt.layers.quantization import fp8, modelopt_quant
        from sglang.srt.layers.quantization.quark.utils import should_ignore_layer
    fused = {
        name.rpartition(".")[2]: [part.rpartition(".")[2] for part in parts] for name, parts in layers.items() if parts
    }
    packed, dense = SimpleNamespace(), SimpleNamespace()
    classes = {
        "fp8": fp8.Fp8Config,
        "modelopt fp8": modelopt_quant.ModelOptFp8Config,
        "modelopt fp4": modelopt_quant.ModelOptFp4Config,
    }
    config = None if method == "quark" else classes[method].from_config({**content, "packed_modules_mapping": fused})

    def answer(name):
        kind = FusedMoE if name.endswith(".experts") else LinearBase
        layer = kind.__new__(kind)
        for key in ("use_triton_kernels", "use_flashinfer_trtllm_moe"):
            object.__setattr__(layer, key, None)
        try:
            if config is None:
                return "keeps" if should_ignore_layer(name, content["exclude"], fused) else "packs"
            found = config.get_quant_method(layer, name)
        except ValueError:
            return "refuses"
        return "packs" if found is packed else "keeps"

    targets = [(fp8, name, packed) for name in ("Fp8LinearMethod", "Fp8MoEMethod")]
    targets += [(fp8, name, dense) for name in ("UnquantizedLinearMethod", "UnquantizedFusedMoEMethod")]
    for name in ("ModelOptFp8", "ModelOptFp4"):
        targets += [(modelopt_quant, f"{name}LinearMethod", packed)]
    targets += [(modelopt_quant, name, packed) for name in ("ModelOptFp8MoEMethod", "ModelOptNvFp4FusedMoEMethod")]
    try:
        for module, name, result in targets:
            patch.object(module, name, lambda *_, found=result, **__: found).start()
        return {name: answer(name) for name in layers}
    finally:
        patch.stopall()


@before("transformers", (5, 24), "it ends an entry at a dot")
def test_transformers_takes_every_entry_for_what_the_table_says():
    from transformers.quantizers.quantizers_utils import should_convert_module

    names = sorted({module for _, module, _ in TABLE} | {f"{L5}.{name}" for name in LINEAR})
    entries = {entry for entries in LISTS_ASKED for entry in entries if not entry.startswith(("*", "re:"))}
    assert [
        (entry, name)
        for entry in sorted(entries)
        for name in names
        if rules.regex_from_start(entry)(name) == should_convert_module(name, [entry])
    ] == []


def test_every_method_of_the_table_has_keys_and_every_key_is_one_of_them():
    for row in LISTS:
        for method in row.methods:
            assert set(row.keys) <= set(KEYS[method]), (row.readers, method)


_WORD = st.text("ab1._-", max_size=8)


@settings(max_examples=300, deadline=None)
@given(_WORD, st.lists(_WORD, max_size=6), st.sampled_from(["", ".", "a", ".b"]))
def test_entries_of_words_and_dots_as_the_regular_expressions_that_they_are(entry, names, more):
    for name in [*names, entry + more, entry.replace(".", "x") + more, more + entry]:
        start, dotted = re.match(entry, name), re.match(rf"(?:{entry.rstrip('.')})(?:\.|$)", name)
        assert rules.regex_from_start(entry)(name) is (bool(start) or name.endswith(entry)), name
        assert rules.regex_to_a_dot(entry)(name) is (bool(dotted) or name.endswith(entry)), name


# Parameters of a layer by who packs them: slime FP8, miles FP8, miles MXFP8, miles NVFP4, verl FP8.
PACKED = {
    "11101": ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"],
    "11111": ["mlp.experts.17.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_expert.up_proj"],
    "11110": ["block_sparse_moe.experts.17.w1"],
    # Latent attention, of which verl knows the output projection alone, and the indexer of sparse attention.
    "11100": [
        *(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
        *("self_attn.indexer.wq_b", "self_attn.indexer.wk"),
    ],
    # Linear attention: MXFP8 leaves all of it, FP8 what Qwen3-Next has fused.
    "11000": ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"],
    # verl's "mlp" takes in the gate of the shared expert.
    "00001": ["mlp.shared_expert_gate"],
    "00000": [
        *("mlp.gate", "block_sparse_moe.gate", "self_attn.indexer.weights_proj", "input_layernorm", "self_attn.q_norm"),
        *(f"linear_attn.{name}" for name in ("in_proj_qkvz", "in_proj_ba", "in_proj_a", "conv1d")),
        "eh_proj",
    ],
}
# Of multi-token prediction, a layer as any other, what joins its inputs by nobody.
OUTSIDE = {"mtp.layers.0.self_attn.q_proj": "11101"}
OUTSIDE |= dict.fromkeys(("mtp.fc", "model.embed_tokens", "lm_head"), "00000")
RULES = (slime_fp8, miles_fp8, miles_mxfp8, miles_nvfp4, verl_fp8)


def test_each_trainer_packs_what_its_code_names():
    expected = {f"{L3}.{name}": packed for packed, names in PACKED.items() for name in names} | OUTSIDE
    found = {name: "".join(str(int(rule(f"{name}.weight", {}))) for rule in RULES) for name in expected}
    assert found == expected


def test_miles_leaves_the_key_of_an_interleaved_indexer_in_bf16():
    name = f"{L3}.self_attn.indexer.wk.weight"
    assert [rule(name, {"indexer_rope_interleave": True}) for rule in RULES] == [True, False, False, False, False]
