"""Starts Python programs that import only installed packages, and identifies variables with secrets.

With `-m` or `-c`, Python puts the current directory, often that of a checkpoint, first on the import path: it would
import a `torch.py` next to the weights. So every Python process of ckptkit is started here.
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

PACKAGES_HOME = Path(__file__).resolve().parents[2]  # the directory that contains ckptkit
_NUMBA = ".numba_config.yaml"
# Names of variables with a password, a key or a token, but not with a number of tokens.
_SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(API|ACCESS|PRIVATE|SSH|SIGNING|ENCRYPTION)KEY|WEBHOOK"
    r"|(^|_)(KEYS?|OAUTH\w*|AUTH|AUTHORIZATION|BEARER|COOKIES?|SESSION|DSN|JWT|PAT|PASS|PRIVATE|SAS|CONNECTION_STRING)(_|$)"
    r"|(?<!MAX_)(?<!MIN_)(?<!NUM_)TOKEN\d*(_(?!LEN|NUM|COUNT|LIMIT|BUDGET|PER)|$)|_PWD$",
    re.IGNORECASE,
)
# Also withheld from witnesses, which are offline and need no account. A list of allowed variables instead would lack
# those of some driver or cluster.
_ACCOUNT = re.compile(
    r"^(AWS|AZURE|GOOGLE|GCP|OPENAI|ANTHROPIC|WANDB|GITHUB|GITLAB|SSH|KUBERNETES|FSSPEC)_|_URL$|_PROXY$", re.IGNORECASE
)
HIDDEN = "a variable that may hold a secret"


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable contains a password, key or token, by its name, or a URL with one, or HIDDEN instead."""
    return value == HIDDEN or _SECRET.search(name) is not None or without_credentials(value) != value


def is_withheld(name: str, value: str) -> bool:
    """Whether a variable is withheld from witnesses: secrets, accounts, addresses and proxies."""
    return is_secret(name, value) or _ACCOUNT.search(name) is not None


def isolated(variables: Mapping[str, str], *packages: Path) -> dict[str, str]:
    """Variables for a Python process and its children that prevent imports from the current directory.

    PYTHONPATH becomes `packages` and its absolute directories except the current one. Python before 3.11 ignores
    PYTHONSAFEPATH, so processes are also started in an empty directory.
    """
    old = variables.get("PYTHONPATH", "").split(os.pathsep)
    current = {part for part in old if os.path.exists(part) and os.path.samefile(part, os.curdir)}
    path = [*map(str, packages), *(part for part in old if os.path.isabs(part) and part not in current)]
    return {**variables, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path)}


def offline() -> dict[str, str]:
    """This process's variables, `isolated` and without secrets, for a process without network access."""
    public = {name: value for name, value in os.environ.items() if not is_withheld(name, value)}
    # The user's home directory may also contain a token.
    hub = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    return isolated(public, PACKAGES_HOME) | hub


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the process `parent`, its parent, ends (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # it has already ended
        os._exit(1)


def refuse_numba_settings() -> None:
    """Raises CkptkitError if Numba would read settings from the current directory, which can name code to run."""
    if os.path.lexists(_NUMBA):
        message = f"{os.path.abspath(_NUMBA)} is in the current directory and may contain code that Numba would run"
        raise CkptkitError(message, "run from another directory")


def start_python(
    words: Sequence[str], folder: Path, variables: Mapping[str, str], python: str = sys.executable, **streams: Any
) -> subprocess.Popen[Any]:
    """Starts `PYTHON WORDS...` without standard input, in a folder of ckptkit, with `isolated` variables."""
    assert "PYTHONSAFEPATH" in variables
    return subprocess.Popen([python, *words], cwd=folder, env=variables, stdin=subprocess.DEVNULL, **streams)


@contextmanager
def isolated_in(folder: Path, **more: str) -> Iterator[None]:
    """Isolates processes of other libraries, in `folder` with `more` variables; affects all threads of this process."""
    before = dict(os.environ)
    current = os.open(os.curdir, os.O_PATH | os.O_DIRECTORY)
    try:
        os.environ.update(isolated(before, PACKAGES_HOME), **more)
        os.chdir(folder)
        yield
    finally:
        os.fchdir(current)
        os.close(current)
        os.environ.clear()
        os.environ.update(before)
