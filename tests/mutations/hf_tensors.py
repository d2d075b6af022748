"""Ways to break the tensors of an HF directory: names, shapes, dtypes and values."""

import re

import torch
from safetensors.torch import load_file, save_file

from mutations.edits import INDEX, names, rename, replace, shard_of, tensor, write_index
from mutations.hf_files import weight_map

# Changes of one tensor. Where `valued` or `stored` applies them, shape and dtype stay as they were.


def cast(dtype):
    return lambda before: before.to(getattr(torch, dtype))


CHANGES = {
    "first": lambda rows: lambda before: before[:rows],
    "columns": lambda count: lambda before: before[:, :count],
    "turned": lambda before: before.T,
    "zero_rows_added": lambda before: torch.cat([before, before[:32] * 0]),
    "filled": lambda value: lambda before: torch.full_like(before, value),
    "times": lambda factor: lambda before: before * factor,
    "halved": lambda before: before // 2,
    "vocabulary_cut": lambda before: torch.cat([before[:300], before[300:] * 0]),
    # Bytes of another format: numbers, and all of them far below what a weight can be.
    "denormal": lambda before: torch.full_like(before, 1e-39) * torch.sign(before),
    # The tensor of a base model: values like these, and not these.
    "other_training": lambda before: (
        torch.randn(before.shape, generator=torch.Generator().manual_seed(7)) * before.float().std()
    ),
    "zero_centered": lambda before: before - 6.9,
    "rows_reversed": lambda before: before.flip(0),
    "columns_reversed": lambda before: before.flip(1),
    "rolled": lambda by: lambda before: before.roll(by, 0),
    # The two halves along an axis in each other's place: two tensor parallel ranks joined in the wrong order.
    "halves": lambda axis: lambda before: before.roll(before.shape[axis] // 2, axis),
    # Gate and up, one row of each after the other.
    "rows_by_turns": lambda before: before.unflatten(-2, (2, -1)).transpose(-3, -2),
    # Query heads as if one of each group came first: 2 groups of 5 heads of 32.
    "regrouped": lambda before: before.reshape(2, 5, 32, -1).transpose(0, 1),
    # Rotary rows of every head of 32 in pairs instead of halves, as Meta's Llama has them.
    "half_turned": lambda before: before.reshape(-1, 2, 16, before.shape[-1]).transpose(1, 2),
}


def last(value):
    def change(before):
        after = before.clone()
        after.view(-1)[-1] = value
        return after

    return change


def half_zero(axis):
    """Only the first half along an axis was ever loaded."""

    def change(before):
        kept, lost = before.chunk(2, axis)
        return torch.cat([kept, lost * 0], axis)

    return change


def unwritten(before):
    """What memory that was never written may hold: finite numbers of every magnitude."""
    generator = torch.Generator().manual_seed(5)
    return torch.exp(torch.rand(before.shape, generator=generator) * 60 - 40) * torch.sign(before.float())


# Damages: names.


def lost(path, name):
    replace(path, {}, [name])


def lost_all(path, folded, part):
    replace(path, {}, names(path, part))


def never_exported(path, folded, part):
    """Another export, into one file, without the tensors with this part in their names."""
    kept = {name: tensor(path, name) for name in names(path, "") if part not in name}
    for file in [*path.glob("*.safetensors"), path / INDEX]:
        file.unlink()
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def renamed(path, name, old, new):
    rename(path, lambda one: re.sub(old, new, one))


def lora(path, name):
    base = "model.layers.3.self_attn.q_proj"
    replace(path, {f"{base}.lora_{part}.weight": torch.randn(8, 128).bfloat16() for part in "AB"})


# Shapes and dtypes.


def reshaped(path, name, change):
    replace(path, {name: change(tensor(path, name))})


def merged_with(path, name, others):
    """The tensor holds others of its layer too, which are still there."""
    parent, own, leaf = name.rsplit(".", 2)
    replace(path, {name: torch.cat([tensor(path, f"{parent}.{module}.{leaf}") for module in (own, *others)])})


def fused_turned(path, name):
    """Fused experts [experts, out, in] as [experts, in, out] in every layer."""
    replace(path, {one: tensor(path, one).transpose(1, 2) for one in names(path, ".experts.gate_up_proj")})


def all_in(path, folded, dtype, part):
    replace(path, {name: cast(dtype)(tensor(path, name)) for name in names(path, part)})


def shard_in(path, folded, name, dtype):
    """The shard of a tensor was converted with another dtype."""
    shard = shard_of(path, name)
    content = {key: cast(dtype)(value) for key, value in load_file(shard).items()}
    save_file(content, shard, metadata={"format": "pt"})
    write_index(path, weight_map(path))


# Values.


def valued(path, name, change):
    before = tensor(path, name)
    replace(path, {name: change(before).to(before.dtype).reshape(before.shape)})


def fused(path, folded, part, change):
    """One fused tensor holds other values; the place is how a finding names its experts."""
    reshaped(path, f"model.layers.5.mlp.experts.{part}", change)


def copied(path, folded, name, origin):
    """A tensor holds the bytes of another; the place is how a finding names both."""
    replace(path, {name: tensor(path, origin)})


def as_embedding(path, name):
    """An output layer that was tied while training."""
    copied(path, "", name, "model.embed_tokens.weight")


def swapped(path, name, old, new):
    """The tensor and the one whose name has `new` for `old` hold each other's values."""
    other = name.replace(old, new)
    replace(path, {name: tensor(path, other), other: tensor(path, name)})


def of_another_number(path, pattern, origin):
    """Every tensor that fits holds the values of the one with the number `origin(number)`, the pattern's one group."""
    moved = {}
    for name in names(path, ""):
        if match := re.fullmatch(pattern, name):
            other = f"{name[: match.start(1)]}{origin(int(match[1]))}{name[match.end(1) :]}"
            moved[name] = tensor(path, other)
    replace(path, moved)


def next_of(path, folded, pattern, count):
    """Each has the values of the next, the last those of the first."""
    of_another_number(path, pattern, lambda number: (number + 1) % count)


def experts_of_rank_0(path, folded):
    """The second of two expert parallel ranks wrote the experts that have its local numbers: 6 to 11 are 0 to 5."""
    of_another_number(path, r".*\.experts\.(\d+)\..*", lambda number: number % 6)


def layers_of_stage_0(path, folded):
    """The second of two pipeline stages wrote its layers by their local numbers: 6 to 11 are 0 to 5."""
    of_another_number(path, r"model\.layers\.(\d+)\..*", lambda number: number % 6)


def rounded_state(path, folded):
    """fp32 state that went through bfloat16 and came back: the dtype is right again, the values are not."""
    replace(path, {name: tensor(path, name).bfloat16().float() for name in names(path, "e_score_correction_bias")})
