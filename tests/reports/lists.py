"""Reports about lists of modules that are left out, and about what is quantized against them or under other names."""

import re

import torch
from mutations.edits import edit_config, edit_json, names, replace, tensor
from mutations.int4 import packed
from support.floats import SPELLINGS, fp8_block
from support.quantized import one_target, widen
from torch import Tensor

from ckptkit.app.api import quantize
from ckptkit.quant.formats.scheme import QuantScheme
from reports.changes import (
    config,
    dropped,
    int4_without,
    number_files,
    on_checkpoint,
    quantization,
    renamed,
    settings,
    steps,
    stored_as,
    without_tensors,
)
from reports.quantized import cache_scales, dequantized_from
from reports.report import SOURCE, Case

LAYERS = tuple(f"model.language_model.layers.{layer}" for layer in range(12))
ROUTERS = tuple(f"model.layers.{layer}.mlp.gate" for layer in range(12))
ATTENTION = tuple(f"{layer}.self_attn.{part}_proj" for layer in LAYERS for part in "qkvo")
_NVFP4 = SPELLINGS["nvfp4-modelopt"]
_BESIDE = "hf_quant_config.json"
_KEPT = (3, 5, 6)

_FP8 = r"(.*language_model|mtp)\.layers\..*((self_attn|mlp)\.\w+_proj|linear_attn\.(in_proj_(qkv|z)|out_proj))\.weight"
_READ = r".*language_model\.layers\..*(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj\.weight"
_TEXT = r".*language_model\.layers\..*(self_attn|mlp)\.\w+_proj\.weight"
_CHANNEL = SPELLINGS["fp8-channel"]
_OF_TEXT = ["re:mtp.*", "re:.*visual.*", "re:.*linear_attn.*", "re:.*mlp.gate$", "re:.*shared_expert_gate$"]
_OF_QWEN = [f"{layer}.linear_attn.{part}" for layer in LAYERS for part in ("in_proj_a", "in_proj_b", "conv1d")]
_OF_GEMMA = ["re:.*router.*", "re:.*vision_tower.*", "re:.*embed_vision.*", "re:.*experts.*"]
_OF_KEPT = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*mlp.gate$",
    *(f"re:model.layers.{layer}.mlp.experts.*" for layer in _KEPT),
]


def listed(key, *entries):
    return quantization(lambda content: content.update({key: [*content.get(key, []), *entries]}))


def _excluding(*modules, packed=r".*_proj\.weight"):
    return steps(stored_as(_NVFP4, packed), exclude(lambda listed: [*listed, *modules]))


def exclude(change):
    def damage(work):
        def edit(content):
            content["quantization"]["exclude_modules"] = change(content["quantization"]["exclude_modules"])

        edit_json(work / "CKPT" / _BESIDE, edit)

    return damage


def without(*modules):
    return exclude(lambda listed: [one for one in listed if one not in modules])


def _head_packed(path):
    name = "lm_head.weight"
    replace(path, dict(_NVFP4.store("lm_head", tensor(path, name))), [])


def _containers(content):
    """The modules that hold an expert's projections, as llm-compressor lists what has no weight of its own."""
    content["ignore"] += [f"model.layers.{layer}.mlp.experts.{one}" for layer in range(12) for one in range(12)]


def _fp8_listed(work):
    """FP8 in blocks, and a list of what is left in BF16 under the name that transformers gives it."""
    stored_as("fp8", r".*\.(q|k|v|o|gate|up|down)_proj\.weight")(work)
    kept = ("in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "conv1d", "out_proj")
    left = [f"{name}.linear_attn.{part}" for name in LAYERS for part in kept]
    quantization(lambda content: content.update(modules_to_not_convert=[*left, "lm_head", "model.visual", "mtp"]))(work)


def _gates_of_a_mixture(content):
    """The router of each layer, as in the list of the mixture of experts; a dense layer has gate_proj there."""
    content["modules_to_not_convert"] += [f"{layer}.mlp.gate" for layer in LAYERS]


def _packed_experts(path):
    """Experts of a layer in one tensor a part, under names that quantized experts do not have."""
    old = names(path, ".mlp.experts.")
    stacked = {}
    for name in old:
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)_proj\.(.+)", name)
        assert match
        stacked.setdefault((match[1], match[3], match[4]), {})[int(match[2])] = tensor(path, name)
    whole = {key: torch.stack([one[number] for number in sorted(one)]) for key, one in stacked.items()}
    new = {}
    for (stem, part, ending), found in whole.items():
        suffix = "" if ending == "weight" else f"_{ending}"
        if part == "down":
            new[f"{stem}.down_proj{suffix}"] = found
        elif part == "gate":
            up = whole[stem, "up", ending]
            new[f"{stem}.gate_up_proj{suffix}"] = torch.cat([found, up], 1) if found.ndim > 1 else found
    replace(path, new, old)
    number_files(path)


def _without_draft_experts(content):
    kept = [entry for entry in content["ignore"] if "mtp" not in entry]
    draft = ["re:mtp.layers.0.self_attn.*", "re:mtp.layers.0.mlp.shared_expert.*", "mtp.layers.0.mlp.gate"]
    content["ignore"] = [*kept, "mtp.fc", *draft]


def _one_by_one(content):
    parts = [f"{expert}.{part}_proj" for expert in range(12) for part in ("gate", "up", "down")]
    kept = [entry for entry in content["exclude"] if "experts" not in entry]
    content["exclude"] = [*kept, *(f"model.layers.{layer}.mlp.experts.{part}" for layer in _KEPT for part in parts)]


_OUTPUTS = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(12)]


def _wide_outputs(work):
    widen(work / "CKPT", (work / SOURCE).resolve(), ".o_proj")


def _attention_in_fp8(path):
    """As Quark leaves block FP8 that its list excludes, under a name of its own for the scale."""
    for name in names(path, "self_attn."):
        if name.endswith("_proj.weight"):
            codes, scale = fp8_block(tensor(path, name), 32)
            replace(path, {name: codes, f"{name}_scale": scale})


def _two_widths(work):
    int4_without()(work)
    widen(work / "CKPT", (work / SOURCE).resolve(), ".down_proj")


def _with_recipe(work):
    """A recipe of patterns beside the list of names that they became."""
    stored_as("nvfp4-compressed", _TEXT)(work)
    own = [name.removesuffix(".weight") for name in names(work / "CKPT", "router.proj.weight")]
    listed("ignore", *own, "re:.*vision_tower.*", "re:.*embed_vision.*", "re:.*experts.*")(work)
    (work / "CKPT" / "recipe.yaml").write_text(
        "default_stage:\n  default_modifiers:\n    QuantizationModifier:\n      targets: [Linear]\n"
        "      ignore: ['re:.*router', 're:.*vision_tower.*', lm_head]\n      scheme: NVFP4\n"
    )


def _drafts_packed(path):
    modules = [name.removesuffix(".weight") for name in names(path, "mtp.layers.0") if name.endswith("_proj.weight")]
    packed(modules)(path, "")


def _visual_packed(work):
    """The tower's MLP too, whose sizes no kernel's tile divides."""
    path = work / "CKPT"
    store, new = SPELLINGS["nvfp4-modelopt"].store, dict[str, Tensor]()
    for name in names(path, "visual.blocks"):
        if re.search(r"mlp\.linear_fc\d\.weight", name) and tensor(path, name).shape[1] % 16 == 0:
            new |= store(name.removesuffix(".weight"), tensor(path, name))
    assert new
    replace(path, new)
    exclude(lambda listed: [one for one in listed if "visual" not in one])(work)


def _bytes_as_numbers(work):
    """Exponents multiplied as the numbers that their bytes are."""
    path, new = work / "CKPT", dict[str, Tensor]()
    for name in names(work / SOURCE, ".weight_scale_inv"):
        weight = name.removesuffix("_scale_inv")
        codes, scale = tensor(work / SOURCE, weight), tensor(work / SOURCE, name)
        new[weight] = (codes.float().unflatten(-1, (-1, 32)) * scale.float().unsqueeze(-1)).flatten(1).bfloat16()
    replace(path, new)


def _routers_fp8(work):
    path, new = work / "CKPT", dict[str, Tensor]()
    for name in [*names(path, "router.proj.weight"), *names(path, "embed_vision.embedding_projection.weight")]:
        new |= _CHANNEL.store(name.removesuffix(".weight"), tensor(path, name))
    replace(path, new)
    quantization(lambda content: content.update(ignore=["lm_head", "re:.*vision_tower.*", "re:.*experts.*"]))(work)


def _with_zero_points(work):
    """INT4 of experts in groups of 128, with zero points, for vLLM."""
    scheme = QuantScheme(128, "minmax", ("re:.*self_attn.*",), symmetric=False)
    quantize(work / SOURCE, work / "CKPT", scheme, readers=("vllm",))


def _gptq(work):
    """Matrices of the decoder under the names, dtypes and sizes of AutoRound's GPTQ format."""
    path, new = work / "CKPT", {}
    old = names(path, "_proj.weight")
    for name in old:
        rows, columns = tensor(path, name).shape
        for part, dtype, factor in (
            ("qweight", torch.int32, 8),
            ("qzeros", torch.int32, 32),
            ("scales", torch.half, 32),
        ):
            new[name.removesuffix("weight") + part] = torch.ones(rows, columns // factor, dtype=dtype)
    replace(path, new, old)
    number_files(path)
    how = {"bits": 4, "group_size": 32, "sym": True, "packing_format": "auto_round:auto_gptq"}
    edit_config(path, quantization_config={"quant_method": "auto-round", **how})


def _older_tower(content):
    """The tower's modules by name, as transformers called them before 5: no class of today has `vision_model`."""
    parts = (*(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2")
    tower = [f"model.vision_tower.vision_model.encoder.layers.{layer}.{part}" for layer in (0, 1) for part in parts]
    content["ignore"] = [*(entry for entry in content["ignore"] if "vision" not in entry), *tower]


def _in_groups(targets):
    def change(content):
        group = next(iter(content["config_groups"].values()))
        content["config_groups"] = {
            f"group_{bits}": {**group, "targets": several, "weights": {**group["weights"], "num_bits": bits}}
            for bits, several in targets.items()
        }

    return quantization(change)


def _short(name):
    return name.replace("language_model.model.layers.", "language_model.layers.")


_EXPERTS = r".*\.experts\..*_proj\.weight"

CASES = {
    "llm-compressor#3159": Case(
        "gemma3/",
        ("vision_tower.encoder.layers.{0..1}.mlp.fc1.weight", "packed as INT4"),
        quantization(_older_tower),
        int4_without("re:.*vision_tower.*"),
    ),
    "compressed-tensors#846": Case(
        "qwen2-untied-tiles/",
        ("self_attn.o_proj.weight_packed", "4 bits", "'re:.*proj', which SGLang 0.5.16"),
        _in_groups({4: ["re:.*proj"], 8: ["re:.*o_proj"]}),
        steps(int4_without(), _wide_outputs, _in_groups({8: _OUTPUTS, 4: ["re:.*proj"]})),
    ),
    "compressed-tensors#866": Case(
        "qwen2-untied-tiles/",
        ("model.layers.0.mlp.down_proj.weight", "packed as INT4"),
        quantization(lambda content: content.update(ignore=["lm_head", "model.layers.0.feed_forward.down_proj"])),
        int4_without("model.layers.0.mlp.down_proj"),
    ),
    "vllm#54556": Case(
        "qwen3_moe/",
        ("self_attn.q_proj.weight", "BF16", "float8_e4m3fn"),
        on_checkpoint(_attention_in_fp8),
        stored_as("mxfp4-quark", _EXPERTS),
    ),
    "sglang-omni#1451": Case(
        "qwen3_moe/",
        ("mlp.experts.{0..11}.down_proj.weight", "missing, but 432 weights"),
        config(lambda content: content.update(use_fp8_experts=content.pop("quantization_config") is not None)),
        stored_as("fp8", _EXPERTS),
    ),
    "Model-Optimizer#753": Case(
        "qwen2-untied/",
        ("quant_method is 'fp8' (config.json)", "'NVFP4'", "SGLang and vLLM read config.json"),
        settings(quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
        _excluding(),
    ),
    "Model-Optimizer#1858": Case("qwen3_moe/", ("mlp.gate",), without(*ROUTERS), _excluding(*ROUTERS)),
    "Model-Optimizer#479": Case(
        "qwen3_vl-tied/",
        ("self_attn",),
        exclude(
            lambda listed: [one.replace("model.language_model.", "model.layers.language_model.") for one in listed]
        ),
        _excluding(*ATTENTION, "model.visual*", packed=r".*language_model.*mlp\.\w+_proj\.weight"),
    ),
    "vllm#45132": Case("qwen2-untied/", ("lm_head",), on_checkpoint(_head_packed), _excluding()),
    "vllm#46264": Case(
        "qwen2-untied/", ("k_scale",), dropped(r"\.k_scale"), steps(stored_as("fp8-channel"), cache_scales)
    ),
    "sglang#32736": Case("qwen3_moe-tiles/int4", ("mlp.experts",), quantization(_containers)),
    "sglang#23687": Case(
        "qwen3_5/",
        ("transformers 5.12", "mlp.gate_proj.weight", "mlp.gate'"),
        quantization(_gates_of_a_mixture),
        _fp8_listed,
    ),
    "Model-Optimizer#2334": Case(
        "qwen3_5_moe/",
        ("experts.down_proj",),
        on_checkpoint(_packed_experts),
        _excluding(
            "model.visual*", "mtp.*", "*linear_attn*", packed=r".*language_model.*experts\.\d+\.\w+_proj\.weight"
        ),
    ),
    "vllm#41994": Case(
        "qwen3_5_moe/",
        ("vLLM 0.26 would pack", "mtp.layers.0.mlp.experts.{0..11}.down_proj.weight"),
        quantization(_without_draft_experts),
        steps(
            stored_as("nvfp4-compressed", r".*language_model\.layers.*(self_attn|mlp).*_proj\.weight"),
            listed("ignore", *_OF_TEXT),
        ),
    ),
    "sglang#37673": Case(
        "qwen3_moe/",
        ("SGLang 0.5.16 would pack model.layers.{3,5..6}.mlp.experts.{0..11}.gate_proj.weight",),
        quantization(_one_by_one),
        steps(
            stored_as("mxfp4-quark", r"model\.layers\.(?!(3|5|6)\.).*\.experts\..*"),
            quantization(lambda content: content.update(exclude=_OF_KEPT)),
        ),
    ),
    "auto-round#2188": Case(
        "qwen2-untied-tiles/",
        ("mlp.gate_proj.weight_packed", "8 bits"),
        quantization(one_target),
        _two_widths,
        "ckptkit lint CKPT --reader vllm",
    ),
    "compressed-tensors#712": Case(
        "qwen3_5-tiles/", ("mtp.layers.0",), on_checkpoint(_drafts_packed), int4_without("re:mtp.*")
    ),
    "vllm#49187": Case(
        "glm4_moe/",
        ("layers.12",),
        quantization(lambda content: content.update(exclude=["lm_head"])),
        steps(
            stored_as("nvfp4-quark", r"(?!.*layers\.12\.).*_proj\.weight"),
            listed("exclude", r"re:model\.(layers\.12|decoder)\..*"),
        ),
    ),
    "Model-Optimizer#1687": Case(
        "qwen3_5/",
        ("model.visual.blocks.{0..1}.mlp.linear_fc1.weight",),
        _visual_packed,
        steps(
            stored_as("nvfp4-modelopt", _READ),
            exclude(lambda listed: [*listed, "model.visual*", "mtp*", "*linear_attn*"]),
        ),
    ),
    "imp#1450": Case(
        "qwen3_5/",
        ("mtp.layers.0",),
        without_tensors(r"^mtp\..*weight_scale_inv"),
        steps(
            stored_as("fp8", _FP8),
            quantization(
                lambda content: content.update(modules_to_not_convert=["lm_head", "model.visual", "mtp.fc", *_OF_QWEN])
            ),
        ),
    ),
    "omlx#2159": Case(
        "qwen2-untied/", ("_proj.weight", "root mean square"), _bytes_as_numbers, dequantized_from("mxfp8", SOURCE)
    ),
    "llm-compressor#2714": Case(
        "gemma4/",
        ("router.proj.weight", "the router unquantized"),
        _routers_fp8,
        steps(stored_as(_CHANNEL, _TEXT), listed("ignore", *_OF_GEMMA)),
    ),
    "auto-round#1660": Case("qwen3_moe/hf", ("AWQ or AutoRound",), prepare=_gptq),
    "sglang#36596": Case("qwen3_moe/", prepare=stored_as("nvfp4-modelopt", r".*\.mlp\..*_proj\.weight")),
    "imp#1970": Case("gemma4/", prepare=_with_recipe),
    "sglang#18370": Case(
        "kimi_k25/",
        ("language_model.layers.*", "engines rename"),
        prepare=steps(
            stored_as("nvfp4-modelopt", r".*\.experts\..*_proj\.weight"),
            renamed(_short),
            exclude(lambda listed: [_short(one) for one in listed]),
        ),
    ),
    "sglang#39510": Case(
        "qwen3_moe-tiles/",
        ("[rows / 8, groups]", "mlp.experts.{0..11}.gate_proj.weight_zero_point"),
        prepare=_with_zero_points,
        twin="ckptkit verify CKPT --reader vllm",
    ),
    "auto-round#1464": Case("qwen3_moe/hf", ("quantized format of AWQ or AutoRound",), prepare=_gptq),
}
