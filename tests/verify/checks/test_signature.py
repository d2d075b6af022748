"""Signed manifests: what the library's own command makes of them, and CK119, which finds those that are not."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support import models
from support.check_examples import hold_example
from support.fixture_types import CopyOf, OnlyFinding, PathOf
from support.processes import python

from ckptkit.app.api import convert, make_manifest
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.side_files import side_files
from verify.run import verify

UP = "model.layers.3.mlp.up_proj.weight"
NEEDS = "needs model-signing and pyopenssl"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with pairs of keys: `mine`, `other`, `rsa` (`.pem` and `.pub`), and `locked.pem`, encrypted."""
    pytest.importorskip("model_signing", reason=NEEDS)
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    folder = tmp_path_factory.mktemp("keys")
    made = {"mine": ec.generate_private_key(ec.SECP256R1()), "other": ec.generate_private_key(ec.SECP384R1())}
    for name, key in {**made, "rsa": rsa.generate_private_key(65537, 2048)}.items():
        private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
        (folder / f"{name}.pem").write_bytes(private)
        (folder / f"{name}.pub").write_bytes(public)
    locked = form.BestAvailableEncryption(b"secret")
    (folder / "locked.pem").write_bytes(made["mine"].private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, locked))
    return folder


@pytest.fixture(scope="module")
def original(releases: PathOf, keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release with a manifest that the command line has signed. Read only."""
    path = tmp_path_factory.mktemp("signed") / "model"
    shutil.copytree(releases("qwen2-tied"), path)
    run = CliRunner().invoke(cli, ["manifest", str(path), "--sign", "--key", str(keys / "mine.pem")])
    assert (run.exit_code, run.output.strip()) == (0, str(path / "ckptkit.json"))
    return path


@pytest.fixture
def signed(original: Path, copy_of: CopyOf) -> Path:
    """A copy of it."""
    return copy_of(original)


def library(path: Path, key: Path) -> tuple[int, str]:
    """Exit code and output of `model_signing verify key`, for the manifest at `path`."""
    arguments = ["verify", "key", str(path), "--signature", f"{path}.sig", "--public_key", str(key)]
    done = python("-m", "model_signing", *arguments)
    return done.returncode, done.stdout + done.stderr


def judged(path: Path, key: Path) -> tuple[int, str]:
    """Exit code and output of `ckptkit manifest --verify-signature`."""
    done = CliRunner().invoke(cli, ["manifest", str(path), "--verify-signature", "--key", str(key)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json", "modeling_x.py"])
def test_file_added_to_a_signed_checkpoint_is_found(name: str, signed: Path, keys: Path) -> None:
    was_there = (signed / name).exists()
    (signed / name).write_text("{}")
    code, output = judged(signed, keys / "mine.pub")
    assert (code, "CK120" in output, name in output) == (1, True, True)
    assert ("no file of this name" in output) is not was_there


def test_manifest_beside_an_added_file_is_not_signed(releases: PathOf, copy_of: CopyOf, keys: Path) -> None:
    path = copy_of(releases("qwen2-tied"))
    make_manifest(path)
    (path / "chat_template.jinja").write_text("x")
    with pytest.raises(CkptkitError, match="chat_template.jinja"):
        make_manifest(path, sign=keys / "mine.pem")


def test_signed_manifest_is_what_the_librarys_own_command_verifies(original: Path, keys: Path) -> None:
    assert library(original / "ckptkit.json", keys / "mine.pub") == (0, "Verification succeeded\n")
    assert library(original / "ckptkit.json", keys / "other.pub")[0] != 0
    code, output = judged(original, keys / "mine.pub")
    assert (code, "PASSED" in output) == (0, True)
    report = verify(original, manifest=original / "ckptkit.json", manifest_key=keys / "mine.pub")
    assert [(one.code, one.status) for one in report.checks if one.code in {"CK119", "CK120"}] == [
        ("CK119", "passed"),
        ("CK120", "passed"),
    ]


def test_manifest_signed_by_the_librarys_own_command_passes(original: Path, keys: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    shutil.copy(original / "ckptkit.json", kept)
    arguments = ["sign", "key", str(kept), "--signature", f"{kept}.sig", "--private_key", str(keys / "other.pem")]
    done = python("-m", "model_signing", *arguments)
    assert done.returncode == 0, done.stderr
    assert verify(original, manifest=kept, manifest_key=keys / "other.pub").status == "passed"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def flip_manifest(path: Path) -> None:
    """The last digit of a digest becomes another one."""
    flip(path / "ckptkit.json", (path / "ckptkit.json").read_bytes().rindex(b'"') - 1)


def edit_signature(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    file = path / "ckptkit.json.sig"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def flip_signature(path: Path) -> None:
    """One character within the signature, which stays an integer pair in base64."""
    text = (path / "ckptkit.json.sig").read_text()
    at = text.index('"sig":"') + len('"sig":"') + 20
    other = "A" if text[at] != "A" else "B"
    (path / "ckptkit.json.sig").write_text(text[:at] + other + text[at + 1 :])


def sign_the_directory(path: Path) -> None:
    from model_signing import signing

    key = path.parent / "directory.pem"
    (path / "ckptkit.json.sig").unlink()
    signing.Config().use_elliptic_key_signer(private_key=key).sign(path, path / "ckptkit.json.sig")


@pytest.mark.parametrize(
    ("change", "actual"),
    [
        (flip_manifest, "it signs another manifest, or this one was changed"),
        (flip_signature, "it was made with another key, or changed"),
        (
            lambda path: flip(path / "ckptkit.json.sig", 0),
            "it is not a signature in the format of OpenSSF Model Signing",
        ),
        (
            lambda path: (path / "ckptkit.json.sig").write_text("{}"),
            "it is not a signature in the format of OpenSSF Model Signing",
        ),
        (
            lambda path: edit_signature(path, lambda one: one["dsseEnvelope"].update(signatures=[])),
            "it is not a signature in the format of OpenSSF Model Signing",
        ),
        (lambda path: (path / "ckptkit.json.sig").unlink(), "it cannot be read: No such file or directory"),
        (sign_the_directory, "it signs other files than this manifest alone"),
    ],
    ids=["manifest", "signature", "not JSON", "another JSON", "no signature in it", "absent", "of the directory"],
)
def test_signature_that_is_not_of_the_manifest_is_found(
    change: Callable[[Path], object], actual: str, signed: Path, keys: Path
) -> None:
    shutil.copy(keys / "mine.pem", signed.parent / "directory.pem")
    change(signed)
    report = verify(signed, manifest=signed / "ckptkit.json", manifest_key=keys / "mine.pub")
    (finding,) = [one for one in report.findings if one.code == "CK119"]
    assert (report.status, finding.actual, finding.file) == ("failed", actual, str(signed / "ckptkit.json.sig"))
    if change is flip_manifest:
        hold_example("CK119", finding)


def test_another_key_is_found_and_exits_with_1(original: Path, keys: Path) -> None:
    code, output = judged(original, keys / "other.pub")
    assert code == 1
    assert "CK119" in output
    assert "Key mismatch" in output


def test_weights_changed_under_a_sound_signature_are_found(signed: Path, keys: Path, only: OnlyFinding) -> None:
    tensor = models.tensors(signed)[UP]
    tensor.view(torch.int16)[5, 7] ^= 1
    models.edit(signed, UP, tensor)
    finding = only(verify(signed, manifest=signed / "ckptkit.json", manifest_key=keys / "mine.pub"))
    assert (finding.code, finding.tensor) == ("CK120", UP)


def test_manifest_of_a_conversion_is_signed_as_it_stands_and_its_signature_is_no_side_file(
    converted: PathOf, copy_of: CopyOf, keys: Path, tmp_path: Path
) -> None:
    path = copy_of(converted("qwen2-tied"))
    before = (path / "ckptkit.json").read_bytes()
    make_manifest(path, sign=keys / "mine.pem")
    assert (path / "ckptkit.json").read_bytes() == before
    assert verify(path, manifest=path / "ckptkit.json", manifest_key=keys / "mine.pub").status == "passed"
    convert(path, tmp_path / "hf")
    assert not (tmp_path / "hf" / "ckptkit.json.sig").exists()
    with pytest.raises(CkptkitError, match=r"ckptkit.json.sig exists already"):
        make_manifest(path, sign=keys / "mine.pem")


def test_signature_beside_a_release_is_no_side_file(original: Path) -> None:
    assert [str(name) for name in side_files(original) if "ckptkit" in str(name)] == []


def test_manifest_of_other_weights_is_not_signed(signed: Path, keys: Path) -> None:
    (signed / "ckptkit.json.sig").unlink()
    models.edit(signed, UP, models.tensors(signed)[UP] + 1)
    with pytest.raises(CkptkitError, match=rf"is not the manifest of this checkpoint, and is not signed: {UP}"):
        make_manifest(signed, sign=keys / "mine.pem")
    assert not (signed / "ckptkit.json.sig").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.pub", r"mine.pub is not a private key on the curve P-256, P-384 or P-521"),
        ("rsa.pem", r"rsa.pem is not a private key on the curve"),
        ("locked.pem", r"locked.pem is not a private key on the curve .*: Password was not given"),
        ("absent.pem", r"absent.pem: No such file"),
        (".", r"no regular file, but a directory"),
    ],
)
def test_private_key_that_is_none_is_refused_before_the_work(
    name: str, message: str, keys: Path, releases: PathOf, tmp_path: Path
) -> None:
    with pytest.raises(CkptkitError, match=message):
        make_manifest(releases("qwen2-tied"), tmp_path / "kept.json", sign=keys / name)
    assert list(tmp_path.iterdir()) == []


def test_public_key_that_is_none_is_refused_before_the_work(original: Path, keys: Path) -> None:
    with pytest.raises(CkptkitError, match=r"mine.pem is not a public key"):
        verify(original, manifest=original / "ckptkit.json", manifest_key=keys / "mine.pem")
    with pytest.raises(CkptkitError, match="a key without a manifest"):
        verify(original, manifest_key=keys / "mine.pub")


def test_signing_without_the_library_names_it(
    releases: PathOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(CkptkitError, match="signatures need the library model-signing") as raised:
        make_manifest(releases("qwen2-tied"), tmp_path / "kept.json", sign=tmp_path / "key.pem")
    assert raised.value.hint == "pip install model-signing pyopenssl"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sign"], "--sign: no effect without --key"),
        (["--key", "key.pem"], "--key: no effect without --sign or --verify-signature"),
        (["--sign", "--verify-signature", "--key", "key.pem"], "are two runs, with two keys"),
        (["--verify-signature", "--key", "key.pem", "--workers", "2"], "leave --workers out"),
    ],
)
def test_options_of_signatures_that_do_not_go_together_are_refused(
    options: list[str], message: str, tmp_path: Path
) -> None:
    run = CliRunner().invoke(cli, ["manifest", str(tmp_path), *options])
    assert run.exit_code == 2
    assert message in run.output
