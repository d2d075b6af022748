"""CK748: a launch that builds GPTModel where its checkpoint holds HybridModel, or the other way round."""

import shlex

import pytest
from support.messages import text_with

from ckptkit.app.api import convert
from ckptkit.converters.megatron.arguments import launch_flags, megatron_args
from ckptkit.converters.planner import dims_of
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.verify.launch.preflight import preflight

NAME = "qwen2-untied"


@pytest.fixture(scope="module")
def hybrid(releases, tmp_path_factory):
    path = tmp_path_factory.mktemp("hybrid") / "megatron"
    convert(releases(NAME), path, dialect="hybrid")
    return path


def launched(hf, megatron, dialect, *more, config=None):
    args = megatron_args(dims_of(config or HfCheckpoint(hf).config), dialect)
    words = [word for line in launch_flags(args) for word in shlex.split(line)]
    return preflight(arguments=["--hf-checkpoint", str(hf), "--ref-load", str(megatron), *words, *more])


@pytest.mark.parametrize("dialect", ["mcore", "hybrid"])
def test_the_same_class_is_silent(dialect, releases, converted, hybrid):
    report = launched(releases(NAME), hybrid if dialect == "hybrid" else converted(NAME), dialect)
    assert not report.findings
    assert "CK748" in {one.code for one in report.checks if one.status == "passed"}


CLASSES = {"mcore": "GPTModel", "hybrid": "HybridModel"}


@pytest.mark.parametrize(("builds", "holds"), [("mcore", "hybrid"), ("hybrid", "mcore")])
def test_a_checkpoint_of_the_other_class_is_found(builds, holds, releases, converted, hybrid, only):
    megatron = hybrid if holds == "hybrid" else converted(NAME)
    finding = only(launched(releases(NAME), megatron, builds))
    assert (finding.code, finding.severity, finding.file) == ("CK748", "error", str(megatron / "release"))
    assert finding.expected == text_with(f"{CLASSES[builds]}")
    assert finding.actual == f"a {CLASSES[holds]}"
    assert f"--dialect {builds}" in finding.hint


def test_pattern_of_another_model_is_found_by_the_check_of_arguments(releases, hybrid, only):
    finding = only(launched(releases(NAME), hybrid, "hybrid", "--hybrid-layer-pattern", "*-" * 11 + "*E"))
    assert finding.code == "CK718"
    assert finding.expected.startswith(f"hybrid_layer_pattern = {'*-' * 12} ")


MARKED = "|".join(["*-" * 3, "*-" * 4 + "*", "-" + "*-" * 4])


@pytest.mark.parametrize(
    ("pattern", "pp", "found"),
    [("*-" * 12, 8, ""), ("*-" * 12, 5, "divisible by pp = 5"), (MARKED, 3, ""), (MARKED, 2, "pp = 2")],
)
def test_stages_share_the_layers_of_hybridmodel_or_are_the_marks_in_its_pattern(pattern, pp, found, releases, hybrid):
    """24 layers, of a model of 12, which 8 does not divide."""
    sizes = ["--pipeline-model-parallel-size", str(pp), "--hybrid-layer-pattern", pattern]
    report = launched(releases(NAME), hybrid, "hybrid", *sizes)
    assert {one.code for one in report.findings} == ({"CK703"} if found else set())
    assert all(found in one.expected for one in report.findings)


def test_tied_embeddings_with_mtp_over_several_stages_are_found(releases, tmp_path, only):
    hf, two = releases("mimo-tied-two-layers"), ["--pipeline-model-parallel-size", "2"]
    convert(hf, tmp_path / "hybrid", dialect="hybrid")
    assert not launched(hf, tmp_path / "hybrid", "hybrid").findings
    finding = only(launched(hf, tmp_path / "hybrid", "hybrid", *two))
    assert finding.code == "CK748"
    assert finding.actual == text_with("tied")
