"""Tells which layers of a model are copies of one another on purpose, as mergekit wrote it down.

Source: mergekit `config.py`, `plan.py`, and `merge.py`, which writes mergekit_config.yml beside the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptkit.formats.yaml_text import MAX_BYTES, parse, values
from ckptkit.storage.regular import read_regular
from verify.evidence.folding import layer_of, layers_of

FILE = "mergekit_config.yml"
_MAX_LAYERS = 10_000


def layer_origins(root: Path) -> Sequence[tuple[str, int]]:
    """Model and layer that each layer was copied from; none where no passthrough merge is written down."""
    try:
        content = values(parse(read_regular(root / FILE, MAX_BYTES).decode()))
        if not isinstance(content, dict) or content.get("merge_method") != "passthrough":
            return ()
        return tuple(origin for one in content["slices"] for origin in _of_slice(one))
    except (OSError, ValueError, TypeError, LookupError):
        return ()


def _of_slice(one: Any) -> Iterator[tuple[str, int]]:
    """The layers of a slice, which has one source. Raises ValueError for another."""
    (source,) = one["sources"]
    first, end = source["layer_range"]
    if not 0 <= first <= end <= _MAX_LAYERS:
        raise ValueError(f"layers {first} to {end}")
    yield from ((str(source["model"]), layer) for layer in range(first, end))


def are_copies(names: Sequence[str], origins: Sequence[tuple[str, int]]) -> bool:
    """Whether these are one tensor of several layers, all copied from the same layer."""
    layers = layers_of(names)
    same = {name.replace(f".{layer_of(name)}.", ".#.", 1) for name in names}
    known = len(layers) == len(names) and len(same) == 1 and layers[-1] < len(origins)
    return known and len({origins[layer] for layer in layers}) == 1
