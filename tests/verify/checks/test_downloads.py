"""CK124: what huggingface_hub has downloaded itself, to its cache and to a directory, from a hub of this process."""

import hashlib
import os
import subprocess
from pathlib import Path
from random import Random
from tempfile import NamedTemporaryFile
from threading import Thread

import pytest
import torch
from huggingface_hub._local_folder import read_download_metadata
from huggingface_hub.utils._shared_blobs import publish_blob_to_shared_store
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_hub import SHA, download
from support.messages import text_with

from ckptkit.app.inspection import inspect
from ckptkit.formats.hf.hub_cache import downloads_in
from ckptkit.storage.file_hash import FileHash
from ckptkit.verify.evidence.reading import alternating
from ckptkit.verify.run import verify

NAME, MODEL = "qwen2-untied", "org/model"


def flipped(file):
    content = file.read_bytes()
    return content[:-1] + bytes([content[-1] ^ 1])


def spoiled(release):
    file = sorted(release.glob("*.safetensors"))[-1]
    return {file.name: flipped(file)}


@pytest.fixture(params=["cache_dir", "local_dir"])
def where(request, tmp_path):
    return {request.param: tmp_path / "there"}


def test_a_sound_download_passes_and_says_what_it_is(releases, where):
    path = download(MODEL, releases(NAME), **where)
    report = verify(path)
    assert (report.status, report.findings) == ("passed", [])
    files = len(list(releases(NAME).iterdir()))
    origin = f"{MODEL} at {SHA}" if "cache_dir" in where else f"revision {SHA}"
    assert report.facts["download"] == [text_with(f"{origin} {files} {files}")]
    checked = next(one for one in report.checks if one.code == "CK124")
    assert checked.tensors_compared == files
    assert checked.bytes_compared == sum(file.stat().st_size for file in releases(NAME).iterdir())
    assert f"{files}" in inspect(path)["download"]
    assert "download" not in inspect(releases(NAME))
    os.utime(path / "config.json", (2e9, 2e9))  # touched and not changed
    assert verify(path).findings == []


def test_other_bytes_than_were_published_are_an_error_with_the_command(releases, where):
    """The client takes them without a word; headers, sizes and every other check are as in the sound twin."""
    [(name, content)] = spoiled(releases(NAME)).items()
    small = (releases(NAME) / "generation_config.json").read_bytes().replace(b"{", b"{ ", 1)
    path = download(MODEL, releases(NAME), {name: content, "generation_config.json": small}, **where)
    findings = {finding.file: finding for finding in verify(path).findings}
    assert {(finding.code, finding.severity) for finding in findings.values()} == {("CK124", "error")}
    assert findings.keys() == {str(path / name), str(path / "generation_config.json")}
    finding = findings[str(path / name)]
    assert hashlib.sha256((releases(NAME) / name).read_bytes()).hexdigest() in finding.expected
    assert hashlib.sha256(content).hexdigest() in finding.actual
    repository, to = (MODEL, "") if "cache_dir" in where else ("ORG/NAME", f" --local-dir {path}")
    assert f"`hf download {repository} {name} --revision {SHA}{to} --force-download`" in finding.hint
    assert "SHA-1" in findings[str(path / "generation_config.json")].expected


def test_git_itself_calls_a_small_file_so(releases, tmp_path):
    path = releases(NAME) / "config.json"
    named = subprocess.run(["git", "hash-object", str(path)], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert FileHash(path, named.stdout.strip()).finish()
    assert FileHash(path, hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()).finish()
    assert not FileHash(path, hashlib.sha1(b"another", usedforsecurity=False).hexdigest()).finish()


def test_a_file_that_was_edited_after_the_download_is_a_warning(releases, where, only):
    path = download(MODEL, releases(NAME), **where)
    file = path / "generation_config.json"
    file.write_text(file.read_text() + "\n")
    os.utime(file, (file.stat().st_mtime + 60,) * 2)
    if "local_dir" in where:
        assert read_download_metadata(path, file.name) is None  # the client too takes it for changed
    report = verify(path)
    assert (report.status, only(report).severity) == ("passed", "warning")
    assert only(report).actual == text_with("generation_config.json")
    assert only(report).hint == text_with("change hf")


def test_what_was_put_in_place_of_a_file_has_no_record(releases, tmp_path):
    path = download(MODEL, releases(NAME), cache_dir=tmp_path / "cache")
    file = sorted(path.glob("*.safetensors"))[0]
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    report = verify(path)
    assert report.findings == []
    assert report.facts["download"][0].endswith(f"; no record of {file.name}")


def test_files_that_models_share_are_known_by_the_name_of_their_blob(releases, tmp_path, only):
    """In the shared store they lie under the hash of Xet, which is another one of 64 digits."""
    cache = tmp_path / "cache"
    path = download(MODEL, releases(NAME), cache_dir=cache)
    file = sorted(path.glob("*.safetensors"))[0]
    blob = file.parent / os.readlink(file)
    shared = publish_blob_to_shared_store(
        blob_path=os.path.normpath(blob), xet_hash="ab" * 32, cache_dir=cache, expected_size=blob.stat().st_size
    )
    assert shared
    assert file.resolve().name == "ab" * 32
    assert verify(path).findings == []
    before = file.stat().st_mtime
    file.write_bytes(flipped(file))
    os.utime(file, (before, before))
    assert only(verify(path)).code == "CK124"


def test_every_file_differs_as_with_names_of_a_mirror(releases, tmp_path):
    path = download(MODEL, releases(NAME), cache_dir=tmp_path / "cache")
    for link in sorted(path.iterdir()):
        blob = Path(os.path.normpath(link.parent / os.readlink(link)))
        other = blob.with_name(blob.name[::-1])
        blob.rename(other)
        link.unlink()
        link.symlink_to(Path("../../blobs", other.name))
    report = verify(path)
    assert {finding.code for finding in report.findings} == {"CK124"}
    assert all("HF_ENDPOINT" in finding.hint for finding in report.findings)


def test_metadata_that_the_client_did_not_write_is_no_record(fresh):
    path = fresh(NAME)
    record = path / ".cache" / "huggingface" / "download" / "config.json.metadata"
    record.parent.mkdir(parents=True)
    digest = "0" * 64
    sound = f"{SHA}\n{digest}\n1\n"
    for text in (
        *("", "x\ny\nz\n", sound[:-2], sound.replace("\n1", "\nnan"), sound.replace("\n1", "\n-1e300")),
        *(sound.replace(digest, "0" * 32), sound.replace(SHA, "../.."), sound + "x" * 5000),
    ):
        record.write_text(text)
        assert downloads_in(path) == {}, text
    report = verify(path)
    assert report.findings == []
    assert text_with("CK124") in report.facts["not applicable"]
    record.write_text(sound)
    assert downloads_in(path).keys() == {"config.json"}


def test_one_reading_is_enough(releases, tmp_path, monkeypatch):
    """Of weights, no byte behind the header is read for the hash."""
    path = download(MODEL, releases(NAME), local_dir=tmp_path / "there")
    ends = {}
    read = FileHash._read

    def spied(self, end):
        before = self.size - self.unread
        read(self, end)
        if self.path.suffix == ".safetensors":
            ends[self.path.name] = ends.get(self.path.name, 0) + (self.size - self.unread) - before

    monkeypatch.setattr(FileHash, "_read", spied)
    assert verify(path).findings == []
    assert ends.keys() == {file.name for file in path.glob("*.safetensors")}
    for name, count in ends.items():
        with (path / name).open("rb") as file:
            assert count == 8 + int.from_bytes(file.read(8), "little")


@given(seed=st.integers(0, 2**32), ahead=st.sampled_from([0, 1000, 1 << 20]), threads=st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_pieces_in_any_order_are_hashed_once(seed, ahead, threads):
    """Some come twice, and some not at all or too early, which are read, as the header is."""
    shuffled = Random(seed)
    content = torch.arange(256, dtype=torch.uint8).repeat(64)
    pieces = shuffled.choices(range(0, len(content), 512), k=60)
    with NamedTemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptkit.storage.file_hash._AHEAD", ahead)
        file.write(b"header" + bytes(content.tolist()))
        file.flush()
        digest = hashlib.sha256(Path(file.name).read_bytes()).hexdigest()
        hashed, other = (FileHash(Path(file.name), one, begin=6) for one in (digest, "0" * 64))

        def give(own):
            for start in own:
                for one in (hashed, other):
                    one.add(6 + start, content[start : start + 512])

        givers = [Thread(target=give, args=(pieces[number::threads],)) for number in range(threads)]
        for giver in givers:
            giver.start()
        for giver in givers:
            giver.join()
        assert hashed.unread >= len(content) - 512 * len({*pieces})
        assert (hashed.finish(), other.finish()) == (True, False)


def test_who_fails_lets_others_go_on(tmp_path, monkeypatch):
    """Where a file cannot be read, no thread waits for the one that was told so."""
    monkeypatch.setattr("ckptkit.storage.file_hash._AHEAD", 1)
    (tmp_path / "file").write_bytes(b"header" + bytes(8))
    one = FileHash(tmp_path / "file", "0" * 64, begin=6)
    (tmp_path / "file").unlink()
    piece = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(FileNotFoundError):
        one.add(6, piece)
    other = Thread(target=one.add, args=(10, piece), daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()
    assert one.unread == 14


def test_files_are_gone_through_a_few_at_a_time():
    assert alternating([], 2) == []
    assert alternating("aaabbc", 1) == [0, 1, 2, 3, 4, 5]
    assert alternating("aaabbcdd", 2) == [0, 3, 1, 4, 2, 5, 6, 7]
