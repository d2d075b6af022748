"""The options that preflight knows, held against the installed megatron-core: they are its settings, with its types."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec

import pytest
from support.processes import python

from ckptkit.converters.megatron.argument_table import ARGUMENTS
from ckptkit.verify.launch.options.tables import MODEL, SWITCHES

# Prints every field of Megatron's configurations with its annotation and default, and GPTModel's rope_scaling_factor.
ASK = """
import dataclasses, inspect, json
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
known = (*dataclasses.fields(MLATransformerConfig), *dataclasses.fields(TransformerConfig))
fields = {one.name: [str(one.type), repr(one.default)] for one in known}
factor = inspect.signature(GPTModel.__init__).parameters["rope_scaling_factor"].default
print(json.dumps([fields, factor]))
"""
# What Megatron's arguments call otherwise than its configuration, or give to GPTModel, HybridModel and the tokenizer.
ELSEWHERE = {
    *("num_experts", "norm_epsilon", "apply_layernorm_1p", "swiglu", "quick_geglu", "squared_relu", "vocab_size"),
    *("padded_vocab_size", "make_vocab_size_divisible_by", "max_position_embeddings", "seq_length", "rotary_base"),
    *("rotary_percent", "rotary_seq_len_interpolation_factor", "rope_scaling_factor", "use_rope_scaling"),
    *("position_embedding_type", "use_rotary_position_embeddings", "add_position_embedding"),
    *("untie_embeddings_and_output_weights", "group_query_attention", "attention_backend", "megatron_to_hf_mode"),
    *("allgather_cp", "fp16", "bf16", "post_self_attn_layernorm", "post_mlp_layernorm"),  # slime's patch: the last two
    *("yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
    *("yarn_correction_range_round_to_int", "hybrid_layer_pattern", "hybrid_override_pattern"),
}


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_options_are_settings_of_megatron_core_and_defaults_are_its_own() -> None:
    fields, factor = json.loads(python("-c", ASK).stdout.splitlines()[-1])
    tables = dict((*MODEL.values(), *SWITCHES.values()))
    # Older versions of megatron-core lack those of sparse attention.
    assert [name for name in tables if name not in fields and name not in ELSEWHERE and "dsa" not in name] == []
    for name, kind in tables.items():
        if name in ELSEWHERE:
            continue
        if kind in (int, float, str) and name in fields:
            names = {int: ("int",), float: ("float",), str: ("str", "Literal")}[kind]  # type: ignore[index]
            assert any(one in fields[name][0] for one in names), (name, fields[name])
        if isinstance(kind, bool) and name in fields:
            assert fields[name][1] == repr(not kind), name
    # What CK718 and CK719 take where a launch says nothing.
    assert factor == 8.0
    assert (fields["attention_dropout"][1], fields["hidden_dropout"][1]) == ("0.1", "0.1")
    assert (fields["beta_fast"][1], fields["moe_router_topk"][1]) == ("32", "2")


# Defaults of Megatron-LM's arguments that are not those of its configuration, which has the second.
OTHER_DEFAULTS = {"kv_lora_rank": (32, "512"), "rotary_scaling_factor": (1.0, "40")}


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_the_table_has_megatron_cores_defaults_and_names_of_its_settings() -> None:
    fields, _ = json.loads(python("-c", ASK).stdout.splitlines()[-1])
    compared = [row for row in ARGUMENTS if (row.config or row.name) in fields and row.starts is not None]
    assert len(compared) > 35
    for row in compared:
        default = fields[row.config or row.name][1]
        if row.name in OTHER_DEFAULTS:
            assert (row.starts, default) == OTHER_DEFAULTS[row.name]
        elif default == "None":
            assert row.starts in (0, 1), row.name  # what is not limited, scaled or there
        else:
            assert ast.literal_eval(default) == row.starts, row.name
    assert [row.name for row in ARGUMENTS if row.config and row.config not in fields] == []
