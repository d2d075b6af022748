"""HF directories read from a real S3 server: the same tensors and files as from the disk, by reading parts of files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fixture_types import PathOf
from support.remote_servers import Bucket, Request, breaking, serving, use_s3

import ckptkit
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import locate
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.hf.remote import check_unchanged, opened
from ckptkit.formats.hf.shard import read_shard
from ckptkit.formats.hf.side_files import side_files
from ckptkit.storage import url as store
from ckptkit.storage.directory import Directory

BIG = torch.arange(30_000, dtype=torch.int32).reshape(100, 300)
SMALL = torch.tensor([1.5, -2.0]).to(torch.bfloat16)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """An HF directory of two shards and a tokenizer in a folder."""
    root = tmp_path / "two"
    (root / "extra").mkdir(parents=True)
    save_file({"big": BIG, "small": SMALL}, root / "1.safetensors")
    save_file({"other": SMALL + 1}, root / "2.safetensors")
    (root / "config.json").write_text('{"model_type": "x"}')
    (root / "extra/tokenizer.json").write_text("{}")
    (root / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"big": "1.safetensors", "small": "1.safetensors", "other": "2.safetensors"}})
    )
    return root


def test_tensors_config_and_side_files_are_those_of_the_release(releases: PathOf, bucket: Bucket) -> None:
    source = releases("qwen2-tied")
    bucket.put_directory(source, "models/qwen")
    with opened(bucket.url("models/qwen")) as here:
        assert here.path.name == "qwen"
        assert str(here) == bucket.url("models/qwen")
        assert locate(here).kind == "hf"
        checkpoint = HfCheckpoint(here)
        assert checkpoint.config == json.loads((source / "config.json").read_text())
        expected = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
        assert set(checkpoint.specs) == set(expected)
        assert all(torch.equal(checkpoint.read([name])[name], tensor) for name, tensor in expected.items())
        assert list(side_files(here.path)) == list(side_files(source))
        assert all((here.path / path).read_bytes() == (source / path).read_bytes() for path in side_files(source))
    assert not here.path.exists()


def test_open_reads_a_url_after_its_headers_are_gone(releases: PathOf, bucket: Bucket) -> None:
    source = releases("qwen2-tied")
    bucket.put_directory(source, "models/qwen")
    local, remote = ckptkit.open(source), ckptkit.open(bucket.url("models/qwen"))
    assert (remote.path, remote.config) == (bucket.url("models/qwen"), local.config)
    for name, tensor in remote.layer(3).items():
        truth = load_file(local[name].files[0])[name]
        assert torch.equal(tensor.read(), truth)
        assert torch.equal(tensor[1:3], truth[1:3])
        assert tensor.files == [bucket.url(f"models/qwen/{Path(local[name].files[0]).name}")]
    merged = "decoder.layers.3.mlp.linear_fc1.weight"
    assert torch.equal(remote.as_megatron()[merged].read(), local.as_megatron()[merged].read())


def test_a_path_of_this_machine_is_left_as_it_is(two: Path) -> None:
    with opened(two) as here:
        assert here == Directory(two)
        check_unchanged(here)
    assert two.exists()


@pytest.mark.parametrize("part", [1000, 1024, 70_000])
def test_a_tensor_is_read_in_parts(two: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    bucket.put_directory(two, "two")
    monkeypatch.setattr(store, "_PART", part)
    with opened(bucket.url("two/")) as here:
        assert torch.equal(HfCheckpoint(here).read(["big"])["big"], BIG)


def test_opening_reads_headers_and_reading_reads_one_tensor(
    two: Path, bucket: Bucket, s3_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put_directory(two, "two")
    seen: list[Request] = []
    with serving(breaking(s3_address, seen)) as proxy, use_s3(monkeypatch, proxy), opened(bucket.url("two")) as here:
        checkpoint = HfCheckpoint(here)
        shards = [
            request
            for request in seen
            if request.method == "GET" and ".safetensors" in request.path and "index" not in request.path
        ]
        headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in two.glob("*.safetensors"))
        assert sum(request.bytes for request in shards) == headers
        seen.clear()
        assert torch.equal(checkpoint.read(["small"])["small"], SMALL)
        assert [(request.method, request.bytes) for request in seen] == [("GET", 4)]


def test_a_transfer_that_breaks_off_is_tried_again(
    two: Path, bucket: Bucket, s3_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put_directory(two, "two")
    seen: list[Request] = []

    def first_of_big(request: Request) -> bool:
        return request.bytes == BIG.nbytes and [one.bytes for one in seen].count(BIG.nbytes) == 1

    with (
        serving(breaking(s3_address, seen, first_of_big)) as proxy,
        use_s3(monkeypatch, proxy),
        opened(bucket.url("two")) as here,
    ):
        assert torch.equal(HfCheckpoint(here).read(["big"])["big"], BIG)
    assert [request.bytes for request in seen].count(BIG.nbytes) == 2


def test_a_shard_that_became_shorter_is_named_with_the_tensor(two: Path, bucket: Bucket) -> None:
    bucket.put_directory(two, "two")
    with opened(bucket.url("two")) as here:
        checkpoint = HfCheckpoint(here)
        bucket.put("two/1.safetensors", (two / "1.safetensors").read_bytes()[:-3])
        with pytest.raises(CkptkitError, match=r"/two/1\.safetensors: small ends before its 4 bytes") as error:
            checkpoint.read(["big", "small"])
    assert error.value.message.startswith(bucket.url("two"))


@pytest.mark.parametrize("key", ["two/1.safetensors", "two/config.json", "two/new.json", None])
def test_what_was_written_meanwhile_is_noticed(two: Path, bucket: Bucket, key: str | None) -> None:
    bucket.put_directory(two, "two")
    with opened(bucket.url("two")) as here:
        check_unchanged(here)
        if key:
            bucket.put(key, b"x" * 100)
        else:
            bucket.delete("two/2.safetensors")
        with pytest.raises(
            CkptkitError, match=f"changed while it was read: {(key or 'two/2.safetensors').removeprefix('two/')}\n"
        ):
            check_unchanged(here)


def test_headers_brought_here_are_never_taken_for_weights(two: Path, bucket: Bucket) -> None:
    bucket.put_directory(two, "two")
    with opened(bucket.url("two")) as here:
        size = (two / "1.safetensors").stat().st_size
        assert here.size("1.safetensors") == Directory(two).size("1.safetensors") == size
        assert (here.path / "1.safetensors").stat().st_size < size
        with pytest.raises(CkptkitError, match="the file is truncated"):
            read_shard(here.path / "1.safetensors")


def test_hidden_files_and_weights_in_other_formats_stay_there(two: Path, bucket: Bucket) -> None:
    bucket.put_directory(two, "two")
    for key in (
        ".git/config",
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "folder/",
        "ckptkit.json",
        "original/params.json",
    ):
        bucket.put(f"two/{key}", b"{}")
    with opened(bucket.url("two")) as here:
        found = {
            str(path.relative_to(here.path)): path.stat().st_size for path in here.path.rglob("*") if path.is_file()
        }
    assert sorted(found) == [
        "1.safetensors",
        "2.safetensors",
        "ckptkit.json",
        "config.json",
        "extra/tokenizer.json",
        "model.safetensors.index.json",
        "original/params.json",
        "pytorch_model.bin",
    ]
    assert found["pytorch_model.bin"] == 0


def test_errors_name_the_url(two: Path, bucket: Bucket) -> None:
    bucket.put_directory(two, "two")
    bucket.put("two/config.json", b"{")
    with pytest.raises(CkptkitError) as error, opened(bucket.url("two")) as here:
        HfCheckpoint(here)
    assert error.value.message.startswith(f"{bucket.url('two')}/config.json is not valid JSON")
    assert not here.path.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1], "the file is truncated"),
        (lambda content: content[:4], "too few for a header of"),
        (lambda content: (10**12).to_bytes(8, "little") + content[8:], "too few for a header of"),
        (None, "No such file or directory"),
    ],
)
def test_a_damaged_shard_is_refused_as_on_disk(
    two: Path, bucket: Bucket, change: Callable[[bytes], bytes] | None, message: str
) -> None:
    bucket.put_directory(two, "two")
    if change:
        bucket.put("two/1.safetensors", change((two / "1.safetensors").read_bytes()))
    else:
        bucket.delete("two/1.safetensors")
    with pytest.raises(CkptkitError, match=message) as error, opened(bucket.url("two")) as here:
        HfCheckpoint(here)
    assert error.value.message.startswith(f"{bucket.url('two')}/1.safetensors")


@pytest.mark.parametrize("key", ["two/../escaped.json", "two//twice.json", "two/./same.json"])
def test_a_key_that_is_no_file_name_is_refused(two: Path, bucket: Bucket, key: str) -> None:
    bucket.put_directory(two, "two")
    bucket.put(key, b"{}")
    with pytest.raises(CkptkitError, match="is not a file of this directory"), opened(bucket.url("two")):
        pass


def test_a_single_file_needs_no_index(two: Path, bucket: Bucket) -> None:
    bucket.put("one/model.safetensors", (two / "1.safetensors").read_bytes())
    bucket.put("one/config.json", b"{}")
    with opened(bucket.url("one")) as here:
        assert torch.equal(HfCheckpoint(here).read(["big"])["big"], BIG)
