"""Names that run code in Python's own unpickler, by the lists of scanners, are inert or refused here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import gadget_pickles
from support.processes import python


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What reading all of them did, in a process of its own: a hook of Python's audit cannot be removed again."""
    done = python("-W", "error", gadget_pickles.__file__)
    assert (done.returncode, done.stderr) == (0, "")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_the_list_has_what_every_scanner_knows() -> None:
    known = set(gadget_pickles.names())
    assert {("os", "run"), ("posix", "run"), ("subprocess", "run"), ("builtins", "eval")} <= known
    assert len(known) > 150


def test_no_gadget_imports_or_runs_anything(found: dict[str, Any]) -> None:
    assert found["imported"] == []
    first, *_ = found["events"]  # the import that the process itself makes at its end, and nothing before it
    assert first == "pickle.find_class"


def test_every_gadget_is_an_inert_record_or_refused(found: dict[str, Any]) -> None:
    assert found["odd"] == []
    # INST and both forms of OBJ are instructions of protocol 1, which are refused whatever they name.
    assert (found["read"], found["refused"]) == (8 * len(gadget_pickles.names()), 3 * len(gadget_pickles.names()))
