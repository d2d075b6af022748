"""Launch scripts, configurations and logs that are made to hang or to fill memory: read within bounds, or refused."""

import os
import re
import resource
import time
from pathlib import Path

import pytest
from support.messages import text_with

from ckptkit.converters.megatron.pipeline import Pipeline
from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.launch.python.launcher import read_launcher
from ckptkit.verify.launch.settings.config import Config, UnresolvedError
from ckptkit.verify.launch.settings.files import compose
from ckptkit.verify.launch.settings.tree import read_yaml
from ckptkit.verify.launch.shell.read import read_script

TRAIN = "\npython3 train.py --load /ckpt --hf-checkpoint /hf $A\n"
DOUBLED = "A=xxxxxxxxxx\n" + "A=$A$A\n" * 40
MUCH = "its end"


@pytest.fixture(autouse=True)
def _within_bounds():
    """Every test here ends within 5 seconds of the processor and 1 GiB."""
    seconds, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - seconds < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1 << 20


def read(tmp_path, text):
    script = tmp_path / "run.sh"
    script.write_text(text)
    return read_script(script)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("A=$((2**10**9))", "exponent"),
        ("A=$((9223372036854775807 * 9223372036854775807))", "64.*bits"),
        ("A=" + "$((" + "- " * 4_000 + "1))", "nested too deeply"),
        ("A={1..1000000000}", "set neither|braces"),
        (DOUBLED, MUCH),
        ("A=x\nwhile true; do A=$A$A; done", MUCH),
        ("A=$(printf 'x%.0s' " + "1 " * 15_000 + ")\nfor i in " + "1 " * 15_000 + "; do B=${A##*y*y*y}; done", "."),
        ("A=" + "x" * 900_000 + '\nB=($A $A)\nC="${B[*]}"\nA=$C', MUCH),
        ("source run.sh\nsource run.sh", MUCH),
        ("f() { f; f; }\nf", MUCH),
        ("A=" + "$(echo " * 40 + "x" + ")" * 40, MUCH),
        ("shift " + "9" * 5_000, ""),
        ("A=abc\nA=${A:" + "9" * 5_000 + "}", "evaluate"),
        ("source $'a\\0b'", ""),
        ("source pipe", "pipe"),
        ("source /dev/zero", "regular"),
        ("source huge", "at most 300000 are read"),
        ("\0\0", ""),
    ],
)
def test_script_made_to_hang_is_read_within_bounds(script, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("huge").touch()
    os.truncate("huge", 1 << 40)
    text = read(tmp_path, script + TRAIN)
    lines = "\n".join([*text.unresolved, *(getattr(word, "why", "") for word in text.words)])
    assert re.search(said, lines), lines[:500]
    assert len(lines) < 10_000


def test_script_that_is_no_text_is_read_or_refused(tmp_path):
    script = tmp_path / "run.sh"
    script.write_bytes(b"\xff\xfe A=\xff\n" + TRAIN.encode())
    assert [word.text for word in read_script(script).words][:2] == ["--load", "/ckpt"]
    script.write_bytes(os.urandom(100_000))
    with pytest.raises(CkptkitError):
        read_script(script)


def test_defaults_that_name_each_other_many_times_are_refused(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.yaml").write_text(f"defaults: [{number + 1}.yaml, {number + 1}.yaml]\n")
    (tmp_path / "20.yaml").write_text("a: b\n")
    with pytest.raises(CkptkitError, match="defaults.*100"):
        compose(tmp_path / "0.yaml")
    (tmp_path / "hydra.yaml").write_text("defaults: [hydra]\n")
    (tmp_path / "nemo.yaml").write_text("defaults: other.yaml\n")
    (tmp_path / "other.yaml").write_text("defaults: nemo.yaml\n")
    for name in ("hydra", "nemo"):
        with pytest.raises(CkptkitError, match="circle|itself"):
            compose(tmp_path / f"{name}.yaml")


def test_interpolations_that_double_are_not_worked_out(tmp_path):
    doubled = "".join(f'a{number}: "${{a{number - 1}}}${{a{number - 1}}}"\n' for number in range(1, 29))
    (tmp_path / "job.yaml").write_text(f"a0: x\nb: ''\ncircle: ${{circle}}\nlist: [1]\n{doubled}")
    config = Config(read_yaml(tmp_path / "job.yaml"))
    for key, why in (("a28", "10000"), ("circle", "itself")):
        with pytest.raises(UnresolvedError, match=why):
            config.find(key)
    assert str(getattr(config.find("a3"), "text", None)) == "xxxxxxxx"
    assert config.find("list." + "9" * 5_000) is None
    (tmp_path / "empty.yaml").write_text(f"a0: ''\n{doubled}")
    assert str(getattr(Config(read_yaml(tmp_path / "empty.yaml")).find("a28"), "text", None)) == ""


SIZES = [
    *("num-layers", "mtp-num-layers", "decoder-first-pipeline-num-layers", "num-layers-per-virtual-pipeline-stage"),
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "actor-num-nodes"),
    *("expert-model-parallel-size", "num-virtual-stages-per-pipeline-rank", "rollout-num-gpus-per-engine"),
    *("hidden-size", "vocab-size", "num-experts", "num-attention-heads", "window-size", "moe-layer-freq"),
]
MODEL = "--hf-checkpoint /hf --num-layers 4 --hidden-size 64 --num-experts 8 --moe-layer-freq 1"


def test_size_that_no_model_or_cluster_has_is_refused_by_its_option(tmp_path):
    for option in SIZES:
        for number in [10**10, 10**18, -(10**12), *([1_001, 2**31 - 1] if "layers" in option else [])]:
            with pytest.raises(CkptkitError, match=f"--{option} .*maximum"):
                preflight(arguments=[*MODEL.split(), f"--{option}", str(number)])
    (tmp_path / "custom.yaml").write_text("mtp_num_layers: 1001\n")
    with pytest.raises(CkptkitError, match="maximum of 1,000"):
        preflight(arguments=[*MODEL.split(), "--custom-config-path", str(tmp_path / "custom.yaml")])


def test_large_sizes_that_something_has_are_read():
    words = "--num-layers 1000 --hidden-size 1000000 --rotary-base 1000000000 --save-interval 1000000000"
    words += " --vocab-size 1000000 --seq-length 10000000 --actor-num-nodes 12500"
    assert preflight(arguments=["--hf-checkpoint", "/hf", *words.split()]).findings


@pytest.mark.parametrize(
    "layout",
    [
        "Et*100000000L",
        "E(t*1000)*1000000|L",
        f"Et*{'9' * 5_000}L",
        "(" * 190_000,
        "(t" * 95_000,
        "t*1" * 60_000,
        "|" * 190_000,
    ],
    ids=["letters", "parentheses", "digits", "open", "nested", "stars", "stages"],
)
def test_pipeline_layout_made_to_fill_memory_is_refused(layout):
    with pytest.raises(CkptkitError, match="too long|layout"):
        _ = Pipeline(4, 2, layout=layout).stages
    preflight(arguments=["--hf-checkpoint", "/hf", "--pipeline-model-parallel-layout", layout])


CALL = "\nimport command_utils as U\nU.execute_train(train_args='--load x', num_gpus_per_node=8)\n"


@pytest.mark.parametrize(
    "deep",
    [
        *("-" * 100_000 + "1", "~" * 100_000 + "1", "not " * 50_000 + "1", "1+" * 50_000 + "1", "a" + ".b" * 50_000),
        *("a" + "()" * 50_000, "lambda:" * 30_000 + "1", "-" * 900 + "1", "1+" * 900 + "1"),
    ],
    ids=["minus", "invert", "not", "sum", "attributes", "calls", "lambdas", "some minus", "some sums"],
)
def test_launcher_that_nests_deeper_than_python_parses_is_not_read_for_that_reason(deep, tmp_path):
    launcher = tmp_path / "run.py"
    launcher.write_text(f"x = {deep}{CALL}")
    (line,) = read_launcher(launcher, [], {}).unresolved
    assert line == text_with(f"{launcher} Python")
