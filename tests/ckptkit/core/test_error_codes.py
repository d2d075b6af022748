"""Each kind of error has a code that a program can branch on, also after it came from another process."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from ckptkit.app.run_options import parse_size
from ckptkit.core.errors import (
    CkptkitError,
    DamagedError,
    ErrorCode,
    FinalError,
    MissingDependencyError,
    MissingError,
    UnknownModelError,
    UnsupportedError,
    UsageError,
)
from ckptkit.formats.detect import TRACKER, locate, refuse_hf, tracked_iteration
from ckptkit.formats.hf.reader import read_json
from ckptkit.formats.hf.shard import read_shard
from ckptkit.formats.torch_dist.reader import read_metadata
from ckptkit.storage.fingerprint import ChangedError
from ckptkit.storage.url import Store, StoreError
from ckptkit.verify.options import MegatronOptions
from ckptkit.verify.weight_sync.loaded import DiffersError


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (CkptkitError, "other"),
        (UsageError, "usage"),
        (UnsupportedError, "unsupported"),
        (UnknownModelError, "unsupported"),
        (MissingDependencyError, "missing-dependency"),
        (MissingError, "missing"),
        (DamagedError, "damaged"),
        (StoreError, "storage"),
        (ChangedError, "changed"),
        (DiffersError, "mismatch"),
        (FinalError, "other"),
    ],
)
def test_error_kind_has_its_code_also_when_pickled(kind: type[CkptkitError], code: str) -> None:
    assert pickle.loads(pickle.dumps(kind("what", "next"))).code == code


def test_given_code_survives_pickling_and_becoming_final() -> None:
    given = CkptkitError("what", "next", ["one"], code="storage")
    final = FinalError.of(pickle.loads(pickle.dumps(given)))
    assert (final.code, final.hint, final.details, final.resumable) == ("storage", "next", ("one",), False)


def test_missing_library_of_a_store_is_a_missing_dependency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)  # no other test loads it
    assert code_when(Store("az://container/folder").top) == "missing-dependency"


def code_when(action: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(CkptkitError) as caught:
        action(*arguments)
    return caught.value.code


def test_what_is_not_there_is_missing(tmp_path: Path) -> None:
    assert code_when(locate, tmp_path / "nowhere") == "missing"
    assert code_when(locate, tmp_path) == "missing"
    assert code_when(read_json, tmp_path / "config.json") == "missing"
    assert code_when(read_shard, tmp_path / "model.safetensors") == "missing"
    assert code_when(read_metadata, tmp_path) == "missing"
    (tmp_path / TRACKER).write_text("7")
    assert code_when(tracked_iteration, tmp_path) == "missing"
    (tmp_path / "config.json").mkdir()
    assert code_when(read_json, tmp_path / "config.json") == "other"  # neither missing nor damaged


def test_what_is_there_and_cut_short_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ')
    (tmp_path / "model.safetensors").write_bytes(b"\x40")
    (tmp_path / ".metadata").write_bytes(b"\x80\x04")
    (tmp_path / TRACKER).write_text("seven")
    assert code_when(read_json, tmp_path / "config.json") == "damaged"
    assert code_when(read_shard, tmp_path / "model.safetensors") == "damaged"
    assert code_when(read_metadata, tmp_path) == "damaged"
    assert code_when(tracked_iteration, tmp_path) == "damaged"


def test_a_wrong_option_and_one_without_effect_are_usage_errors(tmp_path: Path) -> None:
    assert code_when(parse_size, "much") == "usage"
    assert code_when(refuse_hf, tmp_path, tmp_path) == "usage"
    assert code_when(MegatronOptions(cp=2).refuse) == "usage"


def test_docs_list_every_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "convert.md").read_text()
    text = page.partition("## Errors")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE) == [*get_args(ErrorCode)]
