"""Replaces `python`, `torchrun` or `ray` under `ckptkit gate`, and runs `preflight` before a trainer starts.

Usage: `stand_in.py FOLDER NAME WORDS...`, with the FOLDER of `ckptkit.app.gate`. It executes the real program at once,
except for the first start of a trainer.
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

HOME = Path(__file__).resolve().parents[2]  # the directory that contains ckptkit


def main() -> None:
    """Checks the words if they start a trainer, and executes the program of that name."""
    folder, name, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    parts = os.environ.get("PATH", os.defpath).split(os.pathsep)
    path = os.pathsep.join(part for part in parts if Path(part) != folder / "bin")
    if (program := shutil.which(name, path=path)) is None:
        print(f"{name}: command not found", file=sys.stderr)
        sys.exit(127)
    if not (folder / "judged").exists() and _starts_trainer(name, words):
        # Other trainers that start now also wait for the verdict.
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
    # By path: with only a name, Python would find this script in PATH instead of its environment's packages.
    os.execv(program, [program, *words])  # noqa: S606 - the words are unchanged


def _starts_trainer(name: str, words: list[str]) -> bool:
    sys.path.insert(0, str(HOME))
    from ckptkit.verify.launch.shell.trainers import names_trainer

    return names_trainer([name, *words])


def _is_stopped(folder: Path, name: str, words: list[str], path: str) -> bool:
    """Prints the report of `preflight` on the command to stderr. Returns whether it stops the launch."""
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
    # Without a report, preflight itself failed, which is not a verdict on the launch.
    return verdict.exists() and json.loads(verdict.read_text())["status"] == "failed"


if __name__ == "__main__":
    main()
