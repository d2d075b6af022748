"""HF directories: safetensors shards with an index, and side files."""
