"""Faults of weights in FP8, MXFP8, MXFP4 and NVFP4: each changes a directory, and returns the name that is wrong."""

import json

import torch
from support import floats, models

from mutations.edits import edit_config, edit_json, names, replace, tensor


def pick(path, projection, ending="weight"):
    found = [name for name in names(path, f".{projection}.") if name.endswith(f"{projection}.weight")]
    quantized = [name for name in found if any(f"{name}_scale{end}" in names(path, name) for end in ("", "_inv"))]
    return f"{(quantized or found)[-1].removesuffix('.weight')}.{ending}"


def change(path, name, edit):
    replace(path, {name: edit(tensor(path, name).clone())})
    return name


def scale_dropped(path):
    name = pick(path, "up_proj")
    replace(path, {}, [f"{name}_scale_inv"])
    return name


def inputs_of_two_dropped(path):
    found = names(path, "up_proj.input_scale")[-2:]
    replace(path, {}, found)
    return found[-1].replace("input_scale", "weight")


def half_the_scales(path):
    return change(path, pick(path, "down_proj", "weight_scale"), lambda scale: scale[:, ::2].contiguous())


def bytes_as_numbers(path):
    name = pick(path, "up_proj", "weight_scale_inv")
    return change(path, name, lambda scale: floats.exponents(scale).float())


def exponents_unannounced(path):
    for name in names(path, "weight_scale_inv"):
        change(path, name, floats.exponents)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    edit_config(path, quantization_config={key: value for key, value in config.items() if key != "scale_fmt"})
    return pick(path, "up_proj", "weight_scale_inv")


def reciprocal(path):
    return change(path, pick(path, "down_proj", "weight_scale_inv"), lambda scale: 1 / scale)


def gates_scale(path):
    return change(path, pick(path, "gate_proj", "weight_scale_2"), lambda scale: scale * 1.7)


def zero_block_as_miles_writes_it(path):
    def nan(codes):
        codes.view(torch.uint8)[:16, :16] = 0xFF
        return codes

    def zero(scale):
        scale[0, 0] = 0
        return scale

    name = change(path, pick(path, "up_proj"), nan)
    return change(path, f"{name}_scale_inv", zero)


def nan_scale(path):
    def nan(scale):
        scale.view(torch.uint8)[0, 0] = 0xFF
        return scale

    return change(path, pick(path, "up_proj", "weight_scale"), nan)


def label_of_powers(path):
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    edit_config(path, quantization_config=config | {"scale_fmt": "ue8m0"})
    return pick(path, "up_proj", "weight_scale_inv")


def codes_of_the_unrounded_scale(path):
    """As transformers 5.12.1 makes them of scale_fmt ue8m0."""
    for scale_name in names(path, "weight_scale_inv"):
        name = scale_name.removesuffix("_scale_inv")
        codes, scale = tensor(path, name), tensor(path, f"{name}_scale_inv")
        spread = scale.repeat_interleave(32, 0)[: codes.shape[0]].repeat_interleave(32, 1)[:, : codes.shape[1]]
        replace(path, {name: floats.fp8_block((codes.float() * spread).bfloat16(), 32)[0]})
    return pick(path, "up_proj")


def gate_alone(path):
    name = pick(path, "up_proj")
    codes = tensor(path, name)
    replace(path, {name: codes.to(torch.bfloat16)}, [f"{name}_scale_inv"])
    return name


def nibbles_swapped(path):
    return change(path, pick(path, "up_proj"), lambda codes: (codes << 4) | (codes >> 4))


def scales_turned(path):
    """In the shape that they had, so that no header tells."""
    name = change(path, pick(path, "down_proj", "weight_scale_inv"), lambda scale: scale.T.reshape(scale.shape))
    return name.removesuffix("_scale_inv")


def scales_of_another_layer(path):
    found = [name for name in names(path, "down_proj.weight_scale_inv") if "shared" not in name]
    other = next(name for name in found if tensor(path, name).shape == tensor(path, found[-1]).shape)
    replace(path, {found[-1]: tensor(path, other)})
    return found[-1].removesuffix("_scale_inv")


def scale_listed_alone(path):
    name = pick(path, "up_proj", "weight_scale_inv")
    models.edit(path, name, None)
    return name


def router_in_fp8(path):
    found = names(path, "mlp.gate.weight")
    name = found[-1] if found else "lm_head.weight"
    replace(path, floats.deepseek(name.removesuffix(".weight"), tensor(path, name)))
    return name


def quantization(path, **values):
    edit_json(path / "config.json", lambda config: config["quantization_config"].update(values))


def layers_by_a_name_that_begins_others(path):
    """Layer 1 is BF16; the entry is a part of the names of layers 10 and 11 too."""
    for name in [name for name in names(path, "layers.1.") if name.endswith("_proj.weight")]:
        rows, packed = tensor(path, name).shape
        parts = [f"{name}_scale", f"{name}_scale_2"]
        replace(path, {name: torch.randn(rows, packed * 2, dtype=torch.bfloat16)}, parts)
    quantization(path, ignore=["lm_head", "model.layers.1"])
    return "model.layers.1"


def one_expert_listed(path):
    module = names(path, ".experts.3.up_proj.weight")[0].removesuffix(".weight")
    quantization(path, modules_to_not_convert=[module])
    return module


def nibbles_of_fused_experts(path):
    return change(path, names(path, "down_proj_blocks")[-1], lambda codes: (codes << 4) | (codes >> 4))


def scale_of_the_query(path):
    """The key has the first scales of the query."""
    names_of = {part: pick(path, f"{part}_proj", "weight_scale_inv") for part in "qk"}
    rows = tensor(path, names_of["k"]).shape[0]
    replace(path, {names_of["k"]: tensor(path, names_of["q"])[:rows].contiguous()})
    return names_of["k"].removesuffix("_scale_inv")


def second_config_of_32(path):
    beside = json.loads((path / "hf_quant_config.json").read_text())
    edit_config(path, quantization_config={"quant_method": "modelopt", **beside["quantization"]})
    edit_json(path / "hf_quant_config.json", lambda content: content["quantization"].update(group_size=32))
    return "hf_quant_config.json"


def packed_for_a_kernel(path):
    """Four bytes of exponents in one int32, as an engine holds them after loading."""
    name = pick(path, "up_proj", "weight_scale_inv")

    def pack(scale):
        padded = torch.nn.functional.pad(floats.exponents(scale), (0, -scale.shape[1] % 4))
        return padded.contiguous().view(torch.int32)

    return change(path, name, pack)


def multiplier_for_divisor(path):
    """ModelOpt's scale of the tensor where compressed-tensors' is stored."""
    return change(path, names(path, "up_proj.weight_global_scale")[-1], lambda scale: 1 / scale)


def global_scale_dropped(path):
    name = names(path, "up_proj.weight_packed")[-1]
    replace(path, {}, [name.replace("packed", "global_scale")])
    return name


def gate_and_up_interleaved(path):
    """Rows of gate and up by turns, as gpt-oss has them, in two tensors."""
    gate, up = (pick(path, f"{part}_proj") for part in ("gate", "up"))
    both = torch.stack([tensor(path, gate), tensor(path, up)], 1).flatten(0, 1)
    replace(path, {gate: both[: len(both) // 2].contiguous(), up: both[len(both) // 2 :].contiguous()})
    return up


def fp8_for_nvfp4(path):
    """FP8 weights under a config that says NVFP4."""
    found = names(path, "up_proj.weight_scale_2")
    for name in found:
        weight = name.removesuffix("_scale_2")
        rows, columns = tensor(path, weight).shape[0], tensor(path, weight).shape[1] * 2
        codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        replace(path, {weight: codes, f"{weight}_scale": torch.tensor(0.01)}, [name])
    return found[-1].removesuffix("_scale_2")


def scale_of_one_dimension_less(path):
    return change(path, pick(path, "down_proj", "weight_scale"), lambda scale: scale[:, 0].contiguous())


def unquantized(path, found):
    plain = {name: torch.randn(tensor(path, name).shape, dtype=torch.bfloat16) / 50 for name in found}
    replace(path, plain, [f"{name}_scale_inv" for name in found])


def draft_layer_unlisted(path):
    """The draft layer is stored in BF16, and no list names it."""
    found = [name for name in names(path, "layers.12.") if f"{name}_scale_inv" in names(path, "layers.12.")]
    unquantized(path, found)
    return found[-1]


def layer_listed_under_a_wrapper(path):
    """Layer 1 is BF16, and listed by names of transformers' wrapper, which engines do not have."""
    found = [name for name in names(path, "layers.1.") if name.endswith("_proj.weight")]
    unquantized(path, found)
    wrapped = (name.removesuffix(".weight").replace("model.", "model.language_model.", 1) for name in found)
    quantization(path, ignored_layers=["lm_head", *wrapped])
    return found[-1]


def fnuz_bits(path):
    """Bits of float8_e4m3fnuz, which mean half of what they say, under scales twice as large."""
    name = pick(path, "up_proj")
    codes = tensor(path, name).view(torch.uint8).clone()
    codes[codes == 0x80] = 0
    replace(path, {name: codes.view(torch.float8_e4m3fn)})
    return change(path, f"{name}_scale_inv", lambda scale: scale * 2).removesuffix("_scale_inv")


def fnuz_dtype(path):
    return change(path, pick(path, "up_proj"), lambda codes: codes.view(torch.float8_e4m3fnuz))


def size_in_rows(path):
    """total_size counts rows, as slime's converter does."""
    total = sum(len(one) if one.dim() else 1 for one in models.tensors(path).values())
    edit_json(path / "model.safetensors.index.json", lambda index: index["metadata"].update(total_size=total))
    return "total_size"


def pairs_as_f4(path):
    """Packed codes under safetensors' F4, which no reader of releases takes."""
    return change(path, pick(path, "up_proj"), lambda codes: codes.view(torch.float4_e2m1fn_x2))
