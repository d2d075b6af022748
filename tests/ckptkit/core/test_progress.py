"""The progress bar: on a terminal, and only there."""

from __future__ import annotations

import io
import sys

import pytest

from ckptkit.core import progress as module
from ckptkit.core.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that appears with the first byte, in an environment that says nothing about terminals."""
    monkeypatch.setattr(module, "_DELAY_S", -1.0)
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("stderr", "shown"), [(Terminal(), True), (io.StringIO(), False), (None, False)])
def test_the_bar_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO | None, shown: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress("HF -> Megatron", 2_000_000) as advance:
        advance(1_000_000)
    written = stderr.getvalue() if stderr else ""
    assert ("HF -> Megatron" in written and "1.0/2.0 MB" in written) == shown
    assert bool(written) == shown


@pytest.mark.usefixtures("at_once")
def test_the_bar_goes_away_when_what_it_is_for_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(ZeroDivisionError), progress("reading", 2) as advance:
        advance(1)
        raise ZeroDivisionError
    # The last thing written moves up and erases the line (ECMA-48: CUU, then EL), after the cursor is shown again.
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")
