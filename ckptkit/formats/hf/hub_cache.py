"""Finds a model that a launch names as on a hub (`ORG/NAME`) in the local cache of such models, without a network."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import INDEX, read_json

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")


@dataclass(frozen=True)
class HubModel:
    """A name on a hub: its snapshot in the local cache, None where not all of it is there, and why."""

    name: str
    path: Path | None
    why: str


def hub_model(text: str, environment: Mapping[str, str]) -> HubModel | None:
    """What a trainer with this environment takes for a model name without downloading it; None for no such name.

    A directory of that name counts first, as for transformers and SGLang.
    """
    if not _NAME.fullmatch(text) or Path(text).exists():
        return None
    # Half a second, and most launches name directories.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    cache = hub_cache(environment)
    try:
        found = try_to_load_from_cache(text, "config.json", cache_dir=cache)
    except HFValidationError:
        return None  # the trainer refuses it too
    if not isinstance(found, str) or not Path(found).exists():
        return HubModel(text, None, f"not in {cache}, so it is downloaded at the start; not looked at")
    snapshot = Path(found).parent
    if not _is_whole(snapshot):
        why = f"in {cache} only in part, so the rest is downloaded at the start; not looked at"
        return HubModel(text, None, why)
    return HubModel(text, snapshot, f"{text} in the local hub cache")


def hub_cache(environment: Mapping[str, str]) -> Path:
    """The directory of the cache. Source: huggingface_hub `constants.py`."""
    home = environment.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = environment.get("HF_HOME") or os.path.join(home, "huggingface")
    cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache)))


def _is_whole(snapshot: Path) -> bool:
    """Whether the weights of a snapshot are there: those that its index names, or any file of them."""
    try:
        index = read_json(snapshot / INDEX) if (snapshot / INDEX).exists() else {}
    except CkptkitError:
        return True  # a damaged index, which a check of headers names
    weights = index.get("weight_map")
    names = set(map(str, weights.values())) if isinstance(weights, dict) else set()
    return all((snapshot / name).exists() for name in names) and any(snapshot.glob("*.safetensors"))
