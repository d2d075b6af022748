"""CK722: the nodes and processes of a launch, against its sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.verify.core.report import Finding
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.launch.shell.read import read_script
from ckptkit.verify.launch.stacks.sizes import across_nodes


def placed(words: str) -> list[Finding]:
    report = preflight(arguments=["--hf-checkpoint", "/nowhere", *words.split()])
    return [one for one in report.findings if one.code == "CK722"]


# Nodes, GPUs of each, other options, and what is found. slime counts nodes of 8 GPUs where nothing is said.
NODES = [
    (2, 4, "--colocate --rollout-num-gpus-per-engine 2", "num_gpus_per_node = 8, by default"),
    (2, 16, "--colocate", "num_gpus_per_node = 8, by default"),
    (2, 8, "--colocate --num-gpus-per-node 4", "num_gpus_per_node = 4"),
    (3, 8, "--colocate --rollout-num-gpus-per-engine 12", "12 GPUs for an engine, 1 nodes and 4 more GPUs"),
    (1, 8, "--rollout-num-gpus 24 --rollout-num-gpus-per-engine 12", "12 GPUs for an engine, 1 nodes and 4 more GPUs"),
    (3, 8, "--colocate --rollout-num-gpus-per-engine 3", "an engine on GPUs 6 to 8 of the job"),
    (1, 4, "--rollout-num-gpus 8 --rollout-num-gpus-per-engine 8", "an engine on GPUs 4 to 11 of the job"),
    (1, 8, "--colocate --prefill-num-servers 4 --rollout-num-gpus-per-engine 2", "0 GPUs"),
    (1, 8, "--rollout-num-gpus 6 --prefill-num-servers 1 --rollout-num-gpus-per-engine 4", "2 GPUs"),
    *((1, 4, one, "no --rollout-num-gpus") for one in ("", "--critic-num-nodes 1", "--rollout-num-gpus-per-engine 2")),
    (1, 4, "--rollout-num-gpus 0 --ci-check-model-hash", "--rollout-num-gpus 0"),
]
SOUND = [
    *("2 4 --colocate --num-gpus-per-node 4 --rollout-num-gpus-per-engine 2", "1 4 --colocate", "2 8 --colocate"),
    *("4 8 --colocate --rollout-num-gpus-per-engine 16", "1 6 --colocate --rollout-num-gpus-per-engine 3"),
    *("1 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 4", "2 4 --rollout-num-gpus 8"),
    "2 4 --colocate --vllm-tensor-parallel-size 1",
    "3 8 --colocate --debug-train-only --rollout-num-gpus-per-engine 3",
    *("1 4 --debug-train-only", "1 4 --load-debug-rollout-data a.pt", "1 4 --rollout-external-engine-addrs a:1"),
    *("1 4 --rollout-num-gpus 0", "1 8 --colocate --prefill-num-servers 2 --rollout-num-gpus-per-engine 2"),
    *("2 4 --colocate --rollout-external-engine-addrs a:1", "2 4 --colocate --num-gpus-per-node $UNKNOWN"),
]


@pytest.mark.parametrize(("nodes", "each", "more", "actual"), NODES)
def test_engines_that_do_not_fit_on_nodes_are_found(nodes: int, each: int, more: str, actual: str) -> None:
    (finding,) = placed(f"--actor-num-nodes {nodes} --actor-num-gpus-per-node {each} {more}")
    assert (finding.severity, finding.actual.startswith(actual)) == ("error", True), finding


@pytest.mark.parametrize("words", SOUND)
def test_engines_that_fit_on_nodes_are_right(words: str, tmp_path: Path) -> None:
    nodes, each, more = words.split(" ", 2)
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py --actor-num-nodes {nodes} --actor-num-gpus-per-node {each} {more}\n")
    report = preflight(hf_checkpoint=tmp_path, text=read_script(script, environment={}))
    assert [one for one in report.findings if one.code == "CK722"] == []


@given(st.integers(1, 40), st.integers(1, 16), st.integers(0, 40), st.integers(1, 5))
def test_engine_fits_where_its_gpus_counted_one_by_one_do(engine: int, node: int, offset: int, count: int) -> None:
    """Each takes whole nodes from the first GPU of one, or the GPUs of one node."""
    starts = range(offset, offset + engine * count, engine)
    whole = engine % node == 0 and offset % node == 0
    one_node = all(start // node == (start + engine - 1) // node for start in starts)
    assert (across_nodes(engine, node, engine * count, offset) is None) == (whole or one_node)


PIPELINE = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --load /nowhere"
# What starts 8 processes, or another number.
EIGHT = [
    *("torchrun --nproc_per_node 8", "torchrun --nproc-per-node=8 --nnodes 1"),
    *("torchrun --nproc_per_node $G --nnodes 2", "python3 -m torch.distributed.run --nproc_per_node 8"),
    "python -u -m torch.distributed.launch --nproc_per_node=8",
    *("deepspeed --num_gpus 8", "deepspeed --num_gpus=4 --num_nodes 2", "accelerate launch --num_processes 8"),
    *("/opt/bin/torchrun --nproc_per_node 8 --master_port 29500", "srun torchrun ${ARGS[@]}", "torchrun ${ARGS[@]}"),
]
OTHERS = [
    *("torchrun --nproc_per_node 8 --nnodes 2", "torchrun --nproc_per_node 16", "torchrun --nproc_per_node gpu"),
    *("torchrun --nproc_per_node 8 --nnodes 1:4", "torchrun --nproc_per_node 8 --nnodes $UNKNOWN", "python3"),
    *("torchrun --nproc_per_node=$UNKNOWN", "torchrun --nnodes=1 --nproc-per-node $UNKNOWN", "torchrun $UNKNOWN"),
    *("deepspeed", "deepspeed --hostfile h", "accelerate launch", "torchrun --nproc_per_node 99999999999999999999"),
]


@pytest.mark.parametrize(("command", "is_found"), [*((one, True) for one in EIGHT), *((one, False) for one in OTHERS)])
def test_processes_of_a_launcher_are_the_world_size(command: str, is_found: bool, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"G=4\nARGS=(--nproc_per_node 8 --nnodes 1)\n{command} pretrain_gpt.py {PIPELINE}\n")
    report = preflight(hf_checkpoint=tmp_path, text=read_script(script, environment={}))
    found = [one for one in report.findings if one.code == "CK722"]
    assert [one.actual for one in found] == [f"8 GPUs: processes started at {script}:3"] * is_found
