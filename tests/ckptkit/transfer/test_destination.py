"""A destination appears whole or not at all."""

import contextlib
import errno
import json
import os
import pickle
import re
import shutil
import socket
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from support.messages import refusal, text_with
from support.models import content
from support.whole_files import whole, write, write_files, write_manifest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from ckptkit.core.errors import CkptkitError, FinalError
from ckptkit.transfer.destination import check_destination, new_directory

ASKED = {"command": "ckptkit convert source out"}


def refuse(path, match, **options):
    """What a run with this destination is refused with, before it writes anything."""
    with pytest.raises(CkptkitError, match=match) as refused, new_directory(path, ASKED, **options):
        pass
    refusal(match, check_destination, path, **options)
    return refused.value


def write_model(out):
    write(out / "config.json")
    write(out / "model.safetensors")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CkptkitError("no")], ids=repr)
def test_nothing_is_left_after_a_failure(tmp_path, error):
    with pytest.raises(type(error)), new_directory(tmp_path / "out", ASKED) as (partial, journal):
        journal.list_files(["figures/x"])
        for name in ("config.json", "figures/x", "release/.__0_0.distcp.0123456789abcdef.tmp"):
            write(partial / name)
        journal.list_files(["figures/x", "release/__0_0.distcp"])
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "resumable"), [(CkptkitError("no"), True), (FinalError.of(CkptkitError("no")), False)]
)
def test_finished_files_are_kept_only_where_the_same_job_may_go_on(tmp_path, error, resumable):
    with pytest.raises(CkptkitError), new_directory(tmp_path / "out", ASKED) as (_, journal):
        journal.record("x.safetensors", {})
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"] * resumable


def test_overwrite_replaces_only_when_the_new_one_is_whole_and_no_neighbour(tmp_path):
    write_model(tmp_path / "out")
    write_model(tmp_path / "out.old")
    old = content(tmp_path)
    refuse(tmp_path / "out", "out exists already")
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "out", ASKED, overwrite=True):
        raise ZeroDivisionError
    assert content(tmp_path) == old
    (tmp_path / "out.partial").mkdir()  # of a dead run
    with new_directory(tmp_path / "out", ASKED, overwrite=True) as (partial, _):
        (partial / "new").write_text("new")
    neighbour = {name: data for name, data in old.items() if name.startswith("out.old/")}
    assert content(tmp_path) == {"out/new": b"new", **neighbour}
    (tmp_path / "other.partial").mkdir()
    refuse(tmp_path / "other", "other.partial exists already")


@pytest.mark.parametrize("destination", ["source", "source/inside", ".", "source.partial/..", "link", "dangling", "/"])
def test_destinations_that_would_lose_something(tmp_path, destination):
    write(tmp_path / "source/config.json", "x")
    (tmp_path / "source.partial").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "source")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CkptkitError, match=r"overlaps|cannot be a destination"):
        check_destination(tmp_path / destination, [tmp_path / "source", None], overwrite=True)
    assert (tmp_path / "source/config.json").read_text() == "x"


def test_a_partial_that_is_read_and_a_destination_in_no_folder_are_refused(tmp_path):
    (tmp_path / "source.partial").mkdir()
    refusal("overlaps", check_destination, tmp_path / "source", [tmp_path / "source.partial"], overwrite=True)
    refusal("absent does not exist", check_destination, tmp_path / "absent/out")


def test_what_was_there_is_put_back_when_the_last_step_fails(tmp_path, monkeypatch):
    write_model(tmp_path / "out")
    old = content(tmp_path / "out")
    rename = os.rename

    def fail(source, target):
        if Path(source).name == "out.partial":
            raise OSError(errno.EIO, "Input/output error", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with (
        pytest.raises(CkptkitError, match=r"Input/output error.*\n.*out\.partial"),
        new_directory(tmp_path / "out", ASKED, overwrite=True) as (partial, _),
    ):
        (partial / "config.json").write_text("new")
    assert content(tmp_path / "out") == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial"]
    assert (tmp_path / "out.partial/config.json").read_text() == "new"


DIRECTORIES = tomllib.loads((Path(__file__).parent / "directories.toml").read_text())
# What a file contains instead of what its name says, next to those of a checkpoint.
JUNK = {
    "config of another program": ("config.json", '{"compilerOptions": {}}', ("model.safetensors",)),
    "config without a model": ("config.json", '{"model_type": ""}', ("model.safetensors",)),
    "config that is a list": ("config.json", "[1]", ("model.safetensors",)),
    "adapter of no kind": ("adapter_config.json", "{}", ("adapter_model.safetensors",)),
    "weights that are text": ("model.safetensors", "x" * 64, ("config.json",)),
    "weights without a tensor": ("model.safetensors", b"\x02" + bytes(7) + b"{}", ("config.json",)),
    "pickles that are text": ("pytorch_model.bin", "x", ("config.json",)),
    "GGUF that is text": ("a.gguf", "x", ("config.json",)),
    "a table that is text": ("release/.metadata", "x", ("release/__0_0.distcp", "hf/config.json")),
    "a table that is a list": ("release/.metadata", b"\x80\x02].", ("release/__0_0.distcp", "hf/config.json")),
    "ranks that are text": ("release/mp_rank_00/model_optim_rng.pt", "x", ("latest_checkpointed_iteration.txt",)),
}


def fill(folder, names):
    for name in names:
        (folder / name).mkdir(parents=True) if name.endswith("/") else write(folder / name)


@pytest.mark.parametrize("name", DIRECTORIES["refused"])
def test_what_is_not_a_checkpoint_alone_is_never_replaced(tmp_path, name):
    named, *names = DIRECTORIES["refused"][name]
    fill(tmp_path / "out", names)
    before = content(tmp_path)
    refuse(tmp_path / "out", re.escape(named), overwrite=True)
    refuse(tmp_path / "out", "exists already", resume=True)
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["a project", "a run with one iteration", "two towers", "settings alone"])
def test_a_partial_that_is_not_a_checkpoint_alone_is_never_replaced(tmp_path, name):
    named, *names = DIRECTORIES["refused"][name]
    fill(tmp_path / "out.partial", names)
    before = content(tmp_path)
    for options in ({"overwrite": True}, {"resume": True}):
        refuse(tmp_path / "out", re.escape(named), **options)
        assert content(tmp_path) == before


@pytest.mark.parametrize("name", JUNK)
def test_what_only_has_the_names_of_a_checkpoint_is_never_replaced(tmp_path, name):
    file, text, others = JUNK[name]
    write(tmp_path / "out" / file, text)
    write_files(tmp_path / "out", *others)
    before = content(tmp_path)
    refuse(tmp_path / "out", "out.*checkpoint", overwrite=True)
    assert content(tmp_path) == before


def test_weights_that_an_index_does_not_name_are_another_checkpoint(tmp_path):
    out = tmp_path / "out"
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    write_files(out, "config.json", *shards)
    write(out / "model.safetensors.index.json", json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    check_destination(out, overwrite=True)
    for name in ("model.safetensors", "adapter_model.safetensors"):
        write(out / name)
        refuse(out, rf"several checkpoints.*{name.partition('.')[0]}", overwrite=True)
        write_manifest(out, "config.json", name)
        check_destination(out, overwrite=True)
        write(out / name, "changed")
        refuse(out, "several checkpoints", overwrite=True)
        (out / name).unlink()
    write_manifest(out, "config.json", hf_layout={"a.safetensors": ["x"]})
    write(out / "a.safetensors")
    refuse(out, r"several checkpoints.*: a\.safetensors", overwrite=True)


@pytest.mark.parametrize(
    ("folder", "key"),
    [
        ("", "optimizer.state.exp_avg.a"),
        ("release/", "chained_1.optimizer.param_groups"),
        ("release/", "app.optim.state.a"),
    ],
)
def test_the_optimizer_of_a_run_is_never_replaced(tmp_path, folder, key):
    out = tmp_path / "out"
    write(out / folder / "__0_0.distcp", bytes(8))

    def write_table(*keys):
        places = {MetadataIndex(name): _StorageInfo("__0_0.distcp", 0, 8) for name in keys}
        table = Metadata({name: BytesStorageMetadata() for name in keys}, storage_data=places)
        write(out / folder / ".metadata", pickle.dumps(table))

    write_table("a")
    check_destination(out, overwrite=True)
    write_table("a", key)
    refuse(out, rf"run.*: {folder}\.metadata.*{key}", overwrite=True)
    write_manifest(out, f"{folder}.metadata")  # as `ckptkit manifest` does
    refuse(out, "optimizer", overwrite=True)


def test_the_optimizer_of_legacy_ranks_is_never_replaced(tmp_path):
    file = tmp_path / "out/release/mp_rank_00/model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    for without in ({}, {"optimizer": None}):
        torch.save({"model": {}, **without}, file)
        check_destination(tmp_path / "out", overwrite=True)
    torch.save({"model": {}, "optimizer": {"state": 1}}, file)
    refuse(tmp_path / "out", "optimizer", overwrite=True)
    torch.save({"model": {}}, file, _use_new_zipfile_serialization=False)
    refuse(tmp_path / "out", r"torch.*1\.6", overwrite=True)


@pytest.mark.parametrize("name", [".env", "hf/.git/config", "figures/.a"])
def test_a_hidden_file_is_never_replaced_whatever_lists_it(tmp_path, name):
    out = tmp_path / "out"
    write_files(out, "config.json", "model.safetensors", name)
    write_manifest(out, "config.json", name)
    refuse(out, f"checkpoint.*: {name}", overwrite=True)


def make_special(path, kind):
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a device":
        try:
            os.mknod(path, stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("this user may make no devices")
    else:
        with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):  # the path of a socket is short
            bound.bind(path.name)


@pytest.mark.parametrize(
    ("place", "name", "kind"),
    [
        ("out", "config.json", "a named pipe"),
        ("out", "ckptkit.json", "a named pipe"),
        ("out", "model.safetensors", "a named pipe"),
        ("out", "x.safetensors", "a socket"),
        ("out", "model.safetensors", "a device"),
        ("out.partial", ".ckptkit/files", "a named pipe"),
        ("out.partial", "model.safetensors", "a socket"),
    ],
)
def test_what_is_no_regular_file_is_in_the_way(tmp_path, place, name, kind):
    files = {"config.json", "model.safetensors"} - {name}
    write_files(tmp_path / place, *files)
    if place == "out.partial":
        write(tmp_path / place / ".ckptkit/asked.json", "{}")
    special = tmp_path / place / name
    make_special(special, kind)
    refuse(tmp_path / "out", f"{special}.*{kind}", overwrite=True)
    assert special.exists()


@pytest.mark.parametrize(
    ("place", "how"), [("out", "tmpfs"), ("out.partial", "bind"), ("out/hf", "tmpfs"), ("a b", "bind")]
)
def test_a_mount_point_is_refused_before_anything_is_written(tmp_path, place, how):
    mounted = tmp_path / place
    (tmp_path / "other").mkdir()
    mounted.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", "size=1m", "tmpfs"] if how == "tmpfs" else ["--bind", tmp_path / "other"]
    if subprocess.run(["mount", *options, mounted], check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        out = tmp_path / ("a b" if place == "a b" else "out")
        refuse(out, rf"{mounted} is a mount point, so (it|{out}) is not replaced", overwrite=True)
        check_destination(mounted / "out", overwrite=True)
    finally:
        subprocess.run(["umount", mounted], check=True)


@pytest.mark.parametrize("name", DIRECTORIES["replaced"])
def test_a_checkpoint_alone_is_replaced(tmp_path, name):
    write_files(tmp_path / "out", *DIRECTORIES["replaced"][name])
    with new_directory(tmp_path / "out", ASKED, overwrite=True) as (partial, _):
        write(partial / "new")
    assert content(tmp_path) == {"out/new": b"x"}


def test_weights_that_an_index_or_a_manifest_names_may_be_called_anything(tmp_path):
    out = tmp_path / "out"
    write_files(out, "config.json", "mtp.safetensors")
    refuse(out, "checkpoint", overwrite=True)
    write(out / "model.safetensors.index.json", json.dumps({"weight_map": {"a": "mtp.safetensors"}}))
    check_destination(out, overwrite=True)
    (out / "model.safetensors.index.json").unlink()
    write_manifest(out, "config.json", hf_layout={"mtp.safetensors": ["a"]})
    check_destination(out, overwrite=True)


OURS = {
    "model.safetensors": ("config.json", "tokenizer.json", "vocab.json"),
    "release/__0_0.distcp": ("release/.metadata", "hf/config.json", "hf/x.png"),
}


@pytest.mark.parametrize("weights", OURS)
@pytest.mark.parametrize("change", ["cut", "gone"])
def test_an_output_of_ours_that_was_damaged_is_replaced(tmp_path, weights, change):
    """Also where weights or settings are damaged; of a file that no loader reads, the bytes must be the manifest's."""
    for number, name in enumerate((weights, *OURS[weights])):
        if name == "hf/x.png":
            continue
        out = tmp_path / f"{number}"
        write_files(out, weights, *OURS[weights])
        write_manifest(out, *OURS[weights], hf_layout={"model.safetensors": ["a"]})
        (out / name).unlink() if change == "gone" else os.truncate(out / name, 0)
        check_destination(out, overwrite=True)
        if weights != "model.safetensors":
            write(out / "model.safetensors")
            refuse(out, "checkpoint", overwrite=True)


def test_what_our_manifest_lists_is_replaced_and_nothing_else(tmp_path):
    out = tmp_path / "out"
    write_files(out, "config.json", "model.safetensors", "figures/a.png", "x.txt", "README.md", "modeling_x.py")
    write_manifest(out, "config.json", "figures/a.png", "x.txt", "README.md", "modeling_x.py")
    check_destination(out, overwrite=True)
    for file in ("figures/b.png", "LICENSE", "modeling_y.py"):
        write(out / file)
        refuse(out, f"checkpoint.*: {file}", overwrite=True)
        (out / file).unlink()
    for file in ("figures/a.png", "x.txt", "README.md", "modeling_x.py"):
        write(out / file, "my own work")
        refuse(out, rf"changed since ckptkit\.json was written, .*: {file}", overwrite=True)
        write(out / file)
    write(out / "config.json", '{"model_type": "mine"}')  # as `lint --fix` does
    check_destination(out, overwrite=True)


def test_a_manifest_makes_no_checkpoint_of_a_project(tmp_path):
    for file in ("config.json", "thesis.tex"):
        write(tmp_path / "out" / file, "{}")
    write_manifest(tmp_path / "out", "config.json", "thesis.tex")
    refuse(tmp_path / "out", "is not a checkpoint.*: it has no config.json", overwrite=True)


@pytest.mark.parametrize(
    "make",
    [lambda partial: partial.symlink_to("precious"), lambda partial: partial.symlink_to("nowhere"), write, os.mkfifo],
    ids=["link", "link to nothing", "file", "pipe"],
)
def test_a_partial_that_is_no_directory_is_named(tmp_path, make):
    write(tmp_path / "precious/config.json")
    make(tmp_path / "out.partial")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        refused = refuse(tmp_path / "out", r"out\.partial is (a link to|not a directory)", **options)
        assert "--overwrite" not in str(refused.hint)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.partial", "precious"]


FOREIGN_IN_PARTIAL = (
    *("thesis.tex", ".git/HEAD", "README.md", "model.safetensors", "release/notes.txt", "figures/b.png", "empty/"),
    *(".ckptkit/thesis.tex", ".ckptkit/notes/a.json", ".thesis.tex.0123456789abcdef.tmp", ".config.json.tmp"),
)


@pytest.mark.parametrize("name", FOREIGN_IN_PARTIAL)
def test_what_no_run_wrote_into_a_partial_is_never_removed(tmp_path, name):
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "out", ASKED) as (partial, journal):
        journal.list_files(["figures/a.png", "release/__0_0.distcp"])
        journal.record("release/__0_0.distcp", {})
        raise ZeroDivisionError
    fill(partial, (name,))
    before = content(tmp_path)
    for options in ({"overwrite": True}, {"resume": True}):
        refuse(tmp_path / "out", rf"out\.partial.*{name}", **options)
        assert content(tmp_path) == before
    assert (partial / name).exists()


def test_a_partial_of_ours_is_replaced_with_all_that_a_run_writes(tmp_path):
    names = ("figures/a.png", "release/__0_0.distcp", "hf/tokenizer.json", "carried/model.safetensors")
    with pytest.raises(KilledError), new_directory(tmp_path / "out", ASKED) as (partial, journal):
        journal.list_files(names)
        journal.begin_run()
        journal.stop_run(journal.begin_run())
        journal.record("release/__0_0.distcp", {}, {"a": [1.0]})
        for name in (*names, "release/.metadata", "release/.__0_0.distcp.0123456789abcdef.tmp", "ckptkit.json"):
            write(partial / name)
        write(partial / ".ckptkit/release%__0_0.distcp.json.01234567.tmp")
        raise KilledError
    assert (partial / "figures/a.png").exists()
    with new_directory(tmp_path / "out", ASKED, overwrite=True):
        pass
    assert content(tmp_path) == {}


def test_what_another_program_wrote_into_the_partial_stays_when_a_run_fails(tmp_path):
    with pytest.raises(CkptkitError, match="no") as failed, new_directory(tmp_path / "out", ASKED) as (partial, _):
        write(partial / "config.json")
        write(partial / "thesis.tex")
        raise FinalError.of(CkptkitError("no"))
    assert (partial / "thesis.tex").exists()
    assert "thesis.tex" in str(failed.value.__notes__)


def test_a_partial_of_ours_into_which_somebody_put_a_link_is_not_written_to(tmp_path):
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "out", ASKED) as (partial, journal):
        journal.record("x.safetensors", {})
        raise ZeroDivisionError
    (partial / "release").symlink_to("/tmp")
    for options in ({"overwrite": True}, {"resume": True}):
        refuse(tmp_path / "out", "release", **options)


@pytest.mark.parametrize("options", [{"overwrite": True}, {"resume": True}])
def test_a_partial_whose_journal_is_half_removed_is_replaced(tmp_path, options):
    for files in (("config.json", "model.safetensors"), ()):
        write_files(tmp_path / "out.partial", *files, ".ckptkit/model.safetensors.json")
        with new_directory(tmp_path / "out", ASKED, **options):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        (tmp_path / "out").rmdir()


ASIDE = "out.partial.old"


class KilledError(BaseException):
    """In place of a signal that cannot be caught: nothing that the run does after it counts."""


@pytest.mark.parametrize("at", ["before the old is moved", "between", "after the new is there", "while it is removed"])
def test_a_run_that_dies_while_it_replaces_leaves_both_whole_and_the_next_one_cleans_up(tmp_path, monkeypatch, at):
    out, old, newer = tmp_path / "out", whole("config.json"), b'{"model_type": "newer"}'
    write_model(out)
    with monkeypatch.context() as patched:
        die_at(at, patched)
        with pytest.raises(KilledError), new_directory(out, ASKED, overwrite=True) as (partial, _):
            write(partial / "config.json", newer)
            write(partial / "model.safetensors")
    new = at in ("after the new is there", "while it is removed")
    place = out if new or at == "before the old is moved" else tmp_path / ASIDE / "replaced"
    assert (place / "config.json").read_bytes() == (newer if new else old)
    with pytest.raises(CkptkitError), new_directory(out, ASKED):
        pass
    with new_directory(out, ASKED, overwrite=True) as (partial, _):
        assert (out / "config.json").read_bytes() == (newer if new else old)
        write(partial / "config.json", "newest")
    assert content(tmp_path) == {"out/config.json": b"newest"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def die_at(at, patched):
    """Lets a run die at a moment: from then on it changes nothing."""
    rename = os.rename

    def renamed(source, target):
        names = Path(source).name, Path(target).name
        when = {
            "before the old is moved": names == ("out", "replaced"),
            "between": names == ("out.partial", "out"),
            "after the new is there": names == ("replaced", "removed"),
        }
        if when.get(at):
            patched.setattr(os, "rename", died)
            raise KilledError
        rename(source, target)

    def died(*_, **__):
        raise KilledError

    patched.setattr(os, "rename", renamed)
    if at == "while it is removed":
        rmtree = shutil.rmtree
        patched.setattr(shutil, "rmtree", lambda path: died() if Path(path).name == "removed" else rmtree(path))


CHANGES = {
    "an iteration": lambda out: write(out / "iter_0000100/__0_0.distcp"),
    "another config": lambda out: write(out / "config.json", '{"model_type": "edited"}'),
    "other weights": lambda out: write(out / "model.safetensors", save({"trained": torch.ones(3)})),
    "no weights": lambda out: (out / "model.safetensors").unlink(),
    "a folder": lambda out: (out / "logs").mkdir(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_another_program_writes_there_meanwhile_is_not_replaced(tmp_path, change):
    out = tmp_path / "out"
    write_model(out)
    with (
        pytest.raises(CkptkitError, match="written") as refused,
        new_directory(out, ASKED, overwrite=True) as (partial, _),
    ):
        write(partial / "config.json", "new")
        change(out)
        before = content(out)
    assert content(out) == before
    assert content(partial) == {"config.json": b"new"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial"]
    assert f"rename it to out, after you move {out} away" in str(refused.value.__notes__)


def test_a_destination_that_another_program_made_meanwhile_is_not_replaced(tmp_path):
    for made in ("out/config.json", "other"):
        with pytest.raises(CkptkitError), new_directory(tmp_path / made.partition("/")[0], ASKED) as (partial, _):
            write(tmp_path / made)
        assert (tmp_path / made).is_file()
        assert partial.is_dir()


def test_a_destination_that_was_only_read_is_replaced(tmp_path):
    for name in ("a", "b"):
        out = tmp_path / name
        write_model(out)
        with new_directory(out, ASKED, overwrite=True) as (partial, _):
            write(partial / "new")
            assert content(out)
            if name == "b":  # it is gone meanwhile
                shutil.rmtree(out)
    assert content(tmp_path) == {"a/new": b"x", "b/new": b"x"}


def rename_and(monkeypatch, source, target, act):
    """After a rename of something of these names, another program acts."""
    rename = os.rename

    def renamed(old, new):
        rename(old, new)
        if (Path(old).name, Path(new).name) == (source, target):
            act()

    monkeypatch.setattr(os, "rename", renamed)


def test_what_is_written_into_the_old_output_when_it_is_moved_is_kept(tmp_path, monkeypatch):
    """A program may write by a directory that it has open, wherever that is moved."""
    out, kept = tmp_path / "out", tmp_path / ASIDE / "replaced"
    write_model(out)
    with monkeypatch.context() as patched:
        rename_and(patched, "out.partial", "out", lambda: write(kept / "iter_0000100/__0_0.distcp"))
        with (
            pytest.raises(CkptkitError, match="complete") as refused,
            new_directory(out, ASKED, overwrite=True) as (partial, _),
        ):
            write_model(partial)
    assert str(kept) in str(refused.value.hint)
    assert (kept / "iter_0000100/__0_0.distcp").exists()
    refuse(out, "iterations", overwrite=True)
    shutil.rmtree(kept / "iter_0000100")
    with new_directory(out, ASKED, overwrite=True):
        pass
    assert content(tmp_path) == {}


def test_what_took_the_place_of_the_old_output_and_the_old_output_stay(tmp_path, monkeypatch):
    out = tmp_path / "out"
    write_model(out)
    old = content(out)
    rename_and(monkeypatch, "out", "replaced", lambda: write(out / "iter_0000100/__0_0.distcp"))
    with pytest.raises(CkptkitError) as refused, new_directory(out, ASKED, overwrite=True) as (partial, _):
        write(partial / "new")
    assert content(out) == {"iter_0000100/__0_0.distcp": b"x"}
    assert content(partial) == {"new": b"x"}
    assert content(tmp_path / ASIDE / "replaced") == old
    assert str(tmp_path / ASIDE / "replaced") in str(refused.value.hint)


def test_a_run_that_was_to_replace_something_goes_on_when_that_is_moved_away(tmp_path):
    out = tmp_path / "out"
    write_model(out)
    with pytest.raises(CkptkitError) as failed, new_directory(out, ASKED, overwrite=True) as (_, journal):
        journal.record("x.safetensors", {})
        raise CkptkitError("no")
    told = f"{out} --resume --overwrite"
    assert str(failed.value.__notes__) == text_with(told)
    assert str(refuse(out, "out exists already", resume=True).hint) == text_with(told)
    out.rename(tmp_path / "old")
    with new_directory(out, ASKED, resume=True) as (_, journal):
        assert journal.count() == 1
    assert out.is_dir()


@pytest.mark.parametrize("made", ["file", "link", "more"])
def test_what_is_not_ours_is_left_where_the_old_output_would_go(tmp_path, made):
    write_model(tmp_path / "out")
    aside = tmp_path / ASIDE
    make = {
        "file": lambda: write(aside),
        "link": lambda: aside.symlink_to("out"),
        "more": lambda: [write(aside / name) for name in (".ckptkit", "thesis.tex", "replaced/config.json")],
    }
    make[made]()
    before = content(tmp_path)
    refuse(tmp_path / "out", ASIDE, overwrite=True)
    assert content(tmp_path) == before
