"""Publishes weight updates as slime does, by an encoder of our own.

The format is as read in slime 624b824a: `UpdateWeightFromDiskDelta._write_delta_files` and `diff_and_compress` in
slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py, `overwrite_encode` and `checksum` in
slime/utils/disk_delta.py. miles 31f1ca96 and vime 03a8e1bf have the same functions.
"""

import json
import shutil
import zlib

import torch
import xxhash
import zstandard
from blake3 import blake3
from safetensors.torch import save_file

from support.models import tensors

INDEX = "model.safetensors.index.json"


def version_at(root, number):
    return root / f"weight_v{number:06d}"


def digest(algorithm, content):
    match algorithm:
        case "xxh3-128":
            return xxhash.xxh3_128_hexdigest(content)
        case "blake3":
            return blake3(content).hexdigest()
    return format(zlib.adler32(content), "08x")


def encoded(encoding, old, new):
    """The payload of a change, before it is compressed; of `overwrite` the count, positions and new bytes."""
    if encoding == "xor":
        return (int.from_bytes(old) ^ int.from_bytes(new)).to_bytes(len(old))
    changed = [at for at, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    numbers = b"".join(number.to_bytes(4, "little") for number in (len(changed), *changed))
    return numbers + bytes(new[at] for at in changed)


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def packed(payload):
    return torch.frombuffer(bytearray(zstandard.ZstdCompressor(level=1).compress(payload)), dtype=torch.uint8)


def publish(root, number, old, new, encoding="xor", algorithm="xxh3-128", ranks=2):
    """Writes the delta from `old` to `new` as that version: the tensors that changed, in a file for each rank."""
    path = version_at(root, number)
    path.mkdir(parents=True)
    changed = [name for name in new if raw(old[name]) != raw(new[name])]
    parts = [part for part in (changed[rank::ranks] for rank in range(ranks)) if part]
    weight_map = {}
    for place, names in enumerate(parts):
        file = f"model-{place:05d}-of-{len(parts):05d}.safetensors"
        stored = {name: packed(encoded(encoding, raw(old[name]), raw(new[name]))) for name in names}
        save_file(stored, path / file, metadata={name: digest(algorithm, raw(new[name])) for name in names})
        weight_map |= dict.fromkeys(names, file)
    stated = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": algorithm,
    }
    (path / INDEX).write_text(json.dumps({"metadata": stated, "weight_map": weight_map}))
    return path


def trained(state, step):
    """The weights after a training step: a few numbers of every second tensor are others."""
    generator, new = torch.Generator().manual_seed(step), {}
    for place, (name, tensor) in enumerate(state.items()):
        new[name] = tensor.clone()
        if (place + step) % 2:
            few = torch.randint(tensor.numel(), (3,), generator=generator)
            new[name].view(-1)[few] += 0.25 + step
    return new


def publish_chain(root, base, encodings=("xor",) * 6):
    """Publishes a chain of deltas onto an HF directory, and returns the weights of each version, 0 the base's."""
    states = [tensors(base)]
    for number, encoding in enumerate(encodings, 1):
        states.append(trained(states[-1], number))
        publish(root, number, states[-2], states[-1], encoding)
    return states


def edit_index(path, **metadata):
    index = json.loads((path / INDEX).read_text())
    index["metadata"] |= metadata
    (path / INDEX).write_text(json.dumps(index))


def renumber(root, old, new):
    shutil.copytree(version_at(root, old), version_at(root, new), dirs_exist_ok=True)
    edit_index(version_at(root, new), version=f"{new:06d}", base_version=f"{new - 1:06d}")
