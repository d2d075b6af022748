"""Classes from an untrusted config: transformers fetches and runs no code for it, and its sizes give the same model."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import pytest
import torch
import transformers
from families import HF_CASES, nemotron_h
from huggingface_hub import constants
from support import published
from torch import nn
from transformers import AutoConfig, AutoModel, modeling_flash_attention_utils, modeling_utils
from transformers.integrations import hub_kernels
from transformers.models.auto import auto_factory, configuration_auto

from ckptkit.core.errors import CkptkitError
from converters.registry import FAMILIES
from quant.lint.lint import lint
from quant.selection.meta_model import meta_tree, text_model, whole_model
from quant.selection.tree import ClassTree, release_of

RELEASES = {
    model_type: family.release
    for model_type, family in FAMILIES.items()
    if family.release and not family.release.own_tree
}
NO_KERNELS = {name: ModuleType(name) for name in ("causal-conv1d", "mamba-ssm")}
REPOSITORY = "kernels-community/flash-attn2@0123456789abcdef"
ATTENTION = (
    REPOSITORY,
    f"{REPOSITORY}:forward",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "paged|flash_attention_2",
    {"": REPOSITORY},
)
VL = {
    "model_type": "qwen3_vl_moe",
    "text_config": {key: value for key, value in published.QWEN.items() if key != "model_type"},
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 128,
        "deepstack_visual_indexes": [0],
    },
}
GEMMA = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 32,
        "vocab_size": 256,
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vision_use_head": False,
    },
}


def tree_of(config: Mapping[str, Any]) -> ClassTree:
    """What transformers' classes say, whether or not the family knows."""
    return meta_tree(FAMILIES[config["model_type"]], release_of(config), config)


def content(name: str) -> dict[str, Any]:
    """config.json of a test model, with every key that transformers writes, as its release has it."""
    one = HF_CASES[name]
    written = one.config().to_dict()
    return one.edit(written)


def parameters(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Class and shape of every parameter's module."""
    modules = dict(model.named_modules())
    return {
        name: (type(modules[name.rpartition(".")[0]]).__name__, tuple(value.shape))
        for name, value in model.named_parameters()
    }


NAMES = sorted(
    name for name, one in HF_CASES.items() if {one.config().model_type, content(name)["model_type"]} <= RELEASES.keys()
)


@pytest.mark.parametrize("name", NAMES)
def test_language_model_from_sizes_has_the_parameters_of_the_whole_config(name: str) -> None:
    """All but biases and norms of queries and keys, which are not Linear layers and take no part."""
    config = content(name)
    names = release_of(config)
    fields = {
        key: value for key, value in names.text(config).items() if key not in ("model_type", "quantization_config")
    }
    # In a process that has imported SGLang, transformers' class drops the layers that "-" names.
    if letters := fields.pop("hybrid_override_pattern", None):
        fields["layers_block_type"] = [nemotron_h.WORDS[letter] for letter in letters]
    with torch.device("meta"), mock.patch.dict(hub_kernels._KERNEL_MODULE_MAPPING, NO_KERNELS):
        expected = AutoModel.from_config(
            AutoConfig.for_model(names.model_type or names.text(config)["model_type"], **fields)
        )
    assert matrices(text_model(names, config)) == matrices(expected)


def matrices(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The parameters with two or more axes."""
    return {name: found for name, found in parameters(model).items() if len(found[1]) > 1}


@pytest.mark.parametrize("config", [VL, GEMMA], ids=["qwen3_vl_moe", "gemma3"])
def test_whole_model_holds_the_vision_tower_beside_the_language_model(config: dict[str, Any]) -> None:
    names = release_of(config)
    whole = whole_model(names, config)
    assert whole is not None
    assert matrices(whole.get_submodule("language_model")) == matrices(text_model(names, config))
    with torch.device("meta"):
        expected = AutoModel.from_config(AutoConfig.for_model(**config))
    assert matrices(whole) == matrices(expected)


def test_whole_model_of_a_config_without_vision_is_not_made_up() -> None:
    config = {key: value for key, value in VL.items() if key != "vision_config"}
    assert whole_model(release_of(config), config) is None


class Imports:
    """Writes down what Python is asked to import, and finds none of it."""

    def __init__(self, attempts: list[str]) -> None:
        self.attempts = attempts

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """No module, but a note that it was wanted."""
        self.attempts.append(f"import {name}")


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, Any]], list[str]]:
    """`attempts(config)`: what was fetched, or imported anew, while the class of this config was built."""
    seen: list[str] = []

    def note(what: str, answer: Any = None) -> Callable[..., Any]:
        def noted(*args: Any, **_: Any) -> Any:
            seen.append(f"{what} {args}")
            return answer

        return noted

    def no_request(*_: Any, **__: Any) -> Any:
        seen.append("request")
        raise httpx.ConnectError("no network")

    kernel = SimpleNamespace(flash_attn_func=len, flash_attn_varlen_func=len)
    monkeypatch.setattr(hub_kernels, "get_kernel", note("kernel", kernel))
    monkeypatch.setattr(hub_kernels, "_kernels_available", True, raising=False)  # transformers 5.12
    for module in (hub_kernels, modeling_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda: True, raising=False)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(httpx.Client, "send", no_request)
    for module in (auto_factory, configuration_auto):
        monkeypatch.setattr(module, "get_class_from_dynamic_module", note("dynamic module"))
        monkeypatch.setattr(module, "resolve_trust_remote_code", note("trust", True))

    def build(config: Mapping[str, Any]) -> list[str]:
        names = release_of(config)
        text_model(names, config)
        whole_model(names, config)
        return seen

    for plain in (VL, published.QWEN):
        build(plain)  # imports transformers' modules for good
    seen.clear()
    monkeypatch.setattr(sys, "meta_path", [Imports(seen), *sys.meta_path])
    return build


@pytest.mark.parametrize("where", ["top", "text_config", "vision_config"])
@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_attn_implementation_internal"])
def test_attention_from_the_hub_is_never_fetched(attempts: Callable[..., list[str]], key: str, where: str) -> None:
    for value in ATTENTION:
        assert attempts(with_key(VL, where, key, value)) == []
        assert attempts(with_key(published.QWEN, "top", key, value)) == []


def with_key(config: Mapping[str, Any], where: str, key: str, value: Any) -> dict[str, Any]:
    """The config with one more key, at the top or in a part."""
    if where == "top":
        return {**config, key: value}
    return {**config, where: {**config[where], key: value}}


# Everything by which transformers picks code, a file or a repository in either version that ckptkit runs with.
LOADING: Mapping[str, Sequence[Any]] = {
    "auto_map": (dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "evil/evil--modeling.Model"),),
    "custom_pipelines": ({"text-generation": {"impl": "evil.Pipeline", "pt": ["AutoModel"]}},),
    "_experts_implementation": ("sonicmoe", "deepgemm", "grouped_mm", REPOSITORY),
    "experts_implementation": ("sonicmoe", "deepgemm", REPOSITORY),
    "_experts_implementation_internal": (REPOSITORY,),
    "kernel_config": ({"kernel_mapping": {"RMSNorm": "kernels-community/liger_kernels:LigerRMSNorm"}},),
    "fusion_config": ({"patch_embeddings": True},),
    "quantization_config": (
        {"quant_method": "fp8"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        published.quantization(["lm_head"]),
    ),
    "compression_config": ({"quant_method": "compressed-tensors"},),
    **dict.fromkeys(("base_model_name_or_path", "_name_or_path", "name_or_path", "custom_generate"), ("evil/evil",)),
    **dict.fromkeys(("loss_type", "__class__", "tokenizer_class", "processor_class"), ("evil.Evil",)),
    **dict.fromkeys(("use_kernels", "use_timm_backbone", "use_pretrained_backbone"), (True,)),
    **dict.fromkeys(("is_encoder_decoder", "output_attentions"), (True,)),
    "_commit_hash": ("0123456789abcdef",),
    "transformers_version": ("99.0.0",),
    "backbone": ("resnet50",),
    "backbone_config": ({"model_type": "timm_backbone", "backbone": "resnet50", "use_pretrained_backbone": True},),
    "backbone_kwargs": ({"pretrained": True},),
    "audio_config": ({"model_type": "whisper", "_attn_implementation": REPOSITORY},),
    "model_type": ("timm_wrapper",),
    "sub_configs": ({"text_config": {"_attn_implementation": REPOSITORY}},),
    "attribute_map": ({"hidden_size": "_attn_implementation"}, {"_attn_implementation_internal": "evil"}),
    "architectures": (["EvilForCausalLM"],),
    "generation_config": ({"custom_generate": "evil/evil"},),
    "dtype": ("_dynamo", "hub", "evil"),
    "torch_dtype": ("_inductor", "evil"),
    "rope_parameters": ({"rope_type": REPOSITORY}, {"rope_type": "evil"}),
    "rope_scaling": ({"type": "evil"},),
    "base_model_tp_plan": ({"layers.*": "evil"},),
    "distributed_config": ({"enable_expert_parallel": True},),
    "gguf_file": ("evil.gguf",),
    "adapter_kwargs": ({"_adapter_model_path": "evil/evil"},),
    "_auto_class": ("AutoModel",),
}


@pytest.mark.parametrize("key", LOADING)
def test_no_key_that_picks_code_has_an_effect(attempts: Callable[..., list[str]], key: str) -> None:
    """Wherever it stands, nothing is fetched or imported, and the model is the same as without it."""
    for value in LOADING[key]:
        for where in ("top", "text_config", "vision_config"):
            if (key, where) == ("model_type", "top"):
                continue
            config = with_key(VL, where, key, value)
            assert attempts(config) == []
            assert tree_of(config) == tree_of(VL)
        if key != "model_type":
            assert attempts({**published.QWEN, key: value}) == []


def every_name() -> set[str]:
    """Returns every possible key in transformers' code for configs, models and kernels and in the classes used here."""
    root = Path(transformers.__file__).parent
    names = ("configuration_utils", "modeling_utils", "backbone_utils", "modeling_flash_attention_utils")
    files = [root / f"{name}.py" for name in names]
    for place in ("integrations/*.py", "models/auto/*.py", "generation/config*.py"):
        files += root.glob(place)
    kinds = {(names.model_type or kind).removesuffix("_text") for kind, names in RELEASES.items()} | {"siglip"}
    files += [file for kind in kinds for file in (root / "models" / kind).glob("*.py")]
    return {word for file in files for word in re.findall(r"[A-Za-z_]\w+", file.read_text())}


@pytest.mark.parametrize("config", [VL, GEMMA], ids=["qwen3_vl_moe", "gemma3"])
def test_only_sizes_reach_transformers_whatever_its_version_reads(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every word of the installed transformers as a key, only numbers, switches and known words are passed on."""
    passed: list[Any] = []
    build = AutoConfig.for_model

    def noted(model_type: str, **fields: Any) -> Any:
        passed.append(fields)
        return build(model_type, **fields)

    monkeypatch.setattr(AutoConfig, "for_model", noted)
    tree_of({**config, "clean": True})
    whole_model(release_of(config), config)
    clean, known = list(passed), names_in(passed)
    passed.clear()
    poison = {word: REPOSITORY for word in every_name() if word not in known and word not in ALLOWED}
    assert {
        "_attn_implementation",
        "attn_implementation",
        "auto_map",
        "quantization_config",
        "use_kernels",
    } <= poison.keys()
    poisoned = {
        **poison,
        **config,
        "text_config": {**poison, **config["text_config"]},
        "vision_config": {**poison, **config["vision_config"]},
    }
    tree_of(poisoned)
    whole_model(release_of(poisoned), poisoned)
    assert passed == clean


def names_in(value: Any) -> set[str]:
    """All keys in nested values."""
    if isinstance(value, list):
        return {name for one in value for name in names_in(one)}
    return (
        {name for key, inner in value.items() for name in {key, *names_in(inner)}} if isinstance(value, dict) else set()
    )


def words(text: str) -> list[str]:
    return text.split()


# Keys with checked values, written out: whoever adds one has to think about it here too.
SIZES = words(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "moe_intermediate_size shared_expert_intermediate_size n_shared_experts num_shared_experts n_routed_experts "
    "num_experts num_local_experts num_experts_per_tok first_k_dense_replace decoder_sparse_step q_lora_rank "
    "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim index_n_heads index_topk "
    "index_topk_freq index_skip_topk_offset linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim "
    "linear_num_key_heads linear_num_value_heads full_attention_interval moe_num_experts moe_k moe_num_shared_experts "
    "moe_layer_start_index moe_layer_end_index moe_layer_interval mamba_num_heads mamba_head_dim n_groups "
    "ssm_state_size conv_kernel chunk_size mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv "
    "mamba_expand shared_intermediate_size moe_shared_expert_intermediate_size moe_latent_size global_head_dim "
    "num_global_key_value_heads top_k_experts num_kv_shared_layers hidden_size_per_layer_input "
    "vocab_size_per_layer_input"
)
SWITCHES = ("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp")
VISION_SIZES = words(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_channels image_size patch_size depth "
    "num_heads in_channels spatial_merge_size temporal_patch_size out_hidden_size num_position_embeddings"
)
WORDS = words(
    "hidden_act hidden_activation layer_types mlp_layer_types indexer_types index_topk_pattern mlp_only_layers "
    "mlp_hidden_act layers_block_type hybrid_override_pattern"
)
VISION_WORDS = ("hidden_act", "deepstack_visual_indexes", "vision_use_head")
OVERRIDING = ("per_layer_config",)
ALLOWED = {
    *SIZES,
    *SWITCHES,
    *VISION_SIZES,
    *WORDS,
    *VISION_WORDS,
    *OVERRIDING,
    "mm_tokens_per_image",
    "text_config",
    "vision_config",
    "model_type",
}


@pytest.mark.parametrize("key", [*SIZES, *SWITCHES, *WORDS, *OVERRIDING])
def test_a_value_that_is_no_size_is_refused_by_its_key(key: str) -> None:
    for value in (REPOSITORY, {"": REPOSITORY}, [REPOSITORY], [[1]], -1 if key in SIZES else 7, 1.5, 2**40):
        with pytest.raises(
            CkptkitError, match=rf"transformers cannot build model_type 'qwen3_moe' from config\.json: {key} "
        ) as caught:
            tree_of({**published.QWEN, key: value})
        assert "repair config.json" in str(caught.value.hint)
        with pytest.raises(CkptkitError, match=rf"from config\.json: text_config\.{key} "):
            tree_of(with_key(VL, "text_config", key, value))


@pytest.mark.parametrize("key", [*VISION_SIZES, *VISION_WORDS])
def test_a_value_of_the_vision_tower_that_is_no_size_is_refused_by_its_key(key: str) -> None:
    config = with_key(VL, "vision_config", key, REPOSITORY)
    with pytest.raises(CkptkitError, match=rf"from config\.json: vision_config\.{key} "):
        whole_model(release_of(config), config)


NO_MODEL = (
    {"hidden_size": 2**31 - 1, "vocab_size": 2**31 - 1},
    {"num_attention_heads": 0, "head_dim": None},
    {"num_hidden_layers": None},
)


@pytest.mark.parametrize("sizes", NO_MODEL)
def test_sizes_that_make_no_model_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(CkptkitError, match="transformers cannot build model_type 'qwen2'"):
        tree_of({**published.QWEN, "model_type": "qwen2", **sizes})


def test_which_layers_have_an_indexer_is_read_from_a_pattern() -> None:
    config = content("glm_moe_dsa")
    base = {
        key: value
        for key, value in config.items()
        if not key.startswith(("index_topk_", "index_skip", "indexer_types"))
    }
    layers = base["num_hidden_layers"]
    for pattern in ("F" + "S" * (layers - 1), ["full"] + ["shared"] * (layers - 1)):
        found = {
            name for name in tree_of({**base, "index_topk_pattern": pattern}).linears if name.endswith("indexer.wk")
        }
        assert found == {"model.layers.0.self_attn.indexer.wk"}


def test_the_hub_is_offline_while_a_class_is_built_and_as_before_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def refuse(*_: Any, **__: Any) -> Any:
        seen.append(constants.HF_HUB_OFFLINE)
        raise ValueError("no such thing")

    monkeypatch.setattr(AutoModel, "from_config", refuse)
    for before in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", before)
        with pytest.raises(CkptkitError, match="no such thing"):
            text_model(release_of(published.QWEN), published.QWEN)
        assert constants.HF_HUB_OFFLINE is before
    assert seen == [True, True]


def test_attention_and_experts_are_fixed() -> None:
    model = whole_model(release_of(VL), VL)
    assert model is not None
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            assert (module.config._attn_implementation, module.config._experts_implementation) == ("eager", "eager")


def test_lint_of_a_config_with_a_kernel_fetches_nothing(tmp_path: Path, attempts: Callable[..., list[str]]) -> None:
    config = {**published.QWEN, "_attn_implementation": REPOSITORY, "auto_map": {"AutoModel": "evil.Evil"}}
    seen = attempts(config)
    (tmp_path / "evil.py").write_text("raise SystemExit('run')\n")
    assert lint(published.write(tmp_path, config, published.QWEN_LIST)).packed
    assert seen == []
