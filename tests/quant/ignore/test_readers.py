"""The readers' rules, against the readers' own code where it can be installed, and against verdicts written by hand."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.utils.match import is_match
from hypothesis import given, settings
from hypothesis import strategies as st
from support.installed import release
from support.messages import refusal

from ckptkit.quant.formats.scheme import QuantScheme, quantization_config
from ckptkit.quant.ignore.matching import Names, any_part, dotted_ending, exact, ignored, prefix, regex_or_exact
from ckptkit.quant.ignore.names import names_of_layer
from ckptkit.quant.ignore.readers import ALL_READERS, INT4_READERS, readers_of

L0 = "model.layers.0"

# entry, module, is it ignored by: compressed-tensors, SGLang 0.5.16, SGLang 0.5.23, slime
TABLE = [
    ("model.embed_tokens.weight", "model.embed_tokens", "0001"),
    ("model.embed_tokens", "model.embed_tokens", "1111"),
    ("lm_head", "language_model.lm_head", "0110"),
    ("re:.*mlp.gate$", f"{L0}.mlp.gate", "1110"),
    (r"re:.*mlp\.gate\..*", f"{L0}.mlp.gate", "0001"),
    (r"re:.*mlp\.gate\.*", f"{L0}.mlp.gate_proj", "1111"),
    (f"{L0}.mlp.gate", f"{L0}.mlp.gate_proj", "0101"),
    ("model.layers.1", "model.layers.17.mlp.up_proj", "0101"),
    (f"{L0}.mlp.experts.1", f"{L0}.mlp.experts.12.up_proj", "0101"),
    ("mlp.gate", f"{L0}.mlp.gate", "0110"),
    ("proj", f"{L0}.mlp.up_proj", "0100"),
    ("self_attn.kv_b_proj", f"{L0}.self_attn.kv_b_proj", "0110"),
    ("re:lm_head", "language_model.lm_head", "0000"),
    ("re:.*shared_experts.*", f"{L0}.mlp.shared_expert_gate", "0000"),
    ("re:.*q_proj$", f"{L0}.self_attn.q_proj", "1110"),
    ("re:.*q_proj$", f"{L0}.self_attn.qkv_proj", "0000"),
    ("Linear", f"{L0}.self_attn.q_proj", "1000"),
    ("linear", f"{L0}.linear_attn.out_proj", "0100"),
    ("LM_HEAD", "lm_head", "0100"),
    (r"re:.*\.mlp\.gate(\.weight)?$", f"{L0}.mlp.gate", "1111"),
    (r"re:.*\.mlp\.gate(\.weight)?$", f"{L0}.mlp.gate_proj", "0000"),
]


def test_entries_match_modules_for_each_reader_as_listed():
    for entry, module, expected in TABLE:
        readers = (any_part(entry), dotted_ending(entry))
        read = [ignored([module], [entry]), *(rule(module) for rule in readers), prefix(entry)(f"{module}.weight")]
        assert "".join(str(int(bool(one))) for one in read) == expected, (entry, module)


@pytest.fixture(scope="module")
def sglang_quantization():
    """SGLang's compressed-tensors package; importing it warns about what a machine without GPU lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors as config_module
        from sglang.srt.layers.quantization.compressed_tensors import utils

        return SimpleNamespace(
            config=config_module.CompressedTensorsConfig, should_ignore_layer=utils.should_ignore_layer
        )


INSTALLED = dotted_ending if release("sglang") >= (0, 5, 23) else any_part


NAMES = sorted(
    {row[1] for row in TABLE}
    | {f"{L0}.mlp.experts.0.gate_proj", f"{L0}.mlp.experts.12.up_proj", "model.layers.10.mlp.down_proj"}
)
ENTRIES = sorted({row[0] for row in TABLE})


@pytest.mark.sglang
def test_every_entry_on_every_name_as_the_readers_themselves(sglang_quantization):
    linear = torch.nn.Linear(1, 1, device="meta")
    for entry in ENTRIES:
        assert ignored(NAMES, [entry]) == {name for name in NAMES if is_match(name, linear, entry)}
        found = [bool(INSTALLED(entry)(name)) for name in NAMES]
        assert found == [sglang_quantization.should_ignore_layer(name, [entry]) for name in NAMES], entry


def test_readers_by_the_name_of_the_option():
    assert readers_of(["slime", "transformers"]) == ("compressed-tensors", "transformers", "slime")
    assert readers_of(ALL_READERS) == INT4_READERS
    refusal("unknown reader 'trtllm'", readers_of, ["slime", "trtllm"])
    refusal("reader", readers_of, [])


ATTENTION = ["q_proj", "k_proj", "v_proj"]


@pytest.mark.sglang
@pytest.mark.parametrize("mapping", [{}, {"qkv_proj": tuple(ATTENTION)}], ids=["plain", "mapped"])
def test_fused_layers_as_sglang_itself(sglang_quantization, mapping):
    layer = f"{L0}.self_attn.qkv_proj"
    lists = [[f"{L0}.self_attn.{name}" for name in ATTENTION], [f"{L0}.self_attn.q_proj"], [layer]]
    lists += [[entry] for entry in ("re:.*self_attn.*", "re:.*(q|k|v)_proj", "re:.*k_proj", "re:.*mlp.*")]
    for ignore in lists:
        names = (layer,) if layer in ignore else names_of_layer(layer, mapping)
        verdicts = {any(INSTALLED(entry)(name) for entry in ignore) for name in names}
        if len(verdicts) == 2:
            with pytest.raises(ValueError, match="requires all to use the same scheme"):
                sglang_quantization.should_ignore_layer(layer, ignore, mapping)
        else:
            assert verdicts == {sglang_quantization.should_ignore_layer(layer, ignore, mapping)}, ignore


@pytest.mark.sglang
def test_experts_as_sglang_itself(sglang_quantization, monkeypatch):
    config = sglang_quantization.config.from_config(quantization_config(QuantScheme(32, "qmax7")))
    asked = []

    def record(layer, name):
        asked.append(name)

    monkeypatch.setattr(config, "get_scheme_dict", record)
    config.get_moe_scheme(None, f"{L0}.mlp.experts")
    assert asked == list(names_of_layer(f"{L0}.mlp.experts", {}))


@pytest.mark.sglang
def test_the_output_layer_is_no_layer_that_sglang_quantizes_by_class(sglang_quantization):
    """Neither is an embedding: SGLang looks for a scheme for its Linear layers and experts alone."""
    config = sglang_quantization.config.from_config(quantization_config(QuantScheme(32, "qmax7")))
    assert config.get_quant_method(torch.nn.Embedding(1, 1, device="meta"), "lm_head") is None


_PARTS = st.lists(
    st.sampled_from(["model", "layers", "1", "10", "mlp", "Gate", "gate_proj", "", "a\0b", "É", "İ"]), max_size=5
)
_NAME = _PARTS.map(".".join)


@pytest.mark.parametrize("rule", [exact, regex_or_exact, prefix, any_part, dotted_ending])
@settings(max_examples=150, deadline=None)
@given(st.lists(_NAME, max_size=6), _NAME, st.integers(0, 12), st.integers(0, 12))
def test_any_names_at_once_as_one_by_one(rule, names, entry, begin, end):
    for one in {entry, *(name[begin : len(name) - end] for name in names)} - {""}:
        assert Names(frozenset(names)).covered(rule, one) == {name for name in names if rule(one)(name)}
