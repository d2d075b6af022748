"""The exceptions of a check that does not apply, or that cannot finish."""

from __future__ import annotations


class NotApplicable(Exception):  # noqa: N818
    """Raised by a check, or by its `applies_to`, if there is nothing to check; the report lists the message.

    If the user asked for a witness and its check raises this, it counts as `CannotCheck`.
    """


class CannotCheck(Exception):  # noqa: N818
    """Raised by a check that cannot start or finish.

    `because` are the codes of the checks that report the cause. Without codes the report is inconclusive, with the
    message as a reason, unless it has errors.
    """

    def __init__(self, reason: str, *because: str) -> None:
        super().__init__(f"{reason} ({', '.join(because)})" if because else reason)
        self.because = because
