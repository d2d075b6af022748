"""Texts made by a grammar that a file holds, the same text for the same number at every call.

In the file blank lines part the rules. A rule is its name and its forms, one a line, of which each is as likely;
`<name>` stands for a form of that rule, `<break>` for the end of a line, and `<none>` for nothing.
"""

import functools
import random
import re

_SLOT = re.compile(r"<([a-z]+)>")
_LONG = 900  # characters, past which nothing that nests is added: deep texts have no end


def text_of(grammar, number, shallow):
    """The text of this number, by the first rule of the file. `shallow`: what rules become in a text that is long."""
    rules = _rules(grammar)
    chance = random.Random(number)
    text = f"<{next(iter(rules))}>"
    while found := _SLOT.search(text):
        form = chance.choice(rules[found[1]])
        if len(text) > _LONG:
            form = shallow.get(found[1], form)
        text = text[: found.start()] + form + text[found.end() :]
    return text


@functools.cache
def _rules(grammar):
    parts = (part.partition("\n") for part in grammar.read_text().strip("\n").split("\n\n"))
    return {name: forms.split("\n") for name, _, forms in parts} | {"none": [""], "break": ["\n"]}
