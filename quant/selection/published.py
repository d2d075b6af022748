"""Recognizes `ignore` lists of releases, which are made for engines and not for trainers that pack by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from converters.registry import FAMILIES
from quant.formats.groups import groups_of
from quant.selection.readers import RULES, severity_of
from quant.selection.tree import ClassTree


def is_published(model_type: str, ignore: Sequence[str], tree: ClassTree) -> bool:
    """Whether the list is one of a known release, or is written out as llm-compressor saves it.

    Written out: whole module names and no pattern, the head and every router among them.
    """
    family = FAMILIES.get(model_type)
    if family and family.release and frozenset(ignore) in family.release.published_ignore:
        return True
    routers = tree.gates | {name for name in tree.others if ".layers." in f".{name}"}
    return not any(entry.startswith("re:") for entry in ignore) and {tree.head, *routers} <= set(ignore)


def severities(
    config: Mapping[str, Any],
    ignore: Sequence[str],
    tree: ClassTree,
    asked: Sequence[str] | None,
    engine: str = "sglang",
    *,
    updated: bool | None = False,
) -> dict[str, Literal["error", "warning"]]:
    """The severity, for each reader, of a list that contradicts the packed weights: see `severity_of`.

    A config of several groups is made for engines too: trainers read the first alone. `updated` None: the trainer packs
    what is stored packed, so that slime's reading of the list does not matter.
    """
    published = len(groups_of(config)) > 1 or is_published(str(config.get("model_type")), ignore, tree)
    readers = (reader for reader in RULES if updated is not None or reader != "slime")
    return {
        reader: severity_of(reader, asked, engine, published=published, updated=bool(updated)) for reader in readers
    }
