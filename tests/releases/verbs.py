"""Every verb that answers from headers, on one release: no finding but those that lie in the release."""

import gc
import json
import math
from contextlib import contextmanager

import pytest

from ckptkit.app.api import convert, inspect, model_arguments
from ckptkit.converters.registry import FAMILIES
from ckptkit.core.errors import UnknownModelError, UnsupportedError
from ckptkit.quant.ignore.lint import lint
from ckptkit.verify.launch.preflight import preflight
from releases.cards import MODELS as CARDS
from releases.header_only import write
from releases.record import load

# Those with the most tensors take as long as all others together, so a second process tests them.
LARGE = (
    "MiniMaxAI/MiniMax-M2.7",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "RedHatAI/Qwen3-30B-A3B-quantized.w4a16",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3.2",
    "deepseek-ai/DeepSeek-V4-Flash",
    "deepseek-ai/DeepSeek-V4-Pro",
    "moonshotai/Kimi-K2-Instruct",
    "moonshotai/Kimi-K2-Thinking",
    "moonshotai/Kimi-K2.5",
    "moonshotai/Kimi-K3",
    "zai-org/GLM-5.3-Flash-BF16",
)


def check_every_verb(model, root):
    """Writes the release into `root`, and fails at the first verb that finds something in it that is not there."""
    release = load(model)
    check_against_published_numbers(release)
    path = write(release, root / "release")
    with collecting_as_the_command_line_does():
        report = preflight(hf_checkpoint=path)
        assert [f"{one.code} {one.severity}" for one in report.findings] == release.findings.get("preflight", []), (
            "\n".join(map(str, report.findings[:5]))
        )
        assert report.status == "passed"
        if model not in CARDS:  # test_cards.py inspects and plans those
            facts = inspect(path)
            assert (facts["tensors"], facts["bytes"]) == (len(release.tensors_in_order), release.nbytes)
            check_conversion(path, root / "megatron")
        family = FAMILIES.get(release.config["model_type"])
        if family is not None and family.unwitnessed is None:
            text = release.config.get("text_config") or release.config
            assert model_arguments(path)["hidden_size"] == text["hidden_size"]
        if any(tensor.name.endswith(".weight_packed") for tensor in release.tensors_in_order):
            linted = [f"{one.kind} {one.severity}" for one in lint(path).findings if one.severity != "note"]
            assert linted == release.findings.get("lint", [])


def check_conversion(release, megatron):
    """Plans it; a release that no released Megatron loads only by names that are settled upstream."""
    family = FAMILIES.get(json.loads((release / "config.json").read_text())["model_type"])
    if family is None:
        with pytest.raises(UnknownModelError):
            convert(release, megatron, dry_run=True)
        return
    unwitnessed = family.unwitnessed
    if unwitnessed is not None and unwitnessed.names is None:
        with pytest.raises(UnsupportedError, match="published"):
            convert(release, megatron, dry_run=True, unwitnessed=True)
        return
    assert convert(release, megatron, dry_run=True, unwitnessed=unwitnessed is not None).tensors > 0
    assert not megatron.exists()


def check_against_published_numbers(release):
    assert len({tensor.name for tensor in release.tensors_in_order}) == len(release.tensors_in_order)
    elements = sum(
        math.prod(tensor.shape) for tensor in release.tensors_in_order if release.scales or "_scale" not in tensor.name
    )
    assert release.tensors in (None, len(release.tensors_in_order))
    assert release.total_size in (None, release.nbytes)
    assert release.parameters in (None, elements)


@contextmanager
def collecting_as_the_command_line_does():
    """Looks for garbage as seldom as `ckptkit` itself."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
