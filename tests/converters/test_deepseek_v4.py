"""DeepSeek-V4: the names, dtypes and formats of its releases, and saves that are others."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import UNWITNESSED
from families.case import save
from mutations.edits import edit_config, replace
from support import floats, models
from transformers import AutoModelForCausalLM, PreTrainedModel

from ckptkit.app.api import inspect
from ckptkit.verify.run import verify

NAME = "deepseek_v4"
CASE = UNWITNESSED[NAME]
TABLE = "layers.1.ffn.gate.tid2eid"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PreTrainedModel, Path]]:
    """transformers' model, and the release of it."""
    root = tmp_path_factory.mktemp("v4") / "release"
    model, _ = save(NAME, CASE, root, torch.bfloat16)
    yield model, root
    shutil.rmtree(root)


@pytest.fixture
def release(saved: tuple[PreTrainedModel, Path]) -> Path:
    return saved[1]


@pytest.fixture(scope="module")
def published(saved: tuple[PreTrainedModel, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release with its weights in FP8 and MXFP4."""
    return floats.write(saved[1], tmp_path_factory.mktemp("v4") / "published", floats.DEEPSEEK_V4, is_quantized)


def is_quantized(name: str) -> bool:
    return floats.V4_QUANTIZED.fullmatch(name) is not None


def findings(path: Path, **options: Any) -> list[tuple[str, str, str]]:
    """Code, severity and tensor of each finding."""
    return [(one.code, one.severity, str(one.tensor)) for one in verify(path, **options).findings]


def test_transformers_finds_every_tensor_of_the_release_where_its_class_wants_it(
    saved: tuple[PreTrainedModel, Path],
) -> None:
    """All but the multi-token prediction layer, which it leaves out."""
    model, release = saved
    loaded, info = AutoModelForCausalLM.from_pretrained(release, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert {name.split(".")[0] for name in info["unexpected_keys"]} <= {"mtp"}
    found = loaded.state_dict()
    differing = [name for name, tensor in model.state_dict().items() if not found[name].equal(tensor.to(found[name]))]
    assert {name.rpartition(".")[2] for name in differing} == {"e_score_correction_bias"}  # float32 in the release


def test_formats_of_the_release_are_read_and_found_sound(release: Path, published: Path) -> None:
    text = inspect(published)["quantization"]
    assert re.search(r"FP8 .* 128 x 128\): 111 tensors and MXFP4 .*: 468 tensors", text), text
    assert findings(published) == []
    assert findings(published, source=release) == []
    assert findings(release, source=release) == []


@pytest.mark.parametrize(
    ("stated", "expected"), [("fp4", []), ("fp8", ["CK303"])], ids=["as the experts are", "as they are not"]
)
def test_the_format_of_the_experts_that_config_json_states(
    published: Path, tmp_path: Path, stated: str, expected: list[str]
) -> None:
    path = shutil.copytree(published, tmp_path / "made")
    edit_config(path, expert_dtype=stated)
    assert sorted({code for code, *_ in findings(path)}) == expected


def test_experts_in_fp8_under_a_config_that_says_fp4_are_found(release: Path, tmp_path: Path) -> None:
    """vLLM builds experts by `expert_dtype`, SGLang by the dtype of the first one."""
    all_fp8 = floats.Spelling(_in_fp8, floats.DEEPSEEK_V4.config)
    path = floats.write(release, tmp_path / "fp8", all_fp8, is_quantized)
    assert findings(path) == []
    edit_config(path, expert_dtype="fp4")
    assert {code for code, *_ in findings(path)} == {"CK303"}


def _in_fp8(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, scale = floats.fp8_block(weight, powers=True)
    return {f"{module}.weight": codes, f"{module}.scale": scale}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (torch.zeros_like, ("CK205", "error")),
        (lambda table: None, ("CK104", "error")),
        (lambda table: table.bfloat16(), ("CK107", "error")),
        (lambda table: torch.where(table == 11, 12, table), ("CK215", "error")),
        (lambda table: table - 1, ("CK215", "error")),
        (lambda table: table.int(), ("CK203", "error")),
        (lambda table: table.roll(1, 0), ("CK202", "error")),
    ],
    ids=["zeros", "lost", "bfloat16", "no such expert", "less than none", "int32", "rows moved"],
)
def test_a_wrong_table_is_found(release: Path, tmp_path: Path, change: Any, expected: tuple[str, str]) -> None:
    path = shutil.copytree(release, tmp_path / "made")
    models.edit(path, TABLE, change(models.tensors(path)[TABLE]))
    assert (*expected, TABLE) in findings(path, source=release)
    alone = {code for code, *_ in findings(path)}
    assert (expected[0] in alone) == (expected[0] in ("CK104", "CK107", "CK205", "CK215"))


def test_tables_that_repeat_in_every_layer_are_not_suspicious(release: Path, tmp_path: Path) -> None:
    """SGLang's own default is the same in all layers; nothing says that releases differ there."""
    path = shutil.copytree(release, tmp_path / "made")
    table = models.tensors(path)[TABLE]
    replace(path, {f"layers.{layer}.ffn.gate.tid2eid": table for layer in range(3)})
    assert findings(path) == []
