"""Stands in for `python`, `torchrun` or `ray` under `ckptkit gate`: has a trainer's words judged before it starts.

As a program, `stand_in.py FOLDER NAME WORDS...`. FOLDER is that of `ckptkit.app.gate`; everything but the first start
of a trainer goes on to the real program at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]  # the directory that ckptkit is in


def main() -> None:
    """Judges the words where they start a trainer, and becomes the program of that name."""
    folder, name, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    parts = os.environ.get("PATH", os.defpath).split(os.pathsep)
    path = os.pathsep.join(part for part in parts if Path(part) != folder / "bin")
    if (program := shutil.which(name, path=path)) is None:
        print(f"{name}: command not found", file=sys.stderr)
        sys.exit(127)
    if not (folder / "judged").exists() and _starts_trainer(name, words):
        # A trainer that is started meanwhile waits for the verdict too.
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "judged").exists():
                if _is_stopped(folder, name, words, path):
                    (folder / "stopped").touch()
                (folder / "judged").touch()
    if (folder / "stopped").exists():
        print(f"ckptkit gate: {name} is not started, because the launch was stopped", file=sys.stderr)
        sys.exit(1)
    if (folder / "judged").exists():
        os.environ["PATH"] = path
    # By its path: by a bare name Python would find this stand-in in PATH, and not the packages of its environment.
    os.execv(program, [program, *words])  # noqa: S606 - the words as they were given


def _starts_trainer(name: str, words: list[str]) -> bool:
    sys.path.insert(0, str(HOME))
    from ckptkit.verify.launch.shell.trainers import names_trainer

    return names_trainer([name, *words])


def _is_stopped(folder: Path, name: str, words: list[str], path: str) -> bool:
    """Prints what `preflight` says of the command to stderr; whether that ends the launch."""
    options, verdict = (folder / "options").read_text().split("\0")[:-1], folder / "verdict.json"
    code = f"import sys; sys.path.insert(0, {str(HOME)!r}); from ckptkit.app.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, "preflight", "-q", "-", "--report", str(verdict), *options],
        input=shlex.join([name, *words]),
        stdout=sys.stderr,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
    )
    if "--strict" in options:
        return done.returncode != 0
    # Without a report preflight could not judge: what it said of that is no verdict on the launch.
    return verdict.exists() and json.loads(verdict.read_text())["status"] == "failed"


if __name__ == "__main__":
    main()
