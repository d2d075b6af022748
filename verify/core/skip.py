"""How a check says that it does not apply, or that it could not look."""

from __future__ import annotations


class NotApplicable(Exception):  # noqa: N818
    """Raised by a check, or by its `applies_to`, that has no subject here; the message says why.

    The report lists that under "not applicable". A witness that the user asked for has a subject by that: raised by its
    check, it counts as `CannotCheck`.
    """


class CannotCheck(Exception):  # noqa: N818
    """Raised by a check that cannot look, or not to the end; the message says why.

    `because`: the codes of the checks that judge what stands in the way. Without one the report is inconclusive, with
    this message as a reason, unless something is found wrong.
    """

    def __init__(self, reason: str, *because: str) -> None:
        super().__init__(f"{reason} ({', '.join(because)})" if because else reason)
        self.because = because
