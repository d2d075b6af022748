"""Tied models that ship `lm_head.weight`: sound where it repeats the embedding, wrong where not, open from headers."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save
from mutations.edits import edit_config, replace
from support import models
from support.fixture_types import OnlyFinding, PathOf
from support.messages import text_with
from support.nightly import daily
from support.tied import NAMES, one_bit_off, with_head

from ckptkit.app.api import convert, quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.core.report import Report
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

HEAD, EMBEDDING = NAMES["qwen2-tied"]


@pytest.fixture(
    scope="module", params=daily(sorted(NAMES), ("qwen2-tied", "mimo-tied-two-layers", "gemma3", "qwen3_vl-tied"))
)
def shipped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    root = tmp_path_factory.mktemp("tied")
    save(request.param, CASES[request.param], root / "plain", torch.bfloat16)
    return request.param, with_head(root / "plain", root / "shipped", request.param)


def has_note(report: Report, head: str = HEAD, embedding: str = EMBEDDING) -> bool:
    notes = report.facts.get("notes", [])
    return any(note == text_with(f"{head} tie_word_embeddings {embedding}") for note in notes)


def passes(report: Report) -> None:
    assert [str(finding) for finding in report.findings] == []
    assert report.status == "passed"


def test_a_head_that_repeats_the_embedding_passes_and_comes_back_from_megatron(
    shipped: tuple[str, Path], tmp_path: Path
) -> None:
    """The same files, byte for byte. Either side may lack the head."""
    name, path = shipped
    report = verify(path)
    passes(report)
    assert has_note(report, *NAMES[name])
    assert [check.status for check in report.checks if check.code == "CK211"] == ["passed"]
    passes(verify(path, source=path.parent / "plain"))
    passes(verify(path.parent / "plain", source=path))
    convert(path, tmp_path / "megatron")
    passes(verify(tmp_path / "megatron", source=path))
    convert(tmp_path / "megatron", tmp_path / "back")
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert filecmp.cmpfiles(path, tmp_path / "back", files, shallow=False) == (files, [], [])
    assert NAMES[name][0] in models.tensors(tmp_path / "back")


def test_a_model_without_the_head_has_neither_note_nor_check(releases: PathOf) -> None:
    report = verify(releases("qwen2-tied"))
    assert not has_note(report)
    assert "CK211" not in [check.code for check in report.checks]


@pytest.fixture
def stale(releases: PathOf, tmp_path: Path) -> Path:
    """A release whose output layer is one bit off."""
    release = releases("qwen2-tied")
    return with_head(release, tmp_path / "stale", "qwen2-tied", one_bit_off(models.tensors(release)[EMBEDDING]))


def test_a_head_that_differs_is_an_error(stale: Path, releases: PathOf, tmp_path: Path, only: OnlyFinding) -> None:
    """Only of values: preflight, which reads headers, has a note. A model without it has lost it."""
    finding = only(verify(stale))
    assert (finding.code, finding.severity, finding.tensor) == ("CK211", "error", HEAD)
    assert EMBEDDING in finding.expected
    assert "tie_word_embeddings" in finding.hint
    report = preflight(hf_checkpoint=stale)
    assert HEAD not in [one.tensor for one in report.findings]
    assert has_note(report)
    finding = only(verify(releases("qwen2-tied"), source=stale))
    assert (finding.code, finding.tensor) == ("CK202", HEAD)
    with pytest.raises(CkptkitError, match=f"{HEAD}.*{EMBEDDING}") as refused:
        convert(stale, tmp_path / "megatron")
    assert "tie_word_embeddings" in str(refused.value.hint)
    assert not (tmp_path / "megatron").exists()


def test_a_head_of_another_dtype_or_shape_is_an_error(releases: PathOf, tmp_path: Path) -> None:
    embedding = models.tensors(releases("qwen2-tied"))[EMBEDDING]
    path = with_head(releases("qwen2-tied"), tmp_path / "wide", "qwen2-tied", embedding.float())
    assert "CK211" in [finding.code for finding in verify(path).findings]
    path = with_head(releases("qwen2-tied"), tmp_path / "shorter", "qwen2-tied", embedding[:340].contiguous())
    for report in (verify(path), preflight(hf_checkpoint=path)):
        assert ("CK105", HEAD) in [(finding.code, finding.tensor) for finding in report.findings]


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
    head = models.tensors(tmp_path / "int4").get(HEAD)
    assert (head is not None and torch.equal(head, models.tensors(path)[HEAD])) is (shipping == "source")
    passes(verify(tmp_path / "int4", source=source))


@pytest.mark.sglang
@pytest.mark.usefixtures("served_sglang")
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3_moe"])
def test_sglang_loads_a_tied_model_with_its_head(fresh: PathOf, name: str) -> None:
    """SGLang 0.5.16 drops the head of qwen2, whose class ties, and loads that of qwen3_moe."""
    path = fresh(name)
    replace(path, {HEAD: models.tensors(path)[EMBEDDING].clone()})
    edit_config(path, tie_word_embeddings=True)
    report = verify(path, against=frozenset({"sglang"}))
    passes(report)
    statuses = {check.code: check.status for check in report.checks}
    assert [statuses[code] for code in ("CK501", "CK502", "CK503", "CK504")] == ["passed"] * 4
