"""Reports about conversions: what is left out, put under other names, or written with wrong values or dtypes."""

import re
import shutil

import torch
from mutations.edits import edit_common, edit_json, names, replace, tensor
from mutations.hf_tensors import CHANGES, experts_of_rank_0
from mutations.torch_dist import FC1

from ckptkit.app.api import convert
from reports.changes import (
    as_release,
    changed,
    config,
    number_files,
    on_checkpoint,
    renamed,
    settings,
    stored,
    without_tensors,
)
from reports.quantized import deepseek_v4
from reports.report import SOURCE, Case

EXPERT_FC1 = "decoder.layers.5.mlp.experts.experts.linear_fc1.weight"

MTP_EXPERTS = "mtp.layers.0.mlp.experts"

_DRAFT = "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight"

# Norms of a class that multiplies by 1 + w.
_ONE_MORE = r"^(?!.*visual).*(layernorm|[qk]_norm|language_model\.norm|mtp\..*norm\w*)\.weight"
# What transformers does not save of Gemma 4: layers that use the keys of another have none.
_SHARED = r"language_model\.layers\.(7|8|9|10|11)\.self_attn\.(k_proj|v_proj|k_norm)"
_PROJECTIONS = ("gate", "up", "down")


def _random(found):
    return torch.randn(found.shape).mul(0.02).to(found.dtype)


def _release(work, change):
    release = work / SOURCE
    target = release.resolve()
    release.unlink()
    shutil.copytree(target, release)
    change(release)
    return release


def _draft_experts_packed(path):
    """The experts of the MTP layer in one tensor each, as Qwen3.6 has them."""
    old, stacks = names(path, f"{MTP_EXPERTS}."), {}
    for part in ("gate", "up", "down"):
        own = sorted((name for name in old if f".{part}_proj." in name), key=lambda name: int(name.split(".")[5]))
        stacks[part] = torch.stack([tensor(path, name) for name in own])
    new = {f"{MTP_EXPERTS}.gate_up_proj": torch.cat([stacks["gate"], stacks["up"]], 1)}
    replace(path, new | {f"{MTP_EXPERTS}.down_proj": stacks["down"]}, old)
    number_files(path)


def _from_packed_drafts(work):
    release = _release(work, _draft_experts_packed)
    convert(release, work / "CKPT")


def _yarn(content):
    content["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def _from_yarn(work):
    release = _release(work, lambda path: edit_json(path / "config.json", _yarn))
    convert(release, work / "CKPT")


def _own_output_layer(work):
    """The side files are still the release's."""
    made, path = work / "made", work / "CKPT"
    shutil.copytree((work / SOURCE).resolve(), made)
    replace(made, {"lm_head.weight": _random(tensor(made, "model.embed_tokens.weight"))})
    edit_json(made / "config.json", lambda content: content.update(tie_word_embeddings=False))
    shutil.rmtree(path)
    convert(made, path)
    shutil.rmtree(path / "hf")
    shutil.copytree((work / SOURCE).resolve(), path / "hf")


def _kept_in_float32(work):
    """Decay and norms of the linear attention in float32, as the release has them."""
    shutil.copytree((work / SOURCE).resolve(), work / "CKPT")
    changed(r"linear_attn\..*(A_log|norm\.weight)$", lambda found: found.float() * (1 + 2**-12))(work)
    as_release(work)


def _types(count):
    types = ["full_attention"] * 3 + ["minimax_m3_sparse"] * count
    return config(lambda content: content["text_config"].update(layer_types=types))


def _down_turned(work):
    for layer in range(12):
        key = f"decoder.layers.{layer}.mlp.experts.experts.linear_fc2.weight"
        stored(key, lambda found: found.mT.contiguous(), 12)(work)


def _lora(name):
    """A name as a model under an adapter saves it."""
    module = any(part in name for part in ("_proj.weight", "down_proj"))
    return "base_model.model." + (name.replace(".weight", ".base_layer.weight") if module else name)


def _as_transformers_saves(path):
    """GLM-5.3-Flash under the names of transformers' modules, its experts and convolutions joined."""
    new, old = {}, list[str]()
    for name in names(path, ""):
        other = re.sub(r"hc_(attn|ffn)_(fn|base|scale)$", r"\1_hc.\2", name)
        other = re.sub(r"self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)", r"self_attn.forget_gate.\1", other)
        if other != name:
            new[other] = tensor(path, name)
            old.append(name)
    for name in names(path, ".experts.0.down_proj.weight"):
        block = name.removesuffix(".0.down_proj.weight")
        own = [one for one in names(path, f"{block}.") if one.endswith(".down_proj.weight")]
        experts = [f"{block}.{number}" for number in range(len(own))]
        gate, up, down = ([tensor(path, f"{one}.{part}_proj.weight") for one in experts] for part in _PROJECTIONS)
        new[f"{block}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        new[f"{block}.down_proj"] = torch.stack(down)
        old += names(path, f"{block}.")
    for name in names(path, ".q_conv1d.weight"):
        three = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        new[name.replace("q_conv1d", "conv1d")] = torch.cat([tensor(path, one) for one in three])
        old += three
    replace(path, new, old)
    number_files(path)


def _as_the_trainer_names(path):
    """Gemma 4's router and experts under a trainer's names, experts transposed, their scales taken into them."""
    new, old = {}, names(path, "router.per_expert_scale")
    for name in names(path, ".router.") + names(path, ".experts."):
        if name not in old:
            other = name.replace(".router.", ".moe.gate.").replace(".experts.", ".moe.experts.")
            other = other.replace("gate_up_proj", "gate_and_up_projs").replace("down_proj", "down_projs")
            new[other] = tensor(path, name).mT if ".experts." in name else tensor(path, name)
            old.append(name)
    replace(path, new, old)
    number_files(path)


def _experts_apart(path):
    """Granite's experts one by one, as a quantizer saves them."""
    new, old = {}, list[str]()
    for name in names(path, "block_sparse_moe.input_linear.weight"):
        block = name.removesuffix(".input_linear.weight")
        output = f"{block}.output_linear.weight"
        for number, (both, down) in enumerate(zip(tensor(path, name), tensor(path, output), strict=True)):
            parts = zip(_PROJECTIONS, (*both.chunk(2), down), strict=True)
            new |= {f"{block}.experts.{number}.{part}_proj.weight": one for part, one in parts}
        old += [name, output]
    replace(path, new, old)
    number_files(path)


CASES = {
    "Megatron-Bridge#1272": Case(
        "qwen2-untied/hf",
        ("self_attn.q_proj.weight", "in no shard"),
        without_tensors(*(f"self_attn.{part}_proj" for part in "qkvo")),
    ),
    "Megatron-Bridge#4107": Case(
        "nemotron_h/hf", ("backbone.norm_f.weight", "in no shard"), without_tensors("backbone.norm_f")
    ),
    "NeMo-RL#2774": Case("nemotron_h-latent/hf", ("mtp.layers.0.eh_proj.weight", "missing"), without_tensors("mtp.")),
    "vime#388": Case(
        "gemma4/hf",
        ("{0..2} and {3..5} and {6..8} and {9..11}", "expert parallel rank"),
        changed(r"\.experts\.", lambda whole: torch.cat([whole[: len(whole) // 4]] * 4)),
    ),
    "llm-compressor#2735": Case(
        "deepseek_v4/hf", ("mtp.0.attn.wkv.weight", "missing"), without_tensors("mtp."), deepseek_v4
    ),
    "slime#1799": Case("qwen3_moe/hf", (".mlp.experts.",), on_checkpoint(lambda path: experts_of_rank_0(path, ""))),
    "ISEEKYAN/Megatron-LM#81": Case(
        "glm4_moe/hf",
        ("e_score_correction_bias",),
        changed("e_score_correction_bias", lambda found: found.to(torch.bfloat16)),
    ),
    "Megatron-LM#5844": Case(
        "mixtral/megatron",
        ("experts",),
        stored(EXPERT_FC1, lambda found: torch.randn(found.shape).mul(0.02).to(found.dtype), experts=12),
    ),
    "Megatron-Bridge#5366": Case(
        "qwen2-untied/megatron",
        ("model.layers.3.mlp.gate_proj.weight",),
        stored(FC1, lambda found: CHANGES["rows_by_turns"](found).reshape(found.shape)),
    ),
    "Megatron-Bridge#5375": Case(
        "qwen2-untied/hf",
        ("embed_tokens.weight",),
        changed("embed_tokens.weight|lm_head.weight", lambda found: torch.cat([found, found[:32] * 0])),
    ),
    "training-gym#100": Case(
        "qwen3_5_moe/fused",
        ("mlp.experts.down_proj",),
        changed("layers.3.mlp.experts.down_proj", lambda found: found.transpose(1, 2)),
    ),
    "slime#1840": Case(
        "gpt_oss/hf",
        ("mlp.experts.down_proj",),
        changed("mlp.experts.down_proj", lambda found: found.transpose(1, 2) if found.dim() == 3 else found),
    ),
    "NeMo-RL#2249": Case("gpt_oss/hf", ("model.layers.",), without_tensors("model.layers.10.", "model.layers.11.")),
    "Megatron-Bridge#4960": Case("glm_moe_dsa/hf", ("model.layers.12.",), without_tensors("model.layers.12.")),
    "Model-Optimizer#2427": Case("deepseek_v3/hf", ("model.layers.12.",), without_tensors("model.layers.12.")),
    "Megatron-Bridge#1883": Case(
        "deepseek_v3/hf",
        ("no weights",),
        on_checkpoint(lambda path: [file.unlink() for file in path.glob("*.safetensors*")]),
    ),
    "Megatron-Bridge#4657": Case(
        "kimi_k2/megatron",
        ("e_score_correction_bias",),
        lambda work: [
            stored(f"decoder.layers.{layer}.mlp.router.expert_bias", torch.zeros_like)(work) for layer in range(1, 12)
        ],
    ),
    "Megatron-Bridge#3740": Case("qwen3_5_moe/", (MTP_EXPERTS,), stored(_DRAFT, _random, 12), _from_packed_drafts),
    "Megatron-Bridge#5334": Case(
        "step3p5/hf", ("shared_head.output.weight",), without_tensors("shared_head.output"), settings(eos_token_id=3)
    ),
    "Model-Optimizer#1305": Case(
        "glm4_moe/hf", ("e_score_correction_bias",), without_tensors("e_score_correction_bias")
    ),
    "Megatron-Bridge#3077": Case(
        "qwen2-untied/",
        ("rotary_base",),
        on_checkpoint(lambda path: edit_common(path, lambda content: setattr(content["args"], "rotary_base", 10000))),
        _from_yarn,
    ),
    "swiss-ai/Megatron-LM#106": Case("qwen3-untied/hf", ("q_norm.weight",), without_tensors("q_norm", "k_norm")),
    "ms-swift#9412": Case(
        "qwen3_5/",
        ("linear_attn.A_log",),
        changed("linear_attn.A_log", lambda found: found.to(torch.bfloat16)),
        _kept_in_float32,
    ),
    "mlx-vlm#2114": Case(
        "qwen3_5/hf",
        ("input_layernorm.weight", "each element is 1 more than the source's"),
        changed(_ONE_MORE, lambda found: found + 1),
    ),
    "vllm#54917": Case("gemma4-small-as-released/hf", prepare=without_tensors(_SHARED)),
    "auto-round#1984": Case("minimax_m3_vl/hf", ("layer_types",), _types(4), _types(9)),
    "unsloth#8448": Case(
        "qwen2-untied/hf",
        prepare=on_checkpoint(
            lambda path: edit_json(
                path / "tokenizer_config.json", lambda content: content.update(tokenizer_class="TokenizersBackend")
            )
        ),
    ),
    "Megatron-Bridge#3743": Case("gpt_oss-square/megatron", ("down_proj.weight", "144"), _down_turned),
    "slime#345": Case("qwen2/megatron", ("untie_embeddings_and_output_weights = True",), _own_output_layer),
    "sglang#37679": Case(
        "granitemoehybrid/hf",
        ("block_sparse_moe.experts.{0..11}.gate_proj.weight", "drops"),
        on_checkpoint(_experts_apart),
    ),
    "transformers#48075": Case(
        "nemotron_h/hf",
        ("backbone.embedding.weight", "promise"),
        renamed(lambda name: name.replace("backbone.embeddings.", "backbone.embedding.")),
    ),
    "sglang#38616": Case(
        "glm5_next/hf", ("self_attn.forget_gate.f_a_proj.weight", "promise"), on_checkpoint(_as_transformers_saves)
    ),
    "Automodel#1761": Case(
        "gemma4/hf", ("router.per_expert_scale", "transformers fills"), on_checkpoint(_as_the_trainer_names)
    ),
    "verl#4761": Case("qwen2-untied/hf", ("base_model.model.",), renamed(_lora)),
    "prime-rl#2640": Case(
        "qwen3_5/hf",
        ("model.language_model.language_model.language_model.", "repeat"),
        renamed(
            lambda name: name.replace("model.language_model.", "model.language_model.language_model.language_model.")
        ),
    ),
    "llm-compressor#2752": Case(
        "qwen3_5_text-tied-tiles/int4",
        ("model.language_model.*", "the multimodal class"),
        renamed(lambda name: name.replace("model.", "model.language_model.", 1)),
    ),
    "vllm#50355": Case(
        "qwen3_5_text-tied/hf",
        ("model.language_model.*", "the multimodal class"),
        renamed(lambda name: name.replace("model.", "model.language_model.", 1)),
    ),
    "transformers#45357": Case(
        "qwen3_5/hf",
        ("model.language_model.visual.blocks",),
        renamed(lambda name: name.replace("model.visual.", "model.language_model.visual.")),
    ),
}
