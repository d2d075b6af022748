"""Each kind of error has a code that a program can branch on, also after it came from another process."""

from __future__ import annotations

import pickle
import sys

import pytest

from ckptkit.app.job.loaded import DiffersError
from ckptkit.app.run_options import parse_size
from ckptkit.core.errors import (
    CkptkitError,
    FinalError,
    MissingDependencyError,
    UnknownModelError,
    UnsupportedError,
    UsageError,
)
from ckptkit.storage.fingerprint import ChangedError
from ckptkit.storage.url import Store, StoreError


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (CkptkitError, "other"),
        (UsageError, "usage"),
        (UnsupportedError, "unsupported"),
        (UnknownModelError, "unsupported"),
        (MissingDependencyError, "missing-dependency"),
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


def test_wrong_option_is_a_usage_error() -> None:
    with pytest.raises(UsageError) as caught:
        parse_size("much")
    assert caught.value.code == "usage"


def test_missing_library_of_a_store_is_a_missing_dependency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)  # no other test loads it
    with pytest.raises(StoreError) as caught:
        Store("az://container/folder").top()
    assert caught.value.code == "missing-dependency"
