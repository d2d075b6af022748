"""Composes a configuration file with its defaults: Hydra's defaults lists, and NeMo-RL's `defaults: parent.yaml`.

Source: Hydra's defaults list; NeMo-RL `utils/config.py`. Missing files may belong to the trainer or another machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.settings.tree import NULL, Tree, merge_settings, read_yaml
from ckptkit.verify.launch.words import Word

_MAX_DEPTH, _MAX_FILES = 20, 100
_SELF = "_self_"


@dataclass(frozen=True)
class Composed:
    """The tree of a file and its defaults."""

    tree: dict[str, Tree]
    absent: tuple[Word, ...] = ()  # entries of defaults lists with missing files
    files: int = 0  # number of files read so far


def compose(path: Path, depth: int = 0, files: int = 0) -> Composed:
    """Merges a file over its defaults, with `files` read before. Raises CkptkitError, also for circular defaults."""
    if files >= _MAX_FILES:
        raise CkptkitError(f"{path}: its defaults name more than {_MAX_FILES} files", "pass the file of one job")
    if depth > _MAX_DEPTH:
        raise CkptkitError(f"{path}: its defaults include the file itself", "remove the circle")
    tree = read_yaml(path)
    defaults = tree.pop("defaults", None)
    if defaults is None or (isinstance(defaults, Word) and defaults.text == NULL):
        return Composed(tree, files=files + 1)
    entries: list[Tree] = defaults if isinstance(defaults, list) else [defaults]
    # File names as in NeMo-RL, or a Hydra defaults list.
    has_files = any(isinstance(entry, Word) and entry.text.endswith((".yaml", ".yml")) for entry in entries)
    read = _inherit if has_files or isinstance(defaults, Word) else _compose_list
    return read(path, tree, entries, depth, files + 1)


def _inherit(path: Path, tree: dict[str, Tree], defaults: list[Tree], depth: int, files: int) -> Composed:
    base = Composed({}, files=files)
    for word in defaults:
        if not isinstance(word, Word):
            raise CkptkitError(f"{path}: defaults has an entry that is not a file name", "write names of YAML files")
        parent = path.parent / word.text
        if not parent.is_file():
            base = Composed(base.tree, (*base.absent, word), base.files)
            continue
        below = compose(parent, depth + 1, base.files)
        base = Composed(_merge(base.tree, below.tree), (*base.absent, *below.absent), below.files)
    return Composed(_merge(base.tree, tree), base.absent, base.files)


def _merge(base: dict[str, Tree], over: dict[str, Tree]) -> dict[str, Tree]:
    """Merges; a section of `over` with `_override_: true` replaces that of `base`."""
    base, merged = dict(base), dict(over)
    for key, value in over.items():
        mark = value.get("_override_") if isinstance(value, dict) else None
        if isinstance(value, dict) and isinstance(mark, Word) and mark.text.lower() == "true":
            base.pop(key, None)
            merged[key] = {name: item for name, item in value.items() if name != "_override_"}
    return merge_settings(base, merged)


def _compose_list(path: Path, tree: dict[str, Tree], defaults: list[Tree], depth: int, files: int) -> Composed:
    composed: dict[str, Tree] = {}
    absent: list[Word] = []
    entries = list(_entries(defaults))
    if all(name.text != _SELF for _, name in entries):
        entries.append(("", Word(_SELF)))
    for group, name in entries:
        if name.text == _SELF:
            composed = merge_settings(composed, tree)
            continue
        folder, _, package = group.removeprefix("override ").removeprefix("optional ").partition("@")
        file = path.parent / folder / (name.text if name.text.endswith((".yaml", ".yml")) else f"{name.text}.yaml")
        if name.text == NULL:
            continue
        if "${" in name.text or not file.is_file():
            # Folders of the trainer's own files are missing too.
            absent.append(replace(name, text=f"{folder}/{name.text}") if folder and file.parent.is_dir() else name)
            continue
        below = compose(file, depth + 1, files)
        absent, files = [*absent, *below.absent], below.files
        package = package or folder.strip("./").replace("/", ".")
        nested: dict[str, Tree] = below.tree
        keys = [] if package == "_here_" else package.removeprefix("_global_").split(".")
        for key in reversed(list(filter(None, keys))):
            nested = {key: nested}
        composed = merge_settings(composed, nested)
    return Composed(composed, tuple(absent), files)


def _entries(defaults: list[Tree]) -> Iterator[tuple[str, Word]]:
    """Group and file of every entry of a defaults list: `a`, `group/a`, `group: a` and `group@package: a`."""
    for entry in defaults:
        if isinstance(entry, dict):
            yield from ((group, name) for group, name in entry.items() if isinstance(name, Word))
        elif isinstance(entry, Word):
            text, _, package = entry.text.partition("@")
            folder, _, name = text.rpartition("/")
            yield f"{folder}@{package}" if package else folder, Word(name, entry.file, entry.line)
