"""Runs the targets under atheris: `run.py` all of them, `run.py NAME` one in this process."""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
_PACKAGES = ["ckptkit"]
_SECONDS, _MIB = 60, 3072  # of one input by the clock, which others may use too, and of a process
_IN_MEMORY = Path("/dev/shm")
_VALUES = [
    *(None, True, False, 0, 1, -1, 2, 7, 1 << 31, (1 << 31) + 1, 1 << 60, 1 << 63, 10**99, -(10**99)),
    *(0.0, 0.5, -1.5, 1e300, float("inf"), float("nan"), "", "a", "\0", "\x1b[2J", "/", "..", "é", "a" * 300),
    *([], {}, [[]], [0], [1, 2], ["a"], {"a": 1}, [None], [[1]], {"a": {}}),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", help="one target, in this process")
    parser.add_argument("--minutes", type=float, default=16, help="shared by all targets")
    parser.add_argument("--runs", type=int, default=-1, help="executions of each target at most")
    parser.add_argument("--work", type=Path, default=Path(".venv-fuzz/found"), help="what was found; kept")
    given = parser.parse_args()
    if given.name:
        return _fuzz(given.name, round(given.minutes * 60), given.runs, given.work)
    failed = [name for name in _names() if not _child(name, given.minutes / len(_names()), given.runs, given.work)]
    print("crashed: " + ", ".join(failed) if failed else "no target crashed")
    return bool(failed)


def _names():
    return sorted(folder.name for folder in CORPUS.iterdir())


def _child(name, minutes, runs, work):
    """One target in a process of its own, with a line of what it did. Returns whether it ended well."""
    command = [sys.executable, __file__, name, f"--minutes={minutes}", f"--runs={runs}", f"--work={work}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    said = done.stdout + done.stderr
    executed, speed = (
        re.findall(rf"stat::{key}:\s+(\d+)", said) for key in ("number_of_executed_units", "average_exec_per_sec")
    )
    cover = re.findall(r"cov: (\d+)", said)
    print(f"| {name} | {(executed or ['?'])[-1]} | {(speed or ['?'])[-1]} | {(cover or ['?'])[-1]} |", flush=True)
    if done.returncode:
        print(said[-4000:], flush=True)
    return not done.returncode


def _fuzz(name, seconds, runs, work):
    import atheris

    with atheris.instrument_imports(include=_PACKAGES, enable_loader_override=False):
        from fuzz.targets import TARGETS

    found = work / name
    found.mkdir(parents=True, exist_ok=True)
    options = [
        *(f"-runs={runs}", f"-max_total_time={seconds}", f"-timeout={_SECONDS}", f"-rss_limit_mb={_MIB}"),
        *(f"-max_len={TARGETS[name].largest}", f"-artifact_prefix={work}/{name}.", "-print_final_stats=1"),
    ]

    def mutate(data, largest, seed):
        choose = random.Random(seed)
        try:
            value = json.loads(data) if choose.random() < 0.7 else None
        except (ValueError, RecursionError):
            value = None
        if value is None:
            return atheris.Mutate(data, largest)
        changed = json.dumps(_changed(value, choose)).encode()
        return changed if len(changed) <= largest else atheris.Mutate(data, largest)

    # A file is written for each execution: on a disk that takes longer than most parsers.
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) as scratch:
        unit = TARGETS[name].make(Path(scratch))
        more = {"custom_mutator": mutate} if TARGETS[name].is_json else {}
        atheris.Setup([sys.argv[0], *options, str(found), str(CORPUS / name)], unit, **more)
        atheris.Fuzz()  # ends the process
    return 0


def _changed(value, choose):
    """A JSON value of which one part is another, gone, or there once more."""
    if choose.random() < 0.15 or not isinstance(value, (dict, list)) or not value:
        return choose.choice(_VALUES)
    if isinstance(value, list):
        at = choose.randrange(len(value))
        return _list_changed(value, at, choose)
    key = choose.choice(list(value))
    match choose.randrange(8):
        case 0:
            return {name: one for name, one in value.items() if name != key}
        case 1:
            return value | {choose.choice(list(value)): value[key]}
        case _:
            return value | {key: _changed(value[key], choose)}


def _list_changed(value, at, choose):
    match choose.randrange(5):
        case 0:
            return [*value[:at], *value[at + 1 :]]
        case 1:
            return [*value, value[at]]
        case _:
            return [*value[:at], _changed(value[at], choose), *value[at + 1 :]]


if __name__ == "__main__":
    sys.exit(main())
