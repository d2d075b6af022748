"""convert, quantize and inspect with URLs, against a real S3 server and a hub: the same bytes as on a disk."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support import models
from support.fake_hub import fake_hub
from support.processes import ckptkit
from support.remote_servers import Bucket

from ckptkit.app.api import convert, inspect, model_arguments, quantize
from ckptkit.app.cli import conversion
from ckptkit.core.errors import CkptkitError
from ckptkit.transfer.journal import Journal
from ckptkit.transfer.upload import Upload
from quant.schemes.w4a16 import int4_scheme

MANIFEST = "ckptkit.json"


@pytest.fixture(scope="module")
def megatron(small_release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What it is converted to on this machine. Read only."""
    root = tmp_path_factory.mktemp("megatron") / "qwen-megatron"
    convert(small_release, root)
    return root


def content(root: Path) -> dict[str, Any]:
    """The files of a directory; of a manifest, what does not name a path, and of an index, where tensors are."""
    return {
        str(path.relative_to(root)): _bare(path.name, path.read_bytes()) for path in root.rglob("*") if path.is_file()
    }


def shards(root: Path) -> dict[str, bytes]:
    """The weights of an HF directory."""
    return {path.name: path.read_bytes() for path in root.glob("*.safetensors")}


def uploaded(bucket: Bucket, prefix: str) -> dict[str, Any]:
    """The same of a directory of the bucket."""
    return {key.removeprefix(prefix): _bare(key, bucket.get(key)) for key in bucket.listed() if key.startswith(prefix)}


def _bare(name: str, file: bytes) -> Any:
    if name.endswith(MANIFEST):
        return {key: value for key, value in json.loads(file).items() if key not in ("command", "source_fingerprint")}
    return json.loads(file)["weight_map"] if name.endswith(".index.json") else file


def test_from_s3_to_megatron_and_back_to_s3(
    small_release: Path, megatron: Path, stored: str, bucket: Bucket, tmp_path: Path
) -> None:
    convert(stored, tmp_path / "qwen-megatron")
    assert content(tmp_path / "qwen-megatron") == content(megatron)
    assert json.loads((tmp_path / "qwen-megatron" / MANIFEST).read_text())["command"] == ["ckptkit", "convert", stored]
    back = ckptkit("convert", tmp_path / "qwen-megatron", bucket.url("back"), "--json")
    assert back.returncode == 0, back.stderr
    assert json.loads(back.stdout)["destination"] == bucket.url("back")
    found = uploaded(bucket, "back/")
    assert set(found.pop(MANIFEST)["tensors"]) == set(models.tensors(small_release))
    assert found == content(small_release)


def test_int4_from_s3_to_s3(small_release: Path, stored: str, bucket: Bucket, tmp_path: Path) -> None:
    quantize(small_release, tmp_path / "int4", int4_scheme(group_size=32))
    written = quantize(stored, bucket.url("int4"), int4_scheme(group_size=32))
    assert (written.source, written.destination) == (stored, bucket.url("int4"))
    assert uploaded(bucket, "int4/") == content(tmp_path / "int4")
    # It is the reference of another one, and says which groups that has.
    like = quantize(small_release, tmp_path / "like", int4_scheme(bucket.url("int4")), like=bucket.url("int4"))
    assert like.tensors == written.tensors
    assert shards(tmp_path / "like") == shards(tmp_path / "int4")


def test_the_release_on_the_way_back_may_be_at_a_url(
    small_release: Path, megatron: Path, stored: str, tmp_path: Path
) -> None:
    written = convert(megatron, tmp_path / "back", hf=stored)
    assert written.source == stored
    assert {name: file for name, file in content(tmp_path / "back").items() if name != MANIFEST} == content(
        small_release
    )
    assert "--hf " + stored in " ".join(json.loads((tmp_path / "back" / MANIFEST).read_text())["command"])


def test_convert_from_the_hub_writes_the_same_bytes(small_release: Path, megatron: Path, tmp_path: Path) -> None:
    asked: list[str] = []
    with fake_hub("org/qwen", small_release, asked) as address:
        done = ckptkit("convert", "hf://org/qwen", tmp_path / "out", HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
        absent = ckptkit("convert", "hf://org/absent", tmp_path / "absent", HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "out") == content(megatron)
    assert "GET /org/qwen/resolve/main/config.json" in asked
    assert absent.returncode == 2
    assert absent.stderr.startswith("error: hf://org/absent: ")
    assert "set HF_TOKEN, or run `hf auth login`" in absent.stderr


def test_inspect_says_of_a_url_what_it_says_of_a_directory(small_release: Path, stored: str) -> None:
    assert inspect(stored) == inspect(small_release) | {"path": stored}
    assert model_arguments(stored) == model_arguments(small_release)


def test_a_path_is_a_path_with_file_in_front(small_release: Path, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="overlaps"):
        quantize(f"file://{small_release}", small_release, int4_scheme(), overwrite=True)
    assert convert(f"file://{small_release}", f"file://{tmp_path}/out", dry_run=True).destination == str(
        tmp_path / "out"
    )


def test_of_the_shards_only_those_being_written_are_here(
    small_release: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here: list[list[str]] = []
    put = Upload.put

    def noting(self: Upload, file: Path, name: str) -> None:
        here.append(sorted(path.name for path in file.parent.glob("*.safetensors")))
        put(self, file, name)

    monkeypatch.setattr(Upload, "put", noting)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    quantize(small_release, bucket.url("out"), int4_scheme(group_size=32), workers=1)
    assert [found for found in here if found] == [[name] for name in sorted(shards(small_release))]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_writes_nothing(stored: str, bucket: Bucket, tmp_path: Path) -> None:
    before = bucket.listed()
    assert quantize(stored, bucket.url("out"), int4_scheme(group_size=32), dry_run=True).layout
    assert bucket.listed() == before


class PowerCutError(Exception):
    """Ends a run."""


@pytest.fixture
def cut_off(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a run from the URL to this machine was cut off when its first file was whole."""
    record = Journal.record

    def first(self: Journal, file: str, *whole: Any) -> None:
        if self.count():
            raise PowerCutError
        record(self, file, *whole)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "record", first)
        with pytest.raises(PowerCutError):
            quantize(stored, tmp_path / "out", int4_scheme(group_size=32), workers=1)
    return tmp_path / "out"


def test_a_run_from_a_url_goes_on(cut_off: Path, small_release: Path, stored: str, tmp_path: Path) -> None:
    kept = tmp_path / "out.partial/model-00001-of-00003.safetensors"
    made = kept.stat().st_ino
    quantize(stored, cut_off, int4_scheme(group_size=32), resume=True)
    assert (cut_off / kept.name).stat().st_ino == made
    quantize(small_release, tmp_path / "whole", int4_scheme(group_size=32))
    assert content(cut_off) == content(tmp_path / "whole")


def test_a_run_from_a_url_that_was_written_since_does_not_go_on(cut_off: Path, stored: str, bucket: Bucket) -> None:
    bucket.put("models/qwen/tokenizer_config.json", b"{}")
    with pytest.raises(CkptkitError, match="cannot be resumed: files of its source were"):
        quantize(stored, cut_off, int4_scheme(group_size=32), resume=True)


def test_the_command_line_leaves_urls_as_they_are() -> None:
    words = ["s3://a//b/", "gs://c", "--hf", "hf://d/e", "--quantize", "w4a16", "--like", "file:///f"]
    command = conversion.convert.make_context("convert", words)
    assert [command.params[name] for name in ("src", "dst", "hf", "like")] == [
        "s3://a//b/",
        "gs://c",
        "hf://d/e",
        Path("/f"),
    ]
