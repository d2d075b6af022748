"""Rejects implausible values of an HF config before code loops over them or allocates memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened

MAX_KEYS = 2_000  # per part; transformers' have about a hundred
MAX_LAYERS = 1_000  # the deepest released models have 126
MAX_EXPERTS = 128_000  # in all layers together: Kimi K2 has 23,424
MAX_SIZE = 1 << 31  # of any size
MAX_RANKS = 1_000_000  # of nodes, GPUs and parallel sizes
_LAYERS = ("num_hidden_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers", "depth")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_PARTS = ("text_config", "vision_config")
_OBJECTS = (*_PARTS, "thinker_config", "rope_parameters", "rope_scaling")
_LISTS = (
    "layer_types",
    "mlp_layer_types",
    "indexer_types",
    "mlp_only_layers",
    "attn_type_list",
    "deepstack_visual_indexes",
)
# As releases and tools spell them; transformers looks the word up in torch.
_DTYPES = re.compile(r"(torch\.)?(auto|half|double|b?float\d*(_e\dm\d\w*)?|[bm]?x?fp\d+|u?int\d+)")


def check_config(config: Mapping[str, Any]) -> None:
    """Raises CkptkitError, naming the key, for values that are invalid or implausibly large."""
    for where, part in _parts(config):
        if len(part) > MAX_KEYS:
            raise _wrong(f"{where.rstrip('.')} number of keys".strip(), len(part), f"at most {MAX_KEYS:,}")
        _check_kinds(where, part)
        _check_sizes(where, part)


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config and its parts for language and vision, each with the prefix of its keys."""
    thinker = config.get("thinker_config")
    for where, holder in (("", config), ("thinker_config.", thinker if isinstance(thinker, Mapping) else {})):
        yield where, holder
        for key in _PARTS:
            part = holder.get(key)
            if isinstance(part, Mapping):
                yield f"{where}{key}.", part


def _check_kinds(where: str, part: Mapping[str, Any]) -> None:
    for key in _OBJECTS:
        if part.get(key) is not None and not isinstance(part[key], Mapping):
            raise _wrong(where + key, part[key], "an object")
    for key in _LISTS:
        if (value := part.get(key)) is None:
            continue
        is_short = isinstance(value, list) and len(value) <= MAX_LAYERS
        if not is_short or not all(type(one) in (str, int) for one in value):
            raise _wrong(where + key, part[key], f"a list of at most {MAX_LAYERS:,} strings or numbers")
    if not isinstance(part.get("index_topk_pattern"), (str, list, type(None))):
        raise _wrong(where + "index_topk_pattern", part["index_topk_pattern"], "a string of F and S, or a list")
    for key in ("dtype", "torch_dtype"):
        value = part.get(key)
        if value is not None and (type(value) is not str or not _DTYPES.fullmatch(value)):
            raise _wrong(where + key, value, "the name of a dtype, such as bfloat16")


def _check_sizes(where: str, part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if type(value) is int and key.startswith(("num_", "n_")) and abs(value) > MAX_SIZE:
            raise _wrong(where + key, value, f"at most {MAX_SIZE}")
    for key in _LAYERS:
        if type(value := part.get(key)) is int and value > MAX_LAYERS:
            raise _wrong(where + key, value, f"at most {MAX_LAYERS:,}")
    layers = part.get("num_hidden_layers")
    for key in _EXPERTS:
        value = part.get(key)
        if type(value) is int and value * (layers if type(layers) is int else 1) > MAX_EXPERTS:
            raise _wrong(where + key, value, f"at most {MAX_EXPERTS:,} experts in all layers together")


def _wrong(key: str, value: Any, allowed: str) -> CkptkitError:
    return CkptkitError(f"config.json: {key} is {shortened(value)}, not {allowed}", "compare it with the release")
