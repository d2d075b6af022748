"""Two sides of a launch that must start from the same weights, compared by the digests beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fixture_types import OnlyFinding, PathOf

from ckptkit.app.api import convert, make_manifest
from verify.launch.preflight import preflight
from verify.report import CheckResult, Report

NAME = "qwen3_moe"
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def hf(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release with a manifest of its own."""
    path = Path(shutil.copytree(releases(NAME), tmp_path_factory.mktemp("same") / "release"))
    make_manifest(path)
    return path


@pytest.fixture
def megatron(hf: Path, converted: PathOf, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted(NAME), tmp_path / "megatron"))


def of(report: Report) -> CheckResult:
    return next(one for one in report.checks if one.code == "CK723")


def change(root: Path, name: str) -> None:
    """Gives a tensor another digest, as other weights would have."""
    manifest = json.loads((root / "ckptkit.json").read_text())
    dtype, shape, digest = manifest["tensors"][name]
    manifest["tensors"][name] = [dtype, shape, digest[::-1]]
    (root / "ckptkit.json").write_text(json.dumps(manifest))


def test_megatron_weights_converted_from_the_engines_model_pass(hf: Path, megatron: Path) -> None:
    report = preflight(hf_checkpoint=hf, ref_load=megatron)
    assert report.status == "passed"
    # Norms, embeddings, routers and projections; not what Megatron fuses.
    assert of(report).status == "passed"
    assert of(report).tensors_compared > 100


def test_other_weights_than_the_engines_are_found(hf: Path, megatron: Path, only: OnlyFinding) -> None:
    change(megatron, "decoder.final_layernorm.weight")
    finding = only(preflight(hf_checkpoint=hf, ref_load=megatron))
    assert (finding.code, finding.severity, finding.tensor, finding.file) == (
        "CK723",
        "warning",
        "decoder.final_layernorm.weight",
        str(megatron / "release"),
    )
    assert finding.expected == f"the digests of the rollout engine, {hf}"
    assert finding.actual.startswith("others of 1 of the ")


def test_a_run_that_resumes_is_not_compared(hf: Path, megatron: Path, tmp_path: Path) -> None:
    trained = Path(shutil.copytree(megatron, tmp_path / "run"))
    change(trained, "decoder.final_layernorm.weight")
    report = preflight(hf_checkpoint=hf, load=trained, ref_load=megatron)
    assert report.status == "passed"
    assert "CK723" not in [one.code for one in report.checks]


def test_without_digests_a_note_says_how_to_compare(releases: PathOf, megatron: Path) -> None:
    report = preflight(hf_checkpoint=releases(NAME), ref_load=megatron)
    assert (report.status, of(report).status) == ("passed", "skipped")
    line = (
        f"actor and rollout engine: no digests in {releases(NAME) / 'ckptkit.json'}; "
        f"`ckptkit verify {megatron / 'release'} --source {releases(NAME)}` compares them"
    )
    assert report.facts["notes"] == [f"not compared: {line}"]


def test_a_conversion_of_a_release_with_a_manifest_is_known_by_it(hf: Path, tmp_path: Path) -> None:
    """Its lineage names that manifest, so it needs no digests of its own."""
    convert(hf, tmp_path / "megatron")
    path = tmp_path / "megatron" / "ckptkit.json"
    manifest = json.loads(path.read_text())
    del manifest["tensors"]
    path.write_text(json.dumps(manifest))
    report = preflight(hf_checkpoint=hf, ref_load=tmp_path / "megatron")
    assert (of(report).status, of(report).tensors_compared) == ("passed", 1)


def test_actor_and_reference_of_verl_with_other_weights_are_found(
    hf: Path, megatron: Path, tmp_path: Path, only: OnlyFinding
) -> None:
    other = Path(shutil.copytree(megatron, tmp_path / "other"))
    change(other, "decoder.final_layernorm.weight")
    words = [f"actor_rollout_ref.model.path={hf}", "algorithm.adv_estimator=grpo", "trainer.resume_mode=disable"]
    words += ["actor_rollout_ref.actor.use_kl_loss=true"]
    for role, root in (("actor", megatron), ("ref", other)):
        prefix = f"actor_rollout_ref.{role}.megatron"
        words += [f"{prefix}.use_dist_checkpointing=True", f"{prefix}.dist_checkpointing_path={root / 'release'}"]
    finding = only(preflight(arguments=words))
    assert (finding.code, finding.severity, finding.tensor) == ("CK723", "error", "decoder.final_layernorm.weight")
    assert finding.actual.startswith("others of 1 of the ")
