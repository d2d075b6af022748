"""What Python's collector of cycles looks at, and what an import keeps."""

from __future__ import annotations

import gc
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import python

from ckptkit.app.api import quantize
from ckptkit.core.collector import import_apart, uncollected
from quant.formats.scheme import QuantScheme


class _Thing:
    """What a weak reference can tell of."""


@pytest.fixture
def keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that keeps the frames that it is imported from, as torch.fx does."""
    (tmp_path / "keeps_frames.py").write_text(
        textwrap.dedent("""
            import inspect

            def wrap():
                frame = inspect.currentframe()

            wrap()
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "keeps_frames"
    sys.modules.pop("keeps_frames", None)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    gc.collect()
    yield
    gc.enable()


def test_what_a_block_made_is_old_afterwards() -> None:
    with uncollected():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
        assert not any(one is made for one in gc.get_objects(generation=2))
    assert gc.isenabled()
    assert any(one is made for one in gc.get_objects(generation=2))
    assert not gc.get_freeze_count()


def test_inside_another_block_nothing_changes() -> None:
    with uncollected():
        with uncollected():
            made = [[]]
        assert not gc.isenabled()
        assert not any(one is made for one in gc.get_objects(generation=2))


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with uncollected():
            pass
        assert gc.get_freeze_count() == before
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def _ours(module: str, *, apart: bool) -> weakref.ref[_Thing]:
    """Imports a module in a frame that holds a thing, and returns."""
    thing = _Thing()
    if apart:
        import_apart(module)
    else:
        __import__(module)
    return weakref.ref(thing)


def test_an_import_keeps_what_its_caller_holds(keeping: str) -> None:
    with uncollected():
        assert _ours(keeping, apart=False)() is not None


def test_an_import_apart_keeps_nothing(keeping: str) -> None:
    with uncollected():
        assert _ours(keeping, apart=True)() is None
    assert keeping in sys.modules


def test_an_import_apart_says_what_is_wrong() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        import_apart("no_such_module_anywhere")


# Plans a job, forgets the plan, and counts what is left of it without a search for cycles.
LEFT = """
import gc, sys
gc.disable()
import ckptkit
from quant.formats.scheme import QuantScheme
*paths, quantized = sys.argv[1:]
ckptkit.convert(*paths, dry_run=True, quantize=QuantScheme(32, "qmax7") if quantized == "yes" else None)
print("compressed_tensors" in sys.modules, sum(type(one).__name__ == "Step" for one in gc.get_objects()))
"""


@pytest.mark.parametrize("to_int4", [False, True], ids=["INT4 to Megatron", "Megatron to INT4"])
def test_nothing_is_left_of_a_plan(
    releases: Callable[..., Path], converted: Callable[..., Path], tmp_path: Path, to_int4: bool
) -> None:
    if to_int4:
        source = converted("qwen2-untied")
    else:
        source = tmp_path / "int4"
        quantize(releases("qwen2-untied"), source, QuantScheme(32, "qmax7"))
    done = python("-c", LEFT, source, tmp_path / "target", "yes" if to_int4 else "no")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 0\n", "")
