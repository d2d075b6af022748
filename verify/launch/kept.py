"""Keeps what the checks of checkpoints came to, so that a launch that is looked at again need not read headers again.

Only what follows from directories is kept: the launch itself, its script and its settings are read every time. A result
is found again only while the program, the question and every file in the directories are the same (`identity.py`).
An inconclusive result is not kept, nor one of files that changed within the last minute: file systems count time in
steps, and a second change within a step would not show.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ckptkit.core.installation import program_version
from verify.check import NOTES, Outcome
from verify.launch.identity import Identity, identity_of, identity_of_program
from verify.report import CheckResult, Finding

SETTLED_S = 60.0
_MOST_KEPT = 200


def kept_outcome(question: str, directories: Iterable[Path], look: Callable[[], Outcome]) -> Outcome:
    """What `look` comes to for a question about directories, or came to before.

    A note says that it is an earlier result and of when, or why it could not be kept. Raises as `look`.
    """
    paths = sorted(set(directories))
    if (before := identity_of(paths)) is None:
        return look()
    file = cache_directory() / f"{_key(question, before)}.json"
    if (found := _read(file)) is not None:
        return found
    outcome = look()
    if not outcome.unlooked and time.time() - before.changed > SETTLED_S and identity_of(paths) == before:
        try:
            _write(file, outcome)
        except OSError as error:
            outcome.facts.setdefault(NOTES, []).append(f"not kept for the next run: {file.parent}: {error.strerror}")
    return outcome


def cache_directory() -> Path:
    """Where results are kept: `ckptkit/preflight` in $XDG_CACHE_HOME, or in ~/.cache where that is not set."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "ckptkit" / "preflight"


def _key(question: str, directories: Identity) -> str:
    packages = [Path(__file__).parents[2] / name for name in ("ckptkit", "converters", "quant", "verify")]
    parts = program_version(), platform.python_version(), identity_of_program(packages), question, directories.digest
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()


def _read(file: Path) -> Outcome | None:
    """A result that this user kept; None where there is none, or the file is damaged and will be written again."""
    try:
        if file.stat().st_uid != os.geteuid():
            return None
        content = json.loads(file.read_bytes())
        if content["digest"] != _digest(content["outcome"]):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    outcome, when = content["outcome"], content["when"]
    said = f"headers and samples of the checkpoints were looked at {when}, and no file of them has changed since"
    facts = outcome["facts"] | {NOTES: [*outcome["facts"].get(NOTES, []), f"{said}; --no-cache looks again"]}
    checks = [CheckResult(**one) for one in outcome["checks"]]
    return Outcome(checks, [Finding(**one) for one in outcome["findings"]], facts)


def _write(file: Path, outcome: Outcome) -> None:
    """Writes a result whole or not at all, and removes the oldest beyond _MOST_KEPT. Raises OSError."""
    content: dict[str, Any] = {
        "checks": [asdict(one) for one in outcome.checks],
        "findings": [asdict(one) for one in outcome.findings],
        "facts": outcome.facts,
    }
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({"when": when, "digest": _digest(content), "outcome": content}))
    partial.replace(file)
    there = sorted(file.parent.iterdir(), key=lambda path: path.lstat().st_mtime_ns)
    for old in there[:-_MOST_KEPT]:
        old.unlink(missing_ok=True)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
