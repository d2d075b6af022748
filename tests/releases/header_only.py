"""Writes a release without its weights: real headers and sparse data. A model of 1 TB takes kilobytes of disk."""

import json

# What transformers cuts at, for releases whose number of shards was not seen.
SHARD_BYTES = 5_000_000_000


def write(release, path):
    path.mkdir(parents=True)
    _json(path / "config.json", release.config)
    _write_tokenizer(path)
    shards = list(_shards(release))
    if len(shards) == 1:
        _write_shard(path / "model.safetensors", shards[0])
        return path
    weight_map = {}
    # gpt-oss counts its shards from 0, up to the number of the last one.
    last = len(shards) + release.first_shard - 1
    for number, tensors in enumerate(shards, release.first_shard):
        file = f"model-{number:05d}-of-{last:05d}.safetensors"
        _write_shard(path / file, tensors)
        weight_map |= {tensor.name: file for tensor in tensors}
    total = release.nbytes if release.index_size is None else release.index_size
    _json(
        path / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )
    return path


def _shards(release):
    count = release.shards or max(1, -(-release.nbytes // SHARD_BYTES))
    written, shard, number = 0, [], 1
    for tensor in release.tensors_in_order:
        if shard and number < count and written >= release.nbytes * number / count:
            yield shard
            shard, number = [], number + 1
        shard.append(tensor)
        written += tensor.nbytes
    yield shard


def _write_shard(path, tensors):
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _write_tokenizer(path):
    words = {"<unk>": 0, "a": 1, "b": 2}
    model = {"type": "BPE", "vocab": words, "merges": [], "unk_token": "<unk>"}
    _json(path / "tokenizer.json", {"version": "1.0", "added_tokens": [], "model": model})
    _json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"})


def _json(path, content):
    path.write_text(json.dumps(content, indent=2) + "\n")
