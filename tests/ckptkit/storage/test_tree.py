"""What is walked of a directory that others made: no more than is bounded, and nothing outside it."""

import os
import subprocess

import pytest
from support.messages import refusal

from ckptkit.storage import tree
from ckptkit.storage.tree import ForeignFileError, files_below


@pytest.fixture
def place(tmp_path):
    yield tmp_path
    subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)


def names(root):
    return [str(file) for file in files_below(root)]


def deep(root, folders):
    """So many folders inside one another; the path of the last may be longer than a path can be."""
    here = os.open(root, os.O_RDONLY)
    for _ in range(folders):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("x", os.O_CREAT, dir_fd=here))
    os.close(here)
    return root


def test_files_are_sorted_and_hidden_ones_left_out(tmp_path):
    for name in ("b/c", "b.txt", "a", ".git/config", ".env", "release/.metadata", "b/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert names(tmp_path) == ["a", "b/c", "b.txt", "release/.metadata"]
    assert names(tmp_path / "nowhere") == names(tmp_path / "a") == []


@pytest.mark.parametrize("folders", [100, 3000])
def test_folders_too_deep_are_refused_unless_hidden(place, folders):
    (place / ".git").mkdir()
    deep(place / ".git", folders)
    assert names(place) == []
    refusal("folders over 64", files_below, deep(place, folders))


def test_folders_not_too_deep_are_walked(tmp_path):
    assert names(deep(tmp_path, 63)) == ["d/" * 63 + "x"]


def test_too_many_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tree, "MAX_FILES", 3)
    for name in "abc":
        (tmp_path / name).touch()
    assert names(tmp_path) == ["a", "b", "c"]
    (tmp_path / "d").touch()
    refusal("more than 3 files", files_below, tmp_path)


def test_folders_of_links_to_folders_do_not_multiply(tmp_path, monkeypatch):
    monkeypatch.setattr(tree, "MAX_FILES", 1000)
    for level in range(30):
        (tmp_path / f"{level}").mkdir()
        for link in "ab":
            (tmp_path / f"{level}" / link).symlink_to(f"../{level + 1}")
    refusal(r"more than 1000 files", files_below, tmp_path)


def test_folders_that_lead_to_one_another_are_refused(tmp_path):
    for here, there in ("ab", "ba"):
        (tmp_path / here).mkdir()
        (tmp_path / here / "next").symlink_to(f"../{there}")
    with pytest.raises(ForeignFileError, match="around"):
        files_below(tmp_path)


def test_links_that_lead_nowhere_are_listed(tmp_path):
    (tmp_path / "gone").symlink_to("nowhere/x")
    (tmp_path / "loop").symlink_to("loop")
    assert names(tmp_path) == ["gone", "loop"]


@pytest.mark.parametrize("target", ["/nowhere/x", "../x", "a/../../x", "../model-2/x", ".git/x", ".x"])
def test_links_outside_are_refused(tmp_path, target):
    for name in ("model", "model-2"):
        (tmp_path / name).mkdir()
    (tmp_path / "model-2/x").touch()
    (tmp_path / "model" / "y").symlink_to(target)
    with pytest.raises(ForeignFileError, match="link"):
        files_below(tmp_path / "model")
