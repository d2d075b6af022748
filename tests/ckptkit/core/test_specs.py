"""Folding of names, against hand-written expectations."""

from __future__ import annotations

import pytest

from ckptkit.core.specs import fold, summarize


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["lm_head.weight"], ["lm_head.weight"]),
        ([f"model.layers.{i}.mlp.gate.weight" for i in range(48)], ["model.layers.{0..47}.mlp.gate.weight"]),
        (["a.1.w", "a.3.w", "a.4.w"], ["a.{1,3..4}.w"]),
        ([f"l.{i}.e.{e}.w" for i in range(3) for e in range(12)], ["l.{0..2}.e.{0..11}.w"]),
        # layer 2 lacks expert 1: folding must not claim it
        (["l.1.e.0.w", "l.1.e.1.w", "l.2.e.0.w"], ["l.1.e.{0..1}.w", "l.2.e.0.w"]),
        ([], []),
    ],
)
def test_fold_joins_names_that_differ_in_numbers(names: list[str], folded: list[str]) -> None:
    assert sorted(fold(names)) == sorted(folded)


def test_summarize_counts_what_it_leaves_out() -> None:
    assert summarize(["a", "b", "c"], limit=2) == "a, b and 1 more"
