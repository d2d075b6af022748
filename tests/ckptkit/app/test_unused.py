"""An option that would do nothing is refused: whoever gives one believes that it does something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.fixture_types import PathOf

from ckptkit.app import api
from ckptkit.app.api import convert
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from verify.run import verify


def run(*arguments: str | Path) -> str:
    """Runs the command line. Returns what it printed."""
    return CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False).output


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--like", {"like": "absent"}),
        ("--tp", {"tp": 4}),
        ("--reader", {"readers": ("sglang",)}),
        ("--device", {"device": "cuda"}),
    ],
)
@pytest.mark.parametrize("direction", ["to Megatron", "to HF"])
def test_int4_argument_without_a_scheme_is_refused(
    option: str, given: dict[str, Any], direction: str, releases: PathOf, converted: PathOf, tmp_path: Path
) -> None:
    source = (releases if direction == "to Megatron" else converted)("qwen2-tied")
    with pytest.raises(CkptkitError, match=f"^{option} is about quantized weights"):
        convert(source, tmp_path / "out", **given)
    assert list(tmp_path.iterdir()) == []


def test_quantizing_into_or_from_megatron_names_the_command_with_the_scheme_that_was_asked_for(
    releases: PathOf, converted: PathOf, tmp_path: Path
) -> None:
    for verb, source, option in (("convert", releases, "--quantize"), ("quantize", converted, "--scheme")):
        with pytest.raises(CkptkitError) as error:
            run(verb, source("qwen2-tied"), tmp_path / "out", option, "fp8-block")
        other = "`ckptkit quantize SRC DST --scheme" if verb == "convert" else "`ckptkit convert SRC DST --quantize"
        assert f"{other} fp8-block`" in (error.value.hint or "")


def test_dialect_on_the_way_to_quantized_hf_is_refused(converted: PathOf, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="--dialect writes a Megatron checkpoint, which holds no INT4 weights"):
        run("convert", converted("qwen2-tied"), tmp_path / "out", "--dialect", "mcore", "--quantize", "w4a16")


@pytest.mark.parametrize("verb", ["convert", "inspect", "arguments", "manifest", "verify", "verify with a source"])
def test_hf_where_nothing_is_megatron_is_refused(verb: str, releases: PathOf, tmp_path: Path) -> None:
    model = releases("qwen2-tied")
    calls: dict[str, Callable[[], object]] = {
        "convert": lambda: convert(model, tmp_path / "out", hf=model),
        "inspect": lambda: api.inspect(model, hf=model),
        "arguments": lambda: api.model_arguments(model, hf=model),
        "manifest": lambda: api.make_manifest(model, tmp_path / "out.json", hf=model),
        "verify": lambda: verify(model, hf=model),
        "verify with a source": lambda: verify(model, source=model, hf=model),
    }
    with pytest.raises(CkptkitError, match="^--hf (is for the way back|gives the config of a Megatron checkpoint)"):
        calls[verb]()
    assert list(tmp_path.iterdir()) == []


def test_dtype_and_shard_size_beside_quantize_have_an_effect(converted: PathOf, tmp_path: Path) -> None:
    words = ["--quantize", "w4a16", "--group-size", "32"]
    run("convert", converted("qwen2-tied"), tmp_path / "plain", *words)
    run("convert", converted("qwen2-tied"), tmp_path / "other", *words, "--dtype", "float16", "--max-shard-size", "1MB")
    dtypes = [set(api.inspect(tmp_path / name)["dtypes"]) for name in ("plain", "other")]
    assert dtypes == [{"bfloat16", "int32", "int64"}, {"float16", "int32", "int64"}]
    files = [len(list((tmp_path / name).glob("*.safetensors"))) for name in ("plain", "other")]
    assert files[0] != files[1]
