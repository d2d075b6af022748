"""HF directories at URLs, against a real S3 server and a hub: the same tensors and bytes as on a disk."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import models, processes
from support.fake_hub import fake_hub
from support.messages import refusal
from support.remote_servers import breaking, serving, use_s3
from support.whole_files import write

import ckptkit
from ckptkit.app.api import convert, inspect, model_arguments, quantize
from ckptkit.app.cli import conversion
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import locate
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.hf.remote import check_unchanged, open_directory
from ckptkit.formats.hf.shard import read_shard
from ckptkit.formats.hf.side_files import side_files
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.storage import url as store
from ckptkit.transfer.journal import Journal
from ckptkit.transfer.upload import Upload

BIG = torch.arange(30_000, dtype=torch.int32).reshape(100, 300)
SMALL = torch.tensor([1.5, -2.0]).to(torch.bfloat16)


@pytest.fixture
def two(tmp_path):
    root = tmp_path / "two"
    places = {"big": "1.safetensors", "small": "1.safetensors", "other": "2.safetensors"}
    write(root / "config.json", '{"model_type": "x"}')
    write(root / "extra/tokenizer.json", "{}")
    write(root / "model.safetensors.index.json", json.dumps({"weight_map": places}))
    save_file({"big": BIG, "small": SMALL}, root / "1.safetensors")
    save_file({"other": SMALL + 1}, root / "2.safetensors")
    return root


def test_tensors_config_and_side_files_are_those_of_the_release(releases, bucket):
    source = releases("qwen2-tied")
    bucket.put_directory(source, "models/qwen")
    with open_directory(bucket.url("models/qwen")) as here:
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


def test_open_reads_a_url_after_its_headers_are_gone(releases, bucket):
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


@pytest.mark.parametrize("part", [1000, 70_000])
def test_a_tensor_is_read_in_parts(two, bucket, monkeypatch, part):
    bucket.put_directory(two, "two")
    monkeypatch.setattr(store, "_PART", part)
    with open_directory(bucket.url("two/")) as here:
        assert torch.equal(HfCheckpoint(here).read(["big"])["big"], BIG)


def test_opening_reads_headers_and_reading_reads_one_tensor(two, bucket, s3_address, monkeypatch):
    bucket.put_directory(two, "two")
    seen = []
    with (
        serving(breaking(s3_address, seen)) as proxy,
        use_s3(monkeypatch, proxy),
        open_directory(bucket.url("two")) as here,
    ):
        checkpoint = HfCheckpoint(here)
        shards = [one for one in seen if one.method == "GET" and one.path.partition("?")[0].endswith(".safetensors")]
        headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in two.glob("*.safetensors"))
        assert sum(request.bytes for request in shards) == headers
        seen.clear()
        assert torch.equal(checkpoint.read(["small"])["small"], SMALL)
        assert [(request.method, request.bytes) for request in seen] == [("GET", 4)]


def test_a_transfer_that_breaks_off_is_tried_again(two, bucket, s3_address, monkeypatch):
    bucket.put_directory(two, "two")
    seen = []

    def tries():
        return [one.bytes for one in seen].count(BIG.nbytes)

    once = breaking(s3_address, seen, lambda request: request.bytes == BIG.nbytes and tries() == 1)
    with serving(once) as proxy, use_s3(monkeypatch, proxy), open_directory(bucket.url("two")) as here:
        assert torch.equal(HfCheckpoint(here).read(["big"])["big"], BIG)
    assert tries() == 2


def test_a_shard_that_became_shorter_is_named_with_the_tensor(two, bucket):
    bucket.put_directory(two, "two")
    with open_directory(bucket.url("two")) as here:
        checkpoint = HfCheckpoint(here)
        bucket.put("two/1.safetensors", (two / "1.safetensors").read_bytes()[:-3])
        error = refusal(r"/two/1\.safetensors: small ends before its 4 bytes", checkpoint.read, ["big", "small"])
    assert error.message.startswith(bucket.url("two"))


@pytest.mark.parametrize("key", ["two/1.safetensors", "two/config.json", "two/new.json", None])
def test_what_was_written_meanwhile_is_noticed(two, bucket, key):
    bucket.put_directory(two, "two")
    with open_directory(bucket.url("two")) as here:
        check_unchanged(here)
        if key:
            bucket.put(key, b"x" * 100)
        else:
            bucket.delete("two/2.safetensors")
        refusal(f"{(key or 'two/2.safetensors').removeprefix('two/')}", check_unchanged, here)


def test_hidden_files_and_weights_in_other_formats_stay_there(two, bucket):
    bucket.put_directory(two, "two")
    left = {".git/config", "original/consolidated.00.pth", "folder/"}
    brought = {"pytorch_model.bin", "ckptkit.json", "original/params.json"}
    for key in left | brought:
        bucket.put(f"two/{key}", b"{}")
    with open_directory(bucket.url("two")) as here:
        found = {str(path.relative_to(here.path)) for path in here.path.rglob("*") if path.is_file()}
        assert (here.path / "pytorch_model.bin").stat().st_size == 0
        assert here.size("1.safetensors") == (two / "1.safetensors").stat().st_size
        with pytest.raises(CkptkitError, match="truncated"):  # of a shard its header is there
            read_shard(here.path / "1.safetensors")
    assert found == brought | {str(path.relative_to(two)) for path in two.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("file", "damaged", "message"),
    [
        ("1.safetensors", bytes(4), "header"),
        ("1.safetensors", (10**12).to_bytes(8, "little") + b"{}", "header"),
        ("1.safetensors", None, "No such file or directory"),
        ("config.json", b"{", "not valid JSON"),
    ],
)
def test_a_damaged_file_is_refused_as_on_disk(two, bucket, file, damaged, message):
    bucket.put_directory(two, "two")
    bucket.delete(f"two/{file}") if damaged is None else bucket.put(f"two/{file}", damaged)
    with pytest.raises(CkptkitError, match=message) as error, open_directory(bucket.url("two")) as here:
        HfCheckpoint(here)
    assert error.value.message.startswith(f"{bucket.url('two')}/{file}")
    assert not here.path.exists()


def test_a_key_that_is_no_file_name_is_refused(two, bucket):
    for number, key in enumerate(("../escaped.json", "/twice.json", "./same.json")):
        bucket.put_directory(two, f"{number}")
        bucket.put(f"{number}/{key}", b"{}")
        with pytest.raises(CkptkitError, match="directory"), open_directory(bucket.url(f"{number}")):
            pass


def test_a_single_file_needs_no_index(two, bucket):
    bucket.put("one/model.safetensors", (two / "1.safetensors").read_bytes())
    bucket.put("one/config.json", b"{}")
    with open_directory(bucket.url("one")) as here:
        assert torch.equal(HfCheckpoint(here).read(["big"])["big"], BIG)


MANIFEST = "ckptkit.json"


@pytest.fixture(scope="module")
def megatron(small_release, tmp_path_factory):
    root = tmp_path_factory.mktemp("megatron") / "qwen-megatron"
    convert(small_release, root)
    return root


def content(root):
    """The files of a directory; of a manifest, what does not name a path, and of an index, where tensors are."""
    return {name: _bare(name, data) for name, data in models.content(root).items()}


def uploaded(bucket, prefix):
    return {key.removeprefix(prefix): _bare(key, bucket.get(key)) for key in bucket.listed() if key.startswith(prefix)}


def _bare(name, file):
    if name.endswith(MANIFEST):
        return {key: value for key, value in json.loads(file).items() if key not in ("command", "source_fingerprint")}
    return json.loads(file)["weight_map"] if name.endswith(".index.json") else file


def test_from_s3_to_megatron_and_back_to_s3(small_release, megatron, stored, bucket, tmp_path):
    out = tmp_path / "qwen-megatron"
    convert(stored, out)
    assert content(out) == content(megatron)
    assert json.loads((out / MANIFEST).read_text())["command"] == ["ckptkit", "convert", stored]
    back = processes.ckptkit("convert", out, bucket.url("back"), "--json")
    assert back.returncode == 0, back.stderr
    assert json.loads(back.stdout)["destination"] == bucket.url("back")
    found = uploaded(bucket, "back/")
    assert set(found.pop(MANIFEST)["tensors"]) == set(models.tensors(small_release))
    assert found == content(small_release)


def test_int4_from_s3_to_s3(small_release, stored, bucket, tmp_path):
    quantize(small_release, tmp_path / "int4", int4_scheme(group_size=32))
    written = quantize(stored, bucket.url("int4"), int4_scheme(group_size=32))
    assert (written.source, written.destination) == (stored, bucket.url("int4"))
    assert uploaded(bucket, "int4/") == content(tmp_path / "int4")
    # It is the reference of another one, and says which groups that has.
    like = quantize(small_release, tmp_path / "like", int4_scheme(bucket.url("int4")), like=bucket.url("int4"))
    assert like.tensors == written.tensors
    for file in (tmp_path / "like").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "int4" / file.name).read_bytes()


def test_the_release_on_the_way_back_may_be_at_a_url(small_release, megatron, stored, tmp_path):
    assert convert(megatron, tmp_path / "back", hf=stored).source == stored
    found = content(tmp_path / "back")
    del found[MANIFEST]
    assert found == content(small_release)
    assert "--hf " + stored in " ".join(json.loads((tmp_path / "back" / MANIFEST).read_text())["command"])


def test_convert_from_the_hub_writes_the_same_bytes(small_release, megatron, tmp_path):
    asked = []
    with fake_hub("org/qwen", small_release, asked) as address:
        hub = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        done = processes.ckptkit("convert", "hf://org/qwen", tmp_path / "out", **hub)
        absent = processes.ckptkit("inspect", "hf://org/absent", **hub)
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "out") == content(megatron)
    assert "GET /org/qwen/resolve/main/config.json" in asked
    assert absent.returncode == 2
    assert absent.stderr.startswith("error: hf://org/absent: ")
    assert "set HF_TOKEN, or run `hf auth login`" in absent.stderr


def test_inspect_says_of_a_url_what_it_says_of_a_directory(small_release, stored, bucket):
    assert inspect(stored) == inspect(small_release) | {"path": stored}
    assert model_arguments(stored) == model_arguments(small_release)
    before = bucket.listed()
    assert quantize(stored, bucket.url("out"), int4_scheme(group_size=32), dry_run=True).layout
    assert bucket.listed() == before


def test_a_path_is_a_path_with_file_in_front(small_release, tmp_path):
    refusal("overlaps", quantize, f"file://{small_release}", small_release, int4_scheme(), overwrite=True)
    assert convert(f"file://{small_release}", f"file://{tmp_path}/out", dry_run=True).destination == str(
        tmp_path / "out"
    )


def test_of_the_shards_only_those_being_written_are_here(small_release, bucket, tmp_path, monkeypatch):
    here = []
    put = Upload.put

    def noting(self, file, name):
        here.append(sorted(path.name for path in file.parent.glob("*.safetensors")))
        put(self, file, name)

    monkeypatch.setattr(Upload, "put", noting)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    quantize(small_release, bucket.url("out"), int4_scheme(group_size=32), workers=1)
    shards = sorted(path.name for path in small_release.glob("*.safetensors"))
    assert [found for found in here if found] == [[name] for name in shards]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def cut_off(stored, tmp_path, monkeypatch):
    """Where a run from the URL to this machine was cut off when its first file was whole."""
    record = Journal.record

    def first(self, file, *whole):
        if self.count():
            raise ZeroDivisionError
        record(self, file, *whole)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "record", first)
        with pytest.raises(ZeroDivisionError):
            quantize(stored, tmp_path / "out", int4_scheme(group_size=32), workers=1)
    return tmp_path / "out"


def test_a_run_from_a_url_goes_on(cut_off, small_release, stored, tmp_path):
    kept = tmp_path / "out.partial/model-00001-of-00003.safetensors"
    made = kept.stat().st_ino
    quantize(stored, cut_off, int4_scheme(group_size=32), resume=True)
    assert (cut_off / kept.name).stat().st_ino == made
    quantize(small_release, tmp_path / "whole", int4_scheme(group_size=32))
    assert content(cut_off) == content(tmp_path / "whole")


def test_a_run_from_a_url_that_was_written_since_does_not_go_on(cut_off, stored, bucket):
    bucket.put("models/qwen/tokenizer_config.json", b"{}")
    refusal("resumed", quantize, stored, cut_off, int4_scheme(group_size=32), resume=True)


def test_the_command_line_leaves_urls_as_they_are():
    words = ["s3://a//b/", "gs://c", "--hf", "hf://d/e", "--quantize", "w4a16", "--like", "file:///f"]
    found = conversion.convert.make_context("convert", words).params
    assert [found[name] for name in ("src", "dst", "hf", "like")] == ["s3://a//b/", "gs://c", "hf://d/e", Path("/f")]
