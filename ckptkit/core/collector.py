"""Python's collector of reference cycles, and when it is only in the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module

_FROZEN_BY_PYTHON = gc.get_freeze_count()  # as it starts: nothing up to 3.11, some hundred objects in 3.12


@contextmanager
def uncollected() -> Iterator[None]:
    """No search for cycles in the block, or in the decorated function: a large plan is a million objects that stay, and a search looks at each.

    Nor right after it: what the block made counts as old, as if it had been looked through.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            # All that is young or frozen becomes old; so not where the program has frozen something itself.
            if gc.get_freeze_count() <= _FROZEN_BY_PYTHON:
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def import_apart(module: str) -> None:
    """Imports a module on a thread of its own, so that nothing of the caller is kept by it.

    `torch.fx.wrap`, which runs as torch's compiler and models are imported, leaves a cycle that holds every frame below it, and all that these
    will ever hold: a plan, until there is a search for cycles.
    """
    with ThreadPoolExecutor(1) as pool:
        pool.submit(import_module, module).result()
