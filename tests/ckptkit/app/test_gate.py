"""`gate` with launchers of three kinds, whose trainer is a stub that notes that it ran."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

NAME = "qwen2-untied"
OPTIONS = "--hf-checkpoint $HF --ref-load $REF --actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1"
MAIN = "import sys; from ckptkit.app.cli import main; sys.exit(main())"


@pytest.fixture
def job(tmp_path):
    """A folder with a trainer and three launchers of it. Python is found as in an environment that is activated."""
    (tmp_path / "train.py").write_text("import sys\nopen('started', 'a').write(repr(sys.argv[1:]) + '\\n')\n")
    (tmp_path / "run.sh").write_text(f'python3 -c "print(1)"\npython3 train.py {OPTIONS} --wandb-group "a  b"\n')
    start = f"subprocess.run([os.path.expandvars(one) for one in {['python3', 'train.py', *OPTIONS.split()]!r}])"
    (tmp_path / "run.py").write_text(f"import os, subprocess, sys\nsys.exit({start}.returncode)\n")
    (tmp_path / "Makefile").write_text(f"run:\n\t@python3 train.py {OPTIONS.replace('$', '$$')}\n")
    return tmp_path


COMMANDS = {"bash": ["bash", "run.sh"], "python": ["python", "run.py"], "make": ["make", "-s", "run"]}


def gate(job, command, hf, ref, *options, **more):
    """The ended command, which has left nothing in the directory for temporary files."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    words = [sys.executable, "-P", "-c", MAIN, "gate", *options, "--", *command]
    with TemporaryDirectory() as scratch:
        variables = {**os.environ, "PATH": path, "HF": str(hf), "REF": str(ref), "TMPDIR": scratch, **more}
        done = subprocess.run(words, cwd=job, env=variables, capture_output=True, text=True, check=False)
        assert os.listdir(scratch) == []
    return done


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_right_launch_of_any_kind_goes_on(kind, job, releases, converted):
    right = gate(job, COMMANDS[kind], releases(NAME), converted(NAME))
    assert right.returncode == 0, right.stderr
    assert (job / "started").read_text().count("--hf-checkpoint") == 1
    assert "PASSED" in right.stderr


def test_the_trainer_gets_the_very_words_and_its_exit_code_is_that_of_gate(job, releases, converted):
    (job / "train.py").write_text("import sys\nopen('started', 'w').write(repr(sys.argv[1:]))\nsys.exit(7)\n")
    done = gate(job, COMMANDS["bash"], releases(NAME), converted(NAME), "--report", "found.json")
    assert done.returncode == 7
    assert "'a  b'" in (job / "started").read_text()
    assert json.loads((job / "found.json").read_text())["status"] == "passed"


def test_of_one_or_several_trainers_none_starts_before_the_verdict(job, releases, converted):
    for script in (
        f"python3 train.py {OPTIONS}\n",
        f"python3 train.py {OPTIONS}\npython3 train.py again\npython3 train.py {OPTIONS}\n",
        f"for rank in 0 1 2; do python3 train.py {OPTIONS} & done\nwait\n",
    ):
        (job / "run.sh").write_text(script)
        done = gate(job, COMMANDS["bash"], releases(NAME), converted("qwen3_moe"))
        assert done.returncode == 1
        assert not (job / "started").exists()
        assert done.stderr.count("FAILED") == 1


@pytest.mark.parametrize("strict", [False, True])
def test_an_inconclusive_launch_goes_on_unless_strict(strict, job, converted):
    in_no_cache = Path("organization/model")
    done = gate(job, COMMANDS["bash"], in_no_cache, converted(NAME), *["--strict"] * strict)
    assert "INCONCLUSIVE" in done.stderr, done.stderr
    assert ((job / "started").exists(), done.returncode) == ((False, 1) if strict else (True, 0))


def test_no_module_of_the_job_is_imported_by_the_one_that_judges(job, releases, converted):
    for name in ("ckptkit", "verify", "json", "click", "torch", "numpy"):
        (job / f"{name}.py").write_text("open('imported', 'w').close()\nraise SystemExit('planted')\n")
    (job / "train.py").write_text("open('started', 'w').close()\n")
    done = gate(job, COMMANDS["bash"], releases(NAME), converted("qwen3_moe"), PYTHONPATH="")
    assert done.returncode == 1, done.stderr
    assert "FAILED" in done.stderr
    assert not (job / "imported").exists()


def test_python_that_starts_no_trainer_keeps_its_environment(job):
    code = "import sys; print(sys.executable, sys.prefix)"
    done = gate(job, ["bash", "-c", f"python -c '{code}'; python3 -c '{code}'"], job, job)
    folder = Path(sys.executable).parent
    assert done.stdout.splitlines() == [f"{folder / name} {sys.prefix}" for name in ("python", "python3")]


def test_a_command_that_starts_no_trainer_says_so_and_keeps_its_exit_code(job):
    done = gate(job, ["bash", "-c", "python3 -c 'print(5)'; exit 3"], job, job)
    assert (done.returncode, done.stdout) == (3, "5\n")
    assert "start" in done.stderr
    gone = gate(job, ["no-such-command"], job, job)
    assert gone.returncode == 2
    assert "no-such-command" in gone.stderr


def test_a_signal_reaches_the_command(job):
    (job / "run.sh").write_text(
        "trap 'echo stopped > trapped; exit 9' TERM\ntouch ready\nwhile :; do sleep 0.1; done\n"
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", MAIN, "gate", "--", "bash", "run.sh"], cwd=job)
    end = time.monotonic() + 60
    while not (job / "ready").exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 9
    assert (job / "trapped").exists()
