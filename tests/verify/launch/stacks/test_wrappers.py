"""Scripts that start a trainer by others: what they source, name and hand on reaches the settings of the job."""

import itertools
import json
from pathlib import Path

import pytest

from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.launch.shell.read import read_script

JOBS = Path(__file__).parents[1] / "jobs"
COMMON, SUITE, RECIPE, BASE = (
    (JOBS / "suite" / name).read_text() for name in ("common.env", "job.sh", "recipe.yaml", "base.yaml")
)
SFT, DISTILL, VERL_SFT, ASYNC = (
    (JOBS / name).read_text() for name in ("roll_sft.yaml", "roll_distillation.yaml", "verl_sft.sh", "verl_async.sh")
)
MAIN = """import argparse
import os


def main():
    args = parse()
    if not args.config:
        args.config = os.path.join(
            os.path.dirname(__file__), "configs", "default.yaml"
        )
"""


def suite(tmp_path, hf, nodes):
    for folder in ("tests/suites", "configs/recipes", "examples/configs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tests/suites/common.env").write_text(COMMON)
    (tmp_path / "configs/base.yaml").write_text(BASE)
    (tmp_path / "configs/recipes/job.yaml").write_text(RECIPE.replace("HF", str(hf)).replace("../../", "../"))
    default = (BASE + "  #").replace("policy:", f"policy:\n  model_name: {hf}")
    (tmp_path / "examples/configs/default.yaml").write_text(default)
    (tmp_path / "examples/run_grpo.py").write_text(MAIN)
    script = tmp_path / "tests/suites/job.sh"
    script.write_text(SUITE.replace("NODES", nodes))
    return script


@pytest.fixture(autouse=True)
def no_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "copies"))


def test_suite_of_nemo_rl_is_read_through_what_it_sources(releases, tmp_path, only):
    script = suite(tmp_path, releases("qwen3_moe"), "2")
    report = preflight(script=script)
    assert (report.status, report.findings, list(report.reasons)) == ("passed", [], [])
    script.write_text(SUITE.replace("NODES", "1"))
    finding = only(preflight(script=script))
    assert (finding.code, "3 GPUs" in finding.actual) == ("CK722", True)
    assert f"{tmp_path}/configs/recipes/../base.yaml:5" in finding.expected
    # The program names a file of settings where the launch does not.
    script.write_text(f"cd {tmp_path}\nuv run examples/run_grpo.py grpo.max_num_steps=1\n")
    assert only(preflight(script=script)).code == "CK722"
    script.write_text(f"cd {tmp_path}\nuv run examples/run_grpo.py cluster.gpus_per_node=4\n")
    assert preflight(script=script).status == "passed"


@pytest.mark.parametrize("how", ["bash $HERE/job.sh", "NAME=job bash ./tests/suites/job.sh", "COMMAND"])
def test_script_that_starts_another_one_is_read(how, releases, tmp_path, monkeypatch, only):
    suite(tmp_path, releases("qwen3_moe"), "1")
    monkeypatch.chdir(tmp_path)
    if how == "COMMAND":
        how = f"""read -r -d '' COMMAND <<EOF
cd {tmp_path}
HF_HOME=$NOBODY/cache \\
uv run python examples/run_grpo.py --config configs/recipes/job.yaml ++logger.name=$NOBODY
EOF
COMMAND=$COMMAND sbatch --nodes=1 ray.sub"""
    script = tmp_path / "tests/suites/outer.sh"
    script.write_text(f'HERE=$(cd "$(dirname "$0")" && pwd)\nexport UNUSED=1\n{how}\n')
    finding = only(preflight(script=script))
    assert (finding.code, "3 GPUs" in finding.actual) == ("CK722", True)


def test_file_of_roll_stands_beside_its_program(tmp_path, only, releases):
    job = tmp_path / "examples" / "job"
    job.mkdir(parents=True)
    (job / "sft.yaml").write_text(SFT.replace("HF", str(releases("qwen3_moe"))).replace("0,8", "0,6"))
    script = job / "run.sh"
    script.write_text(
        f"cd {tmp_path}\nCONFIG_PATH=$(basename $(dirname $0))\n"
        "python examples/start_sft_pipeline.py --config_path $CONFIG_PATH  --config_name sft\n"
    )
    finding = only(preflight(script=script))
    assert (finding.code, "6 GPUs" in finding.actual) == ("CK722", True)


@pytest.mark.parametrize(
    ("text", "before", "after", "code"),
    [
        (SFT, "", "", ""),
        (DISTILL, "", "", ""),
        (DISTILL, "[8,9,10,11]", "[8,9,10]", "CK722"),
        (DISTILL, "teacher_pretrain: HF", "teacher_pretrain: /nosuch", "CK714"),
    ],
)
def test_fine_tuning_and_distillation_of_roll_are_read(text, before, after, code, releases, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text((text.replace(before, after) if before else text).replace("HF", str(releases("qwen3_moe"))))
    report = preflight(script=job)
    assert {one.code for one in report.findings} == ({code} if code else set())
    assert report.status == ("failed" if code else "passed")


def test_fine_tuning_of_verl_is_read(releases, tmp_path, only):
    script, local = tmp_path / "run.sh", tmp_path / "local"
    text = VERL_SFT.replace("HF", str(releases("qwen3_moe"))).replace("LOCAL", str(local))
    script.write_text(text)
    report = preflight(script=script)
    assert (report.findings, len(report.facts["what would be loaded"]) > 0) == ([], True)
    words = ["engine.use_dist_checkpointing=True", "engine.dist_checkpointing_path=/nosuch"]
    assert only(preflight(script=script, arguments=words)).code == "CK711"
    assert only(preflight(script=script, arguments=["model.path=/nosuch"])).code == "CK714"
    # A run that goes on from a step is not looked at.
    local.mkdir()
    (local / "latest_checkpointed_iteration.txt").write_text("5")
    assert "resumed" in preflight(script=script).facts["not read"][0]


@pytest.mark.parametrize(
    ("ranks", "words", "found"),
    [
        ("--nproc_per_node=8", "engine=fsdp engine.ulysses_sequence_parallel_size=2", ""),
        ("--nproc_per_node=4", "engine.strategy=fsdp2", ""),
        ("--nproc-per-node=3 --nnodes 3", "engine.ulysses_sequence_parallel_size=2", "9 GPUs: processes started at"),
        ("--nproc_per_node=7", "engine=veomni engine.ulysses_parallel_size=2", "7 GPUs"),
        ("--nproc_per_node=6", "engine=fsdp engine.ulysses_sequence_parallel_size=3", "10"),  # heads
    ],
)
def test_ranks_of_torchrun_divide_over_those_that_share_a_sequence(ranks, words, found, releases, tmp_path):
    script, model = tmp_path / "run.sh", f"model.path={releases('qwen3_moe')} data.train_files=/d.parquet"
    script.write_text(f"torchrun {ranks} -m verl.trainer.sft_trainer {model} {words} trainer.project_name=sft\n")
    report = preflight(script=script)
    errors = [one for one in report.findings if one.severity == "error"]
    assert [(one.code, one.actual.startswith(found)) for one in errors] == ([("CK722", True)] if found else [])
    assert {one.code: one.status for one in report.checks}["CK722"] == ("failed" if found else "passed")


def test_rollout_of_verl_has_its_own_gpus(releases, tmp_path, only):
    script = tmp_path / "run.sh"
    text = ASYNC.replace("HF", str(releases("qwen3_moe")))
    script.write_text(text)
    report = preflight(script=script)
    assert (report.status, report.findings, list(report.reasons)) == ("passed", [], [])
    script.write_text(text.replace("n_gpus_per_node=6", "n_gpus_per_node=5"))
    finding = only(preflight(script=script))
    assert finding.code == "CK722"
    assert "5 GPUs: rollout.nnodes" in finding.actual
    # With a date alone in its name, a run that is started twice on one day goes on from its own step.
    script.write_text(text.replace("_%H%M", ""))
    report = preflight(script=script)
    assert report.status == "inconclusive"
    assert "trainer.experiment_name" in report.facts["not read"][0]


@pytest.mark.parametrize(
    ("resource", "options", "actor", "rollout"),
    [
        ({"actor": [1, 8], "rollout": [1, 4]}, "", ("8", "1"), "4"),
        ({"actor": [1, 16]}, "--num-gpus-per-node 4", ("4", "4"), None),
        ({"actor": [1, 8], "advantages": [1, 0]}, "--actor-num-nodes 2", ("", "2"), None),
    ],
)
def test_resources_of_relax_are_the_gpus_of_its_roles(resource, options, actor, rollout):
    command = f"python3 -m relax.entrypoints.train --resource '{json.dumps(resource)}' {options} --hf-checkpoint /x"
    words = [word.text for word in read_script(None, command, environment={}).words]
    given = dict(itertools.pairwise(words))
    assert (given.get("--actor-num-gpus-per-node", ""), given.get("--actor-num-nodes")) == actor
    assert given.get("--rollout-num-gpus") == rollout
    command = "python3 -m relax.entrypoints.train --resource $NOBODY --hf-checkpoint /x"
    assert "--resource $NOBODY" in read_script(None, command, environment={}).unresolved[0]
