"""Loads the `ignore` list of an INT4 config.json and the tensor names of its model. Reads no weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import SINGLE, read_config, shard_names
from ckptkit.formats.hf.shard import read_shard
from ckptkit.formats.hf.side_files import quantization_of
from converters.foreign import refuse_stated
from converters.stored import as_spelled
from quant.formats.groups import Target, groups_of, targets_of
from quant.formats.part_names import SCALE, packed_in
from quant.formats.scheme import listed
from quant.patterns.entries import check_entries
from quant.selection.class_tree import class_tree
from quant.selection.matrices import Matrix, fused_experts, matrices_named
from quant.selection.portable import Divergence, divergences, packed_by
from quant.selection.published import severities
from quant.selection.readers import ALL_READERS, RULES, readers_of
from quant.selection.reading import Reading, covered, read_all
from quant.selection.tree import ClassTree


@dataclass(frozen=True)
class IgnoreList:
    """An `ignore` list, the tensor names of its model, and how each reader takes the list."""

    config: Mapping[str, Any]
    ignore: tuple[str, ...]
    targets: tuple[Target, ...]
    tree: ClassTree
    matrices: Sequence[Matrix]
    stored: frozenset[str] | None  # modules that the files hold packed; None: they hold none
    readers: tuple[str, ...]  # the readers that are checked
    asked: tuple[str, ...] | None = None  # names given with `--reader`; None: none were
    indexed: bool = False  # names come from files, not only from the model's classes
    scaled: frozenset[str] = frozenset()  # modules stored with a scale and not packed, so in another format (FP8)

    @cached_property
    def readings(self) -> dict[str, Reading]:
        """How each reader takes the list."""
        return self.read(self.ignore)

    def read(self, ignore: Sequence[str]) -> dict[str, Reading]:
        """Returns how each reader takes another list."""
        return read_all(RULES, self.matrices, ignore, self.config, self.targets)

    @cached_property
    def packed(self) -> tuple[bool, ...]:
        """Whether each matrix is INT4: by stored names if any is packed, else by classes and compressed-tensors."""
        if self.stored is not None:
            return tuple(matrix.module in self.stored for matrix in self.matrices)
        return tuple(packed_by(self.matrices, self.readings["compressed-tensors"]))

    @cached_property
    def others(self) -> frozenset[str]:
        """Modules in another format than INT4: by stored names, else by what compressed-tensors makes of the groups."""
        if self.stored is not None:
            return self.scaled
        answers = self.readings["compressed-tensors"].answers
        pairs = zip(self.matrices, answers, strict=True)
        return frozenset(matrix.module for matrix, answer in pairs if answer == "other")

    @cached_property
    def severities(self) -> dict[str, Literal["error", "warning"]]:
        """The severity of each reader's disagreement with what is packed, as in `verify`."""
        return severities(self.config, self.ignore, self.tree, self.asked)

    @property
    def by_name(self) -> bool:
        """Whether targets name modules, and not only the class Linear."""
        return [target.pattern for target in self.targets] != ["Linear"]

    @property
    def whole(self) -> bool:
        """Whether all module names are known, so that an entry that covers none is useless."""
        return self.indexed or (self.tree.whole and not self.tree.drafts)

    def spelled(self, pattern: str) -> list[str]:
        """Returns the Linear layers that an entry covers, by transformers' names."""
        return sorted(covered("transformers", pattern, sorted(self.tree.spelled)))

    def divergences(self, readings: Mapping[str, Reading]) -> list[Divergence]:
        """Returns where the checked readers disagree with what is packed."""
        return divergences(self.matrices, self.packed, readings, self.readers, self.others)


def open_subject(path: Path, readers: Sequence[str] | None = None) -> tuple[IgnoreList, str]:
    """Loads the subject at `path`, a directory with config.json, and says where its names come from.

    Raises CkptkitError when there is no compressed-tensors INT4 config, as `refuse_stated`, or the model is not known.
    """
    wanted = readers_of(ALL_READERS if readers is None else readers)
    config: Mapping[str, Any] = read_config(path)
    refuse_stated(config, path)
    content = quantization_of(config)
    if not isinstance(content, Mapping) or content.get("quant_method") != "compressed-tensors":
        raise CkptkitError(
            f"{path / 'config.json'} has no quantization_config of compressed-tensors",
            "lint looks at INT4 checkpoints and their ignore lists",
        )
    ignore, groups = listed(content, "ignore"), groups_of(config)
    if not any(group.kind == "packs" for group in groups):
        raise CkptkitError(
            f"{path / 'config.json'}: no config group has INT4 weights (format {content.get('format')!r})",
            "lint looks at INT4 checkpoints and their ignore lists; `ckptkit verify` looks at other formats",
        )
    targets = targets_of(groups)
    check_entries(ignore, f"{path / 'config.json'}: ignore")
    check_entries([target.pattern for target in targets], f"{path / 'config.json'}: targets")
    stored, source = _stored_names(path)
    config = as_spelled(config, stored)
    tree = class_tree(config)
    names = stored or [f"{module}.weight" for module in [*tree.others, *sorted(tree.linears), *_draft_modules(tree)]]
    matrices = [*matrices_named(names, tree, config), *fused_experts(names, tree, config)]
    packed = frozenset(packed_in(names))
    asked = None if readers is None else tuple(readers)
    return IgnoreList(
        config,
        tuple(dict.fromkeys(ignore)),
        targets,
        tree,
        matrices,
        packed or None,
        wanted,
        asked,
        bool(stored),
        frozenset(name.removesuffix(SCALE) for name in names if name.endswith(SCALE)) - packed,
    ), source


def _stored_names(path: Path) -> tuple[list[str], str]:
    """Returns the names of stored tensors (none without weights) and where they come from."""
    if (weight_map := shard_names(path)) is not None:
        return list(weight_map), "the index"
    if (path / SINGLE).exists():
        return list(read_shard(path / SINGLE).specs), f"the header of {SINGLE}"
    return [], "the model's classes, since there are no weights"


def _draft_modules(tree: ClassTree) -> Iterator[str]:
    """Yields the modules of draft layers: the one that joins their inputs, and the same as in the last layer."""
    for draft in tree.drafts:
        yield draft.joint
        yield from (draft.layer + tail.replace("#", "0") for tail in sorted(tree.last_tails))
