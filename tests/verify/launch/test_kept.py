"""What `preflight` keeps of checkpoints between runs: found again while nothing changed, and never otherwise."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.fixture_types import PathOf

from ckptkit.app.cli import cli
from verify.check import Outcome
from verify.launch import kept
from verify.launch.identity import identity_of
from verify.launch.preflight import preflight
from verify.report import Report

NAME = "qwen3_moe"


@pytest.fixture
def pair(releases: PathOf, converted: PathOf, tmp_path: Path) -> dict[str, Path]:
    """A release and Megatron weights made of it, without a manifest."""
    hf, megatron = tmp_path / "hf", tmp_path / "megatron"
    shutil.copytree(releases(NAME), hf)
    shutil.copytree(converted(NAME), megatron)
    (megatron / "ckptkit.json").unlink()
    return {"hf_checkpoint": hf, "ref_load": megatron}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, which keeps results of files however new they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "SETTLED_S", -60.0)
    return tmp_path / "cache" / "ckptkit" / "preflight"


def looked_again(report: Report) -> bool:
    return not any("--no-cache looks again" in line for line in report.facts.get("notes", []))


def said(report: Report) -> dict[str, Any]:
    """A report without what differs between two runs."""
    content = report.to_json()
    del content["date"]
    content["facts"]["notes"] = [line for line in content["facts"].get("notes", []) if "--no-cache" not in line]
    for check in content["checks"]:
        del check["seconds"]
    return content


def test_a_result_is_found_again_and_says_of_when(pair: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first = preflight(**pair, cache=True)
    assert looked_again(first)
    monkeypatch.setattr("verify.evidence.hf_files.scan_shard", None)  # no header is read
    second = preflight(**pair, cache=True)
    assert said(second) == said(first)
    assert second.status == "passed"
    (note,) = [line for line in second.facts["notes"] if "--no-cache" in line]
    assert note.startswith("headers and samples of the checkpoints were looked at 20")


def test_a_result_that_failed_still_fails(pair: dict[str, Path]) -> None:
    next(pair["hf_checkpoint"].glob("*.safetensors")).unlink()
    first, second = preflight(**pair, cache=True), preflight(**pair, cache=True)
    assert (first.status, second.status) == ("failed", "failed")
    assert (looked_again(first), looked_again(second)) == (True, False)
    assert said(second) == said(first)


def test_a_teacher_that_changed_is_looked_at_again(pair: dict[str, Path], converted: PathOf, tmp_path: Path) -> None:
    """It is only held against the config of the launch; what that came to is kept all the same."""
    teacher = Path(shutil.copytree(converted(NAME), tmp_path / "teacher"))
    words = ["--opd-teacher-load", str(teacher)]
    assert preflight(**pair, arguments=words, cache=True).status == "passed"
    assert not looked_again(preflight(**pair, arguments=words, cache=True))
    shutil.rmtree(teacher / "release")
    shutil.copytree(converted("glm4_moe") / "release", teacher / "release")
    report = preflight(**pair, arguments=words, cache=True)
    assert (looked_again(report), [one.code for one in report.findings]) == (True, ["CK740"])


def same_size(path: Path) -> None:
    """Changes a byte of a file, and sets its time back."""
    at = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))


def exchanged(path: Path) -> None:
    """Puts another file of the same size and time in its place."""
    other = path.with_suffix(".other")
    shutil.copy2(path, other)
    same_size(other)
    other.replace(path)


def shard(pair: dict[str, Path]) -> Path:
    return sorted(pair["hf_checkpoint"].glob("*.safetensors"))[0]


CHANGES: dict[str, Callable[[dict[str, Path]], object]] = {
    "a byte of a shard": lambda pair: same_size(shard(pair)),
    "another shard": lambda pair: exchanged(shard(pair)),
    "a byte of a .distcp file": lambda pair: same_size(pair["ref_load"] / "release" / "__0_0.distcp"),
    "config": lambda pair: same_size(pair["hf_checkpoint"] / "config.json"),
    "config beside Megatron": lambda pair: same_size(pair["ref_load"] / "hf" / "config.json"),
    "a file is gone": lambda pair: shard(pair).unlink(),
    "a file that was not there": lambda pair: (pair["hf_checkpoint"] / "model.safetensors").write_bytes(b""),
    "a manifest that was not there": lambda pair: (pair["ref_load"] / "ckptkit.json").write_text("{}"),
    "a directory that was not there": lambda pair: (pair["hf_checkpoint"] / "original").mkdir(),
    "hf/ is gone": lambda pair: shutil.rmtree(pair["ref_load"] / "hf"),
    "the tracker": lambda pair: (pair["ref_load"] / "latest_checkpointed_iteration.txt").write_text("release\n"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_in_a_directory_is_looked_at(change: str, pair: dict[str, Path]) -> None:
    assert looked_again(preflight(**pair, cache=True))
    assert not looked_again(preflight(**pair, cache=True))
    before = identity_of([pair["hf_checkpoint"], pair["ref_load"] / "release"])
    CHANGES[change](pair)
    assert identity_of([pair["hf_checkpoint"], pair["ref_load"] / "release"]) != before


@pytest.mark.parametrize("change", ["hf/ is gone", "a manifest that was not there", "config beside Megatron"])
def test_what_is_beside_an_iteration_with_a_config_of_its_own_counts(change: str, pair: dict[str, Path]) -> None:
    """It is Megatron's all the same: its weights say so."""
    iteration = pair["ref_load"] / "release"
    shutil.copy(pair["hf_checkpoint"] / "config.json", iteration / "config.json")
    before = identity_of([iteration])
    assert before is not None
    CHANGES[change](pair)
    assert identity_of([iteration]) != before


def test_a_changed_checkpoint_is_judged_anew(pair: dict[str, Path]) -> None:
    preflight(**pair, cache=True)
    shard(pair).unlink()
    report = preflight(**pair, cache=True)
    assert (report.status, looked_again(report)) == ("failed", True)


def test_a_link_whose_target_appears_is_a_change(tmp_path: Path) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    before = identity_of([folder])
    (tmp_path / "blob").write_text("x")
    there = identity_of([folder])
    same_size(tmp_path / "blob")
    assert len({before, there, identity_of([folder])}) == 3


def test_sizes_and_options_are_part_of_the_question(pair: dict[str, Path]) -> None:
    preflight(**pair, cache=True)
    assert looked_again(preflight(**pair, tp=2, cache=True))
    assert looked_again(preflight(hf_checkpoint=pair["hf_checkpoint"], cache=True))


def test_a_script_and_its_variables_are_read_every_time(
    pair: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"python3 train.py --hf-checkpoint {pair['hf_checkpoint']} --attention-dropout $DROP --num-layers 2"
    )
    found = []
    for value in ("0.0", "0.3"):
        monkeypatch.setenv("DROP", value)
        report = preflight(script=script, cache=True)
        found.append((looked_again(report), any(value in one.actual for one in report.findings if one.code == "CK719")))
    assert found == [(True, False), (False, True)]


def test_another_program_looks_again(pair: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    preflight(**pair, cache=True)
    monkeypatch.setattr(kept, "identity_of_program", lambda roots: "edited")
    assert looked_again(preflight(**pair, cache=True))


def test_files_that_have_just_changed_are_not_kept(
    pair: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a step of the file system's clock a second change would not show."""
    monkeypatch.setattr(kept, "SETTLED_S", 60.0)
    preflight(**pair, cache=True)
    assert not cache.exists()


def test_an_inconclusive_result_is_not_kept(pair: dict[str, Path], cache: Path) -> None:
    inconclusive = Outcome(unlooked={"a format that is not supported": ["CK105"]})
    assert kept.kept_outcome("?", [pair["hf_checkpoint"]], lambda: inconclusive) is inconclusive
    assert not cache.exists()
    kept.kept_outcome("?", [pair["hf_checkpoint"]], Outcome)
    assert len(list(cache.iterdir())) == 1


def test_a_directory_with_a_pipe_is_not_kept(pair: dict[str, Path], cache: Path) -> None:
    os.mkfifo(pair["hf_checkpoint"] / "pipe")
    preflight(**pair, cache=True)
    assert not cache.exists()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"digest": "0", "outcome": {}, "when": ""}'])
def test_a_damaged_result_is_looked_at_again_and_replaced(text: str, pair: dict[str, Path], cache: Path) -> None:
    first = preflight(**pair, cache=True)
    (file,) = cache.iterdir()
    file.write_text(text)
    assert said(preflight(**pair, cache=True)) == said(first)
    assert not looked_again(preflight(**pair, cache=True))


def test_a_cache_that_cannot_be_written_is_a_note(
    pair: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    report = preflight(**pair, cache=True)
    assert report.status == "passed"
    assert any(line.startswith("not kept for the next run: ") for line in report.facts["notes"])


def test_the_number_of_results_is_bounded(pair: dict[str, Path], cache: Path) -> None:
    cache.mkdir(parents=True)
    for number in range(250):
        (cache / f"{number}.json").write_text("{}")
        os.utime(cache / f"{number}.json", (number, number))
    preflight(**pair, cache=True)
    assert len(list(cache.iterdir())) == 200
    assert not (cache / "0.json").exists()
    assert (cache / "249.json").exists()


def test_on_the_command_line_results_are_kept_unless_it_is_asked_to_look(pair: dict[str, Path]) -> None:
    command = ["preflight", "--hf-checkpoint", str(pair["hf_checkpoint"]), "--json"]
    notes = [
        json.loads(CliRunner().invoke(cli, [*command, *more]).stdout)["facts"].get("notes", [])
        for more in ([], [], ["--no-cache"])
    ]
    assert [any("--no-cache looks again" in line for line in lines) for lines in notes] == [False, True, False]


def test_checks_look_at_nothing_but_what_counts(pair: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path that is opened, listed or asked for while checkpoints are looked at is in the identity of them."""
    touched: set[str] = set()

    def spied(name: str, module: Any = os) -> None:
        real = getattr(module, name)

        def spy(path: Any = ".", *rest: Any, **more: Any) -> Any:
            if isinstance(path, (str, os.PathLike)):
                touched.add(os.path.abspath(path))
            return real(path, *rest, **more)

        monkeypatch.setattr(module, name, spy)

    for name in ("stat", "lstat", "scandir", "listdir", "open", "readlink"):
        spied(name)
    spied("open", io)
    preflight(**pair)
    roots = [str(pair["hf_checkpoint"]), *(str(pair["ref_load"] / one) for one in ("release", "hf"))]
    root = str(pair["ref_load"])
    inside = str(pair["hf_checkpoint"].parent)
    seen = {path for path in touched if path.startswith(inside + os.sep)}
    assert len(seen) > 20
    outside = {path for path in seen if not any(path == one or path.startswith(one + os.sep) for one in roots)}
    assert {path for path in outside if path != root and os.path.dirname(path) != root} == set()
    program = (sys.prefix, sys.base_prefix, str(Path(kept.__file__).parents[2]), "/proc/")
    elsewhere = {path for path in touched - seen if not path.startswith(program)}
    assert elsewhere <= {inside, *map(str, Path(inside).parents)}
