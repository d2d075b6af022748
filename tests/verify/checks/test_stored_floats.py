"""What `verify` says of weights in FP8, MXFP8, MXFP4 and NVFP4: silent where all is sound, and each mutation found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from mutations.edits import edit_config, edit_index, names, replace, tensor
from support import floats, models
from support.fixture_types import CopyOf, PathOf, RunAlone
from support.nightly import daily

from verify.report import Finding
from verify.run import verify

MODELS = ("qwen2-untied", "qwen3_moe", "deepseek_v3")
CHECKS = ("CK301", "CK303", "CK304", "CK305", "CK306", "CK308")


@pytest.mark.parametrize("model", daily(MODELS, ("qwen3_moe",)))
@pytest.mark.parametrize("name", floats.SPELLINGS)
def test_sound_weights_have_no_finding(name: str, model: str, releases: PathOf, tmp_path: Path) -> None:
    path = floats.write(releases(model), tmp_path / "floats", floats.SPELLINGS[name])
    report = verify(path, source=releases(model))
    assert [str(finding) for finding in report.findings] == []
    assert report.status == "passed"
    checks = {check.code: check for check in report.checks}
    for code in CHECKS:
        assert (code, checks[code].status) == (code, "passed")
        assert checks[code].tensors_compared


@pytest.fixture(scope="module")
def stored(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`stored(model, spelling)`: the model's release so quantized, made once. Not to be written to."""
    root, made = tmp_path_factory.mktemp("floats"), dict[tuple[str, str], Path]()

    def find(model: str, spelling: str) -> Path:
        if (model, spelling) not in made:
            target = root / f"{model}-{spelling}"
            made[model, spelling] = floats.write(releases(model), target, floats.SPELLINGS[spelling])
        return made[model, spelling]

    return find


def pick(path: Path, projection: str, ending: str = "weight") -> str:
    """A tensor of the last module of a projection: of the model's last layer, its last expert."""
    found = [name for name in names(path, f".{projection}.") if name.endswith(f"{projection}.weight")]
    quantized = [name for name in found if any(f"{name}_scale{end}" in names(path, name) for end in ("", "_inv"))]
    return f"{(quantized or found)[-1].removesuffix('.weight')}.{ending}"


def change(path: Path, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Replaces a tensor by what `edit` makes of it. Returns its name."""
    replace(path, {name: edit(tensor(path, name).clone())})
    return name


def scale_dropped(path: Path) -> str:
    name = pick(path, "up_proj")
    replace(path, {}, [f"{name}_scale_inv"])
    return name


def inputs_of_two_dropped(path: Path) -> str:
    found = names(path, "up_proj.input_scale")[-2:]
    replace(path, {}, found)
    return found[-1].replace("input_scale", "weight")


def half_the_scales(path: Path) -> str:
    return change(path, pick(path, "down_proj", "weight_scale"), lambda scale: scale[:, ::2].contiguous())


def bytes_as_numbers(path: Path) -> str:
    name = pick(path, "up_proj", "weight_scale_inv")
    return change(path, name, lambda scale: floats.exponents(scale).float())


def exponents_unannounced(path: Path) -> str:
    for name in names(path, "weight_scale_inv"):
        change(path, name, floats.exponents)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    edit_config(path, quantization_config={key: value for key, value in config.items() if key != "scale_fmt"})
    return pick(path, "up_proj", "weight_scale_inv")


def reciprocal(path: Path) -> str:
    return change(path, pick(path, "down_proj", "weight_scale_inv"), lambda scale: 1 / scale)


def gates_scale(path: Path) -> str:
    return change(path, pick(path, "gate_proj", "weight_scale_2"), lambda scale: scale * 1.7)


def zero_block_as_miles_writes_it(path: Path) -> str:
    def nan(codes: torch.Tensor) -> torch.Tensor:
        codes.view(torch.uint8)[:16, :16] = 0xFF
        return codes

    def zero(scale: torch.Tensor) -> torch.Tensor:
        scale[0, 0] = 0
        return scale

    name = change(path, pick(path, "up_proj"), nan)
    return change(path, f"{name}_scale_inv", zero)


def nan_scale(path: Path) -> str:
    def nan(scale: torch.Tensor) -> torch.Tensor:
        scale.view(torch.uint8)[0, 0] = 0xFF
        return scale

    return change(path, pick(path, "up_proj", "weight_scale"), nan)


def label_of_powers(path: Path) -> str:
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    edit_config(path, quantization_config=config | {"scale_fmt": "ue8m0"})
    return pick(path, "up_proj", "weight_scale_inv")


def codes_of_the_unrounded_scale(path: Path) -> str:
    """As transformers 5.12.1 makes them of scale_fmt ue8m0."""
    for scale_name in names(path, "weight_scale_inv"):
        name = scale_name.removesuffix("_scale_inv")
        codes, scale = tensor(path, name), tensor(path, f"{name}_scale_inv")
        spread = scale.repeat_interleave(32, 0)[: codes.shape[0]].repeat_interleave(32, 1)[:, : codes.shape[1]]
        replace(path, {name: floats.fp8_block((codes.float() * spread).bfloat16(), 32)[0]})
    return pick(path, "up_proj")


def gate_alone(path: Path) -> str:
    name = pick(path, "up_proj")
    codes = tensor(path, name)
    replace(path, {name: codes.to(torch.bfloat16)}, [f"{name}_scale_inv"])
    return name


def nibbles_swapped(path: Path) -> str:
    return change(path, pick(path, "up_proj"), lambda codes: (codes << 4) | (codes >> 4))


def scales_turned(path: Path) -> str:
    """In the shape that they had, so that no header tells."""
    name = change(path, pick(path, "down_proj", "weight_scale_inv"), lambda scale: scale.T.reshape(scale.shape))
    return name.removesuffix("_scale_inv")


def scales_of_another_layer(path: Path) -> str:
    found = [name for name in names(path, "down_proj.weight_scale_inv") if "shared" not in name]
    other = next(name for name in found if tensor(path, name).shape == tensor(path, found[-1]).shape)
    replace(path, {found[-1]: tensor(path, other)})
    return found[-1].removesuffix("_scale_inv")


@dataclass(frozen=True)
class Mutation:
    """What is broken in which spelling, and the check that must name it with these words."""

    damage: Callable[[Path], str]
    spelling: str
    code: str
    words: str
    source: bool = False


MUTATIONS = (
    Mutation(scale_dropped, "fp8", "CK303", "FP8 weights without a scale"),
    Mutation(inputs_of_two_dropped, "nvfp4-modelopt", "CK303", "lack it"),
    Mutation(half_the_scales, "nvfp4-modelopt", "CK303", "for the packed bytes"),
    Mutation(bytes_as_numbers, "fp8-ue8m0", "CK308", "far larger"),
    Mutation(exponents_unannounced, "fp8-ue8m0", "CK303", "119.0"),
    Mutation(reciprocal, "fp8", "CK308", "far larger"),
    Mutation(gates_scale, "nvfp4-modelopt", "CK306", "by up to 1.7 times"),
    Mutation(gates_scale, "nvfp4-modelopt", "CK305", "further off", source=True),
    Mutation(zero_block_as_miles_writes_it, "fp8", "CK304", "zero for 1 blocks whose codes are not zero"),
    Mutation(nan_scale, "nvfp4-modelopt", "CK304", "NaN or infinity: 1 of"),
    Mutation(label_of_powers, "fp8", "CK304", "powers of two, as scale_fmt ue8m0"),
    Mutation(codes_of_the_unrounded_scale, "fp8-ue8m0", "CK304", "448 in every block"),
    Mutation(codes_of_the_unrounded_scale, "fp8-ue8m0", "CK305", "further off", source=True),
    Mutation(gate_alone, "fp8", "CK306", "unquantized"),
    Mutation(nibbles_swapped, "nvfp4-modelopt", "CK305", "further off", source=True),
    Mutation(nibbles_swapped, "mxfp4-quark", "CK305", "further off", source=True),
    Mutation(scales_turned, "fp8", "CK305", "further off", source=True),
    Mutation(scales_of_another_layer, "fp8", "CK305", "further off", source=True),
)


def said(finding: Finding) -> str:
    return f"{finding.tensor} {finding.expected} {finding.actual} {finding.hint}"


@pytest.mark.parametrize("model", daily(MODELS, ("qwen3_moe",)))
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: f"{one.damage.__name__}, {one.code}")
def test_mutation_is_found(
    mutation: Mutation,
    model: str,
    stored: Callable[[str, str], Path],
    releases: PathOf,
    copy_of: CopyOf,
    alone: RunAlone,
) -> None:
    path = copy_of(stored(model, mutation.spelling))
    name = mutation.damage(path)
    how = {"source_path": releases(model)} if mutation.source else {}
    result, findings = alone(mutation.code, path, **how)
    texts = [said(finding) for finding in findings]
    assert any(mutation.words in text for text in texts), (name, texts)
    if len(texts) == 1 and "{" not in texts[0]:
        assert name.rpartition(".")[0] in texts[0]
    assert result is not None
    assert result.status == ("passed" if mutation.words == "448 in every block" else "failed")


def test_listed_scale_that_no_shard_holds_is_a_missing_name(
    stored: Callable[[str, str], Path], copy_of: CopyOf, alone: RunAlone
) -> None:
    path = copy_of(stored("qwen3_moe", "fp8"))
    name = pick(path, "up_proj", "weight_scale_inv")
    home = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"][name]
    models.edit(path, name, None)
    _, findings = alone("CK104", path)
    assert [(finding.tensor, finding.severity) for finding in findings] == [(name, "error")]
    assert [said(finding) for finding in alone("CK303", path)[1]] == []
    edit_index(path, lambda weight_map: weight_map.pop(name))
    assert home
    assert "without a scale" in said(alone("CK303", path)[1][0])


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_router_in_fp8_is_found(
    model: str, stored: Callable[[str, str], Path], copy_of: CopyOf, alone: RunAlone
) -> None:
    path = copy_of(stored(model, "fp8"))
    assert alone("CK301", path)[1] == []
    name = next(name for name in names(path, "mlp.gate.weight"))
    replace(path, floats.deepseek(name.removesuffix(".weight"), tensor(path, name)))
    (finding,) = alone("CK301", path)[1]
    assert (finding.tensor, finding.expected) == (name, "the router unquantized")
    assert finding.actual == "stored in FP8"


def test_formats_that_are_mixed_are_each_judged(
    releases: PathOf, tmp_path: Path, copy_of: CopyOf, alone: RunAlone
) -> None:
    """Experts in NVFP4 and attention in FP8, as ModelOpt's MIXED_PRECISION has them; without a list."""
    release = releases("qwen3_moe")
    nvfp4, fp8 = floats.modelopt_nvfp4(inputs=True), floats.modelopt_fp8
    modules = [name.removesuffix(".weight") for name in models.tensors(release) if name.endswith("_proj.weight")]
    layers = {
        name: {"quant_algo": "NVFP4", "group_size": 16} if ".experts." in name else {"quant_algo": "FP8"}
        for name in modules
    }
    content = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    spelling = floats.Spelling(
        lambda module, weight: (nvfp4 if ".experts." in module else fp8)(module, weight),
        {"quantization_config": content},
        columns=16,
    )
    path = floats.write(release, tmp_path / "release" / "mixed", spelling)
    assert [str(finding) for finding in verify(path, source=release).findings] == []
    broken = copy_of(path)
    name = pick(broken, "o_proj", "weight_scale")
    replace(broken, {}, [name])
    assert "FP8 weights without a scale" in said(alone("CK303", broken)[1][0])


def test_parts_of_a_model_that_is_not_known_are_judged(stored: Callable[[str, str], Path], copy_of: CopyOf) -> None:
    """Headers need no family."""
    path = copy_of(stored("qwen3_moe", "nvfp4-modelopt"))
    edit_config(path, model_type="model_of_tomorrow", architectures=["ModelOfTomorrow"])
    half_the_scales(path)
    found = [finding for finding in verify(path).findings if finding.code == "CK303"]
    assert len(found) == 1
    assert "for the packed bytes" in found[0].hint
