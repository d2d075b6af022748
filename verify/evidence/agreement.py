"""Compares what is packed in an INT4 checkpoint with what every reader expects by its `ignore` list."""

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

# slime packs by names alone, so it says nothing of what the model's classes make of the list.
_BY_CLASS = frozenset(INT4_READERS) - {"slime"}


@dataclass(frozen=True)
class Agreement:
    """The modules of an INT4 checkpoint that readers do not find as they expect them."""

    looked_at: int  # modules that are packed or should be
    forbidden: Mapping[str, str]  # packed, though no reader that counts has a quantized layer for it; with the reason
    unwanted: Sequence[str]  # packed, and no reader that knows classes expects that
    missing: Sequence[str]  # unquantized or absent, and every reader that knows classes expects it packed
    issues: Sequence[Issue]  # one for each reader that interprets the list otherwise than the files are


def agreement(
    specs: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    asked: Sequence[str] | None,
    engine: str = "sglang",
    updated: bool | None = False,
) -> Agreement:
    """Compares the packed modules among `specs` with what the readers of `ignore` expect.

    Which disagreement is an error is for `severities`; `asked`, `engine` and `updated` are as there. Raises
    CkptkitError as `groups_of` and `class_tree` do.
    """
    ignore, tree, stored = get_list(quantization_of(config), "ignore"), class_tree(config), set(packed_in(specs))
    # Linear layers that are stored under no name of their own, such as fused experts; a tied head is not stored.
    linears = sorted(tree.linears - {tree.head})
    absent = [name for name in linears if f"{name}.weight" not in specs and name + PACKED not in specs]
    named = matrices_named((f"{name}.weight" for name in absent), tree, config)
    matrices = [*matrices_of(specs, tree, config), *named]
    packed = [matrix.module in stored for matrix in matrices]
    in_floats = {name.removesuffix(".weight") for name, spec in specs.items() if spec.dtype.startswith("float8")}
    question = Question(matrices, packed, config, tuple(INT4_READERS), targets_of(groups_of(config)), in_floats)
    found = question.divergences(ignore)
    # What every reader with classes expects otherwise, so that the list's spelling is not the cause.
    tensors = by_key((one.tensor, one.reader) for one in found)
    everybody = {tensor for tensor, who in tensors.items() if _BY_CLASS.issubset(who)}
    readers = deciding_readers(asked, engine)
    pairs = [
        (matrix, forbidden(matrix, tree, readers)) for matrix, packs in zip(matrices, packed, strict=True) if packs
    ]
    ruled_out = {matrix.module: reason for matrix, reason in pairs if reason}
    reported = everybody | {f"{module}.weight" for module in ruled_out}
    by_reader, issues = severities(config, ignore, tree, asked, engine, updated=updated), list[Issue]()
    others = [one for one in found if one.tensor not in reported and one.reader in by_reader]
    hint = advice(others, question, ignore) if others else ""
    for reader, its in by_key((one.reader, one) for one in others).items():
        severity = "error" if any(is_untargeted(one, asked) for one in its) else by_reader[reader]
        expected = "an ignore list that every reader interprets in the same way"
        issues.append(
            Issue(expected, "; ".join(describe_divergences(its)), hint, file="config.json", severity=severity)
        )
    missing = [
        matrix.module
        for matrix, packs in zip(matrices, packed, strict=True)
        if matrix.tensor in everybody and not packs
    ]
    unwanted = [module for module in stored if f"{module}.weight" in everybody and module not in ruled_out]
    return Agreement(len(stored) + len(missing), ruled_out, sorted(unwanted), sorted(missing), issues)
