"""HF directories written to a real S3 server: no reader takes them for a checkpoint before they are one."""

import json
from pathlib import Path
from urllib.parse import unquote

import fsspec
import pytest
from support.messages import refusal, text_with
from support.remote_servers import breaking, serving, use_s3
from support.whole_files import whole

from ckptkit.storage import url as store
from ckptkit.transfer.upload import Upload, check_upload

FILES = {
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}).encode(),
    "config.json": whole("config.json"),
    "1.safetensors": whole("1.safetensors"),
    "2.safetensors": whole("2.safetensors"),
    "additional_chat_templates/chat.jinja": b"{{ x }}",
}
PARTIAL = "out/.ckptkit-partial"


@pytest.fixture
def local(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def keys(*names):
    return sorted(f"out/{name}" for name in names)


def test_config_and_index_come_last_and_the_mark_goes(local, bucket, s3_address, monkeypatch):
    seen = []
    with serving(breaking(s3_address, seen)) as proxy, use_s3(monkeypatch, proxy):
        upload = Upload(bucket.url("out/"))
        assert bucket.listed() == [PARTIAL]
        for name in FILES:
            upload.put(local / name, name)
            (local / name).unlink()
        others = ["1.safetensors", "2.safetensors", "additional_chat_templates/chat.jinja"]
        assert bucket.listed() == keys(".ckptkit-partial", *others)
        upload.finish()
    put = [unquote(one.path).partition("?")[0].partition("/out/")[2] for one in seen if one.method == "PUT"]
    assert put == [".ckptkit-partial", *others, "config.json", "model.safetensors.index.json"]
    assert bucket.listed() == keys(*FILES)
    assert {name: bucket.get(f"out/{name}") for name in FILES} == FILES


def test_a_large_file_goes_in_parts(local, bucket, monkeypatch):
    monkeypatch.setattr(store, "_UPLOAD_PART", 5 << 20)  # the smallest that S3 takes
    content = bytes(range(256)) * (11 << 12)
    (local / "1.safetensors").write_bytes(content)
    Upload(bucket.url("out")).put(local / "1.safetensors", "1.safetensors")
    assert bucket.get("out/1.safetensors") == content
    tag = bucket.client.head_object(Bucket=bucket.name, Key="out/1.safetensors")["ETag"]
    assert tag.strip('"').endswith("-3")


def test_a_store_that_takes_no_lists(local, monkeypatch):
    memory = fsspec.filesystem("memory")
    # As huggingface_hub's does.
    monkeypatch.setattr(type(memory), "rm", lambda self, path: self.rm_file(path.removeprefix("/")))
    upload = Upload("memory://up/out")
    for name in FILES:
        upload.put(local / name, name)
    upload.finish()
    assert sorted(memory.find("/up/out")) == sorted(f"/up/out/{name}" for name in FILES)
    again = Upload("memory://up/out", overwrite=True)
    again.put(local / "1.safetensors", "1.safetensors")
    again.discard()
    assert memory.find("/up/out") == []


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (("thesis.tex",), "checkpoint.*: thesis.tex"),
        (("thesis.tex", "config.json", "model.safetensors"), "checkpoint.*: thesis.tex"),
        (("config.json", "README.md"), "no weights"),
        (("model.safetensors",), "not a checkpoint.*model_type"),
        (("config.json", "model.safetensors", "model-00002-of-00002.safetensors/junk"), "model-00002-of.*/junk"),
        (("release/.metadata", "release/__0_0.distcp"), "not a checkpoint.*: release/.metadata is not safetensors"),
    ],
)
def test_what_is_no_checkpoint_is_never_replaced(bucket, files, why):
    for name in files:
        bucket.put(f"out/{name}", whole(name.rpartition("/")[2]))
    refusal(why, Upload, bucket.url("out"), overwrite=True)
    assert bucket.listed() == sorted(f"out/{name}" for name in files)


@pytest.mark.parametrize("content", [b"", b"x" * 64, (2).to_bytes(8, "little") + b"{}"])
def test_weights_without_a_header_are_never_replaced(bucket, content):
    bucket.put("out/config.json", whole("config.json"))
    bucket.put("out/model.safetensors", content)
    refusal("checkpoint.*: model.safetensors", Upload, bucket.url("out"), overwrite=True)
    assert bucket.get("out/model.safetensors") == content


def test_an_upload_that_died_says_so_and_can_be_replaced(local, bucket):
    Upload(bucket.url("out")).put(local / "1.safetensors", "1.safetensors")
    refusal("upload", Upload, bucket.url("out"))
    again = Upload(bucket.url("out"), overwrite=True)
    for name in ("config.json", "2.safetensors"):
        again.put(local / name, name)
        assert PARTIAL in bucket.listed()
    again.finish()
    assert bucket.listed() == keys("config.json", "2.safetensors")


def test_replacing_begins_with_the_index_and_leaves_nothing_old(local, bucket, monkeypatch):
    index = json.dumps({"weight_map": {"a": "1.safetensors", "b": "9.safetensors"}}).encode()
    settings, weights = ["config.json", "model.safetensors.index.json"], ["1.safetensors", "9.safetensors"]
    for name in (*settings, *weights, "ckptkit.json"):
        bucket.put(f"out/{name}", index if "index" in name else whole(name))
    before = bucket.listed()
    Upload(bucket.url("out"), overwrite=True).discard()  # before the first file the old checkpoint is left
    assert bucket.listed() == before
    upload = Upload(bucket.url("out"), overwrite=True)
    assert bucket.get("out/model.safetensors.index.json") == index
    removed = []
    remove = store.Store.remove
    monkeypatch.setattr(
        store.Store, "remove", lambda self, names: (removed.append(sorted(names)), remove(self, names))[1]
    )
    upload.put(local / "1.safetensors", "1.safetensors")
    assert removed == [settings, [*weights, "ckptkit.json"]]
    assert bucket.listed() == keys(".ckptkit-partial", "1.safetensors")
    upload.put(local / "config.json", "config.json")
    upload.finish()
    expected = {f"out/{name}": FILES[name] for name in ("1.safetensors", "config.json")}
    assert {key: bucket.get(key) for key in bucket.listed()} == expected


def test_a_destination_around_or_in_the_source_is_refused(bucket):
    sources = [bucket.url(source) for source in ("out", "out/", "out/inside", "")]
    for source in (*sources, f"s3a://{bucket.name}/out", f"s3://{bucket.name}/out//"):
        refusal("overlaps", check_upload, bucket.url("out"), True, [None, Path("out"), source])
    assert check_upload(bucket.url("out"), True, [bucket.url("out2"), Path("out")]) == []


def test_discard_leaves_nothing_or_says_what_may_be_left(local, bucket):
    bucket.put("beside/config.json", b"x")
    upload = Upload(bucket.url("out"))
    for name in FILES:
        upload.put(local / name, name)
    assert upload.discard() == text_with("behind")
    assert bucket.listed() == ["beside/config.json"]
    upload = Upload(bucket.url("out"))
    upload.put(local / "1.safetensors", "1.safetensors")
    refusal(r"config\.json was not", upload.finish)
    for key in bucket.listed():
        bucket.delete(key)
    bucket.client.delete_bucket(Bucket=bucket.name)
    assert upload.discard() == text_with(f"{bucket.url('out')} --overwrite")


def test_an_object_of_another_size_is_noticed(local, bucket, monkeypatch):
    upload = Upload(bucket.url("out"))
    filesystem, _ = store.Store(bucket.url("out"))._opened
    monkeypatch.setattr(filesystem, "put_file", lambda file, path, **options: filesystem.pipe_file(path, b"t"))
    size = len(FILES["1.safetensors"])
    refusal(rf"out/1\.safetensors.*1.*{size}", upload.put, local / "1.safetensors", "1.safetensors")
