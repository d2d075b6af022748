"""How a check says that it did not look, or does not apply."""

from __future__ import annotations


class Skip(Exception):  # noqa: N818
    """Raised by a check that has nothing to look at here; the message is the reason that the report gives."""


class Inapplicable(Skip):
    """Raised by a check that finds, once it has looked, that it does not apply; the message says why.

    The report then has it among what does not apply, as a check that `unless` leaves out.
    """


class OfNoFamily(Inapplicable):
    """Raised by a check that needs one of ckptkit's families, for a model of another.

    transformers is asked about that instead (CK541). For a witness that the user asked for it counts as `Unable`.
    """


class Unable(Skip):
    """Raised by a check that cannot look at what it was asked to: a package is missing, a tool of ours broke.

    Unless something else is found wrong, the report is then inconclusive, with this message as its reason.
    """
