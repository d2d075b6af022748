"""For CK206: which layers are copies of one another on purpose, as mergekit wrote it down beside the weights.

Source: mergekit `config.py`, `plan.py` and `merge.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptkit.formats.yaml_text import MAX_BYTES, parse, values
from ckptkit.storage.regular import read_regular
from verify.evidence.folding import layer_of, layers_of

FILE, _MAX_LAYERS = "mergekit_config.yml", 10_000


def layer_origins(root: Path) -> Sequence[tuple[str, int]]:
    """Model and layer that each layer was copied from; none where no passthrough merge is written down."""
    origins: list[tuple[str, int]] = []
    try:
        content = values(parse(read_regular(root / FILE, MAX_BYTES).decode()))
        for one in content["slices"] if content["merge_method"] == "passthrough" else ():
            (source,) = one["sources"]
            first, end = source["layer_range"]
            if first < 0 or end > _MAX_LAYERS or len(origins) > _MAX_LAYERS:
                return ()
            origins += [(str(source["model"]), layer) for layer in range(first, end)]
    except (OSError, ValueError, TypeError, LookupError):
        return ()
    return origins


def are_copies(names: Sequence[str], origins: Sequence[tuple[str, int]]) -> bool:
    """Whether these are one tensor of several layers, all copied from the same layer."""
    layers = layers_of(names)
    same = {name.replace(f".{layer_of(name)}.", ".#.", 1) for name in names}
    known = len(layers) == len(names) and len(same) == 1 and layers[-1] < len(origins)
    return known and len({origins[layer] for layer in layers}) == 1
