"""The Python of a witness: this one, or that of another environment, which needs no package of ckptkit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from ckptkit.core.errors import UsageError, words_of
from ckptkit.core.isolation import PACKAGES_HOME, start_python
from ckptkit.core.printable import one_line
from ckptkit.verify.witnesses.process.sandbox import environment

_SECONDS = 120  # for a busy machine with its packages on a network disk
_ABSENT = 3  # an exit code
# Prints the version of a package, or whether a module can be found.
_RELEASE = "from importlib.metadata import version; print(version(sys.argv[1]))"
_HAS = f"from importlib.util import find_spec; find_spec(sys.argv[1]) or sys.exit({_ABSENT})"
_PROGRAM = """
import sys
try:
    {}
except ModuleNotFoundError:  # as PackageNotFoundError is
    sys.exit({})
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python, and changes to the environment variables of a witness that runs in it."""

    path: str = sys.executable
    hidden: Collection[str] = ()  # removed variables
    variables: Mapping[str, str] = field(default_factory=dict)  # additional ones

    @property
    def is_external(self) -> bool:
        return self.path != sys.executable

    def environment(self, scratch: Path) -> dict[str, str]:
        """The variables of a witness. Another environment gets only ckptkit's own packages, from `scratch`."""
        variables = environment(**self.variables)
        if self.is_external:
            home = scratch / "path"  # has no package but ckptkit
            home.mkdir(exist_ok=True)
            if not (home / "ckptkit").exists():
                (home / "ckptkit").symlink_to(PACKAGES_HOME / "ckptkit")
            variables["PYTHONPATH"] = str(home)
        return {name: value for name, value in variables.items() if name not in self.hidden}

    def release(self, package: str) -> str | None:
        """The version of a package there, without import, or None. Raises UsageError for a Python that does not run."""
        if not self.is_external:
            with suppress(PackageNotFoundError):
                return version(package)
            return None
        output = self._ask(_RELEASE, package)
        return None if output is None else output.strip()

    def has(self, module: str) -> bool:
        """Whether a module can be found there. Only its parent packages are imported."""
        if not self.is_external:
            return find_spec(module) is not None
        return self._ask(_HAS, module) is not None

    def _ask(self, program: str, word: str) -> str | None:
        """The output of a short program there, or None for a missing package. Raises UsageError if it does not run."""
        variables = environment() | {"PYTHONPATH": ""}
        command = ["-c", _PROGRAM.format(program, _ABSENT), word]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        try:
            with (
                TemporaryDirectory(prefix="ckptkit-python-") as folder,
                start_python(command, Path(folder), variables, self.path, **pipes) as process,
            ):
                try:
                    output, errors = process.communicate(timeout=_SECONDS)
                finally:
                    process.kill()
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"{self.path} is not a working Python", words_of(error)) from error
        if process.returncode not in (0, _ABSENT):
            raise UsageError(f"{self.path} is not a working Python", one_line(errors)[-200:] or "it failed")
        return None if process.returncode else output


def python_of(program: str, given: Mapping[str, str]) -> str:
    """The absolute path, or the name in PATH, of a program's Python: `given`, its environment variable, or this one."""
    path = given.get(program) or os.environ.get(f"CKPTKIT_{program.upper()}_PYTHON") or sys.executable
    return os.path.abspath(path) if os.sep in path else path
