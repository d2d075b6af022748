"""Every verb in a checkpoint's directory that has a module of every name: none of them is imported."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.installed import require_megatron
from support.nightly import daily
from support.processes import environment

from hostile.planted import NAMES, plant, ran

VERBS = {
    "convert": "convert . {out}/made",
    "quantize": "quantize . {out}/made --group-size 32",
    "verify": "verify .",
    "diff": "diff . {sound}",
    "lint": "lint .",
    "manifest": "manifest . --output {out}/manifest.json",
    "preflight": "preflight --hf-checkpoint .",
    "launch": "preflight run.sh",
    "triage": "triage log.txt",
    "inspect": "inspect .",
    "explain": "explain CK305",
    "doctor": "doctor --vllm-python ../bin/python",
}


@pytest.fixture
def here(releases, tmp_path):
    """A checkpoint with a module of every name, and of those of its own that a user may have."""
    path = Path(shutil.copytree(releases("qwen3_moe"), tmp_path / "here"))
    plant(path, tmp_path / "marks")
    (path / "log.txt").write_text("iteration 1\n")
    (path / "run.sh").write_text("python3 train.py --hf-checkpoint .\n")
    return path


def ckptkit(words, here, path=""):
    """Runs the command as it is installed: a script in a directory of its own. `path` is more of PYTHONPATH."""
    script, out = here.parent / "bin" / "ckptkit", here.parent / "out"
    for folder in (script.parent, out):
        folder.mkdir()
    script.write_text("from ckptkit.app.cli import main\nmain()\n")
    (script.parent / "python").symlink_to(sys.executable)
    command = [sys.executable, str(script), *words.format(out=out, sound=here).split()]
    variables = environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    variables["PYTHONPATH"] += path
    return subprocess.run(command, cwd=here, env=variables, capture_output=True, text=True, check=False)


def test_modules_of_all_that_a_witness_imports_are_planted():
    needed = {"torch", "ctypes", "json", "numpy", "transformers", "sglang", "triton", "numba", "ray", "megatron"}
    assert needed | {"ckptkit", "runpy", "multiprocessing"} <= {*NAMES}


@pytest.mark.parametrize("verb", daily(VERBS, ["convert", "launch"]))
def test_no_verb_imports_what_is_next_to_the_weights(verb, here, tmp_path):
    done = ckptkit(VERBS[verb], here)
    assert ran(tmp_path / "marks") == []
    assert done.returncode in (0, 1, 2)
    assert "an error inside" not in done.stdout + done.stderr
    if verb not in ("lint", "preflight", "launch"):
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.sglang
def test_sglang_imports_nothing_that_is_next_to_the_weights(here, tmp_path):
    done = ckptkit("verify . --against-sglang --report ../report.json", here)
    assert ran(tmp_path / "marks") == []
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["reasons"] == [], done.stdout + done.stderr
    assert "CK501" in {check["code"] for check in report["checks"] if check["status"] == "passed"}


def test_megatron_imports_nothing_that_is_next_to_the_weights(converted, tmp_path, releases):
    require_megatron()
    here = Path(shutil.copytree(converted("qwen2-tied"), tmp_path / "here"))
    plant(here, tmp_path / "marks")
    done = ckptkit(f"verify . --source {releases('qwen2-tied')} --against-megatron", here)
    assert ran(tmp_path / "marks") == []
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
def test_workers_of_ray_import_nothing_that_is_next_to_the_weights(here, tmp_path):
    pytest.importorskip("ray")
    done = ckptkit("quantize . ../made --group-size 32 --ray local --workers 1", here)
    assert ran(tmp_path / "marks") == []
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "made" / "config.json").exists()


def test_settings_of_numba_that_are_next_to_the_weights_are_refused(here, tmp_path):
    (here / ".numba_config.yaml").write_text("cache_locator_classes: evil.Locator\n")
    done = ckptkit(VERBS["quantize"], here)
    assert done.returncode == 2
    assert f"{here}/.numba_config.yaml is in the current directory" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []
