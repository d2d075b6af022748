"""A run that was cut off goes on where it was, and ends as if nothing had happened."""

import json
import os
import re
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
from support.messages import refusal
from support.models import content
from support.nightly import daily
from support.whole_files import flip, write, write_files

from ckptkit.app.api import convert, quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.formats import files as formats
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.transfer import destination
from ckptkit.transfer import files as module
from ckptkit.verify.run import verify

FILE_BYTES = 1_000_000


@pytest.fixture
def run(request, releases, converted):
    """A way (by default to Megatron) of a model that takes several files, made here, where nothing is cut off yet."""
    way = getattr(request, "param", "to Megatron")
    if way == "to INT4":
        return partial(quantize, releases("qwen3_moe"), scheme=int4_scheme(group_size=32))
    if way == "to HF":
        return partial(convert, converted("qwen3_moe"))
    return partial(convert, releases("qwen3_moe"), max_shard_size=FILE_BYTES)


class PowerCutError(Exception):
    """Ends a run."""


@contextmanager
def cut_off_after(count, monkeypatch):
    """Lets so many files be finished. Yields the files that are begun."""
    begun = []
    opened = module.FilesWriter._opened

    def watched(self, file):
        if file not in begun:
            begun.append(file)
        if len(begun) > count:
            raise PowerCutError
        return opened(self, file)

    with monkeypatch.context() as patched:
        patched.setattr(module.FilesWriter, "_opened", watched)
        yield begun


@pytest.mark.parametrize("run", ["to Megatron", "to HF", "to INT4"], indirect=True)
def test_only_unfinished_files_are_written_again(run, tmp_path, monkeypatch):
    whole = run(tmp_path / "whole", resume=True)  # with nothing to go on with, it begins
    with pytest.raises(PowerCutError), cut_off_after(1, monkeypatch) as finished:
        run(tmp_path / "out", workers=1)
    assert (tmp_path / "out.partial").is_dir()
    with cut_off_after(1000, monkeypatch) as begun:
        resumed = run(tmp_path / "out", resume=True)
    with cut_off_after(1000, monkeypatch) as every:
        run(tmp_path / "again")
    assert len(every) > 2
    assert sorted(begun) == sorted(set(every) - {finished[0]})
    assert content(tmp_path / "out") == content(tmp_path / "whole") == content(tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "out", "whole"]
    assert resumed.packed == whole.packed  # the error also of what the first run packed
    assert whole.packed is None or whole.packed.relative_error


@pytest.mark.parametrize(
    ("run", "lost"), [("to Megatron", "a bit"), ("to HF", "a bit"), ("to INT4", "the record")], indirect=["run"]
)
def test_a_finished_file_that_was_damaged_since_is_written_again(run, lost, tmp_path, monkeypatch):
    """A rename may outlive a power cut, and the bytes of the renamed file, or of its record, not."""
    run(tmp_path / "whole")
    with pytest.raises(PowerCutError), cut_off_after(1, monkeypatch):
        run(tmp_path / "out", workers=1)
    ending = ".json" if lost == "the record" else ""
    (finished,) = (
        file for kind in ("safetensors", "distcp") for file in (tmp_path / "out.partial").rglob(f"*.{kind}{ending}")
    )
    finished.write_text("") if ending else flip(finished)
    run(tmp_path / "out", resume=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_cut_off_run_is_not_replaced_or_resumed_unasked(run, tmp_path, monkeypatch):
    with pytest.raises(PowerCutError), cut_off_after(1, monkeypatch):
        run(tmp_path / "out", workers=1)
    before = content(tmp_path / "out.partial")
    refusal(r"out.partial[\s\S]*--resume", run, tmp_path / "out")
    with pytest.raises(CkptkitError, match=r"command was .*max-shard-size 1000000.* but is .*--dtype float32"):
        run(tmp_path / "out", dtype="float32", resume=True)
    refusal("--resume.*--overwrite", run, tmp_path / "out", resume=True, overwrite=True)
    assert content(tmp_path / "out.partial") == before
    run(tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("count", daily(range(6), (0, 4)))
def test_a_run_with_other_files_and_a_tower_that_was_cut_off_is_replaced_whatever_it_had_written(
    releases, copy_of, tmp_path, monkeypatch, count
):
    source, out = copy_of(releases("qwen3_vl_moe")), tmp_path / "out"
    write_files(source, "figures/a.png", "thesis.tex", "README.md", "modeling_x.py")
    convert(source, out, max_shard_size=FILE_BYTES)
    assert (out / "carried").is_dir()
    whole = content(out)
    with monkeypatch.context() as patched:
        patched.setattr(destination, "_keep_or_remove", lambda *_: "killed")
        with pytest.raises(PowerCutError), cut_off_after(count, monkeypatch):
            convert(source, out, max_shard_size=FILE_BYTES, workers=1, overwrite=True)
    assert content(out) == whole
    assert (tmp_path / "out.partial/hf/thesis.tex").exists()
    convert(releases("qwen2-tied"), out, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", source.name]
    assert not (out / "hf/thesis.tex").exists()


def _write_in_place(file):
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")


def _write_anew(file):
    other = file.with_name("other")
    other.write_bytes(file.read_bytes()[:-1] + b"\x55")
    other.rename(file)


@pytest.mark.parametrize(
    ("change", "ends"), [(_write_in_place, False), (_write_anew, True)], ids=["in place, cut off", "anew, whole"]
)
def test_a_source_of_the_same_size_and_time_is_another(releases, copy_of, tmp_path, monkeypatch, change, ends):
    source, out = copy_of(releases("qwen3_moe")), tmp_path / "out"
    with nullcontext() if ends else pytest.raises(PowerCutError), cut_off_after(99 if ends else 1, monkeypatch):
        convert(source, out, max_shard_size=FILE_BYTES, workers=1)
    file = sorted(source.glob("*.safetensors"))[-1]
    before = file.stat()
    change(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    refusal("out exists already" if ends else "resumed", convert, source, out, max_shard_size=FILE_BYTES, resume=True)


def test_a_resumed_run_says_how_much_it_kept(run, tmp_path, monkeypatch, caplog):
    with pytest.raises(PowerCutError), cut_off_after(1, monkeypatch) as begun:
        run(tmp_path / "out", workers=1)
    nbytes = (tmp_path / "out.partial" / begun[0]).stat().st_size
    with caplog.at_level("INFO", "ckptkit.progress"), cut_off_after(1000, monkeypatch) as rest:
        run(tmp_path / "out", resume=True)
    (said,) = [one.getMessage() for one in caplog.records if one.getMessage().startswith("kept ")]
    files, written = re.fullmatch(r"kept 1 of (\d+) files, (.+), of .*", said).groups()
    assert int(files) == len(rest) + 1
    assert 0 < float(written.split()[0]) * {"kB": 1e3, "MB": 1e6}[written.split()[1]] <= nbytes * 1.01


def test_a_megatron_output_of_less_than_5_gb_is_in_files_that_a_cut_off_run_keeps(releases, tmp_path, monkeypatch):
    gb = 10**9
    assert [formats.part_bytes(size) for size in (gb, 8 * gb, 60 * gb)] == [gb // 2, gb, 5 * gb]
    monkeypatch.setattr(formats, "_LEAST_BYTES", 100_000)
    source, out = releases("qwen3_moe"), tmp_path / "out"
    with cut_off_after(3, monkeypatch), pytest.raises(PowerCutError):
        convert(source, out, workers=1)
    kept = {path.name for path in (tmp_path / "out.partial").rglob("*.distcp")}
    assert len(kept) >= 3
    with cut_off_after(99, monkeypatch) as begun:
        convert(source, out, workers=1, resume=True)
    assert 5 <= len(list(out.rglob("*.distcp"))) <= 9
    assert len(begun) < len(list(out.rglob("*.distcp")))
    assert verify(out, source=source).findings == []


# What is whole


def test_a_run_that_died_when_all_was_written_is_whole(run, tmp_path):
    run(tmp_path / "out")
    before = content(tmp_path)
    (tmp_path / "out.partial.lock").write_text("ckptkit: pid 1 on elsewhere\n")
    write_files(tmp_path / "out.partial.old", ".ckptkit")
    for _ in range(2):
        run(tmp_path / "out", resume=True)
        assert content(tmp_path) == before
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    # It lacks only its name.
    (tmp_path / "out").rename(tmp_path / "out.partial")
    write_files(tmp_path / "out.partial.old", ".ckptkit", "replaced/config.json", "replaced/model.safetensors")
    run(tmp_path / "out", resume=True)
    assert content(tmp_path) == before


def _shorten(file, count):
    os.truncate(file, file.stat().st_size - count)


@pytest.mark.parametrize(
    "change",
    [
        lambda source, out: (out / "hf/config.json").unlink(),
        lambda source, out: next((out / "release").glob("*.distcp")).unlink(),
        lambda source, out: _shorten(next((out / "release").glob("*.distcp")), 1),
        lambda source, out: _shorten(max((out / "release").glob("*.distcp")), 7),
        lambda source, out: (out / "release/.metadata").write_bytes(b"x"),
        lambda source, out: (out / "ckptkit.json").write_text("{}"),
        lambda source, out: edit_manifest(out, version="0"),
        lambda source, out: edit_manifest(out, command=["ckptkit", "convert", "elsewhere"]),
        lambda source, out: edit_manifest(out, source_fingerprint=None),
        lambda source, out: (source / "generation_config.json").write_text("{}"),
        lambda source, out: os.utime(next(source.glob("*.safetensors")), (1, 1)),
        lambda source, out: (out.parent / "out.partial").mkdir(),
    ],
)
def test_anything_else_is_refused_as_ever(releases, copy_of, tmp_path, change):
    source, out = copy_of(releases("qwen2-tied")), tmp_path / "out"
    convert(source, out)
    change(source, out)
    before = content(out)
    refusal("out exists already", convert, source, out, resume=True)
    assert content(out) == before


@pytest.mark.parametrize(
    ("way", "name", "change"),
    [
        ("convert", "config.json", "flip"),
        ("convert", "vocab.json", "cut"),
        ("convert", "figures/a.txt", "gone"),
        ("quantize", "generation_config.json", "gone"),
        ("quantize", "config.json", "cut"),
        ("quantize", "figures/a.txt", "flip"),
    ],
)
def test_a_side_file_that_is_not_as_it_was_written_is_named_and_overwritten(
    releases, copy_of, tmp_path, way, name, change
):
    source, out = copy_of(releases("qwen2-tied")), tmp_path / "out"
    write(source / "figures/a.txt", "a figure")
    write(source / "vocab.json", '{"a": 1, "b": 2}')
    run = partial(convert if way == "convert" else partial(quantize, scheme=int4_scheme(group_size=32)), source)
    run(out)
    whole, file = content(out), out / ("hf" if way == "convert" else "") / name
    assert run(out, resume=True).was_whole
    {"flip": flip, "cut": lambda file: os.truncate(file, 3), "gone": Path.unlink}[change](file)
    before = content(out)
    refused = refusal(rf"out exists already, .* but \S*{name} (is missing|has other)", run, out, resume=True)
    assert "--overwrite" in str(refused.hint)
    assert content(out) == before
    if name != "figures/a.txt" or change == "gone":
        assert not run(out, overwrite=True).was_whole
        assert content(out) == whole


def test_a_file_that_was_added_is_named(releases, tmp_path):
    convert(releases("qwen2-tied"), tmp_path / "out")
    for name in ("hf/evil.py", "hf/pkg/evil.py", "hf/chat_template.jinja"):
        write(tmp_path / "out" / name)
        with pytest.raises(CkptkitError, match=rf"out exists already, .* but {name} was added"):
            convert(releases("qwen2-tied"), tmp_path / "out", resume=True)
        (tmp_path / "out" / name).unlink()


def test_what_was_not_read_is_said(releases, tmp_path, ckptkit):
    """A bit of the weights is not seen here: that is for `verify`, which the closing line names."""
    source, out = releases("qwen2-tied"), tmp_path / "out"
    convert(source, out)
    flip(next((out / "release").glob("*.distcp")))
    done = ckptkit("convert", source, out, "--resume")
    assert done.returncode == 0, done.stderr
    assert "read" in done.stdout
    assert f"next: ckptkit verify {out} --source {source}" in done.stderr


def edit_manifest(out, **changes):
    file = out / "ckptkit.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_new_files_have_the_permissions_that_the_umask_leaves(releases, tmp_path):
    for umask, left in ((0o077, 0o600), (0o002, 0o664)):
        before = os.umask(umask)
        try:
            convert(releases("qwen2-tied"), tmp_path / f"{umask}")
        finally:
            os.umask(before)
        files = [path for path in (tmp_path / f"{umask}").rglob("*") if path.is_file()]
        assert {path.stat().st_mode & 0o777 for path in files} == {left}
