"""Audit cards: the page, and its JSON, which is the manifest of what was looked at and has the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.deltas import publish_chain
from support.fixture_types import CopyOf, PathOf
from support.processes import python

from ckptkit.app.api import make_manifest
from ckptkit.app.cli import cli
from ckptkit.app.cli.verification import _repeated
from ckptkit.transfer.manifest import digest_of_all, read_manifest
from verify.evidence import reading
from verify.report import Report
from verify.reports import card as audit

NAME = "qwen2-untied"
Card = Callable[..., Result]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Card:
    """`card(*words)`: runs `ckptkit card` in an empty directory."""
    (tmp_path / "cards").mkdir()
    monkeypatch.chdir(tmp_path / "cards")

    def run(*words: str | Path) -> Result:
        given = ["card", *map(str, words)]
        monkeypatch.setattr(sys, "argv", ["ckptkit", *given])
        return CliRunner().invoke(cli, given)

    return run


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a private key, `mine.pem`, and its public one."""
    pytest.importorskip("model_signing", reason="needs model-signing and pyopenssl")
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    folder, key = tmp_path_factory.mktemp("keys"), ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    (folder / "mine.pem").write_bytes(private)
    public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    (folder / "mine.pub").write_bytes(public)
    return folder


def content(path: str = "card.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


def test_a_card_says_what_was_compared_and_how_to_repeat_it(card: Card, releases: PathOf, copy_of: CopyOf) -> None:
    path, source = copy_of(releases(NAME)), releases(NAME)
    done = card(path, "--source", source, "--output", "audit.md")
    assert done.exit_code == 0
    page, made = Path("audit.md").read_text(), content("audit.json")
    assert page.startswith(f"# {path.name}: PASSED\n")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    rows = dict(line[2:-2].split(" | ") for line in page.splitlines() if line.count(" | ") == 1 and line != "| | |")
    assert rows["checkpoint"] == f"`{path}`"
    assert rows["compared with"] == f"`{source}`"
    count = len(index["weight_map"])
    assert rows["tensors"] == f"{count} ({count} bfloat16)"
    assert rows["size"] == f"{index['metadata']['total_size']:,} bytes"
    assert rows["verdict"] == "PASSED files and values; Megatron, SGLang, vLLM not asked"
    assert rows["digest of all tensors"] == f"BLAKE3 `{made['card']['weights']}`"
    assert rows["signature"] == "none"
    assert rows["versions"].startswith("ckptkit ")
    assert f"torch {made['card']['versions']['torch']}" in rows["versions"]
    assert made["card"]["memory"] == {"ckptkit": made["card"]["memory"]["ckptkit"], "largest process": 0}
    assert made["card"]["memory"]["ckptkit"] > 100_000_000
    assert f"\n- all of it: `ckptkit card {path} --source {source}`\n" in page
    assert "\n- are these the weights: `ckptkit verify COPY --manifest audit.json`\n" in page
    assert "## tensors per layer" in page
    assert "## not applicable" not in page
    assert "not applicable" in made["report"]["facts"]
    assert "| CK202 | values equal the source's, bit for bit | passed |" in page
    assert made["report"]["status"] == "passed"
    assert made["report"]["source"] == str(source)


def test_its_json_is_the_manifest_and_takes_no_reading_of_its_own(
    card: Card, releases: PathOf, copy_of: CopyOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, passes = copy_of(releases(NAME)), []
    read = reading._pass
    monkeypatch.setattr(reading, "_pass", lambda *given, **how: passes.append(given) or read(*given, **how))
    assert card(path, "--source", releases(NAME)).exit_code == 0
    assert len(passes) == 1
    expected = read_manifest(make_manifest(path, tmp_path / "kept.json"))
    assert read_manifest(Path("card.json")) == expected
    assert content()["card"]["weights"] == digest_of_all(expected.tensors)
    verified = CliRunner().invoke(cli, ["verify", str(path), "--manifest", "card.json"])
    assert verified.exit_code == 0
    file = path / "generation_config.json"
    file.write_text(file.read_text() + "\n")
    assert "CK120" in CliRunner().invoke(cli, ["verify", str(path), "--manifest", "card.json"]).output


def test_one_digest_stands_for_all_tensors_in_any_order(releases: PathOf, tmp_path: Path) -> None:
    tensors = read_manifest(make_manifest(releases(NAME), tmp_path / "kept.json")).tensors
    whole = digest_of_all(tensors)
    assert digest_of_all(dict(reversed(tensors.items()))) == whole
    first, *_, last = tensors
    assert digest_of_all({**tensors, first: tensors[last]}) != whole
    assert digest_of_all({name: one for name, one in tensors.items() if name != last}) != whole


def test_of_megatron_it_has_the_names_of_global_tensors(
    card: Card, releases: PathOf, converted: PathOf, tmp_path: Path
) -> None:
    assert card(converted(NAME), "--source", releases(NAME)).exit_code == 0
    assert read_manifest(Path("card.json")) == read_manifest(make_manifest(converted(NAME), tmp_path / "kept.json"))


def test_a_signed_card_says_who_vouches_for_it(card: Card, releases: PathOf, keys: Path) -> None:
    done = card(releases(NAME), "--sign", "--key", keys / "mine.pem")
    assert done.exit_code == 0
    page = Path("card.md").read_text()
    assert "| signature | `card.json.sig` |" in page
    assert f": `ckptkit card {releases(NAME)}`\n" in page  # nothing of the key
    asked = ["verify", str(releases(NAME)), "--manifest", "card.json", "--manifest-key", str(keys / "mine.pub")]
    assert CliRunner().invoke(cli, asked).exit_code == 0
    library = ["verify", "key", "card.json", "--signature", "card.json.sig", "--public_key", str(keys / "mine.pub")]
    assert python("-m", "model_signing", *library).returncode == 0
    Path("card.json").write_text(Path("card.json").read_text().replace('"status": "passed"', '"status": "failed"'))
    assert "CK119" in CliRunner().invoke(cli, asked).output


def test_releases_of_what_was_asked_stand_in_the_table() -> None:
    """A fact of SGLang or Megatron begins with the release (`tests/verify/witnesses`)."""
    report = Report("1", (), "x", None, [], [], {"SGLang": ["SGLang 0.5.16, tp 2", "147 tensors into 60"]})
    made = audit.Card(report, ["card"], [], None, Path("card.json"), False, {}, "", 1.0, (10**9, 2 * 10**9))
    text = audit.page(made)
    assert "\n| SGLang | SGLang 0.5.16, tp 2 |\n" in text
    assert "\n| most memory | 1.00 GB; 2.00 GB in a process that it started |\n" in text


def test_a_card_of_a_broken_checkpoint_says_so_and_exits_with_1(
    card: Card, releases: PathOf, copy_of: CopyOf, edit_json: Callable[..., None]
) -> None:
    path = copy_of(releases(NAME))
    edit_json(path / "config.json", rms_norm_eps=0.5)
    assert card(path, "--source", releases(NAME)).exit_code == 1
    page = Path("card.md").read_text()
    assert page.startswith(f"# {path.name}: FAILED\n\nconfig.json: rms\\_norm\\_eps = 0.5 instead of 1e-06. ")
    assert "\n| verdict | FAILED with 1 error |\n" in page
    assert "\n| looked at | files and values; Megatron, SGLang, vLLM not asked |\n" in page
    assert "## CK702 error: " in page
    assert content()["report"]["status"] == "failed"
    assert len(read_manifest(Path("card.json")).tensors) == len(content()["tensors"])


def test_without_sound_headers_there_are_no_digests(card: Card, releases: PathOf, copy_of: CopyOf) -> None:
    path = copy_of(releases(NAME))
    file = sorted(path.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-8])
    assert card(path).exit_code == 1
    assert content()["tensors"] == {}
    assert "| digest of all tensors | none: not all could be read |" in Path("card.md").read_text()
    assert "are these the weights" not in Path("card.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "page.html"], "page.html cannot be a card"),
        (["--output", "config.md"], "config.json has a name that loaders read"),
        (["--output", "nowhere/card.md"], "nowhere does not exist"),
        (["--sign", "--key", "nowhere.pem"], "nowhere.pem: No such file or directory"),
    ],
)
def test_what_cannot_be_written_or_signed_is_refused_first(
    words: list[str], message: str, card: Card, releases: PathOf
) -> None:
    pytest.importorskip("model_signing", reason="needs model-signing and pyopenssl")
    done = card(releases(NAME), *words)
    assert message in str(done.exception)
    assert list(Path().iterdir()) == []


def test_what_is_no_full_checkpoint_has_no_card(card: Card, releases: PathOf, tmp_path: Path) -> None:
    """Deltas and adapters have checks of their own, and no tensors of a model."""
    publish_chain(tmp_path / "updates", releases(NAME), ("xor",))
    assert "is not a full checkpoint (deltas)" in str(card(tmp_path / "updates").exception)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("name", ["card.md", "card.json"])
def test_a_card_is_never_replaced(name: str, card: Card, releases: PathOf) -> None:
    Path(name).write_text("mine")
    assert f"{name} exists already" in str(card(releases(NAME)).exception)
    assert [path.name for path in Path().iterdir()] == [name]
    assert Path(name).read_text() == "mine"


def test_the_command_that_repeats_it_has_neither_key_nor_output() -> None:
    words = ["card", "--sign", "x", "--key", "mine.pem", "--output=a.md", "--tp", "2", "--output", "b.md", "-q"]
    assert _repeated(words) == ["card", "x", "--tp", "2", "-q"]
