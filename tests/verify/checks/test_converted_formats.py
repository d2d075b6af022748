"""`verify --source` where both sides are quantized, each in another format."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace as with_
from pathlib import Path

import pytest
import torch
from mutations.edits import replace, tensor
from safetensors.torch import load_file, save_file
from support import floats
from support.fixture_types import CopyOf, PathOf, RunAlone
from support.nightly import daily

import ckptkit
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.formats.dequantize import dequantized
from ckptkit.verify.run import verify

# The format of the source, and what is made of its weights.
PAIRS = (
    ("mxfp4-quark", "fp8-ue8m0"),
    ("mxfp4-compressed", "fp8"),
    ("mxfp4-compressed", "mxfp8"),
    ("fp8", "mxfp8"),
    ("fp8", "fp8-channel"),
    ("fp8", "nvfp4-modelopt"),
    ("fp8", "mxfp4-quark"),
    ("fp8-ue8m0", "fp8"),
    ("nvfp4-modelopt", "nvfp4-compressed"),
    ("nvfp4-compressed", "fp8"),
)
DAILY = (PAIRS[0], PAIRS[3])
Pair = Callable[[str, str], tuple[Path, Path]]
EXPERT = "model.layers.5.mlp.experts.7.up_proj.weight"
OTHER = "model.layers.5.mlp.experts.3.up_proj.weight"
OUTPUT = "model.layers.5.self_attn.o_proj.weight"


def plain_copy(path: Path, release: Path, target: Path) -> Path:
    """The release with the values that a quantized directory dequantizes to."""
    view = dequantized(HfCheckpoint(path), str(path))
    shutil.copytree(release, target)
    for file in target.glob("*.safetensors"):
        save_file(dict(view.read(list(load_file(file)))), file, metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def pair(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A source in one format, and what another makes of its weights. Not to be written to."""
    root, made = tmp_path_factory.mktemp("pairs"), dict[tuple[str, str], tuple[Path, Path]]()

    def find(first: str, second: str) -> tuple[Path, Path]:
        if (first, second) not in made:
            here, release = root / f"{first}-{second}", releases("qwen3_moe")
            source = floats.write(release, here / "source", floats.SPELLINGS[first])
            plain = plain_copy(source, release, here / "plain")
            made[first, second] = source, floats.write(plain, here / "made", floats.SPELLINGS[second])
        return made[first, second]

    return find


@pytest.mark.parametrize("formats", daily(PAIRS, DAILY), ids="-to-".join)
def test_sound_weights_of_another_format_than_the_sources_have_no_finding(
    formats: tuple[str, str], pair: Pair, copy_of: CopyOf, alone: RunAlone
) -> None:
    source, made = pair(*formats)
    report = verify(made, source=source)
    assert [str(finding) for finding in report.findings] == []
    assert report.status == "passed"
    checks = {check.code: check for check in report.checks}
    assert checks["CK305"].tensors_compared > 400
    path, ending = copy_of(made), "_packed" if formats[1] == "nvfp4-compressed" else ""
    replace(path, {EXPERT + ending: tensor(path, OTHER + ending)})
    _, findings = alone("CK305", path, source_path=source)
    assert [(finding.tensor, finding.severity) for finding in findings] == [(EXPERT, "error")]


def mxfp4_and_fp8(module: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Experts in MXFP4 as DeepSeek-V4 stores them, beside FP8."""
    if ".experts." not in module:
        return floats.deepseek(module, weight)
    stored = floats.mxfp4("weight")(module, weight)
    codes, scale = stored[f"{module}.weight"], stored[f"{module}.weight_scale"]
    return {f"{module}.weight": codes.view(torch.int8), f"{module}.scale": scale.view(torch.float8_e8m0fnu)}


def test_fp8_that_is_kept_beside_experts_of_another_format_is_compared_bit_for_bit(
    releases: PathOf, tmp_path: Path, alone: RunAlone
) -> None:
    release, spelling = releases("qwen3_moe"), floats.SPELLINGS["fp8"]
    mixed = with_(spelling, store=mxfp4_and_fp8, config=spelling.config | {"expert_dtype": "fp4"}, columns=32)
    source = floats.write(release, tmp_path / "source", mixed)
    plain = plain_copy(source, release, tmp_path / "plain")
    made = floats.write(plain, tmp_path / "made", with_(spelling, columns=32))
    kept = {name: value for file in source.glob("*.safetensors") for name, value in load_file(file).items()}
    replace(made, {name: kept[name] for name in kept if "self_attn" in name})
    assert [str(finding) for finding in verify(made, source=source).findings] == []
    codes = kept[OUTPUT].view(torch.uint8).clone()
    codes[0, 0] ^= 1
    replace(made, {OUTPUT: codes.view(torch.float8_e4m3fn)})
    assert [finding.tensor for finding in alone("CK202", made, source_path=source)[1]] == [OUTPUT]
    assert alone("CK305", made, source_path=source)[1] == []


def test_weights_that_were_dequantized_beside_others_are_compared_with_their_source(
    releases: PathOf, tmp_path: Path, alone: RunAlone
) -> None:
    release, spelling = releases("qwen3_moe"), floats.SPELLINGS["fp8"]
    source = floats.write(release, tmp_path / "source", spelling)
    plain = plain_copy(source, release, tmp_path / "plain")
    made = floats.write(plain, tmp_path / "made", spelling, lambda name: ".experts." in name and "_proj" in name)
    assert [str(finding) for finding in verify(made, source=source).findings] == []
    wrong = tensor(made, OUTPUT)
    wrong[0, 0] += 1
    replace(made, {OUTPUT: wrong})
    assert [finding.tensor for finding in alone("CK202", made, source_path=source)[1]] == [OUTPUT]


def spread_of(release: Path, target: Path, exponent: int) -> Path:
    """MXFP4 in which one group of a block has 4.0, and another 0.5 times this power of two."""
    source = floats.write(release, target, floats.SPELLINGS["mxfp4-quark"])
    name = EXPERT
    codes, scale = tensor(source, name), tensor(source, f"{name}_scale")
    codes[:32, :16], scale[:32, 0] = 0, 127
    codes[0, 0], codes[1, 0], scale[1, 0] = 6, 1, 127 + exponent
    replace(source, {name: codes, f"{name}_scale": scale})
    return source


@pytest.mark.parametrize("exponent", [-14, -16])
def test_mxfp4_that_fp8_cannot_hold_is_found(exponent: int, releases: PathOf, tmp_path: Path, alone: RunAlone) -> None:
    release = releases("qwen3_moe")
    source = spread_of(release, tmp_path / "source", exponent)
    made = floats.write(
        plain_copy(source, release, tmp_path / "plain"), tmp_path / "made", floats.SPELLINGS["fp8-ue8m0"]
    )
    result, findings = alone("CK305", made, source_path=source)
    assert (result and result.status) == "passed"
    if exponent == -14:
        assert findings == []
        return
    (finding,) = findings
    assert (finding.tensor, finding.severity) == (EXPERT, "warning")
    assert finding.actual.startswith("not lossless: 1 of ")
    first = f"the first of {EXPERT}, [1, 0] was 7.62939e-06 and is 0"
    assert finding.actual.endswith(f"elements are rounded, 1 of them to 0; {first}")


SCHEMES = {
    "w4a16": ckptkit.int4_scheme(group_size=32),
    "fp8-channel": ckptkit.FloatScheme("fp8-channel"),
    "mxfp8": ckptkit.FloatScheme("mxfp8"),
}


@pytest.mark.parametrize("spelling", ["fp8", "mxfp4-compressed"])
@pytest.mark.parametrize("scheme", daily(SCHEMES, ("w4a16",)))
def test_what_quantize_makes_of_a_quantized_release_has_no_finding(
    scheme: str, spelling: str, releases: PathOf, tmp_path: Path
) -> None:
    source = floats.write(releases("qwen3_moe"), tmp_path / "source", floats.SPELLINGS[spelling])
    ckptkit.quantize(source, tmp_path / "made", SCHEMES[scheme])
    report = verify(tmp_path / "made", source=source)
    assert [str(finding) for finding in report.findings if finding.severity == "error"] == []
    assert report.status == "passed"
    checks = {check.code: check for check in report.checks}
    assert checks["CK305"].tensors_compared
