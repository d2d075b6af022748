"""What `verify` says of weights in FP8, MXFP8, MXFP4 and NVFP4: silent where all is sound, and each mutation found."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import floats
from support.fixture_types import PathOf

from verify.run import verify

MODELS = ("qwen2-untied", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", floats.SPELLINGS)
def test_sound_weights_have_no_finding(name: str, model: str, releases: PathOf, tmp_path: Path) -> None:
    path = floats.write(releases(model), tmp_path / "floats", floats.SPELLINGS[name])
    report = verify(path, source=releases(model))
    assert [str(finding) for finding in report.findings] == []
    assert report.status == "passed"
    checks = {check.code: check for check in report.checks}
    for code in ("CK301", "CK303", "CK304", "CK305", "CK306", "CK308"):
        assert (code, checks[code].status) == (code, "passed")
        assert checks[code].tensors_compared
