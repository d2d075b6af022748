"""A bash script that launches verl: its overrides with their lines, and variables that nobody knows."""

from __future__ import annotations

from pathlib import Path

from support.fixture_types import OnlyFinding, PathOf

from verify.launch.preflight import preflight

SCRIPT = """#!/bin/bash
set -x
MODEL=HF
PP=${PP:-2}
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$DATA/train.parquet \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=sglang \\
    trainer.nnodes=NODES trainer.n_gpus_per_node=8 trainer.resume_mode=disable $@
"""


def script(tmp_path: Path, hf: Path, nodes: str = "1") -> Path:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace("HF", str(hf)).replace("NODES", nodes))
    return path


def test_a_script_of_verl_passes(releases: PathOf, tmp_path: Path) -> None:
    """`$DATA` is not known, and decides nothing."""
    report = preflight(script=script(tmp_path, releases("qwen3_moe")))
    assert (report.status, report.findings, list(report.reasons)) == ("passed", [], [])
    assert report.facts["what would be loaded"][0].startswith(f"actor loads {releases('qwen3_moe')} (HF)")


def test_words_behind_a_script_override_it_and_places_are_its_lines(
    releases: PathOf, tmp_path: Path, only: OnlyFinding
) -> None:
    """The script passes them on by `$@`, on its line 12."""
    path = script(tmp_path, releases("qwen3_moe"))
    word = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3"
    finding = only(preflight(script=path, arguments=[word]))
    megatron = "actor_rollout_ref.actor.megatron"
    assert finding.code == "CK722"
    assert f"{megatron}.tensor_model_parallel_size ({path}:" in finding.expected
    assert f"{megatron}.pipeline_model_parallel_size ({path}:12)" in finding.expected
    assert finding.actual.startswith(f"8 GPUs: trainer.nnodes ({path}:")


def test_a_variable_that_decides_and_is_not_known_is_inconclusive(releases: PathOf, tmp_path: Path) -> None:
    report = preflight(script=script(tmp_path, releases("qwen3_moe"), "$CKPTKIT_TEST_NODES"))
    assert (report.status, report.findings) == ("inconclusive", [])
    (line,) = report.facts["not read"]
    assert line.startswith("trainer.nnodes: ")
    assert "CKPTKIT_TEST_NODES" in line
