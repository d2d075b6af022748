"""Ways to break an INT4 checkpoint: what is packed, what config.json says of it, and the parts of packed weights."""

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from support import quantized

from mutations.edits import edit_json, names, replace, tensor
from mutations.hf_tensors import reshaped

TENTH, ELEVENTH = (f"model.layers.5.mlp.experts.{number}.down_proj" for number in (10, 11))
PARTS = ("weight_packed", "weight_scale", "weight_shape")


def packed(modules):
    """Packs modules that no reader expects packed, as a quantizer does that knows only names."""

    def damage(path, folded):
        pack = quantized.int4(symmetric=True, strategy="group", group_size=32)
        parts = {
            f"{module}.weight{ending}": part
            for module in modules
            for ending, part in pack(tensor(path, f"{module}.weight"))[0].items()
        }
        replace(path, parts, [f"{module}.weight" for module in modules])

    return damage


def unpack(path, modules):
    plain = {}
    for module in modules:
        words, scale, shape = (tensor(path, f"{module}.{part}") for part in PARTS)
        codes = unpack_from_int32(words, 4, torch.Size(shape.tolist()))
        plain[f"{module}.weight"] = codes.to(scale.dtype) * scale.repeat_interleave(32, 1)
    replace(path, plain, [f"{module}.{part}" for module in modules for part in PARTS])


def unpacked(path, folded, modules):
    unpack(path, modules)


def all_plain(path, place):
    """The weights are BF16 and config.json still claims INT4: the wrong directory was copied."""
    unpack(path, [name.removesuffix(".weight_packed") for name in names(path, "weight_packed")])


def quantization(path, place, values):
    edit_json(path / "config.json", lambda config: config["quantization_config"].update(values))


def weights(path, place, values):
    def change(config):
        config["quantization_config"]["config_groups"]["group_0"]["weights"].update(values)

    edit_json(path / "config.json", change)


def not_quantized(path, place):
    edit_json(path / "config.json", lambda config: config.pop("quantization_config"))


def ignore(path, place, entry):
    edit_json(path / "config.json", lambda config: config["quantization_config"]["ignore"].append(entry))


def part(path, weight, ending, change):
    """One part of a packed weight, which a finding calls by the weight's name, holds something else."""
    reshaped(path, weight + ending, change)


def words_lost(path, weight):
    replace(path, {}, [f"{weight}_packed"])


def scale_without_weight(path, name):
    replace(path, {name: torch.ones(12, 4, dtype=torch.bfloat16)})


def in_awq_order(words):
    """The 4 bit codes of each word in AutoAWQ's order."""
    codes = unpack_from_int32(words, 4, torch.Size((len(words), words.shape[1] * 8)))
    return pack_to_int32(codes.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1).contiguous(), 4)


def one_nibble(words):
    changed = words.clone()
    changed[0, 0] ^= 0x0000F000
    return changed


def without_offset(words):
    """Codes as signed numbers: 0x88888888 is the 8 that is added to each."""
    return words ^ -0x77777778


def parts_swapped(path, folded, part):
    """A part of this expert and the same of the one before hold each other's values."""
    here, before = f"{ELEVENTH}.{part}", f"{TENTH}.{part}"
    replace(path, {here: tensor(path, before), before: tensor(path, here)})


def words_copied(path, folded):
    replace(path, {f"{ELEVENTH}.{part}": tensor(path, f"{TENTH}.{part}") for part in PARTS})
