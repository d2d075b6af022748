"""Which tensors are quantized and which ignore lists are refused, with transformers' classes for each family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from support import models
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from quant.formats.scheme import QuantScheme, quantization_config
from quant.selection.decision import default_ignore, packed_modules, resolve

FAMILIES = sorted(models.configs())
NAMED_ALWAYS = ("lm_head", "model.embed_tokens")


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return dict(models.configs()[family].to_dict()) | changes


@pytest.fixture(scope="module")
def specs() -> Mapping[str, dict[str, TensorSpec]]:
    """Tensors of each family as a release stores them, one an expert: taken from transformers, unfused here by hand."""
    return {family: release_specs(models.configs()[family]) for family in FAMILIES}


def release_specs(config: Any) -> dict[str, TensorSpec]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            prefix, _, kind = name.rpartition(".")
            for expert in range(tensor.shape[0]):
                for projection in ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",):
                    shapes[f"{prefix}.{expert}.{projection}.weight"] = (
                        tensor.shape[1] // (1 + (kind == "gate_up_proj")),
                        tensor.shape[2],
                    )
        elif not (name == "lm_head.weight" and config.tie_word_embeddings):
            shapes[name] = tuple(tensor.shape)
    return {name: TensorSpec(name, shape, "bfloat16") for name, shape in shapes.items()}


def scheme(*ignore: str, group_size: int = 32) -> QuantScheme:
    return QuantScheme(group_size, "qmax7", ignore)


def test_resolve_gives_the_reason_for_each_tensor(specs: Mapping[str, dict[str, TensorSpec]]) -> None:
    config = config_of("glm4_moe")
    verdicts = resolve(specs["glm4_moe"], config, scheme(*default_ignore(config), "re:.*self_attn.*"))
    reasons = {
        "model.layers.2.mlp.gate.weight": "Glm4MoeTopkRouter is not a Linear",
        "model.layers.2.mlp.gate.e_score_correction_bias": "no weight matrix",
        "model.embed_tokens.weight": "Embedding is not a Linear",
        "lm_head.weight": "output embedding",
        "model.norm.weight": "no weight matrix",
        "model.layers.0.self_attn.q_proj.bias": "no weight matrix",
        "model.layers.0.self_attn.q_proj.weight": "ignored by 're:.*self_attn.*'",
        "model.layers.11.mlp.experts.11.down_proj.weight": "Linear",
        "model.layers.11.mlp.shared_experts.down_proj.weight": "Linear",
    }
    assert {name: verdicts[name].reason for name in reasons} == reasons


def test_default_ignore_of_each_family_lists_what_stays_unpacked() -> None:
    assert default_ignore(config_of("qwen2-tied")) == ("model.embed_tokens", "lm_head")
    assert default_ignore(config_of("glm4_moe")) == ("model.embed_tokens", r"re:.*\.mlp\.gate(\.weight)?$", "lm_head")
    # Qwen2-MoE weighs its shared expert with a Linear of one output, which SGLang never packs.
    shared = default_ignore(Qwen2MoeConfig(num_hidden_layers=2, num_experts=4).to_dict())
    assert shared == (
        "model.embed_tokens",
        r"re:.*\.mlp\.gate(\.weight)?$",
        r"re:.*\.mlp\.shared_expert_gate(\.weight)?$",
        "lm_head",
    )


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen2-untied"])
def test_transformers_quantizes_the_same_modules(specs: Mapping[str, dict[str, TensorSpec]], family: str) -> None:
    """compressed-tensors walks the real model as transformers starts it. (It sees no modules in fused experts.)"""
    config = config_of(family)
    ignore = (*default_ignore(config), r"re:model\.layers\.3\..*")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.configs()[family])
    apply_quantization_config(
        model,
        QuantizationConfig.model_validate(quantization_config(scheme(*ignore))),
        run_compressed=True,
        show_progress=False,
    )
    applied = {
        f"{name}.weight" for name, module in model.named_modules() if getattr(module, "quantization_scheme", None)
    }
    assert applied == {
        name for name, verdict in resolve(specs[family], config, scheme(*ignore)).items() if verdict.quantize
    }


REFUSED = [
    # family, entries, tensor and reader in the message, portable spelling in the hint
    (
        "glm4_moe",
        ("re:.*mlp.gate$",),
        r"slime would pack model\.layers\.\{2\.\.11\}\.mlp\.gate\.weight",
        r"re:.*mlp.gate(\.weight)?$",
    ),
    (
        "qwen3_moe",
        ("re:.*gate$",),
        r"slime would pack model\.layers\.\{0\.\.11\}\.mlp\.gate\.weight",
        r"re:.*gate(\.weight)?$",
    ),
    (
        "glm4_moe",
        (),
        r"slime would pack model\.layers\.\{2\.\.11\}\.mlp\.gate\.weight because no entry",
        r"re:.*\.mlp\.gate(\.weight)?$",
    ),
    (
        "qwen2-untied",
        ("model.layers.1",),
        r"SGLang 0\.5\.16 and slime would leave unpacked .*model\.layers\.\{1,10\.\.11\}\.mlp",
        r"re:model\.layers\.1(\..*)?$",
    ),
    (
        "qwen2-untied",
        ("re:.*o_proj$",),
        r"slime would pack model\.layers\.\{0\.\.11\}\.self_attn\.o_proj",
        r"re:.*o_proj(\.weight)?$",
    ),
    (
        "qwen2-untied",
        (r"re:.*self_attn\.o_proj\..*",),
        r"slime would leave unpacked .*o_proj\.weight",
        r"re:.*self_attn\.o_proj(\.weight)?$",
    ),
    ("qwen2-untied", (r"re:.*mlp\.gate\.*",), r"SGLang 0\.5\.16 and SGLang 0\.5\.23 would .*mlp\.up_proj", None),
    (
        "qwen2-untied",
        ("self_attn.o_proj",),
        r"would leave unpacked model\.layers\.\{0\.\.11\}\.self_attn\.o_proj",
        r"re:.*\.self_attn\.o_proj(\..*)?$",
    ),
    (
        "qwen2-untied",
        (r"re:.*\.self_attn\.q_proj(\.weight)?$",),
        r"SGLang 0\.5\.16 and SGLang 0\.5\.23 would pack model\.layers\.\{0\.\.11\}\.self_attn\.q_proj",
        r"re:.*\.self_attn\.(q|k|v|qkv)_proj(\.weight)?$",
    ),
    (
        "qwen2-untied",
        tuple(f"model.layers.{layer}.mlp.{name}_proj" for layer in range(12) for name in ("gate", "up")),
        r"SGLang 0\.5\.16 and SGLang 0\.5\.23 would pack model\.layers\.\{0\.\.11\}\.mlp\.gate_proj",
        None,
    ),
    (
        "qwen3_moe",
        (r"re:.*\.mlp\.gate(\.weight)?$", r"re:.*\.experts\.(5|6)\..*"),
        r"SGLang 0\.5\.16 and SGLang 0\.5\.23 would pack "
        r".*model\.layers\.\{0\.\.11\}\.mlp\.experts\.\{5\.\.6\}\.down_proj",
        r"re:.*\.experts\..*",
    ),
    (
        "qwen3_moe",
        (r"re:.*\.mlp\.gate(\.weight)?$", "model.layers.3.mlp.experts.1"),
        r"slime would leave unpacked .*model\.layers\.3\.mlp\.experts\.\{1,10\.\.11\}\.down_proj",
        r"re:model\.layers\.3\.mlp\.experts\..*",
    ),
    # Cutting this one behind "experts" leaves a bracket open.
    (
        "qwen3_moe",
        (r"re:.*\.mlp\.gate(\.weight)?$", r"re:.*(experts\.5|nothing)\..*"),
        r"would pack .*\.experts\.5\.down_proj",
        None,
    ),
    (
        "qwen2-untied",
        ("Linear",),
        r"vLLM 0\.26 and vLLM 0\.33 and SGLang 0\.5\.16 and SGLang 0\.5\.23 and slime would pack",
        None,
    ),
]


@pytest.mark.parametrize(("family", "entries", "message", "spelling"), REFUSED, ids=lambda value: str(value)[:40])
def test_refuses_what_readers_take_differently(
    specs: Mapping[str, dict[str, TensorSpec]],
    family: str,
    entries: tuple[str, ...],
    message: str,
    spelling: str | None,
) -> None:
    config = config_of(family)
    with pytest.raises(CkptkitError, match=message) as caught:
        resolve(specs[family], config, scheme(*NAMED_ALWAYS, *entries))
    hint = caught.value.hint or ""
    if spelling is None:
        return
    assert f"'{spelling}'" in hint
    followed = [*NAMED_ALWAYS, *(entry for entry in entries if f"instead of '{entry}'" not in hint), spelling]
    resolve(specs[family], config, scheme(*followed))  # raises nothing: every reader agrees


def test_advice_is_given_for_a_few_entries_at_a_time(specs: Mapping[str, dict[str, TensorSpec]]) -> None:
    shards = tuple(f"model.layers.{layer}.self_attn.q_proj" for layer in range(12))
    with pytest.raises(CkptkitError, match=r"would pack model\.layers\.\{0\.\.11\}\.self_attn\.q_proj") as caught:
        resolve(specs["qwen2-untied"], config_of("qwen2-untied"), scheme(*NAMED_ALWAYS, *shards))
    hint = caught.value.hint or ""
    assert hint.count("instead of") == 3
    assert hint.endswith("do the same for 9 more entries")


def test_qwen3_moe_may_name_all_shards_of_a_fused_layer(specs: Mapping[str, dict[str, TensorSpec]]) -> None:
    """Its class in SGLang takes qkv_proj apart; that of Qwen2 does not."""
    shards = tuple(f"model.layers.3.self_attn.{name}_proj" for name in "qkv")
    for family, accepted in (("qwen3_moe", True), ("qwen2-untied", False)):
        config = config_of(family)
        ignore = scheme(*default_ignore(config), *shards)
        if accepted:
            kept = [
                name for name, verdict in resolve(specs[family], config, ignore).items() if "ignored" in verdict.reason
            ]
            assert sorted(kept) == sorted(f"{shard}.weight" for shard in shards)
        else:
            with pytest.raises(CkptkitError, match=r"would pack model\.layers\.3\.self_attn\.k_proj"):
                resolve(specs[family], config, ignore)


def test_the_output_embedding_must_be_named(specs: Mapping[str, dict[str, TensorSpec]]) -> None:
    with pytest.raises(
        CkptkitError, match=r"transformers and slime would pack lm_head\.weight because no entry"
    ) as caught:
        resolve(specs["qwen2-untied"], config_of("qwen2-untied"), scheme("model.embed_tokens"))
    assert "add 'lm_head'" in str(caught.value)


def test_a_harmless_addition_is_accepted(specs: Mapping[str, dict[str, TensorSpec]]) -> None:
    config = config_of("glm4_moe")
    plain = resolve(specs["glm4_moe"], config, scheme(*default_ignore(config)))
    for entry in ("re:.*mlp.gate$", r"re:.*mlp\.gate\..*", "re:.*not_there.*"):
        assert resolve(specs["glm4_moe"], config, scheme(*default_ignore(config), entry)) == plain


def test_a_tensor_outside_the_model_is_kept_only_when_named(specs: Mapping[str, dict[str, TensorSpec]]) -> None:
    config = config_of("qwen2-untied")
    more = specs["qwen2-untied"] | {"extra.proj.weight": TensorSpec("extra.proj.weight", (64, 64), "bfloat16")}
    with pytest.raises(CkptkitError, match=r"slime would pack extra\.proj\.weight because no entry covers it"):
        resolve(more, config, scheme(*default_ignore(config)))
    assert (
        resolve(more, config, scheme(*default_ignore(config), "extra.proj"))["extra.proj.weight"].reason
        == "not a module of the model"
    )


def test_draft_layers_stay_as_they_are() -> None:
    """GLM-4.5 stores its draft layer as layer number num_hidden_layers; SGLang builds it as model.decoder."""
    config = config_of("glm4_moe", num_nextn_predict_layers=1)
    ignore = default_ignore(config)
    assert ignore[-1] == r"re:model\.(layers\.12|decoder)\..*"
    names = ["eh_proj", "self_attn.q_proj", "mlp.experts.0.gate_proj", "mlp.gate", "shared_head.head"]
    draft = {
        name: TensorSpec(name, (64, 128), "bfloat16") for name in (f"model.layers.12.{name}.weight" for name in names)
    }
    specs = release_specs(models.configs()["glm4_moe"]) | draft
    verdicts = resolve(specs, config, scheme(*ignore))
    assert {verdicts[name].reason for name in draft} == {"draft layer"}
    with pytest.raises(
        CkptkitError,
        match=r"\n  vLLM 0\.26 and vLLM 0\.33 and SGLang 0\.5\.16 and SGLang 0\.5\.23 would pack "
        r"model\.layers\.12\.self_attn\.q_proj",
    ) as caught:
        resolve(specs, config, scheme(*ignore[:-1]))
    # SGLang's eh_proj, router and head of the draft layer are none that it quantizes.
    assert "slime would pack model.layers.12.eh_proj.weight" in str(caught.value)
    assert f"add '{ignore[-1]}'" in str(caught.value)
    # Naming the layer as the checkpoint does is not enough for SGLang.
    with pytest.raises(
        CkptkitError, match=r"\n  SGLang 0\.5\.16 and SGLang 0\.5\.23 would pack model\.layers\.12\.self_attn"
    ):
        resolve(specs, config, scheme(*ignore[:-1], r"re:model\.layers\.12\..*"))


def test_groups_must_divide(specs: Mapping[str, dict[str, TensorSpec]]) -> None:
    config = config_of("glm4_moe")
    with pytest.raises(
        CkptkitError,
        match=r"groups of 128 do not divide the 96, 288, 320 input features of "
        r"model\.layers\.\{0\.\.11\}\.self_attn\.o_proj",
    ) as caught:
        resolve(specs["glm4_moe"], config, scheme(*default_ignore(config), group_size=128))
    hint = caught.value.hint or ""
    assert "use --group-size 32" in hint
    entries = re.findall(r"--ignore '([^']+)'", hint)
    assert r"re:.*\.mlp\.experts\..*" in entries
    verdicts = resolve(specs["glm4_moe"], config, scheme(*default_ignore(config), *entries, group_size=128))
    assert verdicts["model.layers.0.self_attn.q_proj.weight"].quantize
    assert not verdicts["model.layers.3.mlp.experts.5.gate_proj.weight"].quantize


@pytest.mark.parametrize(("shape", "dtype"), [((64, 128), "float8_e4m3fn"), ((2, 64, 128), "bfloat16")])
def test_only_float_matrices_can_be_quantized(
    specs: Mapping[str, dict[str, TensorSpec]], shape: tuple[int, ...], dtype: str
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    config = config_of("qwen2-untied")
    with pytest.raises(CkptkitError, match=r"layers\.0\.self_attn\.q_proj\.weight .* cannot be quantized"):
        resolve(specs["qwen2-untied"] | {name: TensorSpec(name, shape, dtype)}, config, scheme(*default_ignore(config)))


def test_an_ignore_list_without_the_head_promises_a_packed_head(specs: Mapping[str, dict[str, TensorSpec]]) -> None:
    for family, promised in (("qwen2-untied", True), ("qwen2-tied", False)):
        finished = config_of(family) | {"quantization_config": quantization_config(scheme("model.embed_tokens"))}
        assert ("lm_head" in packed_modules(specs[family], finished)) is promised
