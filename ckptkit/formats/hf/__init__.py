"""HF directories: safetensors shards with an index, and the files beside the weights."""
