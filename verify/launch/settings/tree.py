"""YAML as mappings, lists and words that know their line; nothing in it is executed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from ckptkit.core.errors import CkptkitError
from ckptkit.formats import yaml_text
from ckptkit.formats.yaml_text import MAX_BYTES
from ckptkit.storage.regular import read_regular
from ckptkit.verify.launch.words import Word

Tree: TypeAlias = "dict[str, Tree] | list[Tree] | Word"

NULL = "null"


def merged_settings(base: Mapping[str, Tree], over: Mapping[str, Tree]) -> dict[str, Tree]:
    """`over` laid upon `base`, as OmegaConf merges: mappings key by key, anything else as a whole."""
    found = dict(base)
    for key, value in over.items():
        before = found.get(key)
        found[key] = merged_settings(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return found


def flat_settings(
    tree: Tree | Mapping[str, Tree], prefix: str = "", *, lists: bool = True
) -> Iterator[tuple[str, Word]]:
    """Every word with its dotted key; those of lists with their index, or not at all."""
    if isinstance(tree, Word):
        yield prefix, tree
        return
    entries = enumerate(tree if lists else ()) if isinstance(tree, list) else tree.items()
    for key, value in entries:
        yield from flat_settings(value, f"{prefix}.{key}" if prefix else str(key), lists=lists)


def read_yaml(path: Path) -> dict[str, Tree]:
    """The mapping that a YAML file holds; an empty file is an empty mapping.

    A null is the word `null`. Raises CkptkitError for a file that cannot be read, is no mapping, has a key twice, or
    is too large (1 MB, 64 levels, 50,000 values with aliases expanded).
    """
    try:
        data = read_regular(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CkptkitError(f"{path}: {reason}", "check the path of the configuration") from error
    try:
        tree = parse_yaml(data.decode(), path)
    except UnicodeDecodeError as error:
        raise _refused(path, "is not UTF-8 text") from error
    if not isinstance(tree, dict):
        raise _refused(path, "holds no mapping")
    return tree


def parse_yaml(text: str, path: Path | None = None) -> Tree:
    """The tree of a YAML document; empty text is an empty mapping. Raises as `read_yaml`."""
    try:
        return _words(yaml_text.parse(text), path)
    except ValueError as error:
        raise _refused(path, str(error)) from error
    except RecursionError as error:
        raise _refused(path, "nested too deeply, aliases expanded") from error


def _words(tree: yaml_text.Tree, path: Path | None) -> Tree:
    if isinstance(tree, dict):
        return {key: _words(one, path) for key, one in tree.items()}
    if isinstance(tree, list):
        return [_words(one, path) for one in tree]
    return Word(NULL if tree.value is None else tree.text, path, None if path is None else tree.line)


def _refused(path: Path | None, why: str) -> CkptkitError:
    return CkptkitError(f"{path or 'a value on the command line'}: {why}", "give the YAML file as the trainer reads it")
