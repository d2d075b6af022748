"""Two runs never write to one destination at once, and a run that was killed is in nobody's way."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.messages import refusal, text_with
from support.models import content
from support.processes import environment

from ckptkit.app.api import convert, quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.storage.lock import check_free, hold_lock
from ckptkit.transfer.destination import new_directory

ASKED = {"command": "convert"}
LOCK = "out.partial.lock"

# The real command, but that it stops for ever when it has finished one file of weights.
STOPS = """
import sys, time
from ckptkit.transfer import files
from ckptkit.app.cli import cli

opened, begun = files.FilesWriter._opened, []

def stop(self, file):
    begun.append(file)
    if len(set(begun)) > 1:
        print("writing", flush=True)
        time.sleep(1000)
    return opened(self, file)

files.FilesWriter._opened = stop
cli.main(sys.argv[1:], standalone_mode=False)
"""


@contextmanager
def writing(*arguments):
    """A run in a process of its own that is writing. It is killed at the end, as by a machine that goes down."""
    words = [sys.executable, "-c", STOPS, *map(str, arguments), "--workers", "1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.fixture
def words(request, releases, converted, tmp_path):
    if request.param == "to HF":
        return ["convert", converted("qwen3_moe"), tmp_path / "out"]
    return ["convert", releases("qwen3_moe"), tmp_path / "out", "--max-shard-size", "1MB"]


@pytest.mark.parametrize(
    ("words", "how"),
    [("to Megatron", "--overwrite"), pytest.param("to HF", "--resume", marks=pytest.mark.nightly)],
    indirect=["words"],
)
def test_lock_of_a_live_run_refuses_the_second_and_of_a_killed_one_does_not(words, tmp_path, how, ckptkit):
    with writing(*words) as process:
        before = content(tmp_path / "out.partial")
        second = ckptkit(*words, how)
        assert (second.returncode, second.stdout) == (2, ""), second.stderr
        assert second.stderr == text_with(f"{process.pid} {socket.gethostname()} {tmp_path / LOCK}")
        assert content(tmp_path / "out.partial") == before
    assert (tmp_path / LOCK).exists()
    third = ckptkit(*words, how)
    assert third.returncode == 0, third.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert ckptkit(*words[:2], tmp_path / "alone", *words[3:]).returncode == 0
    assert content(tmp_path / "out") == content(tmp_path / "alone")


def test_lock_of_a_live_run_refuses_every_other_verb_and_option(releases, tmp_path):
    source, out = releases("qwen3_moe"), tmp_path / "out"
    refused = [
        lambda: convert(source, out),
        lambda: convert(source, out, overwrite=True, ray="auto"),
        lambda: convert(source, out, overwrite=True, dry_run=True),
        lambda: quantize(source, out, int4_scheme(group_size=32), overwrite=True),
        lambda: convert(source, tmp_path / "out.partial", overwrite=True),
    ]
    with writing("convert", source, out, "--max-shard-size", "1MB") as process:
        for call in refused:
            refusal(f"{process.pid}", call)


def test_lock_leaves_nothing_after_an_error_or_an_end(tmp_path):
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "out", ASKED):
        assert (tmp_path / LOCK).exists()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with (
        new_directory(tmp_path / "out", ASKED),
        pytest.raises(CkptkitError, match=f"pid {os.getpid()} on {socket.gethostname()} holds"),
    ):
        check_free(tmp_path / LOCK)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_lock_that_was_removed_while_it_was_waited_for_is_taken_anew(tmp_path, monkeypatch):
    # The other run ends between opening and locking here: the lock would be on a file that nobody else can find.
    flock, calls = fcntl.flock, []

    def ended_meanwhile(descriptor, kind):
        calls.append(kind)
        if len(calls) == 1:
            (tmp_path / LOCK).unlink()
        flock(descriptor, kind)

    (tmp_path / LOCK).touch()
    monkeypatch.setattr(fcntl, "flock", ended_meanwhile)
    with hold_lock(tmp_path / LOCK), pytest.raises(CkptkitError, match="another run"), hold_lock(tmp_path / LOCK):
        pass


def test_lock_on_a_file_system_without_locks_is_the_file_itself(tmp_path, monkeypatch):
    def refuse(descriptor, kind):
        raise OSError(errno.ENOSYS, "Function not implemented")

    def refused(message, **options):
        with pytest.raises(CkptkitError, match=message), new_directory(tmp_path / "out", ASKED, **options):
            pass

    monkeypatch.setattr(fcntl, "flock", refuse)
    with new_directory(tmp_path / "out", ASKED):
        for options in ({}, {"overwrite": True}, {"resume": True}):
            refused(f"pid {os.getpid()} on ", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / LOCK).write_text("ckptkit: pid 17 on node3\n")
    refused(r"pid 17 on node3 (?s:.)*no locks: if that process is dead, remove", overwrite=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda lock: lock.write_text("x"), "is not a lock file of ckptkit"),
        (lambda lock: lock.symlink_to("thesis"), "Too many levels"),
        (Path.mkdir, "is not a regular file"),
        (os.mkfifo, "is not a regular file"),
    ],
)
def test_lock_file_that_is_somebody_elses_is_left_alone(tmp_path, make, message):
    (tmp_path / "thesis").write_text("x")
    make(tmp_path / LOCK)
    with pytest.raises(CkptkitError, match=rf"{LOCK}: {message}"), new_directory(tmp_path / "out", ASKED):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "thesis"]
    assert (tmp_path / "thesis").read_text() == "x"
