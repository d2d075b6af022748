"""Reports about LoRA adapters, merges of them, and deltas: what is left out, named or scaled otherwise, or lost."""

import json
import re
import shutil

import torch
from mutations.edits import edit_config, edit_json, names, replace, tensor
from safetensors.torch import load_file, save_file
from support.deltas import publish_chain, version_at

from ckptkit.app.api import convert, quantize
from ckptkit.quant.formats.scheme import QuantScheme
from reports.changes import on_checkpoint, without_tensors
from reports.report import SOURCE, Case

VERIFY = "ckptkit verify CKPT"
WEIGHTS, CONFIG, PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
RANK = 4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
_INT4 = QuantScheme(32, "qmax7")


def save(path, factors, targets=ATTENTION, **settings):
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    save_file({f"{PREFIX}{name}.weight": one.contiguous() for name, one in factors.items()}, path / WEIGHTS)
    content = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": [*targets]}
    (path / CONFIG).write_text(json.dumps(content | {"base_model_name_or_path": SOURCE} | settings))


def edit_factors(path, change):
    save_file(dict(change(load_file(path / WEIGHTS))), path / WEIGHTS)


def _random(*shape):
    return torch.randn(shape) * 0.02


def pairs(release, *leaves):
    """A pair for each projection of these names in the layers of the language model, outside of experts."""
    torch.manual_seed(5)
    factors = {}
    for name in names(release, "_proj.weight"):
        module = name.removesuffix(".weight")
        if module.endswith(leaves) and not re.search(r"\.experts\.|visual|tower|^mtp\.", name):
            rows, columns = tensor(release, name).shape
            factors[f"{module}.lora_A"], factors[f"{module}.lora_B"] = _random(RANK, columns), _random(rows, RANK)
    return factors


def blocks_of(release):
    """The blocks of experts, one by one or fused: how many, their inner and their hidden size."""
    blocks = {}
    for name in names(release, ".experts."):
        if match := re.fullmatch(r"(.+\.experts)\.(0\.(gate_proj|w1)\.weight|gate_up_proj)", name):
            shape = tuple(tensor(release, name).shape)
            if match[3] is None:
                blocks[match[1]] = (shape[0], shape[1] // 2, shape[2])
            else:
                blocks[match[1]] = (
                    sum(one.endswith(f".{match[3]}.weight") for one in names(release, match[1])),
                    *shape,
                )
    return blocks


def expert_pairs(release, rank=RANK):
    """Experts of a layer in one pair, of this rank each, as PEFT has them for a tensor [experts, rows, columns]."""
    torch.manual_seed(5)
    factors = {}
    blocks = {block: sizes for block, sizes in blocks_of(release).items() if not block.startswith("mtp.")}
    for block, (experts, inner, hidden) in blocks.items():
        factors[f"{block}.base_layer.lora_A"] = _random(experts * rank, hidden)
        factors[f"{block}.base_layer.lora_B"] = _random(2 * inner, rank * experts)
        factors[f"{block}.lora_A"] = _random(experts * rank, inner)
        factors[f"{block}.lora_B"] = _random(hidden, rank * experts)
    return factors


def _adapter(*leaves, **settings):
    chosen = leaves or ATTENTION
    return lambda work: save(work / "CKPT", pairs(work / SOURCE, *chosen), chosen, **settings)


def _experts(rank=RANK):
    return lambda work: save(work / "CKPT", expert_pairs(work / SOURCE, rank), [], target_parameters=PARAMETERS)


def merged(adapter, scheme=None):
    """The adapter, and the release with it merged, quantized afterwards."""

    def prepare(work):
        adapter(work)
        (work / "CKPT").rename(work / "ADAPTER")
        convert((work / SOURCE).resolve(), work / "CKPT", merge=work / "ADAPTER", quantize=scheme)

    return prepare


def _shared_outer(work):
    """One A for gate and up of all experts and one B for down, as Megatron-Bridge exports and SGLang reads them."""
    torch.manual_seed(5)
    factors = {}
    for block, (experts, inner, hidden) in blocks_of(work / SOURCE).items():
        factors[f"{block}.gate_up_proj.lora_A"] = _random(1, RANK, hidden)
        factors[f"{block}.gate_up_proj.lora_B"] = _random(experts, 2 * inner, RANK)
        factors[f"{block}.down_proj.lora_A"] = _random(experts, RANK, inner)
        factors[f"{block}.down_proj.lora_B"] = _random(1, hidden, RANK)
    save(work / "CKPT", factors, ("gate_up_proj", "down_proj"))


def _without_shared(path):
    """What PEFT leaves that knows no module of the shared factors' names."""
    edit_factors(path, lambda factors: {name: one for name, one in factors.items() if one.shape[0] != 1})


def _named(new_name):
    return on_checkpoint(
        lambda path: edit_factors(path, lambda factors: {new_name(name): one for name, one in factors.items()})
    )


def _trainers_name(name):
    """What is left of a trainer's own names after two of five rules."""
    name = re.sub(r"mixer\.(in|out)_proj", r"mamba.\1_proj", name.replace("backbone.", "model."))
    return name.replace("mixer.shared_experts", "mixer.shared_expert")


def _other_side(name):
    return name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A")


def _turned(path):
    """Pairs of experts as PEFT 0.18 has them: the inputs of a tensor [experts, inputs, outputs] are its rows."""
    torch.manual_seed(5)
    edit_factors(path, lambda found: {name: _random(*reversed(found[_other_side(name)].shape)) for name in found})


def _exchanged(path):
    """Factors as of a tensor [experts, columns, rows]: A has the outputs, B the inputs."""
    edit_factors(path, lambda found: {name: found[_other_side(name)].T.contiguous() for name in found})


def _the_base(work):
    shutil.rmtree(work / "CKPT")
    shutil.copytree((work / SOURCE).resolve(), work / "CKPT")


def _base_quantized(work):
    shutil.rmtree(work / "CKPT")
    quantize((work / SOURCE).resolve(), work / "CKPT", _INT4)


def _linear_attention(*parts):
    """Pairs of the linear attention under these names, each with so many rows; 0: all of in_proj_qkv."""

    def make(work):
        torch.manual_seed(5)
        factors = {}
        for name in names(work / SOURCE, "linear_attn.in_proj_qkv.weight"):
            rows, columns = tensor(work / SOURCE, name).shape
            for part, own in parts:
                module = name.replace("in_proj_qkv.weight", part)
                factors[f"{module}.lora_A"] = _random(RANK, columns)
                factors[f"{module}.lora_B"] = _random(own or rows, RANK)
        save(work / "CKPT", factors, [part for part, _ in parts])

    return make


def _base_experts(work):
    replace(work / "CKPT", {name: tensor(work / SOURCE, name) for name in names(work / SOURCE, ".experts.")})


def _most_fell_back(work):
    found = [name for name in names(work / SOURCE, ".experts.") if not re.search(r"layers\.0\.|per_expert", name)]
    replace(work / "CKPT", {name: tensor(work / SOURCE, name) for name in found})


def _published(work):
    publish_chain(work / "DELTAS", (work / SOURCE).resolve(), ("xor",) * 3)
    convert(work / "DELTAS", work / "CKPT", hf=(work / SOURCE).resolve())


def _missed_the_last(work):
    """The engine could not apply the last delta, and said so to nobody."""
    shutil.rmtree(work / "CKPT")
    shutil.copytree(work / "DELTAS", work / "EARLIER")
    shutil.rmtree(version_at(work / "EARLIER", 3))
    convert(work / "EARLIER", work / "CKPT", hf=(work / SOURCE).resolve())


def _chain(work):
    publish_chain(work / "CKPT", (work / SOURCE).resolve(), ("xor",) * 3)


def _scaled(factor):
    """What was added is so many times what the adapter's settings say."""

    def damage(work):
        new = {}
        for name in names(work / SOURCE, "self_attn."):
            here, there = tensor(work / "CKPT", name), tensor(work / SOURCE, name)
            new[name] = (there.float() + factor * (here.float() - there.float())).bfloat16()
        replace(work / "CKPT", new)

    return damage


def _with_adapter_beside(work):
    """What the merger writes: the base, and the adapter in a directory below it."""
    _the_base(work)
    shutil.copytree(work / "ADAPTER", work / "CKPT" / "lora_adapter")


def _one_by_one(work):
    """A pair for each expert's Linear, as a 4-bit gpt-oss has them, beside those of attention, which are merged."""
    merged(_adapter())(work)
    release, factors = work / SOURCE, pairs(work / SOURCE, *ATTENTION)
    for name in names(release, ".experts.gate_up_proj"):
        if name.endswith("gate_up_proj"):
            experts, hidden, rows = tensor(release, name).shape
            for expert in range(experts):
                module = f"{name.removesuffix('.gate_up_proj')}.gate_up_projs.{expert}"
                factors[f"{module}.lora_A"], factors[f"{module}.lora_B"] = _random(RANK, hidden), _random(rows, RANK)
    save(work / "ADAPTER", factors, [*ATTENTION, "gate_up_projs.0"])


def _untied_merge(work):
    """Embedding and output layer were trained apart (modules_to_save); the config says that they are two."""
    merged(_adapter())(work)
    rows = tensor(work / SOURCE, "model.embed_tokens.weight")
    whole = {"model.embed_tokens": rows + 0.01, "lm_head": rows + 0.02}
    save(work / "ADAPTER", pairs(work / SOURCE, *ATTENTION) | whole, modules_to_save=["embed_tokens", "lm_head"])
    replace(work / "CKPT", {f"{name}.weight": one for name, one in whole.items()})
    edit_config(work / "CKPT", tie_word_embeddings=False)


def _tied_again(path):
    """The flag is still that of the base."""
    edit_config(path, tie_word_embeddings=True)


def _head_discarded(path):
    replace(path, {}, ["lm_head.weight"])
    edit_config(path, tie_word_embeddings=True)


def _expert_after_expert(work):
    """Merged by a reading in which column j of B is that of expert j // rank."""
    shutil.copytree(work / "ADAPTER", work / "OTHER")

    def turned(found):
        sides = {name: one for name, one in found.items() if "lora_B" in name}
        return found | {name: one.unflatten(1, (-1, RANK)).mT.flatten(1).contiguous() for name, one in sides.items()}

    edit_factors(work / "OTHER", turned)
    shutil.rmtree(work / "CKPT")
    convert((work / SOURCE).resolve(), work / "CKPT", merge=work / "OTHER")


def _without_alpha(path):
    edit_json(path / CONFIG, lambda content: content.pop("lora_alpha"))


def _of_experts(work):
    """Over the release with the experts of a layer in one tensor."""
    (work / SOURCE).unlink()
    (work / "CKPT").rename(work / SOURCE)
    _experts()(work)


def _whole(rows):
    """Embedding and output layer too (modules_to_save), with so many rows more than the base has."""

    def make(work):
        own = {name: tensor(work / SOURCE, f"{name}.weight") for name in ("model.embed_tokens", "lm_head")}
        whole = {name: torch.cat([one + 0.01, one[:rows]]) for name, one in own.items()}
        save(work / "CKPT", pairs(work / SOURCE, *ATTENTION) | whole, modules_to_save=["embed_tokens", "lm_head"])

    return make


# One each, so that reports that share a sound twin ask for it once.
_OF_ATTENTION = _adapter()
_MERGED, _EXPERTS_MERGED = merged(_OF_ATTENTION), merged(_experts())

CASES = {
    "Megatron-Bridge#5384": Case(
        "qwen2-untied-tiles/",
        ("self_attn.q_proj.weight", "steps away"),
        _base_quantized,
        merged(_OF_ATTENTION, _INT4),
    ),
    "ms-swift#5450": Case("qwen3-untied/", ("self_attn.q_proj.weight",), _the_base, _MERGED),
    "tinker-cookbook#525": Case(
        "qwen3_5/",
        ("in_proj_q", "PEFT 0.21.2 stops", "the base model"),
        _linear_attention(("in_proj_q", 48), ("in_proj_k", 48), ("in_proj_v", 160)),
        _linear_attention(("in_proj_qkv", 0)),
    ),
    "Relax#262": Case(
        "qwen3-untied/",
        ("base_model.model.", "prefix"),
        _named(lambda name: name.removeprefix(PREFIX)),
        _OF_ATTENTION,
    ),
    "prime-rl#3014": Case(
        "nemotron_h/",
        (".mamba.in_proj", "PEFT 0.21.2"),
        _named(_trainers_name),
        _adapter("in_proj", "up_proj", "down_proj"),  # PEFT refuses out_proj of Mamba
    ),
    "Automodel#3284": Case(
        "qwen3_moe/",
        ("shape [48, 128], as PEFT", "shape [48, 192]", ".experts."),
        on_checkpoint(_turned),
        _experts(),
        VERIFY,
    ),
    "unsloth#5410": Case("qwen3_moe/", (".mlp.experts.", "144"), _base_experts, _EXPERTS_MERGED),
    "Megatron-Bridge#6076": Case(
        "qwen3_moe/", ("lora_A is missing", ".experts.gate_up_proj"), on_checkpoint(_without_shared), _shared_outer
    ),
    "Megatron-Bridge#5588": Case("qwen3_moe/", ("SGLang 0.5.16", ".experts."), prepare=_shared_outer, twin=VERIFY),
    "Automodel#3834": Case(
        "qwen3_moe/", ("shape [48, 128], as PEFT", "shape [12, 128]", ".experts."), _experts(rank=1), _experts(), VERIFY
    ),
    "Megatron-Bridge#3341": Case("qwen3_moe/", (".mlp.experts.",), _base_experts, _EXPERTS_MERGED),
    "slime#2104": Case("qwen2-untied/", ("model.",), _missed_the_last, _published),
    "SkyRL#1902": Case("qwen2-untied/", (), on_checkpoint(lambda path: shutil.rmtree(version_at(path, 1))), _chain),
    # Merges
    "verl#7285": Case("qwen2-untied/", ("self_attn.q_proj.weight",), _with_adapter_beside, _MERGED),
    "Qwen-VL-Series-Finetune#259": Case("qwen3_5/", ("mtp.", "missing"), without_tensors("mtp."), _MERGED),
    "unsloth-zoo#779": Case("gemma4/", (".experts.",), _most_fell_back, merged(_experts())),
    "unsloth-zoo#812": Case("mixtral/", (".experts.",), _base_experts, merged(_experts())),
    "unsloth-zoo#885": Case("gpt_oss/", ("model.layers.0.mlp.experts.gate_up_projs.0",), prepare=_one_by_one),
    "aprender#2189": Case(
        "qwen2-untied/", ("self_attn.q_proj.weight",), _scaled(1 / RANK**0.5), merged(_adapter(use_rslora=True))
    ),
    "mlx-vlm#841": Case("qwen2-untied/", ("self_attn.q_proj.weight",), _scaled(RANK), _MERGED),
    "transformers#45127": Case("qwen2-tied/", ("lm_head.weight",), on_checkpoint(_tied_again), _untied_merge),
    "unsloth#9331": Case("qwen2-tied/", ("lm_head.weight",), on_checkpoint(_head_discarded), _untied_merge),
    "unsloth#6930": Case("qwen3_moe/", (".mlp.experts.", "144"), _expert_after_expert, _EXPERTS_MERGED),
    # Files of adapters
    "surogate#173": Case(
        "qwen2-untied/", ("no lora_alpha", "PEFT uses 8"), on_checkpoint(_without_alpha), _OF_ATTENTION
    ),
    "vllm#48019": Case(
        "qwen3_vl-tied/",
        ("vLLM 0.26", "answers"),
        _named(lambda name: name.replace("model.language_model.", "model.")),
        _OF_ATTENTION,
    ),
    "Automodel#3595": Case(
        "qwen3_omni_moe/",
        ("base_model.model.", "prefix"),
        _named(lambda name: f"thinker.{name.replace('.thinker.', '.')}"),
        _OF_ATTENTION,
    ),
    "ART#803": Case("qwen3_5_moe/fused", (".experts",), on_checkpoint(_exchanged), _of_experts, VERIFY),
    "LlamaFactory#10186": Case(
        "qwen2-untied/", ("[352, 128], as PEFT", "[360, 128]", "embed_tokens"), _whole(8), _whole(0), VERIFY
    ),
    "LlamaFactory#9545": Case("qwen2-untied/", ("SGLang 0.5.16",), _whole(0), _OF_ATTENTION),
}
