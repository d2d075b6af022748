"""Every way in which a URL cannot be read or written: one error each with the next move, and nothing half written."""

import errno
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.messages import text_with
from support.remote_servers import KEYS, breaking, free_port, refusing, serving, use_s3
from support.whole_files import whole

from ckptkit.app.api import convert, make_manifest, quantize
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import locate
from ckptkit.formats.hf import remote
from ckptkit.formats.hf.remote import open_directory
from ckptkit.quant.ignore.lint import lint
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.storage.url import Store
from ckptkit.transfer import files
from ckptkit.transfer.upload import Upload
from ckptkit.verify.launch.preflight import preflight


def reading(url):
    """Opens a URL as a source."""
    with open_directory(url):
        pass


def refusal(url, match, *uses):
    """What opening a URL as a source and as a destination (`Upload`) is refused with."""
    for use in uses or (reading, Upload):
        with pytest.raises(CkptkitError, match=match) as error:
            use(url)
    return error.value


def test_missing_bucket_is_refused(bucket):
    error = refusal("s3://not-there/model", "s3://not-there/model: The specified bucket does not exist")
    assert error.hint == "check the URL"


def test_url_that_holds_nothing_is_refused(bucket):
    for prefix in ("nothing/here", ""):
        refusal(bucket.url(prefix), f"{bucket.url(prefix)} is empty", reading)


def test_no_credentials(bucket, monkeypatch):
    for name in KEYS:
        monkeypatch.delenv(name)
    assert "set AWS_ACCESS_KEY_ID" in str(refusal(bucket.url("model"), "Unable to locate credentials").hint)


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId"])
def test_not_permitted(monkeypatch, code):
    with serving(refusing(403, code)) as address, use_s3(monkeypatch, address):
        error = refusal("s3://bucket/model", f"s3://bucket/model: {code}")
    assert "set AWS_ACCESS_KEY_ID" in str(error.hint)


def test_a_destination_that_may_be_read_and_not_written_is_refused_before_the_work(bucket, s3_address, monkeypatch):
    no_put = refusing(403, "AccessDenied", only="PUT", target=s3_address)
    with serving(no_put) as address, use_s3(monkeypatch, address):
        refusal(bucket.url("model"), "AccessDenied", Upload)


def test_nobody_answers(monkeypatch):
    with use_s3(monkeypatch, f"http://127.0.0.1:{free_port()}"):
        error = refusal("s3://bucket/model", "Could not connect to the endpoint URL")
    assert error.hint == text_with("AWS_ENDPOINT_URL")


@pytest.fixture
def google(monkeypatch):
    """Meanwhile gs:// means a server that refuses those without an account, and this machine has no account."""
    from gcsfs import GCSFileSystem
    from google.auth.exceptions import DefaultCredentialsError

    def none(**_):
        raise DefaultCredentialsError("Your default credentials were not found.")

    monkeypatch.setattr("google.auth.default", none)
    ended = threading.Event()
    monkeypatch.setattr("gcsfs.credentials.GoogleCredentials._connect_cloud", lambda _: ended.wait())
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with serving(refusing(401, "Anonymous caller")) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        GCSFileSystem.clear_instance_cache()
        yield
    ended.set()
    GCSFileSystem.clear_instance_cache()


def test_google_without_an_account_is_an_error_before_its_library_ends(google, monkeypatch, capfd):
    monkeypatch.setattr("ckptkit.storage.url._ANSWER_S", 1)
    error = refusal("gs://b/c", r"gs://b/c: ")
    assert error.code == "storage"
    assert "GOOGLE_APPLICATION_CREDENTIALS" in str(error.hint)
    assert "Traceback" not in capfd.readouterr().err
    # Credentials that cannot be read are not passed over.
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    error = refusal("gs://b/c", "gs://b/c: Your default credentials were not found", reading)
    assert "GOOGLE_APPLICATION_CREDENTIALS" in str(error.hint)


@pytest.mark.parametrize(("url", "module"), [("s3://bucket/model", "s3fs"), ("gs://bucket/model", "gcsfs")])
def test_a_library_that_is_not_installed(monkeypatch, url, module):
    # As another process would find it: fsspec keeps the classes that it has found.
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url.partition(":")[0], raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    assert refusal(url, f"{url}: .*{module}").hint == f"pip install {module}"


def test_a_kind_of_url_that_nothing_reads():
    assert refusal("nosuch://bucket/model", "nosuch://").hint == text_with("s3://, gs://, hf:// az://")


def test_a_store_that_cannot_be_written(monkeypatch):
    def cannot(*arguments, **options):
        raise NotImplementedError

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.ls", cannot)
    assert refusal("memory://x/y", "memory", Upload).hint == text_with("kind")


@pytest.mark.parametrize(
    "key", ["latest_checkpointed_iteration.txt", "iter_0000010/.metadata", "mp_rank_00/model_optim_rng.pt"]
)
def test_megatron_checkpoint_at_a_url_is_refused(bucket, key):
    bucket.put(f"model/{key}", b"x")
    assert refusal(bucket.url("model"), "Megatron.*HF.*directories.*URLs", reading).hint == text_with("disk")


def test_a_directory_without_a_config_is_not_downloaded(bucket):
    bucket.put("everything/film.mkv", b"x")
    refusal(bucket.url("everything"), r"everything .*config\.json.*film\.mkv", reading)


def test_what_takes_only_paths_says_so():
    for path in ("s3://bucket/model", Path("s3://bucket/model"), Path("hf://org/model").absolute()):
        with pytest.raises(CkptkitError, match=r"^(s3://bucket|hf://org)/model is a URL, which") as error:
            locate(path)
        assert "disk" in str(error.value.hint)


CHAIN, UNKNOWN = "chain of URLs", "is not a supported store"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("simplecache::s3://bucket/model", CHAIN),
        ("zip://model::s3://bucket/model.zip", CHAIN),
        ("s3://bucket/a::b", CHAIN),
        ("reference://refs.json", f"reference:// {UNKNOWN}"),
        ("zip:///model.zip", f"zip:// {UNKNOWN}"),
        ("https://example.org/model", f"https:// {UNKNOWN}"),
        ("LOCAL:///etc", f"local:// {UNKNOWN}"),
        ("no-such+thing://model", rf"no-such\+thing:// {UNKNOWN}"),
    ],
)
def test_url_that_is_no_store_is_refused(url, message, small_release, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)  # importing it would raise
    for command in (
        ["inspect", url],
        *([verb, url, str(tmp_path / "out")] for verb in ("convert", "quantize")),
        *([verb, str(small_release), url] for verb in ("convert", "quantize")),
    ):
        with pytest.raises(CkptkitError, match=message):
            CliRunner().invoke(cli, command, standalone_mode=False, catch_exceptions=False)


def test_a_file_of_a_store_that_is_too_large_is_refused_before_it_is_read(monkeypatch):
    store = Store("memory://bounded")
    store.write("config.json", b"x" * 100)
    assert store.read("config.json", 100) == b"x" * 100
    with pytest.raises(CkptkitError, match="config.json has 100.*99"):
        store.read("config.json", 99)
    store.write("tokenizer.json", b"x" * 1000)
    monkeypatch.setattr(remote, "MAX_BYTES", 999)
    refusal(store.url, "tokenizer.json .*1000.*999", reading)


@pytest.mark.parametrize(
    ("there", "about", "note"),
    [
        ((), "model-00002-of-00003.safetensors", "nothing"),
        (("config.json", "model.safetensors"), "index.json", "{} removed"),
    ],
)
def test_an_upload_that_fails_leaves_nothing_and_says_what_is_gone(
    there, about, note, small_release, bucket, s3_address, monkeypatch
):
    for name in there:
        bucket.put(f"out/{name}", whole(name))
    no_put = refusing(403, "AccessDenied", only="PUT", target=s3_address, about=about)
    failed = pytest.raises(CkptkitError, match=rf"{about}: AccessDenied")
    with serving(no_put) as address, use_s3(monkeypatch, address), failed as error:
        quantize(small_release, bucket.url("out"), int4_scheme(group_size=32), overwrite=bool(there))
    assert error.value.__notes__ == [text_with(note.format(bucket.url("out")))]
    assert bucket.listed() == []


def test_no_room_for_the_file_that_goes_up_next(small_release, bucket, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.WrittenFile, "write", full)
    with pytest.raises(CkptkitError, match="writing s3://.*/out: .*No space left on device") as error:
        quantize(small_release, bucket.url("out"), int4_scheme(group_size=32))
    assert str(error.value.hint) == text_with(f"{tempfile.gettempdir()} TMPDIR")
    assert bucket.listed() == []


def test_a_destination_that_exists(small_release, bucket):
    bucket.put("out/config.json", b"{}")
    for dry_run in (False, True):
        with pytest.raises(CkptkitError, match="/out exists already") as error:
            quantize(small_release, bucket.url("out"), int4_scheme(group_size=32), dry_run=dry_run)
        assert "--overwrite" in str(error.value.hint)
    assert bucket.get("out/config.json") == b"{}"


def test_a_destination_in_the_source(stored, bucket):
    before = bucket.listed()
    with pytest.raises(CkptkitError, match="models/qwen/int4 overlaps .*models/qwen"):
        quantize(stored, f"{stored}/int4", int4_scheme(group_size=32), overwrite=True)
    assert bucket.listed() == before


@pytest.mark.parametrize("to", ["disk", "s3"])
def test_a_source_that_changes_meanwhile(to, stored, bucket, s3_address, tmp_path, monkeypatch):
    before = bucket.listed()

    def change(request):
        """When weights are read: behind its header, a shard is read in ranges that begin further on."""
        if (
            request.method == "GET"
            and "00003-of-00003" in request.path
            and not str(request.range).startswith(("bytes=0-", "bytes=8-"))
        ):
            bucket.put("models/qwen/tokenizer_config.json", b"{}")
        return False

    out = str(tmp_path / "out") if to == "disk" else bucket.url("out")
    changed = pytest.raises(CkptkitError, match=r"tokenizer_config\.json")
    with serving(breaking(s3_address, [], change)) as address, use_s3(monkeypatch, address), changed as error:
        quantize(stored, out, int4_scheme(group_size=32))
    assert error.value.__notes__ == [text_with("behind")]
    assert list(tmp_path.iterdir()) == []
    assert bucket.listed() == before


SHARED = "--ray"


@pytest.mark.parametrize(
    ("how", "message", "hint"),
    [
        ({"dst": "s3://b/out", "resume": True}, "s3://b/out: --resume is not .* URL", "--overwrite"),
        *(({key: "s3://b/x", "ray": "auto"}, "--ray .*s3://b/x is a URL", SHARED) for key in ("dst", "src", "hf")),
        ({"dst": "memory://out"}, "memory://out: only HF directories", "disk"),
    ],
)
def test_convert_options_that_urls_do_not_support_are_refused(small_release, how, message, hint, tmp_path):
    with pytest.raises(CkptkitError, match=message) as error:
        convert(**({"src": small_release, "dst": tmp_path / "out"} | how))
    assert error.value.hint == text_with(hint)


def test_what_reads_no_urls_says_so():
    for use in (
        lint,
        make_manifest,
        lambda url: make_manifest(url, hf="s3://bucket/model"),
        lambda url: preflight(hf_checkpoint=url),
        lambda url: preflight(load=url),
        lambda url: preflight(ref_load=url),
    ):
        for kind in (str, Path):
            with pytest.raises(CkptkitError, match="^s3://bucket/model.*URL") as error:
                use(kind("s3://bucket/model"))
            assert error.value.hint == text_with("HF directories URLs")
