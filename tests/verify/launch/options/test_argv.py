"""Command lines split up by `options_of`, each judged by a parser of argparse."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
from typing import Any

import pytest

from ckptkit.verify.launch.options.arguments import parse_arguments
from ckptkit.verify.launch.options.argv import last, options_of
from ckptkit.verify.launch.words import UnresolvedWord, Word

MISSING = "expected one argument"

# Words of a parser with `--load PATH`, `--num-layers N` and the switch `--swiglu`, and what may stand beside them.
WORDS = (
    *("--load", "--load=", "--load=/a=b", "--load=--swiglu", "--loa", "--num-layers", "--num-layers=8"),
    "--num-layers=",
    *("--swiglu", "--swiglu=1", "--other=x", "--other x", "", "/b", "-", "-x", "-1", "-.5", "-1e5", "8", "1_0"),
)
LINES = [list(words) for length in (1, 2, 3) for words in itertools.product(WORDS, repeat=length)]


PARSER = argparse.ArgumentParser(allow_abbrev=False)
PARSER.add_argument("--load")
PARSER.add_argument("--num-layers", type=int)
PARSER.add_argument("--swiglu", action="store_true")


def by_argparse(words: list[str]) -> dict[str, Any] | None:
    """What argparse makes of words; None where it stops."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return vars(PARSER.parse_known_args(words)[0])
    except SystemExit:
        return None


def by_us(words: list[str]) -> dict[str, Any] | None:
    """The same of our options and arguments."""
    options, given = options_of([Word(word) for word in words]), parse_arguments([Word(word) for word in words])
    if given.refused or any(one.value is None for one in options if one.name in ("--load", "--num-layers")):
        return None
    load, layers = last(options, "--load"), last(options, "--num-layers")
    assert (layers is None) == (given.value("num_layers") is None)
    return {
        "load": load.value.text if load and load.value else None,
        "num_layers": given.value("num_layers"),
        "swiglu": given.value("swiglu", False),
    }


def test_options_are_split_up_as_argparse_does() -> None:
    assert [words for words in LINES if by_us(words) != by_argparse(words)] == []


@pytest.mark.parametrize("words", [["--ids", "1", "-2", "3", "--load", "/a"], ["--ids", "--load", "/a"], ["--ids=1"]])
def test_an_option_of_many_values_has_those_that_argparse_gives_it(words: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--ids", nargs="*")
    option = last(options_of([Word(word) for word in words]), "--ids")
    assert option is not None
    assert [word.text for word in option.values] == parser.parse_known_args(words)[0].ids


def test_options_with_a_value_that_could_not_be_told_are_not_known() -> None:
    words = [Word("--load"), UnresolvedWord("$A"), UnresolvedWord("--save=$B"), Word("--tp"), Word("1")]
    known = {one.name: one.known for one in options_of(words)}
    assert known == {"--load": False, "--save": False, "--tp": True}
