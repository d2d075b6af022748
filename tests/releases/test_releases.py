"""Published releases pass every verb that answers from headers, with no finding but those that lie in the release."""

from __future__ import annotations

from pathlib import Path

import pytest

from releases.record import load, models
from releases.verbs import LARGE, check_every_verb, text_config


@pytest.mark.parametrize("model", [model for model in models() if model not in LARGE])
def test_release_as_published_has_no_finding(model: str, tmp_path: Path) -> None:
    check_every_verb(model, tmp_path)


def test_records_are_of_many_kinds() -> None:
    """Sixty releases at least, among them each kind of model and of quantization."""
    releases = [load(model) for model in models()]
    kinds = {str(release.config["model_type"]) for release in releases}
    methods = {str((text_config(release).get("quantization_config") or {}).get("quant_method")) for release in releases}
    assert len(releases) >= 60
    assert len(kinds) >= 20
    assert methods == {"None", "fp8", "mxfp4", "compressed-tensors"}
