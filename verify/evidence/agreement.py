"""Compares the packed modules of an INT4 checkpoint with those that each reader expects by its `ignore` list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.side_files import quantization_of
from ckptkit.quant.formats.groups import groups_of, targets_of
from ckptkit.quant.formats.part_names import PACKED, packed_in
from ckptkit.quant.formats.scheme import get_list
from ckptkit.quant.ignore.agree import Question, advice, describe_divergences, is_untargeted, severities
from ckptkit.quant.ignore.names import forbidden, matrices_named, matrices_of
from ckptkit.quant.ignore.readers import INT4_READERS, deciding_readers
from ckptkit.quant.ignore.tree import class_tree
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.evidence.folding import by_key

_BY_CLASS = frozenset(INT4_READERS) - {"slime"}  # which packs by names only


@dataclass(frozen=True)
class Agreement:
    """The modules of an INT4 checkpoint that are not stored as its readers expect."""

    looked_at: int  # modules that are packed or should be
    forbidden: Mapping[str, str]  # packed, but no relevant reader has a quantized layer for it; with the reason
    unwanted: Sequence[str]  # packed, but every reader that knows classes expects floats
    missing: Sequence[str]  # unquantized or absent, but every reader that knows classes expects it packed
    issues: Sequence[Issue]  # one for each reader that interprets the list differently


def agreement(
    specs: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    asked: Sequence[str] | None,
    engine: str = "sglang",
    updated: bool | None = False,
) -> Agreement:
    """Compares packed modules with the expectations of readers; arguments as in `severities`. Raises CkptkitError."""
    ignore, tree, stored = get_list(quantization_of(config), "ignore"), class_tree(config), set(packed_in(specs))
    # Linear layers without a tensor of that name, such as fused experts; a tied head is not stored.
    linears = sorted(tree.linears - {tree.head})
    absent = [name for name in linears if f"{name}.weight" not in specs and name + PACKED not in specs]
    matrices = [*matrices_of(specs, tree, config), *matrices_named((f"{name}.weight" for name in absent), tree, config)]
    packed = [matrix.module in stored for matrix in matrices]
    in_floats = {name.removesuffix(".weight") for name, spec in specs.items() if spec.dtype.startswith("float8")}
    question = Question(matrices, packed, config, tuple(INT4_READERS), targets_of(groups_of(config)), in_floats)
    divergences = question.divergences(ignore)
    # Where all readers with classes disagree with the files, the spelling of the list is not the cause.
    readers_of = by_key((one.tensor, one.reader) for one in divergences)
    unanimous = {tensor for tensor, names in readers_of.items() if _BY_CLASS.issubset(names)}
    readers = deciding_readers(asked, engine)
    reasons = ((matrix.module, forbidden(matrix, tree, readers)) for matrix in matrices if matrix.module in stored)
    ruled_out = {module: reason for module, reason in reasons if reason}
    reported = unanimous | {f"{module}.weight" for module in ruled_out}
    by_reader, issues = severities(config, ignore, tree, asked, engine, updated=updated), list[Issue]()
    remaining = [one for one in divergences if one.tensor not in reported and one.reader in by_reader]
    hint = advice(remaining, question, ignore) if remaining else ""
    for reader, its in by_key((one.reader, one) for one in remaining).items():
        severity = "error" if any(is_untargeted(one, asked) for one in its) else by_reader[reader]
        expected = "an ignore list that every reader interprets in the same way"
        actual = "; ".join(describe_divergences(its))
        issues.append(Issue(expected, actual, hint, file="config.json", severity=severity))
    missing = [one.module for one in matrices if one.tensor in unanimous and one.module not in stored]
    unwanted = [module for module in stored if f"{module}.weight" in unanimous and module not in ruled_out]
    return Agreement(len(stored) + len(missing), ruled_out, sorted(unwanted), sorted(missing), issues)
