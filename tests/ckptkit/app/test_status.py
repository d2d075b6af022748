"""What a command says while it runs: steps, lines off a terminal, and silence with -q."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
from support.processes import python

from ckptkit.app.cli import output
from ckptkit.app.cli.output import shown
from ckptkit.core.progress import LOG, closing, phase, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_TICK_S", "_LONG_S", "_EVERY_S"):
        monkeypatch.setattr(output, name, 0.001)


def wait_for(text: str, stream: io.StringIO) -> None:
    """Waits until `text` is there; a test that waits in vain ends with the time limit of all tests."""
    while text not in stream.getvalue():
        time.sleep(0.001)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("stream", "said"), [(Terminal(), "planning ...\n"), (io.StringIO(), "planning: 0 s\n")], ids=["terminal", "file"]
)
def test_a_step_that_takes_long_is_named(stream: io.StringIO, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with shown(()), phase("planning"):
        wait_for(said, stream)


@pytest.mark.usefixtures("fast")
def test_off_a_terminal_a_line_says_how_much_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with shown(()), progress("writing", 2_000_000_000) as advance:
        advance(500_000_000)
        wait_for("writing, 500.00 MB of 2.00 GB: 0 s\n", stream)


def test_quiet_says_nothing_and_verbose_every_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {}
    for asked in ("quiet", "verbose"):
        with shown({asked}), phase("planning"):
            closing("wrote 1 GB", "ckptkit verify x")
        said[asked] = capsys.readouterr().err
    assert said["quiet"] == ""
    steps = said["verbose"].splitlines()
    assert (steps[0], steps[1].rpartition(" in ")[0], steps[2]) == (
        "planning ...",
        "wrote 1 GB",
        "next: ckptkit verify x",
    )
    assert LOG.handlers == []


@pytest.mark.parametrize("name", ["verify.py", "quant/__init__.py"])
def test_a_file_that_hides_a_package_of_ckptkit_is_named(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from ckptkit.app.cli import main; main()"
    done = python("-c", code, "inspect", "x")
    assert done.returncode == 2
    assert f"{file} hides the package" in done.stderr
    assert "Traceback" not in done.stderr
