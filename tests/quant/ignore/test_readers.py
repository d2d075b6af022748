"""The readers' rules, against the readers' own code where it can be installed, and against verdicts written by hand."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.utils.match import is_match
from hypothesis import given, settings
from hypothesis import strategies as st
from support.installed import release

from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.scheme import QuantScheme, quantization_config
from ckptkit.quant.ignore.matching import Names, Rule, any_part, dotted_ending, exact, ignored, prefix, regex_or_exact
from ckptkit.quant.ignore.names import Matrix, names_in_vllm, names_of_layer
from ckptkit.quant.ignore.readers import ALL_READERS, INT4_READERS, readers_of

L0 = "model.layers.0"

# entry, module, is it ignored by: compressed-tensors, SGLang 0.5.16, SGLang 0.5.23, slime
TABLE: list[tuple[str, str, bool, bool, bool, bool]] = [
    ("model.embed_tokens.weight", "model.embed_tokens", False, False, False, True),
    ("model.embed_tokens", "model.embed_tokens", True, True, True, True),
    ("lm_head", "lm_head", True, True, True, True),
    ("lm_head", "language_model.lm_head", False, True, True, False),
    ("re:.*mlp.gate$", f"{L0}.mlp.gate", True, True, True, False),
    (r"re:.*mlp\.gate\..*", f"{L0}.mlp.gate", False, False, False, True),
    (r"re:.*mlp\.gate\.*", f"{L0}.mlp.gate_proj", True, True, True, True),
    ("re:.*mlp.gate.*", f"{L0}.mlp.gate_proj", True, True, True, True),
    (f"{L0}.mlp.gate", f"{L0}.mlp.gate_proj", False, True, False, True),
    ("model.layers.1", "model.layers.17.mlp.up_proj", False, True, False, True),
    (f"{L0}.mlp.experts.1", f"{L0}.mlp.experts.12.up_proj", False, True, False, True),
    ("mlp.gate", f"{L0}.mlp.gate", False, True, True, False),
    ("proj", f"{L0}.mlp.up_proj", False, True, False, False),
    ("self_attn.kv_b_proj", f"{L0}.self_attn.kv_b_proj", False, True, True, False),
    ("re:lm_head", "language_model.lm_head", False, False, False, False),
    ("re:.*shared_experts.*", f"{L0}.mlp.shared_expert_gate", False, False, False, False),
    ("re:.*q_proj$", f"{L0}.self_attn.q_proj", True, True, True, False),
    ("re:.*q_proj$", f"{L0}.self_attn.qkv_proj", False, False, False, False),
    (f"{L0}.self_attn.q_proj", f"{L0}.self_attn.qkv_proj", False, False, False, False),
    ("Linear", f"{L0}.self_attn.q_proj", True, False, False, False),
    ("linear", f"{L0}.linear_attn.out_proj", False, True, False, False),
    ("LM_HEAD", "lm_head", False, True, False, False),
    (r"re:.*\.mlp\.gate(\.weight)?$", f"{L0}.mlp.gate", True, True, True, True),
    (r"re:.*\.mlp\.gate(\.weight)?$", f"{L0}.mlp.gate_proj", False, False, False, False),
    (r"re:.*self_attn.*", f"{L0}.self_attn.qkv_proj", True, True, True, True),
]


@pytest.fixture(scope="module")
def sglang_quantization() -> Any:
    """SGLang's compressed-tensors package; importing it warns about what a machine without GPU lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors as config_module
        from sglang.srt.layers.quantization.compressed_tensors import utils

        return SimpleNamespace(
            config=config_module.CompressedTensorsConfig, should_ignore_layer=utils.should_ignore_layer
        )


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]} {row[1]}")
def test_entry_matches_a_module_for_each_reader_as_listed(row: tuple[str, str, bool, bool, bool, bool]) -> None:
    entry, module, *expected = row
    read = [
        bool(ignored([module], [entry])),
        bool(any_part(entry)(module)),
        bool(dotted_ending(entry)(module)),
        bool(prefix(entry)(f"{module}.weight")),
    ]
    assert read == expected


INSTALLED = dotted_ending if release("sglang") >= (0, 5, 23) else any_part


NAMES = sorted(
    {row[1] for row in TABLE}
    | {f"{L0}.mlp.experts.0.gate_proj", f"{L0}.mlp.experts.12.up_proj", "model.layers.10.mlp.down_proj"}
)
ENTRIES = sorted({row[0] for row in TABLE})


@pytest.mark.sglang
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_on_every_name_as_the_readers_themselves(sglang_quantization: Any, entry: str) -> None:
    linear = torch.nn.Linear(1, 1, device="meta")
    assert ignored(NAMES, [entry]) == {name for name in NAMES if is_match(name, linear, entry)}
    assert [bool(INSTALLED(entry)(name)) for name in NAMES] == [
        sglang_quantization.should_ignore_layer(name, [entry]) for name in NAMES
    ]


def test_readers_by_the_name_of_the_option() -> None:
    assert readers_of(["slime", "transformers"]) == ("compressed-tensors", "transformers", "slime")
    assert readers_of(ALL_READERS) == INT4_READERS
    with pytest.raises(CkptkitError, match="unknown reader 'trtllm'"):
        readers_of(["slime", "trtllm"])
    with pytest.raises(CkptkitError, match="reader"):
        readers_of([])


ATTENTION = ["q_proj", "k_proj", "v_proj"]
QKV, LATENT = {"qkv_proj": tuple(ATTENTION)}, {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}


def matrix(layer: str, module: str = "other") -> Matrix:
    return Matrix(f"{module}.weight", True, None, layer, layer, module)


def test_vllm_takes_every_fused_layer_apart_unless_the_release_has_it_so() -> None:
    """GLM-4 stores gate_up_proj as one."""
    layer = f"{L0}.mlp.gate_up_proj"
    assert list(names_in_vllm(matrix(layer))) == [f"{L0}.mlp.gate_proj", f"{L0}.mlp.up_proj"]
    assert list(names_in_vllm(matrix(layer, layer))) == [layer]


@pytest.mark.sglang
@pytest.mark.parametrize("mapping", [{}, QKV], ids=["plain", "mapped"])
@pytest.mark.parametrize(
    "ignore",
    [
        [f"{L0}.self_attn.{name}" for name in ATTENTION],
        [f"{L0}.self_attn.q_proj"],
        [f"{L0}.self_attn.qkv_proj"],
        ["re:.*self_attn.*"],
        ["re:.*(q|k|v)_proj"],
        ["re:.*k_proj"],
        ["re:.*mlp.*"],
    ],
    ids=str,
)
def test_fused_layers_as_sglang_itself(
    sglang_quantization: Any, ignore: list[str], mapping: dict[str, tuple[str, ...]]
) -> None:
    layer = f"{L0}.self_attn.qkv_proj"
    names = (layer,) if layer in ignore else names_of_layer(layer, mapping)
    verdicts = {any(INSTALLED(entry)(name) for entry in ignore) for name in names}
    if len(verdicts) == 2:
        with pytest.raises(ValueError, match="requires all to use the same scheme"):
            sglang_quantization.should_ignore_layer(layer, ignore, mapping)
    else:
        assert verdicts == {sglang_quantization.should_ignore_layer(layer, ignore, mapping)}


@pytest.mark.sglang
def test_experts_as_sglang_itself(sglang_quantization: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = sglang_quantization.config.from_config(quantization_config(QuantScheme(32, "qmax7")))
    asked: list[str] = []

    def record(layer: Any, name: str) -> None:
        asked.append(name)

    monkeypatch.setattr(config, "get_scheme_dict", record)
    config.get_moe_scheme(None, f"{L0}.mlp.experts")
    assert asked == list(names_of_layer(f"{L0}.mlp.experts", {}))


@pytest.mark.sglang
def test_the_output_layer_is_no_layer_that_sglang_quantizes_by_class(sglang_quantization: Any) -> None:
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
def test_any_names_at_once_as_one_by_one(rule: Rule, names: list[str], entry: str, begin: int, end: int) -> None:
    """Entries that are names, and parts of them."""
    for one in {entry, *(name[begin : len(name) - end] for name in names)} - {""}:
        assert Names(frozenset(names)).covered(rule, one) == {name for name in names if rule(one)(name)}
