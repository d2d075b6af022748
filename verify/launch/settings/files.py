"""A configuration file with those that it builds on: Hydra's defaults lists, and NeMo-RL's `defaults: parent.yaml`.

Source: Hydra's defaults list; NeMo-RL `utils/config.py`. A file of the list that is not beside the others belongs to
the installed trainer or to another machine: it is named, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.settings.tree import NULL, Tree, merged_settings, read_yaml
from ckptkit.verify.launch.words import Word

_MAX_DEPTH, _MAX_FILES = 20, 100
_SELF = "_self_"


@dataclass(frozen=True)
class Composed:
    """The tree of a file and its defaults, and the entries of defaults lists whose files are not there.

    `files`: how many were read, with those before them.
    """

    tree: dict[str, Tree]
    absent: tuple[Word, ...] = ()
    files: int = 0


def compose(path: Path, depth: int = 0, files: int = 0) -> Composed:
    """A configuration file with its defaults laid below it. `files`: how many have been read before it.

    Raises CkptkitError for a file that is not there or cannot be read, and for defaults that go in circles or name more
    than 100 files.
    """
    if files >= _MAX_FILES:
        raise CkptkitError(f"{path}: its defaults name more than {_MAX_FILES} files", "give the file of one job")
    if depth > _MAX_DEPTH:
        raise CkptkitError(f"{path}: its defaults go in circles", "a file must not build on itself")
    tree = read_yaml(path)
    defaults = tree.pop("defaults", None)
    if defaults is None or (isinstance(defaults, Word) and defaults.text == NULL):
        return Composed(tree, files=files + 1)
    entries: list[Tree] = defaults if isinstance(defaults, list) else [defaults]
    # Names of files, as NeMo-RL has them, or a defaults list of Hydra.
    names_files = any(isinstance(one, Word) and one.text.endswith((".yaml", ".yml")) for one in entries)
    if names_files or isinstance(defaults, Word):
        return _inherited(path, tree, entries, depth, files + 1)
    return _listed(path, tree, entries, depth, files + 1)


def _inherited(path: Path, tree: dict[str, Tree], defaults: list[Tree], depth: int, files: int) -> Composed:
    base = Composed({}, files=files)
    for word in defaults:
        if not isinstance(word, Word):
            raise CkptkitError(f"{path}: defaults with something that is not a file", "give names of YAML files")
        parent = path.parent / word.text
        if not parent.is_file():
            base = Composed(base.tree, (*base.absent, word), base.files)
            continue
        below = compose(parent, depth + 1, base.files)
        base = Composed(_replaced(base.tree, below.tree), (*base.absent, *below.absent), below.files)
    return Composed(_replaced(base.tree, tree), base.absent, base.files)


def _replaced(base: dict[str, Tree], over: dict[str, Tree]) -> dict[str, Tree]:
    """Merges; a section of `over` that says `_override_: true` replaces that of `base`."""
    kept, laid = dict(base), dict(over)
    for key, value in over.items():
        mark = value.get("_override_") if isinstance(value, dict) else None
        if isinstance(value, dict) and isinstance(mark, Word) and mark.text.lower() == "true":
            kept.pop(key, None)
            laid[key] = {name: one for name, one in value.items() if name != "_override_"}
    return merged_settings(kept, laid)


def _listed(path: Path, tree: dict[str, Tree], defaults: list[Tree], depth: int, files: int) -> Composed:
    found: dict[str, Tree] = {}
    absent: list[Word] = []
    entries = list(_entries(defaults))
    if all(name.text != _SELF for _, name in entries):
        entries.append(("", Word(_SELF)))
    for group, name in entries:
        if name.text == _SELF:
            found = merged_settings(found, tree)
            continue
        folder, _, package = group.removeprefix("override ").removeprefix("optional ").partition("@")
        file = path.parent / folder / (name.text if name.text.endswith((".yaml", ".yml")) else f"{name.text}.yaml")
        if name.text == NULL:
            continue
        if "${" in name.text or not file.is_file():
            # Files of the trainer itself are in folders that are not there.
            is_known = folder and file.parent.is_dir()
            absent.append(replace(name, text=f"{folder}/{name.text}") if is_known else name)
            continue
        below = compose(file, depth + 1, files)
        absent, files = [*absent, *below.absent], below.files
        where = package or folder.strip("./").replace("/", ".")
        found = merged_settings(found, _placed(below.tree, "" if where == "_here_" else where.removeprefix("_global_")))
    return Composed(found, tuple(absent), files)


def _entries(defaults: list[Tree]) -> Iterator[tuple[str, Word]]:
    """Group and file of every entry of a defaults list: `a`, `group/a`, `group: a` and `group@package: a`."""
    for entry in defaults:
        if isinstance(entry, dict):
            yield from ((group, name) for group, name in entry.items() if isinstance(name, Word))
        elif isinstance(entry, Word):
            text, _, package = entry.text.partition("@")
            folder, _, name = text.rpartition("/")
            word = Word(name, entry.file, entry.line)
            yield f"{folder}@{package}" if package else folder, word


def _placed(tree: dict[str, Tree], package: str) -> dict[str, Tree]:
    for key in reversed([key for key in package.split(".") if key]):
        tree = {key: tree}
    return tree
