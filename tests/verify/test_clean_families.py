"""Checks of files, keys and configs are silent on a sound checkpoint of every family, HF and Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import CASES, case

from ckptkit.api import convert
from verify.checks import all_checks, run_checks
from verify.run import LAUNCH, choose
from verify.subject import Subject


@pytest.mark.parametrize("name", CASES)
def test_a_sound_checkpoint_has_no_finding_and_nothing_is_skipped(name: str, tmp_path: Path) -> None:
    case.save(name, CASES[name], tmp_path / "hf", torch.bfloat16)
    convert(tmp_path / "hf", tmp_path / "megatron")
    for subject in (Subject(tmp_path / "hf"), Subject(tmp_path / "megatron", tmp_path / "hf")):
        headers = [one for one in all_checks() if one.code.startswith(("CK1", "CK7")) and not one.code.startswith(LAUNCH)]
        results, findings, _ = run_checks(subject, choose(subject, headers)[0])
        assert findings == []
        assert {result.status for result in results} == {"passed"}
