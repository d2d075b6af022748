"""Reports about quantized checkpoints: `ignore` lists, schemes, scales and sizes that readers take differently."""

import json
import shutil

import torch
from mutations.edits import edit_config, edit_json, names, replace, tensor
from mutations.floats import exponents_unannounced, half_the_scales, packed_for_a_kernel
from mutations.int4 import packed, unpack
from support import models
from support.floats import AMAX, DEEPSEEK_V4, SPELLINGS, V4_QUANTIZED, Spelling, modelopt_nvfp4, write
from support.quantized import with_fp8_blocks

from ckptkit.app.api import quantize
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.formats.dequantize import dequantized
from ckptkit.quant.schemes.floats import FloatScheme
from reports.changes import (
    changed,
    dropped,
    int4_without,
    number_files,
    on_checkpoint,
    quantization,
    settings,
    stored_as,
)
from reports.report import SOURCE, Case


def _suffixed(content):
    """Entries as a wrapper names its modules, `...q_proj.linear`."""
    content["ignore"] = [f"{entry}.linear" if "self_attn" in entry else entry for entry in content["ignore"]]


def deepseek_v4(work):
    (work / "CKPT").rename(work / "plain")
    write(work / "plain", work / "CKPT", DEEPSEEK_V4, lambda name: V4_QUANTIZED.fullmatch(name) is not None)


def _without_scales_of_wo_a(path):
    """The index lists them still."""
    for name in names(path, "attn.wo_a.scale"):
        models.edit(path, name, None)


def _attention_plain(work):
    path = work / "CKPT"
    modules = sorted(
        {name.removesuffix(".weight_packed") for name in names(path, "self_attn.") if name.endswith("weight_packed")}
    )
    unpack(path, modules)
    quantization(lambda content: content["ignore"].extend(modules))(work)


def _split_names(content):
    """The list has the names of an older writer, `in_proj_qkv`; the tensors are `in_proj_qkvz`."""
    kept = [entry for entry in content["ignore"] if "linear_attn" not in entry]
    content["ignore"] = [*kept, "re:.*linear_attn.in_proj_(qkv|z|a|b)$", "re:.*linear_attn.(out_proj|conv1d)$"]


def _small_packed(path):
    parts = ("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight")
    modules = [name.removesuffix(".weight") for part in parts for name in names(path, part)]
    packed(modules)(path, "")
    others = "re:.*linear_attn\\.(in_proj_(qkv|z|qkvz)|out_proj|conv1d)(\\.weight)?$"
    edit_json(
        path / "config.json",
        lambda content: content["quantization_config"].update(
            ignore=[others if "linear_attn" in entry else entry for entry in content["quantization_config"]["ignore"]]
        ),
    )


def _zero_block(path):
    """The scale of a block of zeros is 0 / 448, and its codes are 0 / 0."""
    name = "model.layers.3.mlp.down_proj.weight"
    codes, scale = tensor(path, name), tensor(path, f"{name}_scale_inv")
    scale[0, 0] = float("nan")
    replace(path, {name: codes, f"{name}_scale_inv": scale})


def _fp8(work):
    with_fp8_blocks((work / SOURCE).resolve(), work / "CKPT", 32)


def _mtp_by_name(content):
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    parts += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    kept = [entry for entry in content["ignore"] if "mtp" not in entry]
    content["ignore"] = [*kept, "mtp.fc", *(f"mtp.layers.0.{part}" for part in parts)]


def _without_drafts(content):
    content["ignore"] = [entry for entry in content["ignore"] if "mtp" not in entry]


def cache_scales(work):
    """Calibrated scales of the FP8 cache, as compressed-tensors stores them."""
    path = work / "CKPT"
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    quantization(lambda content: content.update(kv_cache_scheme=scheme))(work)
    ones = torch.ones(1, dtype=torch.bfloat16)
    attention = sorted({name.split(".q_proj")[0] for name in names(path, "self_attn.q_proj.")})
    replace(path, {f"{module}.{kind}_scale": ones.clone() for module in attention for kind in "kv"})


def _targets(work):
    """Targets by expressions that name what is packed, fused names included."""
    targets = [r"re:.*self_attn\.(q|k|v|o|qkv)_proj$", r"re:.*mlp\.experts\..*(gate|up|down|gate_up)_proj$"]
    quantization(lambda content: content["config_groups"]["group_0"].update(targets=targets))(work)


def _nvfp4(work):
    """The projections as ModelOpt stores them in NVFP4, with scales of activations."""
    path, new, store = work / "CKPT", dict[str, torch.Tensor](), modelopt_nvfp4(inputs=True)
    old = names(path, "_proj.weight")
    for name in old:
        new |= store(name.removesuffix(".weight"), tensor(path, name))
    replace(path, new, [name for name in old if name not in new])
    number_files(path)
    edit_config(path, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]})


def _from_mxfp4(exponent):
    """MXFP4 with values in one block that are so far apart, and what FP8 with powers of two makes of it."""

    def make(work):
        name, release, made = "model.layers.5.mlp.experts.7.up_proj.weight", work / "PLAIN", work / "CKPT"
        if not release.exists():
            (work / SOURCE).rename(release)
        for old in (work / SOURCE, made):
            shutil.rmtree(old, ignore_errors=True)
        source = write(release.resolve(), work / SOURCE, SPELLINGS["mxfp4-quark"])
        codes, scale = tensor(source, name), tensor(source, f"{name}_scale")
        codes[:32, :16], scale[:32, 0] = 0, 122
        codes[0, 0], codes[1, 0], scale[1, 0] = 6, 1, 122 + exponent
        replace(source, {name: codes, f"{name}_scale": scale})
        quantize(source, made, FloatScheme("fp8-block", "deepgemm"))

    return make


def _one_scale(module, weight):
    """FP8 with one scale a weight, and one of its inputs, as Mistral stores it."""
    scale = weight.float().abs().max() / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    scales = {"weight_scale_inv": scale.bfloat16(), "activation_scale": torch.tensor(0.02).bfloat16()}
    return {f"{module}.weight": codes, **{f"{module}.{name}": one for name, one in scales.items()}}


def _as_mistral_text(work):
    content = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    spelling = Spelling(_one_scale, {"quantization_config": content | {"modules_to_not_convert": ["lm_head"]}})
    write((work / SOURCE).resolve(), work / "CKPT", spelling)


def _mxfp4_but_for_drafts(work):
    """MXFP4 as Quark stores it, the MTP layer in BF16 and listed."""
    layers = json.loads((work / SOURCE / "config.json").read_text())["num_hidden_layers"]
    stored_as("mxfp4-quark", rf"(?!.*layers\.{layers}\.).*_proj\.weight")(work)
    quantization(lambda content: content["exclude"].append(rf"re:model\.(layers\.{layers}|decoder)\..*"))(work)


def dequantized_from(spelling, name):
    """What a low-precision release means in BF16; that release is at `name`."""

    def prepare(work):
        plain = (work / SOURCE).resolve()
        if name == SOURCE:
            (work / SOURCE).unlink()
        write(plain, work / name, SPELLINGS[spelling])
        shutil.copytree(plain, work / "CKPT")
        view = dequantized(HfCheckpoint(work / name), spelling)
        weights = [one for one in names(work / "CKPT", "_proj.weight") if one in view.specs]
        replace(work / "CKPT", dict(view.read(weights)))

    return prepare


def _without(ending):
    return dropped(rf"^model\.layers\.5\.mlp\.experts\.(3|9)\..*{ending}")


def _scale_too_large(scale):
    """A scale above 448, which a cast to FP8 makes NaN."""
    scale.view(torch.uint8)[0, 0] = 0x7F
    return scale


CASES = {
    "vllm-omni#4025": Case(
        "qwen2-untied/hf",
        ("model.layers.3.mlp.down_proj.weight_scale", "NaN", "1 of"),
        changed("layers.3.mlp.down_proj.weight_scale$", _scale_too_large),
        _nvfp4,
    ),
    "Automodel#2654": Case("ministral3/", prepare=_as_mistral_text),
    "Megatron-Bridge#5731": Case(
        "qwen3_moe/",
        ("mlp.experts.{0..11}.gate_proj.weight_scale_inv", "[48] float32"),
        changed(r"\.experts\..*weight_scale_inv", torch.flatten),
        stored_as("fp8"),
    ),
    "vllm#51946": Case(
        "qwen2-untied/", ("weight_scale_inv", "119.0"), on_checkpoint(exponents_unannounced), stored_as("fp8-ue8m0")
    ),
    "sglang#23841": Case(
        "qwen2-untied/hf",
        ("FP8", "unquantized"),
        settings(quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    ),
    "vllm#51525": Case(
        "qwen3_moe/hf", ("model.layers.5.mlp.experts.{3,9}", "input_scale", "lack it"), _without("input_scale"), _nvfp4
    ),
    "vllm#54444": Case(
        "qwen3_moe/hf",
        ("model.layers.5.mlp.experts.{3,9}", "NVFP4 weights without a scale"),
        _without("weight_scale"),
        _nvfp4,
    ),
    "vllm#52501": Case(
        "qwen3_moe/hf",
        ("model.layers.5.mlp.experts.{3,9}", "without the tensor's scale"),
        _without("weight_scale_2"),
        _nvfp4,
    ),
    "vllm#56770": Case("qwen2-untied/", prepare=stored_as("mxfp4-compressed")),
    "vllm#46400": Case("qwen2-untied/", prepare=_fp8),
    "vllm#53709": Case(
        "qwen3_moe-tiles/",
        ("model.layers.5.mlp.experts.7.up_proj", "1 of"),
        _from_mxfp4(-16),
        _from_mxfp4(-14),
        "ckptkit verify CKPT --source RELEASE",
    ),
    "Model-Optimizer#2038": Case("qwen2-untied/hf", ("weight_scale", "packed"), on_checkpoint(half_the_scales), _nvfp4),
    "vllm#54189": Case("qwen2-untied/hf", ("input_scale", "none is stored"), dropped("input_scale"), _nvfp4),
    "transformers#48371": Case(
        "qwen3_moe/",
        ("mlp.experts.",),
        changed(r"\.experts\.", lambda found: found * (2688 / AMAX)),
        dequantized_from("nvfp4-compressed", "NVFP4"),
    ),
    "sglang#36158": Case(
        "glm4_moe/",
        ("SGLang", "would pack", "layers.12"),
        quantization(lambda content: content.update(exclude=["lm_head"])),
        _mxfp4_but_for_drafts,
    ),
    "miles#1623": Case("qwen2-untied/", ("weight_scale_inv", "int32"), on_checkpoint(packed_for_a_kernel), _fp8),
    "vllm#57108": Case(
        "deepseek_v4/hf",
        ("layers.{0..11}.attn.wo_a.scale", "lists"),
        on_checkpoint(_without_scales_of_wo_a),
        deepseek_v4,
    ),
    "miles#2706": Case(
        "deepseek_v4/hf", ("layers.{0..2}.ffn.gate.tid2eid", "zero"), changed("tid2eid", torch.zeros_like)
    ),
    "vllm#54974": Case(
        "qwen2-untied/hf",
        ("model.layers.3.mlp.", "weight_scale_2", "by up to 1.7 times"),
        changed("layers.3.mlp.gate_proj.weight_scale_2", lambda found: found * 1.7),
        _nvfp4,
    ),
    "vllm#45212": Case(
        "qwen3_moe/hf", ("model.layers.5.mlp.experts.{3,9}", "input_scale", "lack it"), _without("input_scale"), _nvfp4
    ),
    "sglang#35797": Case(
        "qwen3_5-tiles/", ("mtp.layers.0.self_attn",), quantization(_mtp_by_name), int4_without("re:mtp.*")
    ),
    "vllm#53387": Case(
        "qwen3_5-tiles/",
        ("vLLM 0.26 would pack mtp.fc.weight",),
        quantization(_without_drafts),
        int4_without("re:mtp.*"),
    ),
    "sglang#35792": Case("qwen3_moe-tiles/int4", ("self_attn",), quantization(_suffixed), _attention_plain),
    "vllm#40252": Case(
        "qwen3_next-tiles/", ("linear_attn",), quantization(_split_names), int4_without("re:.*linear_attn.*")
    ),
    "transformers#47407": Case("qwen3_moe-tiles/int4", ("mlp.experts.",), twin="ckptkit verify CKPT"),
    "vllm#54304": Case(
        "qwen2-untied-tiles/int4",
        ("model.embed_tokens.weight",),
        on_checkpoint(lambda path: packed(["model.embed_tokens"])(path, "")),
    ),
    "llm-compressor#2805": Case(
        "qwen2-untied-tiles/",
        ("actorder",),
        quantization(lambda content: content["config_groups"]["group_0"]["weights"].update(actorder="static")),
        int4_without(group=None),
    ),
    "sglang#31248": Case(
        "qwen2-untied-tiles/int4", ("marlin-24",), quantization(lambda content: content.update(format="marlin-24"))
    ),
    "vllm#57792": Case(
        "qwen3_moe-tiles/",
        ("down_proj",),
        prepare=int4_without("re:.*self_attn.*", group=128),
        twin="ckptkit verify CKPT",
    ),
    "sglang#19406": Case(
        "qwen3_5-tiles/",
        ("linear_attn.in_proj_b", "unquantized"),
        on_checkpoint(_small_packed),
        int4_without("re:mtp.*", "re:.*linear_attn.*"),
    ),
    "slime#2256": Case("qwen2-untied/", ("model.layers.3.mlp.down_proj",), on_checkpoint(_zero_block), _fp8),
    "slime#2271": Case(
        "qwen2-untied/",
        ("model.layers.3.mlp.down_proj",),
        changed("layers.3.mlp.down_proj.weight_scale_inv", lambda found: found.log2().ceil().exp2()),
        _fp8,
    ),
    "sglang#35455": Case("qwen3_moe-tiles/int4", prepare=cache_scales),
    "vllm#31623": Case("qwen3_moe-tiles/int4", prepare=_targets),
}
