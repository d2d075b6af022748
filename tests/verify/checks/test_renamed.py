"""Names that a wrapper changed: the change in one finding, whatever else is wrong in findings of its own."""

import re

import pytest
import torch
from mutations.edits import edit_config, names, replace, shard_of
from mutations.int4 import packed
from safetensors.torch import save_file
from support import models
from support.messages import text_with
from support.nightly import daily
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify


@pytest.fixture
def saved(fresh):
    def save(change, name="qwen2-untied"):
        path = fresh(name)
        stored = ((change(old), tensor) for old, tensor in models.tensors(path).items())
        for file in path.glob("*.safetensors*"):
            file.unlink()
        content = {new: tensor for new, tensor in stored if new is not None}
        save_file(content, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return save


# What is put before all names, what is said of it, and words of the next move.
FURTHER = {
    "language_model.language_model.": (text_with("prefix `language_model.language_model.`"), ""),
    "base_model.model.": (text_with("prefix `base_model.model.`"), "merge_and_unload()"),
    "module.": (text_with("names module"), "model.module"),
    "_orig_mod.": (text_with("_orig_mod"), "model._orig_mod"),
    "_fsdp_wrapped_module.": (text_with("_fsdp_wrapped_module"), "full state dict"),
}


@pytest.mark.parametrize("prefix", FURTHER)
def test_prefix_of_all_names_is_one_finding(prefix, saved, only):
    actual, hint = FURTHER[prefix]
    path = saved(lambda name: prefix + name)
    for report in (verify(path), preflight(hf_checkpoint=path)):
        finding = only(report)
        assert (finding.code, finding.actual, finding.count) == ("CK104", actual, 147)
        assert f"{prefix}lm_head.weight" in str(finding.tensor)
        assert hint in finding.hint
        assert named(finding.hint) == set()


@pytest.mark.parametrize(
    ("change", "actual"),
    [
        (lambda name: name.removeprefix("model."), text_with("`model.`")),
        (lambda name: name.replace(".0.mlp.", ".0.mlp._fsdp_wrapped_module."), text_with("_fsdp_wrapped_module")),
        (lambda name: name.replace("model.layers.", "model.layers.layers."), text_with("repeat `layers.`")),
    ],
)
def test_another_change_of_names_is_one_finding(change, actual, saved, only):
    finding = only(verify(saved(change, "qwen2-tied")))
    assert (finding.code, finding.actual, named(finding.hint)) == ("CK104", actual, set())


def test_what_is_lost_beside_it_is_found_too(saved):
    lost = "model.layers.3.mlp.up_proj.weight"
    found = verify(saved(lambda name: None if name == lost else f"module.{name}")).findings
    assert [(one.code, one.tensor if one.count == 1 else one.count) for one in found] == [
        ("CK104", 146),
        ("CK104", lost),
    ]


# CK104's next move follows from what is wrong: the key of config.json that disagrees with the names, or none.


KEYS = (
    *("num_hidden_layers", "num_nextn_predict_layers", "num_local_experts", "n_routed_experts", "tie_word_embeddings"),
    *("architectures", "first_k_dense_replace", "attention_bias", "index"),
)


@pytest.fixture
def of_names(alone):
    return lambda path: alone("CK104", path)[1]


def named(hint):
    return {key for key in KEYS if re.search(rf"\b{key}\b", hint)}


@pytest.mark.parametrize(
    ("release", "added", "keys"),
    [
        ("qwen2-tied", "v_head.summary.weight", {"architectures"}),  # TRL
        ("qwen3_moe", "classifier.weight", {"architectures"}),
        ("qwen2-tied", "visual.blocks.0.attn.qkv.weight", set()),
        ("qwen2-tied", "model.layers.40.mlp.up_proj.weight", {"num_hidden_layers"}),
        ("glm4_moe", "model.layers.12.eh_proj.weight", {"num_nextn_predict_layers"}),
        ("qwen3_moe", "mtp.layers.0.self_attn.q_proj.weight", {"num_nextn_predict_layers"}),
        ("qwen3_moe", "model.layers.3.mlp.experts.12.up_proj.weight", {"num_local_experts"}),
        ("glm4_moe", "model.layers.1.mlp.gate.weight", {"first_k_dense_replace"}),
        ("qwen3_moe", "model.layers.1.self_attn.q_proj.bias", {"attention_bias"}),
        ("qwen2-tied", "model.layers.1.self_attn.q_b_proj.weight", {"architectures"}),
    ],
)
def test_tensor_that_config_does_not_promise(release, added, keys, fresh, of_names):
    path = fresh(release)
    replace(path, {added: torch.ones(4, 4)})
    assert [named(one.hint) for one in of_names(path) if added in one.names] == [keys]


@pytest.mark.parametrize(
    ("release", "lost", "keys"),
    [
        ("qwen2-untied", r"model\.layers\.(10|11)\.", {"num_hidden_layers"}),
        ("qwen2-untied", r"model\.layers\.5\.", set()),
        ("qwen2-untied", r"lm_head", {"tie_word_embeddings"}),
        ("qwen3_moe", r".*\.experts\.(10|11)\.", {"num_local_experts"}),
        ("qwen3_moe", r".*layers\.3\.mlp\.experts\.11\.", set()),
    ],
)
def test_tensor_that_is_missing(release, lost, keys, fresh, of_names):
    path = fresh(release)
    replace(path, {}, [name for name in names(path, "") if re.match(lost, name)])
    for file in set(path.glob("*.safetensors")) - {shard_of(path, name) for name in names(path, "")}:
        file.unlink()
    assert {frozenset(named(one.hint)) for one in of_names(path)} == {frozenset(keys)}


@pytest.mark.parametrize("head", ["score.weight", "v_head.weight"])
def test_output_layer_that_another_head_replaces_names_architectures(head, fresh, of_names):
    path = fresh("qwen2-untied")
    replace(path, {head: torch.ones(4, 4)}, ["lm_head.weight"])
    found = {one.tensor: one.hint for one in of_names(path)}
    assert found.keys() == {"lm_head.weight", head}
    assert all(named(hint) == {"architectures"} for hint in found.values())
    assert head in found["lm_head.weight"]


# Models that ckptkit does not know: layers that differ on purpose are not taken for layers that lost something.


LAYERS, EACH = 12, 6  # every sixth layer has full attention


def save_gemma4(path, *, keys_as_values, sharing):
    """A small Gemma 4 as transformers saves it: keys as values in full attention, layers without their own."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 2, "head_dim": 16}
    config = Gemma4TextConfig(
        **sizes,
        **heads,
        global_head_dim=32,
        layer_types=["full_attention" if (layer + 1) % EACH == 0 else "sliding_attention" for layer in range(LAYERS)],
        attention_k_eq_v=keys_as_values,
        num_kv_shared_layers=sharing,
        hidden_size_per_layer_input=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path, max_shard_size="100KB")
    edit_config(path, model_type="gemma_later")  # Gemma 4 itself is known
    return path


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory):
    """As the 31B: keys for values in the layers of full attention."""
    return save_gemma4(tmp_path_factory.mktemp("gemma4") / "release", keys_as_values=True, sharing=0)


def in_int4(path, spared="\0"):
    packed([name.removesuffix(".weight") for name in names(path, "_proj.weight") if not name.startswith(spared)])(
        path, ""
    )


@pytest.mark.parametrize("spared", daily(["\0", "model.layers.3."], ["model.layers.3."]))
def test_keys_that_are_used_as_values_are_no_lost_values(spared, gemma4, copy_of, of_names):
    """Also where all is packed, or all but one layer; what one layer lost is named."""
    full = [f"model.layers.{layer}.self_attn.v_proj.weight" for layer in range(EACH - 1, LAYERS, EACH)]
    assert models.tensors(gemma4).keys().isdisjoint(full)
    assert of_names(gemma4) == []
    path = copy_of(gemma4)
    in_int4(path, spared)
    assert of_names(path) == []
    replace(path, {}, [f"model.layers.7.mlp.up_proj.weight_{part}" for part in ("packed", "scale", "shape")])
    assert [one.tensor for one in of_names(path)] == ["layers.7.mlp.up_proj.weight"]


def test_layers_that_share_the_keys_of_an_earlier_one_lost_nothing(tmp_path, of_names):
    """As the E2B that transformers saves: no k_proj, v_proj and k_norm in the last layers."""
    path = save_gemma4(tmp_path / "release", keys_as_values=False, sharing=4)
    stored = models.tensors(path)
    assert [f"model.layers.{layer}.self_attn.k_proj.weight" in stored for layer in (7, 8)] == [True, False]
    assert of_names(path) == []
