"""Plants a module of every name that Python may import, which notes that it ran and then gives way to the real one."""

import sys
from importlib.metadata import packages_distributions

# What is imported first, in place of the real one, tells it and steps aside, so that the run goes on.
_MODULE = """
import sys
with open({marks!r}, "a") as file:
    file.write(__name__ + " ")
here = __file__.rpartition("/")[0]
sys.path[:] = [one for one in sys.path if one not in ("", ".", here)]
sys.path_importer_cache.pop(here, None)
del sys.modules[__name__]
__import__(__name__)
"""
NAMES = sorted(
    name
    for name in {*sys.stdlib_module_names, *packages_distributions(), "ckptkit"}
    if name.isidentifier() and name not in sys.builtin_module_names
)


def plant(folder, marks):
    """Writes a module of each of `NAMES` into a folder; one that is imported writes its name into the file `marks`."""
    for name in NAMES:
        (folder / f"{name}.py").write_text(_MODULE.format(marks=str(marks)))


def ran(marks):
    return marks.read_text().split() if marks.exists() else []
