"""Job and report files of witnesses are read as they were written, and every engine is registered whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckptkit.core.errors import UsageError
from ckptkit.verify.core.check import LOOKS_AT, NEEDS, WITNESSES, all_checks
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses.process.codec import load_record, save
from ckptkit.verify.witnesses.registry import ENGINES, live_engine, programs_not_asked, with_implied


class Place(NamedTuple):
    at: tuple[int, ...]
    main: bool


@dataclass(frozen=True)
class Inner:
    name: str
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outer:
    several: tuple[Inner, ...] | None
    named: Mapping[str, Sequence[Inner]]
    places: Mapping[str, tuple[Place, ...]]
    mixed: Sequence[tuple[int, Sequence[int]]]
    free: str | Sequence[Mapping[str, Any]]
    path: Path
    other: Path | None = None
    maybe: Inner | None = None


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    inner, places = Inner("a", (1.0, 2.5)), (Place((1, 2), True), Place((), False))
    value = Outer((inner,), {"n": [inner]}, {"p": places}, [(1, [2, 3])], [{"role": "user"}], Path("/a"))
    save(value, tmp_path / "file")
    assert load_record(Outer, tmp_path / "file") == value
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_every_engine_has_its_stage_option_and_checks() -> None:
    for engine in ENGINES:
        checks = [one for one in all_checks() if one.stage == engine.name]
        assert [one.code for one in checks] == [f"{engine.codes}{number}" for number in range(1, 9)]
        assert {one.needs for one in checks} == {(engine.name,)}
        assert (LOOKS_AT[engine.name], WITNESSES[engine.name]) == (engine.label, f"--against-{engine.name}")
        assert engine.name in NEEDS


@pytest.mark.parametrize(
    ("asked", "implied", "unasked"),
    [
        ({"update"}, {"update", "engine"}, ["Megatron", "vLLM"]),
        ({"release-resume"}, {"release-resume", "engine"}, ["Megatron", "vLLM"]),
        ({"logits"}, {"logits"}, ["Megatron", "SGLang", "vLLM"]),
        ({"logits", "megatron"}, {"logits", "megatron"}, ["SGLang", "vLLM"]),
        ({"vllm", "engine"}, {"vllm", "engine"}, ["Megatron", "SGLang"]),
    ],
)
def test_updates_imply_a_live_engine_and_logits_do_not(asked: set[str], implied: set[str], unasked: list[str]) -> None:
    found = with_implied(frozenset(asked))
    assert (found, programs_not_asked(found)) == (implied, unasked)


def test_the_engine_is_vllm_where_that_alone_is_asked() -> None:
    assert [live_engine(frozenset(one)).name for one in ({"engine"}, {"engine", "vllm"})] == ["sglang", "vllm"]
    with pytest.raises(UsageError, match="--engine"):
        VerifyOptions(against=frozenset({"update", "sglang", "vllm"}))
