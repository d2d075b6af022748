"""A witness that hangs, eats memory, spawns or is orphaned is ended, and says nothing about the checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hostile.planted import plant, ran
from support.processes import environment as of_tests
from support.sglang_runs import refusal

from ckptkit.verify.witnesses import runner
from ckptkit.verify.witnesses.loading.job import LoadReport
from ckptkit.verify.witnesses.loading.run import outcome
from ckptkit.verify.witnesses.process.interpreter import Interpreter, python_of
from ckptkit.verify.witnesses.process.sandbox import environment
from ckptkit.verify.witnesses.runner import read_answer, run_ranks

WITNESS = "support.confined_witness"


@pytest.fixture(autouse=True)
def found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", of_tests()["PYTHONPATH"])


def run(folder, do, limit_s=100, count=1):
    for rank in range(count):
        (folder / f"job-{rank}.json").write_text(json.dumps({"do": do, "rank": rank}))
    return run_ranks(folder, range(count), WITNESS, limit_s)


def until(true):
    end = time.monotonic() + 100
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def assert_inconclusive(failed, folder, *words):
    answer = outcome(read_answer(LoadReport, {0: folder / "report-0.json"}, {0: folder / "log-0"}, failed), 1)
    assert (answer.report, refusal(answer)) == (None, "")
    assert all(word in str(answer.failure) for word in words), answer.failure


def test_a_hang_is_inconclusive_with_the_stack_of_the_process(tmp_path):
    failed = run(tmp_path, "hang", limit_s=3)
    assert (tmp_path / "began").exists()
    assert_inconclusive(failed, tmp_path, "3 s", "confined_witness.py", "in hang")


def test_a_witness_that_takes_all_memory_is_inconclusive(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "free_memory", lambda: 200 << 20)
    assert_inconclusive(run(tmp_path, "eat"), tmp_path, "memory")


def test_what_a_witness_started_ends_with_it(tmp_path):
    run(tmp_path, "spawn", limit_s=8)
    child = int((tmp_path / "child").read_text())
    until(lambda: not is_alive(child))


def test_a_witness_ends_when_its_parent_is_killed(tmp_path):
    (tmp_path / "job-0.json").write_text(json.dumps({"do": "hang"}))
    code = (
        "import sys; from pathlib import Path\n"
        "from ckptkit.verify.witnesses.process.sandbox import environment, start_confined\n"
        "folder = Path(sys.argv[1])\n"
        f"process = start_confined({WITNESS!r}, [folder / 'job-0.json'], folder / 'log', environment())\n"
        "(folder / 'part').write_text(str(process.pid)); (folder / 'part').rename(folder / 'pid')\n"
        "process.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=of_tests())
    try:
        until((tmp_path / "began").exists)
        witness = int((tmp_path / "pid").read_text())
        assert is_alive(witness)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    until(lambda: not is_alive(witness))


def test_a_witness_and_what_it_starts_import_nothing_from_where_the_user_is(tmp_path, monkeypatch):
    here, other, scratch = (tmp_path / name for name in ("here", "other", "scratch"))
    for folder in (here, other, scratch):
        folder.mkdir()
    plant(here, tmp_path / "marks")
    monkeypatch.chdir(here)
    given = ["", ".", "..", "lib", "../other", str(here), f"{other}/../here", str(other)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*given, os.environ["PYTHONPATH"], ""]))
    assert run(scratch, "path") == {}
    assert ran(tmp_path / "marks") == []
    for kind, (folder, *path) in json.loads((scratch / "path").read_text()).items():
        assert (kind, folder) == (kind, str(scratch))
        assert not {"", ".", "..", "lib", "../other", str(here), f"{other}/../here", str(scratch)} & set(path), kind
        assert str(other) in path, kind  # an absolute directory stays


@pytest.mark.parametrize("path", ["", ":", "{here}/.", "./../here", "{here}:.:{here}"])
def test_a_python_that_is_asked_for_releases_imports_nothing_from_where_the_user_is(path, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    plant(here, tmp_path / "marks")
    (here / "python").symlink_to(sys.executable)
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", path.format(here=here))
    interpreter = Interpreter(python_of("vllm", {"vllm": "./python"}))
    assert interpreter.path == str(here / "python")
    assert interpreter.release("no-such-package") is None
    assert (interpreter.has("json"), interpreter.has("vllm.x")) == (True, False)
    assert ran(tmp_path / "marks") == []


def test_a_python_is_named_by_a_path_from_here_or_by_a_name_alone():
    assert python_of("vllm", {"vllm": "env/bin/python"}) == os.path.abspath("env/bin/python")
    assert python_of("vllm", {"vllm": "/env/bin/python"}) == "/env/bin/python"
    assert python_of("vllm", {"vllm": "python3.12"}) == "python3.12"


SECRETS = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN", "MY_PASSWORD")
SECRETS = (*SECRETS, "GOOGLE_APPLICATION_CREDENTIALS", "SSH_AUTH_SOCK", "DATABASE_URL", "HTTPS_PROXY", "my_secret")
NEEDED = ("LD_LIBRARY_PATH", "CUDA_HOME", "SGLANG_USE_AITER", "TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "HOME")


def test_a_witness_sees_no_secrets(tmp_path, monkeypatch):
    for name in (*SECRETS, *NEEDED):
        monkeypatch.setenv(name, "0")
    assert run(tmp_path, "tell") == {}
    seen = json.loads((tmp_path / "variables").read_text())
    assert [name for name in SECRETS if name in seen] == []
    assert [name for name in NEEDED if name not in seen] == []
    assert "HF_HUB_DISABLE_IMPLICIT_TOKEN" in seen
    assert environment(CUDA_VISIBLE_DEVICES="")["CUDA_VISIBLE_DEVICES"] == ""


def test_ranks_listen_on_the_loopback_interface_alone(tmp_path):
    assert run(tmp_path, "meet", count=2) == {}
    for rank in range(2):
        addresses = json.loads((tmp_path / f"listening-{rank}").read_text())
        assert addresses
        assert set(addresses) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
