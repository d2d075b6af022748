"""HF directories: safetensors shards with an index, and the files beside the weights."""

MAY_IMPORT = ("ckptkit.core", "ckptkit.storage", "ckptkit.formats")
