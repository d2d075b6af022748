"""What goes wrong with URLs: one error each, with the next move, and nothing half written anywhere."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.remote_servers import Bucket, Request, breaking, refusing, serving, use_s3
from support.whole_files import whole

from ckptkit.app.api import convert, make_manifest, quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.transfer import files
from quant.lint.lint import lint
from quant.schemes.w4a16 import int4_scheme
from verify.launch.preflight import preflight


def test_an_upload_that_fails_leaves_nothing(
    small_release: Path, bucket: Bucket, s3_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = refusing(403, "AccessDenied", only="PUT", target=s3_address, about="00002-of-00003")
    with (
        serving(refusal) as address,
        use_s3(monkeypatch, address),
        pytest.raises(CkptkitError, match=r"out/model-00002-of-00003\.safetensors: Acc") as error,
    ):
        quantize(small_release, bucket.url("out"), int4_scheme(group_size=32))
    assert error.value.__notes__ == ["nothing was left behind"]
    assert bucket.listed() == []


def test_what_had_been_there_is_said_to_be_gone(
    small_release: Path, bucket: Bucket, s3_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "model.safetensors"):
        bucket.put(f"out/{name}", whole(name))
    refusal = refusing(403, "AccessDenied", only="PUT", target=s3_address, about="index.json")
    with (
        serving(refusal) as address,
        use_s3(monkeypatch, address),
        pytest.raises(CkptkitError, match=r"index\.json: AccessDenied") as error,
    ):
        quantize(small_release, bucket.url("out"), int4_scheme(group_size=32), overwrite=True)
    assert error.value.__notes__ == [f"what was at {bucket.url('out')} has been removed"]
    assert bucket.listed() == []


def test_no_room_for_the_file_that_goes_up_next(
    small_release: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.WrittenFile, "write", full)
    with pytest.raises(CkptkitError, match="writing s3://.*/out: .*No space left on device") as error:
        quantize(small_release, bucket.url("out"), int4_scheme(group_size=32))
    assert f"in {tempfile.gettempdir()} before they go up: make room there, or set TMPDIR" in str(error.value.hint)
    assert bucket.listed() == []


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_destination_that_exists(small_release: Path, bucket: Bucket, dry_run: bool) -> None:
    bucket.put("out/config.json", b"{}")
    with pytest.raises(CkptkitError, match="/out exists already") as error:
        quantize(small_release, bucket.url("out"), int4_scheme(group_size=32), dry_run=dry_run)
    assert "--overwrite" in str(error.value.hint)
    assert bucket.get("out/config.json") == b"{}"


def test_a_destination_in_the_source(stored: str, bucket: Bucket) -> None:
    before = bucket.listed()
    with pytest.raises(CkptkitError, match="models/qwen/int4 overlaps .*models/qwen, which is read"):
        quantize(stored, f"{stored}/int4", int4_scheme(group_size=32), overwrite=True)
    assert bucket.listed() == before


def writing(url: str, release: Path, out: Path) -> None:
    """Quantizes to a URL."""
    quantize(release, url, int4_scheme(group_size=32))


@pytest.mark.parametrize("to", ["disk", "s3"])
def test_a_source_that_changes_meanwhile(
    to: str, stored: str, bucket: Bucket, s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bucket.listed()

    def change(request: Request) -> bool:
        """When weights are read: behind its header, a shard is read in ranges that begin further on."""
        if (
            request.method == "GET"
            and "00003-of-00003" in request.path
            and not str(request.range).startswith(("bytes=0-", "bytes=8-"))
        ):
            bucket.put("models/qwen/tokenizer_config.json", b"{}")
        return False

    out = str(tmp_path / "out") if to == "disk" else bucket.url("out")
    changed = pytest.raises(CkptkitError, match=r"models/qwen changed while it was read: tokenizer_config\.json")
    with serving(breaking(s3_address, [], change)) as address, use_s3(monkeypatch, address), changed as error:
        quantize(stored, out, int4_scheme(group_size=32))
    assert error.value.__notes__ == ["nothing was left behind"]
    assert list(tmp_path.iterdir()) == []
    assert bucket.listed() == before


def refused(message: str, hint: str, **how: Any) -> Any:
    """A conversion that is refused before anything is reached."""
    return pytest.param(how, message, hint, id=hint)


@pytest.mark.parametrize(
    ("how", "message", "hint"),
    [
        refused(
            "s3://b/out: --resume is not supported for URL destinations",
            "begin again with --overwrite",
            dst="s3://b/out",
            resume=True,
        ),
        refused(
            "--ray works on .*, and s3://b/out is a URL",
            "copy to such a file system, or leave out --ray",
            dst="s3://b/out",
            ray="auto",
        ),
        refused(
            "--ray works on .*, and s3://b/src is a URL",
            "copy to such a file system, or leave out --ray",
            src="s3://b/src",
            ray="auto",
        ),
        refused(
            "--ray works on .*, and s3://b/hf is a URL",
            "copy to such a file system, or leave out --ray",
            hf="s3://b/hf",
            ray="auto",
        ),
        refused(
            "memory://out: only HF directories are written to URLs",
            "write it to a disk, and copy it there",
            dst="memory://out",
        ),
    ],
)
def test_convert_options_that_urls_do_not_support_are_refused(
    small_release: Path, how: dict[str, Any], message: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(CkptkitError, match=message) as error:
        convert(**({"src": small_release, "dst": tmp_path / "out"} | how))
    assert error.value.hint == hint


@pytest.mark.parametrize(
    "use",
    [
        lint,
        make_manifest,
        lambda url: make_manifest(url, hf="s3://bucket/model"),
        lambda url: preflight(hf_checkpoint=url),
        lambda url: preflight(load=url),
        lambda url: preflight(ref_load=url),
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_what_reads_no_urls_says_so(use: Callable[[Any], object], kind: type) -> None:
    with pytest.raises(CkptkitError, match="^s3://bucket/model is a URL, which is not read here") as error:
        use(kind("s3://bucket/model"))
    assert error.value.hint == "copy it to a local disk; inspect, convert and quantize read HF directories from URLs"
