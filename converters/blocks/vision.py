"""The Linear layers of vision towers, by every name that an `ignore` list may know them by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from converters.config.values import integer


def qwen_vision(config: Mapping[str, Any], mergers: int = 0) -> Iterator[str]:
    """Those of Qwen3-VL and Qwen3.5, with this many further mergers. Source: transformers `Qwen3VLVisionModel`."""
    root = "model.visual."
    for block in range(integer(config["vision_config"], "depth", 27)):
        yield from (f"{root}blocks.{block}.{name}" for name in ("attn.qkv", "attn.proj", *_FC))
    for merger in ("merger", *(f"deepstack_merger_list.{number}" for number in range(mergers))):
        yield from (f"{root}{merger}.{name}" for name in ("linear_fc1", "linear_fc2"))


_FC = ("mlp.linear_fc1", "mlp.linear_fc2")
