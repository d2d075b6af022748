"""Starts Python programs that import installed packages only, and knows which variables hold secrets.

A checkpoint's directory is often the current one, and Python puts that first on the path of a program that it starts
with `-m` or `-c`: a `torch.py` next to the weights would run in its place. So every Python process that ckptkit starts
is started here.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import without_credentials

PACKAGES_HOME = Path(__file__).resolve().parents[2]  # the directory that ckptkit is in
_NUMBA = ".numba_config.yaml"
# What variables are called that hold a password, a key or a token; numbers of tokens are none.
_SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(API|ACCESS|PRIVATE|SSH|SIGNING|ENCRYPTION)KEY|WEBHOOK"
    r"|(^|_)(KEYS?|OAUTH\w*|AUTH|AUTHORIZATION|BEARER|COOKIES?|SESSION|DSN|JWT|PAT|PASS|PRIVATE|SAS|CONNECTION_STRING)(_|$)"
    r"|(?<!MAX_)(?<!MIN_)(?<!NUM_)TOKEN\d*(_(?!LEN|NUM|COUNT|LIMIT|BUDGET|PER)|$)|_PWD$",
    re.IGNORECASE,
)
# What a witness is not given either: it is offline, and needs no account. A list of what other programs may see would
# lack what some driver or cluster needs.
_ACCOUNT = re.compile(
    r"^(AWS|AZURE|GOOGLE|GCP|OPENAI|ANTHROPIC|WANDB|GITHUB|GITLAB|SSH|KUBERNETES|FSSPEC)_|_URL$|_PROXY$", re.IGNORECASE
)
HIDDEN = "a variable that may hold a secret"


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable holds a password, key or token, by its name or a URL; HIDDEN in place of it counts."""
    return value == HIDDEN or _SECRET.search(name) is not None or without_credentials(value) != value


def is_withheld(name: str, value: str) -> bool:
    """Whether a witness does not see a variable: secrets, and those of accounts, addresses and proxies."""
    return is_secret(name, value) or _ACCOUNT.search(name) is not None


def isolated(variables: Mapping[str, str], *packages: Path) -> dict[str, str]:
    """The variables for a Python process and all that it starts: none of them imports from the current directory.

    PYTHONPATH becomes `packages` and those of its directories that are absolute and not the current one. Python before
    3.11 does not know PYTHONSAFEPATH: what it imports from is the directory that it is started in, an empty one.
    """
    given = variables.get("PYTHONPATH", "").split(os.pathsep)
    here = {part for part in given if os.path.exists(part) and os.path.samefile(part, os.curdir)}
    path = [*map(str, packages), *(part for part in given if os.path.isabs(part) and part not in here)]
    return {**variables, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path)}


def offline() -> dict[str, str]:
    """This process's variables, `isolated` and without secrets, for a process that asks the network for nothing."""
    public = {name: value for name, value in os.environ.items() if not is_withheld(name, value)}
    # A token may also lie in the user's home directory.
    hub = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    return isolated(public, PACKAGES_HOME) | hub


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent, the process `parent`, ends (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(1)


def refuse_numba_settings() -> None:
    """Raises CkptkitError where Numba would take settings, such as a cache of compiled code, from where the user is."""
    if os.path.lexists(_NUMBA):
        raise CkptkitError(
            f"{os.path.abspath(_NUMBA)} is in the current directory, from which Numba would read it: it can name code "
            "that Numba then runs",
            "run from another directory",
        )


def start_python(
    words: Sequence[str], folder: Path, variables: Mapping[str, str], python: str = sys.executable, **streams: Any
) -> subprocess.Popen[Any]:
    """Starts `PYTHON WORDS...` without standard input. `folder` is ckptkit's own, `variables` are `isolated`."""
    assert "PYTHONSAFEPATH" in variables
    return subprocess.Popen([python, *words], cwd=folder, env=variables, stdin=subprocess.DEVNULL, **streams)


@contextmanager
def isolated_in(folder: Path, **more: str) -> Iterator[None]:
    """Isolates what other libraries start, in `folder` with `more` variables; for all threads of this process."""
    before = dict(os.environ)
    here = os.open(os.curdir, os.O_PATH | os.O_DIRECTORY)
    try:
        os.environ.update(isolated(before, PACKAGES_HOME), **more)
        os.chdir(folder)
        yield
    finally:
        os.fchdir(here)
        os.close(here)
        os.environ.clear()
        os.environ.update(before)
