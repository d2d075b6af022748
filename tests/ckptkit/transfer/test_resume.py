"""A run that was cut off goes on where it was, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.models import content
from support.whole_files import write_files

from ckptkit.app.api import convert, quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.formats import files as formats
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.transfer import destination
from ckptkit.transfer import files as module
from ckptkit.verify.run import verify

FILE_BYTES = 1_000_000
Run = Callable[..., None]


@pytest.fixture(params=["to Megatron", "to HF", "to INT4"])
def run(request: pytest.FixtureRequest, releases: Callable[[str], Path], converted: Callable[[str], Path]) -> Run:
    """One of the three ways, of a model that takes several files."""
    # Made here, and not while a test cuts off what is written.
    source = (converted if request.param == "to HF" else releases)("qwen3_moe")

    def go(out: Path, **options: object) -> None:
        if request.param == "to INT4":
            quantize(source, out, int4_scheme(group_size=32), **options)  # type: ignore[arg-type]
        else:
            convert(source, out, max_shard_size=FILE_BYTES if request.param == "to Megatron" else None, **options)  # type: ignore[arg-type]

    return go


class PowerCutError(Exception):
    """Ends a run."""


@contextmanager
def cut_off_after(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lets so many files be finished. Yields the files that are begun."""
    begun: list[str] = []
    opened = module.FilesWriter._opened

    def watched(self: module.FilesWriter, file: str) -> object:
        if file not in begun:
            begun.append(file)
        if len(begun) > count:
            raise PowerCutError
        return opened(self, file)

    with monkeypatch.context() as patched:
        patched.setattr(module.FilesWriter, "_opened", watched)
        yield begun


def test_only_unfinished_files_are_written_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "whole")
    with pytest.raises(PowerCutError), cut_off_after(1, monkeypatch) as finished:
        run(tmp_path / "out", workers=1)
    assert (tmp_path / "out.partial").is_dir()
    with cut_off_after(1000, monkeypatch) as begun:
        run(tmp_path / "out", resume=True)
    with cut_off_after(1000, monkeypatch) as every:
        run(tmp_path / "again")
    assert len(every) > 2
    assert sorted(begun) == sorted(set(every) - {finished[0]})
    assert content(tmp_path / "out") == content(tmp_path / "whole") == content(tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "out", "whole"]


def test_a_resumed_run_reports_the_error_of_all_that_was_packed(
    releases: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantize(releases("qwen3_moe"), tmp_path / "whole", int4_scheme(group_size=32))
    with pytest.raises(PowerCutError), cut_off_after(1, monkeypatch):
        quantize(releases("qwen3_moe"), tmp_path / "out", int4_scheme(group_size=32), workers=1)
    resumed = quantize(releases("qwen3_moe"), tmp_path / "out", int4_scheme(group_size=32), resume=True)
    assert resumed.packed == whole.packed
    assert resumed.packed is not None
    assert resumed.packed.relative_error


@pytest.mark.parametrize("lost", ["a bit", "the record"])
def test_a_finished_file_that_was_damaged_since_is_written_again(
    run: Run, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename may outlive a power cut, and the bytes of the renamed file, or of its record, not."""
    run(tmp_path / "whole")
    with pytest.raises(PowerCutError), cut_off_after(1, monkeypatch):
        run(tmp_path / "out", workers=1)
    ending = ".json" if lost == "the record" else ""
    (finished,) = (
        file for kind in ("safetensors", "distcp") for file in (tmp_path / "out.partial").rglob(f"*.{kind}{ending}")
    )
    finished.write_text("") if ending else _flip(finished)
    run(tmp_path / "out", resume=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_cut_off_run_is_not_replaced_or_resumed_unasked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PowerCutError), cut_off_after(1, monkeypatch):
        run(tmp_path / "out", workers=1)
    before = content(tmp_path / "out.partial")
    with pytest.raises(CkptkitError, match=r"out.partial.*off[\s\S]*--resume"):
        run(tmp_path / "out")
    assert content(tmp_path / "out.partial") == before
    run(tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("count", range(6))
def test_a_run_with_other_files_and_a_tower_that_was_cut_off_is_replaced_whatever_it_had_written(
    releases: Callable[[str], Path],
    copy_of: Callable[[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    source, out = copy_of(releases("qwen3_vl_moe")), tmp_path / "out"
    write_files(source, "figures/a.png", "thesis.tex", "README.md", "modeling_x.py")
    convert(source, out, max_shard_size=FILE_BYTES)
    assert (out / "carried").is_dir()
    convert(source, out, max_shard_size=FILE_BYTES, overwrite=True)
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


def test_without_a_cut_off_run_resume_begins(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "out", resume=True)
    assert (tmp_path / "out/ckptkit.json").exists()


def test_another_command_is_refused(
    releases: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = releases("qwen3_moe")
    with pytest.raises(PowerCutError), cut_off_after(1, monkeypatch):
        convert(source, tmp_path / "out", max_shard_size=FILE_BYTES, workers=1)
    before = content(tmp_path / "out.partial")
    with pytest.raises(
        CkptkitError, match=r"cannot be resumed: its command was .*max-shard-size 1000000.* and is .*--dtype float32"
    ):
        convert(source, tmp_path / "out", max_shard_size=FILE_BYTES, dtype="float32", resume=True)
    assert content(tmp_path / "out.partial") == before


def _write_in_place(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")


def _write_anew(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes()[:-1] + b"\x55")
    other.rename(file)


@pytest.mark.parametrize("change", [_write_in_place, _write_anew], ids=["in place", "by another file"])
@pytest.mark.parametrize("ends", [False, True], ids=["cut off", "whole"])
def test_a_source_of_the_same_size_and_time_is_another(
    releases: Callable[[str], Path],
    copy_of: Callable[[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    ends: bool,
) -> None:
    source, out = copy_of(releases("qwen3_moe")), tmp_path / "out"
    if ends:
        convert(source, out, max_shard_size=FILE_BYTES)
    else:
        with pytest.raises(PowerCutError), cut_off_after(1, monkeypatch):
            convert(source, out, max_shard_size=FILE_BYTES, workers=1)
    file = sorted(source.glob("*.safetensors"))[-1]
    before = file.stat()
    change(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    told = "out exists already" if ends else "resumed"
    with pytest.raises(CkptkitError, match=told):
        convert(source, out, max_shard_size=FILE_BYTES, resume=True)


def test_resume_and_overwrite_exclude_each_other(releases: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="--resume.*--overwrite"):
        convert(releases("qwen3_moe"), tmp_path / "out", resume=True, overwrite=True)


def test_a_resumed_run_says_how_much_it_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(PowerCutError), cut_off_after(1, monkeypatch) as begun:
        run(tmp_path / "out", workers=1)
    nbytes = (tmp_path / "out.partial" / begun[0]).stat().st_size
    with caplog.at_level("INFO", "ckptkit.progress"), cut_off_after(1000, monkeypatch) as rest:
        run(tmp_path / "out", resume=True)
    (said,) = [one.getMessage() for one in caplog.records if one.getMessage().startswith("kept ")]
    files, written = re.fullmatch(r"kept 1 of (\d+) files, (.+), of .*", said).groups()
    assert int(files) == len(rest) + 1
    assert 0 < float(written.split()[0]) * {"kB": 1e3, "MB": 1e6}[written.split()[1]] <= nbytes * 1.01


def test_a_megatron_output_of_less_than_5_gb_is_in_files_that_a_cut_off_run_keeps(
    releases: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_run_that_died_when_all_was_written_is_whole(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "out")
    before = content(tmp_path)
    (tmp_path / "out.partial.lock").write_text("ckptkit: pid 1 on elsewhere\n")
    (tmp_path / "out.partial.old").mkdir()
    (tmp_path / "out.partial.old/.ckptkit").touch()
    for _ in range(2):
        run(tmp_path / "out", resume=True)
        assert content(tmp_path) == before
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_only_lacks_its_name_gets_it(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "out")
    before = content(tmp_path)
    (tmp_path / "out").rename(tmp_path / "out.partial")
    old = tmp_path / "out.partial.old"
    write_files(old, ".ckptkit", "replaced/config.json", "replaced/model.safetensors")
    run(tmp_path / "out", resume=True)
    assert content(tmp_path) == before


def _touch(source: Path, out: Path) -> None:
    file = sorted(source.rglob("*.safetensors"))[0]
    os.utime(file, (1, 1))


def _shorten(file: Path, count: int) -> None:
    os.truncate(file, file.stat().st_size - count)


@pytest.mark.parametrize(
    "change",
    [
        lambda source, out: (out / "ckptkit.json").unlink(),
        lambda source, out: (out / "hf/config.json").unlink(),
        lambda source, out: next((out / "release").glob("*.distcp")).unlink(),
        lambda source, out: os.truncate(next((out / "release").glob("*.distcp")), 10),
        lambda source, out: _shorten(next((out / "release").glob("*.distcp")), 1),
        lambda source, out: _shorten(max((out / "release").glob("*.distcp")), 7),
        lambda source, out: (out / "release/.metadata").write_bytes(b"x"),
        lambda source, out: (out / "ckptkit.json").write_text("{}"),
        lambda source, out: edit_manifest(out, version="0"),
        lambda source, out: edit_manifest(out, command=["ckptkit", "convert", "elsewhere"]),
        lambda source, out: edit_manifest(out, command="x"),
        lambda source, out: edit_manifest(out, source_fingerprint=None),
        lambda source, out: (source / "generation_config.json").write_text("{}"),
        _touch,
        lambda source, out: (out.parent / "out.partial").mkdir(),
    ],
)
def test_anything_else_is_refused_as_ever(
    releases: Callable[[str], Path],
    copy_of: Callable[[Path], Path],
    tmp_path: Path,
    change: Callable[[Path, Path], object],
) -> None:
    source, out = copy_of(releases("qwen2-tied")), tmp_path / "out"
    convert(source, out)
    change(source, out)
    before = content(out)
    with pytest.raises(CkptkitError, match="out exists already"):
        convert(source, out, resume=True)
    assert content(out) == before


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("change", ["flip", "cut", "gone"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "vocab.json", "figures/a.txt"])
@pytest.mark.parametrize("way", ["convert", "quantize"])
def test_a_side_file_that_is_not_as_it_was_written_is_named_and_overwritten(
    releases: Callable[[str], Path], copy_of: Callable[[Path], Path], tmp_path: Path, way: str, name: str, change: str
) -> None:
    source, out = copy_of(releases("qwen2-tied")), tmp_path / "out"
    (source / "figures").mkdir()
    (source / "figures/a.txt").write_text("a figure")
    (source / "vocab.json").write_text('{"a": 1, "b": 2}')

    def write(**options: bool) -> bool:
        if way == "convert":
            return convert(source, out, **options).was_whole  # type: ignore[arg-type]
        return quantize(source, out, int4_scheme(group_size=32), **options).was_whole  # type: ignore[arg-type]

    write()
    whole, file = content(out), out / ("hf" if way == "convert" else "") / name
    assert write(resume=True)
    {"flip": _flip, "cut": lambda file: os.truncate(file, 3), "gone": Path.unlink}[change](file)
    before = content(out)
    with pytest.raises(CkptkitError, match=rf"out exists already, .* but \S*{name} (is missing|has other)") as refused:
        write(resume=True)
    assert "--overwrite" in str(refused.value.hint)
    assert content(out) == before
    if name != "figures/a.txt" or change == "gone":
        assert not write(overwrite=True)
        assert content(out) == whole


@pytest.mark.parametrize("name", ["hf/evil.py", "hf/pkg/evil.py", "hf/chat_template.jinja"])
def test_a_file_that_was_added_is_named(releases: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    convert(releases("qwen2-tied"), tmp_path / "out")
    (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / name).write_text("x")
    with pytest.raises(CkptkitError, match=rf"out exists already, .* but {name} was added"):
        convert(releases("qwen2-tied"), tmp_path / "out", resume=True)


def test_what_was_not_read_is_said(releases: Callable[[str], Path], tmp_path: Path) -> None:
    """A bit of the weights is not seen here: that is for `verify`, which the closing line names."""
    source, out = releases("qwen2-tied"), tmp_path / "out"
    convert(source, out)
    _flip(next((out / "release").glob("*.distcp")))
    words = [sys.executable, "-m", "ckptkit", "convert", str(source), str(out), "--resume"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "read" in ran.stdout
    assert f"next: ckptkit verify {out} --source {source}" in ran.stderr


def edit_manifest(out: Path, **changes: object) -> None:
    file = out / "ckptkit.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_new_files_have_the_permissions_that_the_umask_leaves(releases: Callable[[str], Path], tmp_path: Path) -> None:
    for umask, left in ((0o077, 0o600), (0o022, 0o644), (0o002, 0o664)):
        before = os.umask(umask)
        try:
            convert(releases("qwen2-tied"), tmp_path / f"{umask}")
        finally:
            os.umask(before)
        files = [path for path in (tmp_path / f"{umask}").rglob("*") if path.is_file()]
        assert {path.stat().st_mode & 0o777 for path in files} == {left}
