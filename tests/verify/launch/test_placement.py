"""CK722: the nodes and processes of a launch, against its sizes."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.launch.shell.read import read_script
from ckptkit.verify.launch.stacks.sizes import across_nodes

ROWS = tomllib.loads((Path(__file__).parent / "jobs" / "placement.toml").read_text())


def placed(words):
    report = preflight(arguments=["--hf-checkpoint", "/nowhere", *words.split()])
    return [one for one in report.findings if one.code == "CK722"]


def options(row):
    nodes, each, more = f"{row} ".split(" ", 2)
    return f"--actor-num-nodes {nodes} --actor-num-gpus-per-node {each} {more}"


@pytest.mark.parametrize(("row", "actual"), ROWS["nodes"])
def test_engines_that_do_not_fit_on_nodes_are_found(row, actual):
    (finding,) = placed(options(row))
    assert (finding.severity, finding.actual.startswith(actual)) == ("error", True), finding


def test_engines_that_fit_on_nodes_are_right(tmp_path):
    for row in ROWS["sound"]:
        text = read_script(None, f"python3 train.py {options(row)}\n", environment={})
        report = preflight(hf_checkpoint=tmp_path, text=text)
        assert [one for one in report.findings if one.code == "CK722"] == [], row


@given(st.integers(1, 40), st.integers(1, 16), st.integers(0, 40), st.integers(1, 5))
def test_engine_fits_where_its_gpus_counted_one_by_one_do(engine, node, offset, count):
    """Each takes whole nodes from the first GPU of one, or the GPUs of one node."""
    starts = range(offset, offset + engine * count, engine)
    whole = engine % node == 0 and offset % node == 0
    one_node = all(start // node == (start + engine - 1) // node for start in starts)
    assert (across_nodes(engine, node, engine * count, offset) is None) == (whole or one_node)


PIPELINE = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --load /nowhere"


def test_processes_of_a_launcher_are_the_world_size(tmp_path):
    script = tmp_path / "run.sh"
    for command in (*ROWS["eight"], *ROWS["others"]):
        script.write_text(f"G=4\nARGS=(--nproc_per_node 8 --nnodes 1)\n{command} pretrain_gpt.py {PIPELINE}\n")
        report = preflight(hf_checkpoint=tmp_path, text=read_script(script, environment={}))
        found = [one.actual for one in report.findings if one.code == "CK722"]
        assert found == [f"8 GPUs: processes started at {script}:3"] * (command in ROWS["eight"]), command
