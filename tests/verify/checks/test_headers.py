"""CK102, CK106, CK107 and CK201: headers read as strictly as safetensors does, dtypes that models compute in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from support import models
from support.fixture_types import OnlyFinding, PathOf

from verify.run import verify

INDEX = "model.safetensors.index.json"
NAME = "model.norm.weight"


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Rewrites the header of the shard that holds NAME."""
    shard = path / str(json.loads((path / INDEX).read_text())["weight_map"][NAME])
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return shard


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("shape", [128.0], "128.0"),
        ("shape", ["128"], "'128'"),
        ("shape", [True, 128], "True"),
        ("dtype", "BF17", "dtype 'BF17'"),
        ("dtype", ["BF16"], "BF16"),
    ],
)
def test_an_entry_that_safetensors_refuses(key: str, value: Any, said: str, fresh: PathOf) -> None:
    path = fresh("qwen2-tied")
    shard = edit_header(path, lambda header: header[NAME].update({key: value}))
    with pytest.raises(SafetensorError), safe_open(shard, "pt"):
        pass
    found = [finding for finding in verify(path).findings if finding.tensor == NAME and finding.code == "CK102"]
    assert [finding.file for finding in found] == [str(shard)]
    assert said in found[0].actual


@pytest.mark.parametrize("value", [[], {"format": 1}, "pt"])
def test_metadata_that_safetensors_refuses(value: Any, fresh: PathOf, only: OnlyFinding) -> None:
    path = fresh("qwen2-tied")
    shard = edit_header(path, lambda header: header.update({"__metadata__": value}))
    with pytest.raises(SafetensorError), safe_open(shard, "pt"):
        pass
    finding = only(verify(path))
    assert (finding.code, finding.file) == ("CK102", str(shard))
    assert "__metadata__" in finding.expected


@pytest.mark.parametrize(
    "change", [lambda header: header.pop("__metadata__"), lambda header: header.update({"__metadata__": None})]
)
def test_metadata_that_it_takes(change: Callable[[dict[str, Any]], None], fresh: PathOf) -> None:
    path = fresh("qwen2-tied")
    edit_header(path, change)
    assert verify(path).findings == []


def test_a_header_nested_too_deeply(fresh: PathOf, only: OnlyFinding) -> None:
    path = fresh("qwen2-tied")
    shard = edit_header(path, lambda header: None)
    text = b"[" * 200_000
    shard.write_bytes(len(text).to_bytes(8, "little") + text)
    finding = only(verify(path))
    assert (finding.code, finding.file) == ("CK102", str(shard))


def set_total(path: Path) -> None:
    content = json.loads((path / INDEX).read_text())
    content["metadata"]["total_size"] = sum(tensor.nbytes for tensor in models.tensors(path).values())
    (path / INDEX).write_text(json.dumps(content))


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float64, torch.float8_e4m3fn])
def test_weights_in_a_dtype_that_nothing_computes_in(dtype: torch.dtype, fresh: PathOf) -> None:
    path = fresh("qwen2-tied")
    for layer in range(12):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        old = models.tensors(path)[name]
        models.edit(path, name, torch.arange(old.numel()).reshape(old.shape).mul(layer + 1).remainder(97).to(dtype))
    set_total(path)
    report = verify(path)
    found = [(finding.code, finding.tensor, finding.actual, finding.severity) for finding in report.findings]
    assert found == [("CK107", "model.layers.{0..11}.mlp.up_proj.weight", str(dtype).removeprefix("torch."), "error")]
    assert next(check.status for check in report.checks if check.code == "CK204") == "passed"


def test_eight_bits_that_the_config_announces(fresh: PathOf) -> None:
    path = fresh("qwen2-tied")
    for layer in range(12):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        models.edit(path, name, models.tensors(path)[name].to(torch.float8_e4m3fn))
    set_total(path)
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"quantization_config": {"quant_method": "fp8"}}))
    # The dtype is right; that no scale is there, and that gate is in BF16, is for others to say.
    codes = {finding.code for finding in verify(path).findings}
    assert "CK107" not in codes
    assert {"CK303", "CK306"} <= codes


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_config_of_another_dtype_is_a_warning(key: str, fresh: PathOf, only: OnlyFinding) -> None:
    path = fresh("qwen2-tied")
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {key: "float16"}))
    finding = only(verify(path))
    assert (finding.code, finding.severity) == ("CK107", "warning")
    assert (finding.expected, finding.actual) == (f"{key} bfloat16, as most weights are", f"{key} float16")


@pytest.mark.parametrize("metadata", [{"total_size": 5}, {}])
def test_a_total_size_does_not_hide_values(metadata: dict[str, int], fresh: PathOf) -> None:
    path, name = fresh("qwen2-tied"), "model.layers.4.mlp.up_proj.weight"
    models.edit(path, name, torch.zeros_like(models.tensors(path)[name]))
    content = json.loads((path / INDEX).read_text())
    (path / INDEX).write_text(json.dumps(content | {"metadata": metadata}))
    found = verify(path).findings
    assert [(finding.code, finding.severity) for finding in found] == [("CK106", "warning"), ("CK205", "error")]


def test_a_file_of_which_nothing_can_be_read_is_one_finding(fresh_megatron: PathOf, only: OnlyFinding) -> None:
    path = fresh_megatron("qwen2-tied")
    file = path / "release" / "__0_0.distcp"
    file.write_bytes(b"\0" * file.stat().st_size)
    report = verify(path, source=path)
    finding = only(report)
    assert (finding.code, finding.actual.startswith(f"{file}: "), finding.count) == ("CK201", True, 146)
    reasons = {check.code: check.reason for check in report.checks if check.status == "skipped"}
    assert set(reasons) == {f"CK20{digit}" for digit in range(2, 10)}
    assert all("CK201" in (reason or "") for reason in reasons.values())
