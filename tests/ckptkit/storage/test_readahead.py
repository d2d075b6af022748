"""Files are in the page cache before they are read, and never too much of them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from ckptkit.storage import readahead
from ckptkit.storage.readahead import reading_ahead

STEP = 4096


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, bytes) of everything that the kernel is asked for, in steps of 4096."""
    monkeypatch.setattr(readahead, "_STEP", STEP)
    calls: list[tuple[int, int]] = []
    send = os.sendfile

    def seen(out: int, source: int, offset: int, count: int) -> int:
        calls.append((offset, count))
        return send(out, source, offset, count)

    monkeypatch.setattr(os, "sendfile", seen)
    return calls


def wait_for(calls: list[tuple[int, int]], count: int) -> None:
    """Until there are so many calls."""
    deadline = time.monotonic() + 10
    while len(calls) < count and time.monotonic() < deadline:
        time.sleep(0.005)


def test_every_file_is_asked_for_in_order(tmp_path: Path, asked: list[tuple[int, int]]) -> None:
    (tmp_path / "a").write_bytes(bytes(2 * STEP + 5))
    (tmp_path / "b").write_bytes(bytes(STEP))
    with reading_ahead([tmp_path / "a", tmp_path / "b"]):
        wait_for(asked, 4)
    assert asked == [(0, STEP), (STEP, STEP), (2 * STEP, 5), (0, STEP)]


def test_no_more_than_the_window(tmp_path: Path, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "WINDOW", 2 * STEP)
    (tmp_path / "a").write_bytes(bytes(10 * STEP))
    with reading_ahead([tmp_path / "a"]):
        wait_for(asked, 2)
        time.sleep(0.1)
        assert len(asked) == 2
    assert not [thread.name for thread in threading.enumerate() if thread.name == "ckptkit-readahead"]


def test_nothing_more_once_the_process_reads_weights_itself(
    tmp_path: Path, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is asked for counts as read, as it does in the kernel; from the third step on the process has read 200 MB itself.
    monkeypatch.setattr(readahead, "_read_so_far", lambda: STEP * len(asked) + (200_000_000 if len(asked) >= 3 else 0))
    (tmp_path / "a").write_bytes(bytes(10 * STEP))
    with reading_ahead([tmp_path / "a"]):
        wait_for(asked, 3)
        time.sleep(0.1)
    assert len(asked) == 3


def test_files_that_cannot_be_read_are_left_to_their_reader(tmp_path: Path, asked: list[tuple[int, int]]) -> None:
    with reading_ahead([tmp_path / "absent"]):
        pass
    with reading_ahead([tmp_path]):
        pass
    assert asked == []
