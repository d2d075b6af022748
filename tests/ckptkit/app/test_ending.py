"""What verbs say on standard error: each step that takes long, silence with -q, and one closing line at the end."""

import json
import logging
import re
import sys
import time
from contextlib import suppress
from io import StringIO

import pytest

from ckptkit.app.cli import cli, output
from ckptkit.app.cli.output import show_progress
from ckptkit.core import progress as progress_module
from ckptkit.core.progress import LOG, closing, phase, progress


@pytest.fixture
def ends(caplog):
    """`ends(*words)`: runs the command in this process. Returns its closing lines, each with the next command."""

    def run(*words):
        caplog.clear()
        with caplog.at_level(logging.INFO, LOG.name), suppress(SystemExit):  # where there are findings
            cli.main([str(word) for word in words], standalone_mode=False)
        return [(one.getMessage(), one.__dict__["next"]) for one in caplog.records if "next" in one.__dict__]

    return run


def test_verbs_that_compare_end_with_done_since_their_text_has_the_rest(ends, releases, tmp_path):
    hf, log, page = releases("qwen3_moe"), tmp_path / "job.log", tmp_path / "page.html"
    log.write_text("iteration 1\nValueError: There is no module or parameter named x in y\n")
    for words in (
        *(["verify", hf], ["preflight", "--hf-checkpoint", hf], ["diff", hf, hf]),
        *(["inspect", hf], ["inspect", hf, "--megatron-args"], ["triage", log]),
    ):
        assert ends(*words) == [("done", None)], words
    assert ends("verify", hf, "--report", page) == [(f"report in {page}", None)]
    assert ends("explain") == ends("doctor") == []  # which look at no checkpoint


def test_json_leaves_the_counts_and_the_next_command_to_the_closing_line(ends, releases, copy_of, capsys):
    hf = releases("qwen3_moe")
    broken = copy_of(hf)
    next(broken.glob("*.safetensors")).unlink()
    [(said, after)] = ends("verify", broken, "--json")
    counts = json.loads(capsys.readouterr().out)["counts"]  # stdout has the JSON and nothing else
    assert after == "ckptkit explain CK102"
    assert said.startswith(f"{counts['checks']} checks: {counts['passed']} passed, 1 failed, ")
    [(said, after)] = ends("diff", hf, hf, "--json")
    found = json.loads(capsys.readouterr().out)["counts"]
    assert (said, after) == (f"{found['equal']} tensors, {found['bytes_read'] / 1e6:.2f} MB read", None)
    [(said, after)] = ends("inspect", hf, "--json")
    assert (said, after) == (f"{json.loads(capsys.readouterr().out)['tensors']} tensors", None)


def test_manifest_ends_with_what_it_digested_and_how_a_copy_is_verified(ends, releases, tmp_path):
    hf, kept = releases("qwen3_moe"), tmp_path / "kept.json"
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    count, nbytes = len(index["weight_map"]), index["metadata"]["total_size"]
    assert ends("manifest", hf, "--output", kept) == [
        (f"digested {count} tensors, {nbytes / 1e6:.2f} MB", f"ckptkit verify COPY --manifest {kept}")
    ]


def test_a_short_run_with_nothing_to_go_on_with_says_nothing(monkeypatch):
    said = {}
    for after in (None, "ckptkit explain CK505"):
        for long in (0.0, 3600.0):
            monkeypatch.setattr(output, "_LONG_S", long)
            monkeypatch.setattr(sys, "stderr", stream := StringIO())
            with show_progress(()):
                closing("done", after)
            said[after, long] = stream.getvalue()
    assert said[None, 3600.0] == ""
    assert said[None, 0.0].startswith("done in 0.")
    assert said["ckptkit explain CK505", 3600.0].endswith(" s\nnext: ckptkit explain CK505\n")


class Terminal(StringIO):
    def isatty(self):
        return True


@pytest.fixture
def fast(monkeypatch):
    for name in ("_TICK_S", "_LONG_S", "_EVERY_S"):
        monkeypatch.setattr(output, name, 0.001)


def wait_for(text, stream):
    while text not in stream.getvalue():
        time.sleep(0.001)


@pytest.mark.usefixtures("fast")
def test_a_step_that_takes_long_is_named(monkeypatch):
    for stream, line in ((Terminal(), "planning ...\n"), (StringIO(), "planning: 0 s\n")):
        monkeypatch.setattr(sys, "stderr", stream)
        with show_progress(()), phase("planning"):
            wait_for(line, stream)
    with show_progress(()), progress("writing", 2_000_000_000) as advance:  # not on a terminal
        advance(500_000_000)
        wait_for("writing, 500.00 MB of 2.00 GB: 0 s\n", stream)


def test_quiet_says_nothing_and_verbose_every_step(capsys):
    said = {}
    for asked in ("quiet", "verbose"):
        with show_progress({asked}), phase("planning"):
            closing("wrote 1 GB", "ckptkit verify x")
        said[asked] = capsys.readouterr().err
    assert said["quiet"] == ""
    assert re.fullmatch(r"planning ...\nwrote 1 GB in .*\nnext: ckptkit verify x\n", said["verbose"])
    assert LOG.handlers == []


@pytest.fixture
def bar_at_once(monkeypatch):
    """A bar that appears with the first byte, in an environment that says nothing about terminals."""
    monkeypatch.setattr(progress_module, "_DELAY_S", -1.0)
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("bar_at_once")
def test_the_bar_is_shown_on_a_terminal_only_and_goes_away_when_what_it_is_for_fails(monkeypatch):
    for stream in (Terminal(), StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(ZeroDivisionError), progress("HF -> Megatron", 2_000_000) as advance:
            advance(1_000_000)
            raise ZeroDivisionError
        written = stream.getvalue() if stream else ""
        assert (
            bool(written) == ("HF -> Megatron" in written and "1.0/2.0 MB" in written) == isinstance(stream, Terminal)
        )
        # The last thing written moves up and erases the line (ECMA-48: CUU, then EL), after the cursor is shown again.
        assert not written or written.endswith("\x1b[1A\x1b[2K")
