"""No source is lost to its own conversion, by whatever path it is reached: a mount, a link, another spelling."""

import os
import subprocess
from contextlib import contextmanager

import pytest
from support.messages import refusal
from support.models import content
from support.whole_files import write_files

from ckptkit.app.api import convert, quantize
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.transfer.destination import check_destination


@contextmanager
def bind_mount(place, again):
    """Shows the directory `place` at `again` too. Skips the test where that is not allowed."""
    again.mkdir()
    done = subprocess.run(["mount", "--bind", place, again], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no bind mount here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", again], check=True)


def assert_refused(destination, *sources):
    refusal(r"overlaps", check_destination, destination, sources, overwrite=True)


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for folder in ("model", "model/sub", "other"):
        write_files(root / folder, "config.json", "model.safetensors")
    return root


def test_destination_that_is_the_source_through_a_mount_is_refused(tree, tmp_path):
    with bind_mount(tree, tmp_path / "again"):
        for name, source in (("model", "model"), ("model", "model/sub"), ("model/new", "model")):
            assert_refused(tmp_path / "again" / name, tree / source)
        assert_refused(tree / "model", tmp_path / "again/model")
        for name in ("other", "new"):
            check_destination(tmp_path / "again" / name, [tree / "model"], overwrite=True)
        (tree / "model").rename(tree / "out.partial")
        assert_refused(tmp_path / "again/out", tree / "out.partial")


def test_destination_around_or_inside_a_mounted_part_of_the_source_is_refused(tree, tmp_path):
    with bind_mount(tree / "model/sub", tmp_path / "again"):
        assert_refused(tmp_path / "again/new", tree / "model")
        assert_refused(tree / "model", tmp_path / "again")
        check_destination(tree / "other", [tmp_path / "again"], overwrite=True)


def test_overwriting_a_source_through_a_mount_leaves_it_as_it_was(releases, converted, copy_of, tmp_path):
    source, scheme = copy_of(releases("qwen3_moe")), int4_scheme(group_size=32)
    before = content(source)
    with bind_mount(tmp_path, tmp_path.with_name(f"{tmp_path.name}-again")):
        again = tmp_path.with_name(f"{tmp_path.name}-again") / source.name
        for call in (
            lambda: convert(source, again, overwrite=True),
            lambda: quantize(source, again, scheme, overwrite=True),
            lambda: quantize(releases("qwen3_moe"), again, scheme, like=source, overwrite=True),
            lambda: convert(converted("qwen3_moe"), again, hf=source, overwrite=True),
        ):
            refusal(r"overlaps", call)
        assert content(source) == before


def test_destination_that_the_files_of_the_source_lie_in_is_refused(tree, tmp_path):
    # As a download's cache has it: the source is a directory of links.
    source = tmp_path / "snapshot"
    source.mkdir()
    (source / "config.json").symlink_to(tree / "model/config.json")
    assert_refused(tree / "model", source)
    check_destination(tree / "other", [source], overwrite=True)
    (tree / "link").symlink_to(tree)
    for spelling in ("../tree/model", "link/model", "model/../model"):
        assert_refused(tree / spelling, tree / "model")


def test_overwriting_hard_links_of_the_source_leaves_it_as_it_was(releases, copy_of, tmp_path):
    # What has a second name is not lost with the first, and the output is written as new files.
    source, out = copy_of(releases("qwen2-tied")), tmp_path / "out"
    before = content(source)
    out.mkdir()
    for path in source.iterdir():
        os.link(path, out / path.name)
    convert(source, out, overwrite=True)
    assert content(source) == before
    assert (out / "release/.metadata").exists()
