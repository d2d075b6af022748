"""What several threads bring for a file, in pieces of any size and order, is in it when it is closed."""

import errno
import itertools
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.writer import SafetensorsFiles
from ckptkit.storage import buffers
from ckptkit.storage import write as written_file
from ckptkit.storage.write import Regions, WrittenFile
from ckptkit.transfer.files import FilesWriter

REGION = 4 * 4096


@pytest.fixture(autouse=True)
def small_regions(monkeypatch):
    """Of 16 KiB, that are written past the page cache if they hold at least 8 KiB of whole blocks."""
    monkeypatch.setattr(written_file, "BUFFER", REGION)
    monkeypatch.setattr(written_file, "LARGE", 2 * 4096)
    monkeypatch.setattr(buffers, "BUFFER", REGION)


def opened(path, size, regions):
    return WrittenFile(os.open(path, os.O_CREAT | os.O_RDWR, 0o644), size, regions)


@pytest.mark.parametrize(("threads", "room"), [(1, 0), (1, 100), (4, 1), (4, 100)])
def test_pieces_of_several_files_in_any_order(tmp_path, monkeypatch, threads, room):
    """Also where there is room for few regions, and most are written before all of them has come."""
    monkeypatch.setattr(written_file, "_OPEN", room)
    monkeypatch.setattr(written_file, "_OF_THREAD", 0)
    shuffled, regions = random.Random(0), Regions()
    contents = [shuffled.randbytes(size) for size in (5 * REGION + 77, 3 * REGION, 10, 0)]
    files = [opened(tmp_path / str(index), len(content), regions) for index, content in enumerate(contents)]
    pieces = []
    for index, content in enumerate(contents):
        edges = sorted({0, len(content), *(shuffled.randrange(len(content) + 1) for _ in range(40))})
        pieces += [(index, begin, end) for begin, end in itertools.pairwise(edges)]
    shuffled.shuffle(pieces)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda piece: files[piece[0]].write(contents[piece[0]][piece[1] : piece[2]], piece[1]), pieces))
    for file in files:
        file.close()
    assert [(tmp_path / str(index)).read_bytes() == content for index, content in enumerate(contents)] == [True] * 4


def test_a_region_is_written_at_once_by_the_thread_that_completes_it(tmp_path, monkeypatch):
    calls = []
    pwrite = os.pwrite

    def noting(descriptor, content, offset):
        calls.append((offset, len(content)))
        return pwrite(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", noting)
    file = opened(tmp_path / "x", 2 * REGION, Regions())
    content = random.Random(0).randbytes(2 * REGION)
    file.write(content[: REGION - 5], 0)
    file.write(content[REGION + 1 :], REGION + 1)
    assert calls == []
    file.write(content[REGION - 5 : REGION + 1], REGION - 5)
    file.close()
    assert calls == [(0, REGION), (REGION, REGION)]
    assert (tmp_path / "x").read_bytes() == content


def test_a_file_is_not_closed_while_another_thread_writes_what_had_to_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr(written_file, "_OPEN", 1)
    monkeypatch.setattr(written_file, "_OF_THREAD", 0)
    regions, begun, go_on = Regions(), threading.Event(), threading.Event()
    first, second = opened(tmp_path / "1", 100, regions), opened(tmp_path / "2", 100, regions)
    write_run = WrittenFile.write_run

    def slowly(self, view, offset):
        begun.set()
        assert go_on.wait(10)
        write_run(self, view, offset)

    first.write(b"1" * 50, 0)
    monkeypatch.setattr(WrittenFile, "write_run", slowly)
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(second.write, b"2" * 50, 0)
        assert begun.wait(10)
        closing = pool.submit(first.close)
        assert not wait([closing], timeout=0.3).done
        go_on.set()
        writing.result()
        closing.result()
    second.close()
    assert [(tmp_path / name).read_bytes() for name in "12"] == [b"1" * 50 + bytes(50), b"2" * 50 + bytes(50)]


def test_an_abandoned_file_is_written_no_more(tmp_path):
    file = opened(tmp_path / "x", 100, Regions())
    file.write(b"1" * 50, 0)
    file.abandon()
    assert (tmp_path / "x").read_bytes() == bytes(100)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_disk_that_is_full_when_a_file_is_finished(tmp_path, monkeypatch, recorded):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    if not recorded:
        monkeypatch.setattr(Regions, "finish", full)
    files = SafetensorsFiles({"a": TensorSpec("a", (100,), "uint8")}, {"model.safetensors": ["a"]})
    writer = FilesWriter(tmp_path, files, complete=full)
    with pytest.raises(OSError, match="No space left"):
        writer.write("a", torch.zeros(100, dtype=torch.uint8))
    writer.discard()
    assert list(tmp_path.iterdir()) == []
