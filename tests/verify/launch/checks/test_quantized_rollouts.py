"""CK749 of slime and miles; `test_settings_refused.py` has that of verl and NeMo-RL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.check_examples import hold_example
from support.launch_scripts import quantized_launch

from verify.launch.preflight import preflight
from verify.report import Report

BLOCKS, SQUARES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "NVTE_NVFP4_DISABLE_2D_QUANTIZATION"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
IN_BLOCKS = "--fp8-format e4m3 --fp8-recipe blockwise"
IN_NVFP4 = "--fp4-format e2m1 --fp4-recipe nvfp4"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the environment of `preflight` count too."""
    for name in (BLOCKS, SQUARES):
        monkeypatch.delenv(name, raising=False)


def launched(
    folder: Path, quantization: Mapping[str, Any] | None, options: str, **variables: str
) -> tuple[list[str], list[str]]:
    """What CK749 finds and notes of a launch with these options and variables, which ray hands on."""
    report = reported(folder, quantization, options, **variables)
    found = [f"{one.severity}: {one.expected}; {one.actual}" for one in report.findings if one.code == "CK749"]
    return found, [note for note in report.facts.get("notes", []) if note.startswith("NVTE_")]


def reported(folder: Path, quantization: Mapping[str, Any] | None, options: str, **variables: str) -> Report:
    added = "".join(f'\\"{name}\\": \\"{value}\\", ' for name, value in variables.items())

    def change(text: str) -> str:
        given = text.replace('\\"NCCL_NVLS_ENABLE\\"', added + '\\"NCCL_NVLS_ENABLE\\"')
        return given.replace("--num-rollout 100", f"--num-rollout 100 {options}")

    return preflight(script=quantized_launch(folder, "qwen3", quantization, change))


@pytest.mark.parametrize(
    ("quantization", "options", "variables"),
    [
        (FP8, IN_BLOCKS, {BLOCKS: "1"}),
        # slime and miles set it themselves.
        (FP8, IN_BLOCKS, {}),
        (FP8, "", {BLOCKS: "0"}),
        (None, IN_BLOCKS, {BLOCKS: "0"}),
        (FP8, IN_BLOCKS.replace("blockwise", "mxfp8"), {BLOCKS: "0"}),
        (NVFP4, IN_NVFP4, {SQUARES: "1"}),
        (NVFP4, "", {}),
    ],
)
def test_scales_alike_are_right(
    quantization: Mapping[str, Any] | None, options: str, variables: Mapping[str, str], tmp_path: Path
) -> None:
    assert launched(tmp_path, quantization, options, **variables) == ([], [])


def test_what_the_generation_of_the_gpu_decides_is_noted(tmp_path: Path) -> None:
    """TE wants powers of two on Blackwell alone; slime and miles send them there too, miles wherever it is told so."""
    found, (note,) = launched(tmp_path / "a", FP8, IN_BLOCKS, **{BLOCKS: "0"})
    assert (found, note.partition(" (")[0]) == ([], f"{BLOCKS}=0")
    found, (note,) = launched(tmp_path / "b", {**FP8, "scale_fmt": "ue8m0"}, IN_BLOCKS, **{BLOCKS: "1"})
    assert (found, "although scale_fmt of the checkpoint" in note) == ([], True)
    environment = f'{IN_BLOCKS} --train-env-vars \'{{"{BLOCKS}": "0"}}\''
    found, (note,) = launched(tmp_path / "c", FP8, environment, **{BLOCKS: "1"})
    assert (found, note.startswith(f"{BLOCKS}=0 (")) == ([], True)


def test_nvfp4_in_squares_is_found(tmp_path: Path) -> None:
    report = reported(tmp_path, NVFP4, IN_NVFP4)
    (found,) = [one for one in report.findings if one.code == "CK749"]
    assert found.severity == "warning"
    hold_example("CK749", found)


@pytest.mark.parametrize(
    ("trainer", "engine", "agree"),
    [
        (("NVTE_NVFP4_4OVER6", "all"), ("FLASHINFER_NVFP4_4OVER6", "1"), True),
        (("NVTE_NVFP4_4OVER6", "weights"), ("FLASHINFER_NVFP4_4OVER6", "0"), True),
        (("NVTE_NVFP4_4OVER6", "none"), ("FLASHINFER_NVFP4_4OVER6", "1"), False),
        (("NVTE_NVFP4_4OVER6_ERR_MODE", "MSE"), ("FLASHINFER_NVFP4_4OVER6_ERR_MODE", "MSE"), True),
        (("NVTE_NVFP4_4OVER6_ERR_MODE", "MSE"), ("FLASHINFER_NVFP4_4OVER6_ERR_MODE", "MAE"), False),
        (
            ("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "1"),
            ("SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION", "1"),
            True,
        ),
        (
            ("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "0"),
            ("SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION", "1"),
            False,
        ),
    ],
)
def test_variables_of_trainer_and_engine_that_contradict_are_found(
    trainer: tuple[str, str], engine: tuple[str, str], agree: bool, tmp_path: Path
) -> None:
    """The pairs that miles' documents set together, in its `docs/advanced/low-precision.md`."""
    given = dict([(SQUARES, "1"), trainer, engine])
    found, notes = launched(tmp_path, NVFP4, IN_NVFP4, **given)
    assert (len(found), notes) == (0 if agree else 1, [])
    assert all(one.startswith(f"warning: {trainer[0]}=") and "=".join(engine) in one for one in found)
    alone = dict([(SQUARES, "1"), trainer])
    assert launched(tmp_path / "alone", NVFP4, IN_NVFP4, **alone) == ([], [])
