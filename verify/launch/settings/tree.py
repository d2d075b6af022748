"""YAML as mappings, lists, and words with their line; nothing in it is executed."""

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


def merge_settings(base: Mapping[str, Tree], over: Mapping[str, Tree]) -> dict[str, Tree]:
    """Merges as OmegaConf does: mappings key by key; any other value of `over` replaces that of `base`."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge_settings(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def flat_settings(tree: Tree | Mapping[str, Tree], key: str = "", *, lists: bool = True) -> Iterator[tuple[str, Word]]:
    """Every word with its dotted key; `lists` includes words of lists, with their index."""
    if isinstance(tree, Word):
        yield key, tree
        return
    for name, value in enumerate(tree if lists else ()) if isinstance(tree, list) else tree.items():
        yield from flat_settings(value, f"{key}.{name}" if key else str(name), lists=lists)


def read_yaml(path: Path) -> dict[str, Tree]:
    """The mapping in a YAML file, which may be empty; a null is the word `null`.

    Raises CkptkitError for a file that cannot be read, is not a mapping, has a key twice, or is too large (1 MB, 64
    levels, 50,000 values with aliases expanded).
    """
    try:
        text = read_regular(path, MAX_BYTES).decode()
    except UnicodeDecodeError as error:
        raise _refusal(path, "is not UTF-8 text") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CkptkitError(f"{path}: {reason}", "check the path of the configuration") from error
    tree = parse_yaml(text, path)
    if not isinstance(tree, dict):
        raise _refusal(path, "is not a mapping")
    return tree


def parse_yaml(text: str, path: Path | None = None) -> Tree:
    """The tree of a YAML document; empty text is an empty mapping. Raises as `read_yaml`."""
    try:
        return _words(yaml_text.parse(text), path)
    except ValueError as error:
        raise _refusal(path, str(error)) from error
    except RecursionError as error:
        raise _refusal(path, "nested too deeply, aliases expanded") from error


def _words(tree: yaml_text.Tree, path: Path | None) -> Tree:
    if isinstance(tree, dict):
        return {key: _words(value, path) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_words(item, path) for item in tree]
    return Word(NULL if tree.value is None else tree.text, path, None if path is None else tree.line)


def _refusal(path: Path | None, why: str) -> CkptkitError:
    return CkptkitError(f"{path or 'a value on the command line'}: {why}", "pass the YAML file that the trainer reads")
