"""Texts of findings and errors, compared by the data in them: tests do not depend on the wording."""

import re

import pytest

from ckptkit.core.errors import CkptkitError


def refusal(match, call, *words, **options):
    """The CkptkitError that a call with these arguments raises, whose text has a match of this expression."""
    with pytest.raises(CkptkitError, match=match or None) as error:
        call(*words, **options)
    return error.value


class text_with:  # noqa: N801, reads as a function: `finding.actual == text_with("5 GPUs 4")`
    """Equal to a text that has these words, separated by spaces, in this order and with any words between them."""

    __hash__ = None

    def __init__(self, words):
        self.words = words

    def __eq__(self, text):
        pattern = ".*".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in self.words.split())
        return isinstance(text, str) and bool(self.words.split()) and re.search(pattern, text, re.DOTALL) is not None

    def __repr__(self):
        return f"text_with({self.words!r})"
