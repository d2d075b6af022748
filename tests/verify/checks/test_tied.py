"""Tied models that ship `lm_head.weight`: sound where it repeats the embedding, wrong where not, open from headers."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save
from support import models
from support.fixture_types import OnlyFinding, PathOf
from support.tied import NAMES, add, one_bit_off, with_head

from ckptkit.app.api import convert, quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.core.report import Report
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

HEAD, EMBEDDING = NAMES["qwen2-tied"]


@pytest.fixture(scope="module", params=sorted(NAMES))
def shipped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    root = tmp_path_factory.mktemp("tied")
    save(request.param, CASES[request.param], root / "plain", torch.bfloat16)
    return request.param, with_head(root / "plain", root / "shipped", request.param)


def notes(report: Report) -> list[str]:
    return list(report.facts.get("notes", []))


def passes(report: Report) -> None:
    assert [str(finding) for finding in report.findings] == []
    assert report.status == "passed"


def test_a_head_that_repeats_the_embedding_passes_with_a_note(shipped: tuple[str, Path]) -> None:
    name, path = shipped
    report = verify(path)
    passes(report)
    head, embedding = NAMES[name]
    assert [
        note
        for note in notes(report)
        if note.startswith(f"{head} is stored although tie_word_embeddings is true") and embedding in note
    ]
    assert [check.status for check in report.checks if check.code == "CK211"] == ["passed"]


def test_a_head_that_repeats_the_embedding_comes_back_from_megatron(shipped: tuple[str, Path], tmp_path: Path) -> None:
    """The same files, byte for byte, also where the release is no longer there."""
    name, path = shipped
    convert(path, tmp_path / "megatron")
    passes(verify(tmp_path / "megatron", source=path))
    convert(tmp_path / "megatron", tmp_path / "back")
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert filecmp.cmpfiles(path, tmp_path / "back", files, shallow=False) == (files, [], [])
    assert NAMES[name][0] in models.tensors(tmp_path / "back")
    passes(verify(tmp_path / "back", source=path))


def test_either_side_may_lack_a_head_that_repeats_the_embedding(shipped: tuple[str, Path]) -> None:
    _, path = shipped
    passes(verify(path, source=path.parent / "plain"))
    passes(verify(path.parent / "plain", source=path))


def test_a_model_without_the_head_has_neither_note_nor_check(releases: PathOf) -> None:
    report = verify(releases("qwen2-tied"))
    assert notes(report) == []
    assert "CK211" not in [check.code for check in report.checks]


@pytest.fixture
def stale(releases: PathOf, tmp_path: Path) -> Path:
    """A release whose output layer is one bit off."""
    release = releases("qwen2-tied")
    return with_head(release, tmp_path / "stale", "qwen2-tied", one_bit_off(models.tensors(release)[EMBEDDING]))


def test_a_head_that_differs_is_an_error(stale: Path, only: OnlyFinding) -> None:
    finding = only(verify(stale))
    assert (finding.code, finding.severity, finding.tensor) == ("CK211", "error", HEAD)
    assert EMBEDDING in finding.expected
    assert "tie_word_embeddings" in finding.hint


def test_a_head_of_another_dtype_is_an_error(releases: PathOf, tmp_path: Path) -> None:
    release = releases("qwen2-tied")
    path = with_head(release, tmp_path / "wide", "qwen2-tied", models.tensors(release)[EMBEDDING].float())
    assert "CK211" in [finding.code for finding in verify(path).findings]


def test_a_head_of_another_shape_is_an_error_from_headers(releases: PathOf, tmp_path: Path) -> None:
    path = with_head(releases("qwen2-tied"), tmp_path / "shorter", "qwen2-tied", torch.randn(340, 128).bfloat16())
    for report in (verify(path), preflight(hf_checkpoint=path)):
        assert ("CK105", HEAD) in [(finding.code, finding.tensor) for finding in report.findings]


def test_a_head_that_differs_is_refused_by_convert(stale: Path, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match=f"{HEAD}.*{EMBEDDING}.*Megatron") as refused:
        convert(stale, tmp_path / "megatron")
    assert "tie_word_embeddings" in str(refused.value.hint)
    assert not (tmp_path / "megatron").exists()


def test_preflight_of_a_head_beside_tied_embeddings_gives_a_note(stale: Path) -> None:
    report = preflight(hf_checkpoint=stale)
    assert [finding for finding in report.findings if finding.tensor == HEAD] == []
    assert [note for note in notes(report) if note.startswith(f"{HEAD} is stored although tie_word_embeddings is true")]


def test_a_head_of_the_source_that_differs_from_its_embedding_is_lost(stale: Path, releases: PathOf) -> None:
    found = [(finding.code, finding.tensor) for finding in verify(releases("qwen2-tied"), source=stale).findings]
    assert found == [("CK202", HEAD)]


def test_quantize_leaves_the_head_as_it_is(releases: PathOf, tmp_path: Path) -> None:
    path = with_head(releases("qwen2-tied"), tmp_path / "shipped", "qwen2-tied")
    quantize(path, tmp_path / "int4", QuantScheme(32, "qmax7"))
    assert torch.equal(models.tensors(tmp_path / "int4")[HEAD], models.tensors(path)[HEAD])
    passes(verify(tmp_path / "int4", source=path))


@pytest.mark.parametrize("shipping", ["source", "reference"])
def test_quantize_like_a_reference_with_other_head_keeps_the_packed_set(
    releases: PathOf, tmp_path: Path, shipping: str
) -> None:
    """The packed set is the reference's; a head that only one of the two ships is none of it."""
    plain = releases("qwen2-tied")
    path = with_head(plain, tmp_path / "shipped", "qwen2-tied")
    source, reference = (path, plain) if shipping == "source" else (plain, path)
    quantize(reference, tmp_path / "like", QuantScheme(32, "qmax7"))
    quantize(source, tmp_path / "int4", QuantScheme(32, "qmax7"), like=tmp_path / "like")
    assert (HEAD in models.tensors(tmp_path / "int4")) == (shipping == "source")
    passes(verify(tmp_path / "int4", source=source))


@pytest.mark.sglang
@pytest.mark.usefixtures("served_sglang")
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3_moe"])
def test_sglang_loads_a_tied_model_with_its_head(
    releases: PathOf, tmp_path: Path, edit_json: Callable[..., None], name: str
) -> None:
    """SGLang 0.5.16 drops the head of qwen2, whose class ties, and loads that of qwen3_moe."""
    path = Path(shutil.copytree(releases(name), tmp_path / "tied"))
    embedding = models.tensors(path)[EMBEDDING]
    if HEAD in models.tensors(path):
        models.edit(path, HEAD, embedding.clone())
        edit_json(path / "config.json", tie_word_embeddings=True)
    else:
        add(path, HEAD, embedding.clone())
    report = verify(path, against=frozenset({"sglang"}))
    passes(report)
    assert {
        check.code: check.status for check in report.checks if check.code in ("CK501", "CK502", "CK503", "CK504")
    } == dict.fromkeys(("CK501", "CK502", "CK503", "CK504"), "passed")
