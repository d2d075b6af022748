"""Command lines split up by `options_of`, each judged by a parser of argparse."""

from __future__ import annotations

import argparse
import contextlib
import io
from typing import Any

import pytest

from verify.launch.options.argv import last, options_of
from verify.launch.options.given import given_arguments
from verify.launch.words import UnresolvedWord, Word

MISSING = "expected one argument"

# Command lines with `--load PATH`, `--num-layers N` and the switch `--swiglu`.
LINES = [
    ["--load", "/a"],
    ["--load=/a"],
    ["--load="],
    ["--load", ""],
    ["--load=/a=b"],
    ["--load=--swiglu"],
    ["--load", "--swiglu"],
    ["--load", "--other"],
    ["--load", "-x"],
    ["--load", "-"],
    ["--load", "-1"],
    ["--load", "-1.5"],
    ["--load", "-.5"],
    ["--load", "-1e5"],
    ["--load", "-x y"],
    ["--load", "--other value"],
    ["--load", "--other=value"],
    ["--load"],
    ["--load", "/a", "--load", "/b"],
    ["--load", "/a", "--load"],
    ["--load", "/a", "--load="],
    ["--load", "/a", "/b"],
    ["--load=/a", "/b"],
    ["/b", "--load", "/a"],
    ["--swiglu", "--load", "/a"],
    ["--swiglu", "/b"],
    ["--loa", "/a"],
    ["--load", "/a", "--loa", "/b"],
    ["--num-layers", "8"],
    ["--num-layers=8"],
    ["--num-layers", "-8"],
    ["--num-layers", "x"],
    ["--num-layers="],
    ["--num-layers", " 8"],
    ["--num-layers", "1_0"],
    ["--num-layers", "8", "--swiglu", "--num-layers=9"],
    ["--other", "--load", "/a"],
    ["--other", "/b", "--load", "/a"],
    ["--other=x", "--load", "/a"],
    ["--swiglu=1"],
    ["--swiglu="],
]


def by_argparse(words: list[str]) -> dict[str, Any] | None:
    """What argparse makes of words; None where it stops."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--load")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--swiglu", action="store_true")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return vars(parser.parse_known_args(words)[0])
    except SystemExit:
        return None


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_options_are_split_up_as_argparse_does(words: list[str]) -> None:
    options = options_of([Word(word) for word in words])
    load, layers = last(options, "--load"), last(options, "--num-layers")
    given = given_arguments([Word(word) for word in words])
    stops = any(one.value is None for one in options if one.name in ("--load", "--num-layers")) or bool(given.refused)
    expected = by_argparse(words)
    assert stops is (expected is None)
    if expected is not None:
        assert (load.value.text if load and load.value else None) == expected["load"]
        assert given.get("num_layers", None) == expected["num_layers"]
        assert given.get("swiglu", False) == expected["swiglu"]
        assert (layers is None) == (expected["num_layers"] is None)


@pytest.mark.parametrize("words", [["--ids", "1", "-2", "3", "--load", "/a"], ["--ids", "--load", "/a"], ["--ids=1"]])
def test_an_option_of_many_values_has_those_that_argparse_gives_it(words: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--ids", nargs="*")
    option = last(options_of([Word(word) for word in words]), "--ids")
    assert option is not None
    assert [word.text for word in option.values] == parser.parse_known_args(words)[0].ids


def test_options_have_file_and_line_of_their_words(tmp_path: Any) -> None:
    file = tmp_path / "run.sh"
    one, other = options_of([Word("--load=/a", file, 3), Word("--save", file, 4), Word("/b", file, 5)])
    assert (one.value, other.value) == (Word("/a", file, 3), Word("/b", file, 5))


def test_options_with_a_value_that_could_not_be_told_are_not_known() -> None:
    words = [
        Word("--load"),
        UnresolvedWord("$A", why="set nowhere"),
        UnresolvedWord("--save=$B"),
        Word("--tp"),
        Word("1"),
    ]
    assert [(one.name, one.known) for one in options_of(words)] == [
        ("--load", False),
        ("--save", False),
        ("--tp", True),
    ]
