"""Launches of verl: what each side loads by Hydra's settings, and what is wrong with them."""

import shutil
from pathlib import Path

import pytest
from support.launch_scripts import loads, passes
from support.messages import text_with

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.preflight import preflight

TRACKER = "latest_checkpointed_iteration.txt"
NAME = "qwen3_moe"
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
NEW = "trainer.resume_mode=disable"
GRPO = ["--config-name=ppo_megatron_trainer", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=sglang"]


@pytest.fixture
def hf(releases):
    return releases(NAME)


@pytest.fixture
def torch_dist(converted):
    """The iteration itself, which verl loads."""
    return converted(NAME) / "release"


def dist(role, path):
    prefix = f"actor_rollout_ref.{role}.megatron"
    return [f"{prefix}.use_dist_checkpointing=True", f"{prefix}.dist_checkpointing_path={path}"]


def words(hf, *more):
    return [*GRPO, f"actor_rollout_ref.model.path={hf}", *more]


def test_a_first_run_from_hf_passes(hf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = preflight(arguments=words(hf, f"{ACTOR}.use_kl_loss=True"))
    assert passes(report)
    model = "actor_rollout_ref.model.path"
    bridge = f"{model}, through a bridge"
    anew = "resume_mode auto checkpoints/verl_examples/gsm8k"
    assert loads(report) == [
        text_with(f"actor {hf} HF {model} bridge {anew}"),
        f"reference loads {hf} (HF): {bridge}",
        text_with(f"rollout engine {hf} HF sglang {model} actor"),
    ]


def test_a_critic_is_loaded_for_gae_and_fsdp_through_no_bridge(hf, releases):
    other = releases("qwen2-tied")
    given = [f"actor_rollout_ref.model.path={hf}", "algorithm.adv_estimator=gae", f"critic.model.path={other}"]
    report = preflight(arguments=["--config-name=ppo_trainer", *given, NEW])
    assert passes(report)
    assert loads(report)[0].startswith(f"actor loads {hf} (HF): actor_rollout_ref.model.path, without Megatron")
    assert loads(report)[1].startswith(f"critic loads {other} (HF)")
    assert not [line for line in loads(report) if "bridge" in line]


def test_a_resumed_run_passes_and_the_reference_stays_at_the_start(hf, torch_dist, tmp_path):
    actor = tmp_path / "run" / "global_step_40" / "actor"
    shutil.copytree(torch_dist, actor / "model" / "dist_ckpt")
    (tmp_path / "run" / TRACKER).write_text("40")
    given = words(hf, *dist("actor", torch_dist), f"{ACTOR}.use_kl_loss=True")
    report = preflight(arguments=[*given, f"trainer.default_local_dir={tmp_path / 'run'}"])
    assert passes(report)
    resumed, reference, *_ = loads(report)
    assert resumed.startswith(f"actor loads {actor / 'model' / 'dist_ckpt'} (Megatron): the tracker of ")
    assert reference == f"reference loads {hf} (HF): actor_rollout_ref.model.path, through a bridge"


def test_a_step_of_hf_weights_is_resumed_by_its_path(hf, tmp_path):
    step = tmp_path / "global_step_7"
    shutil.copytree(hf, step / "actor" / "huggingface")
    report = preflight(arguments=words(hf, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={step}"))
    assert passes(report)
    assert loads(report)[0].startswith(f"actor loads {step / 'actor' / 'huggingface'} (HF): trainer.resume_from_path")


def test_settings_of_a_file_with_its_defaults_pass(hf, tmp_path):
    (tmp_path / "sizes.yaml").write_text("cut: 2\n")
    file = tmp_path / "job.yaml"
    file.write_text(
        "defaults:\n  - ppo_megatron_trainer\n  - sizes\n  - _self_\n"
        "algorithm: {adv_estimator: grpo}\n"
        f"actor_rollout_ref:\n  model:\n    path: {hf}\n"
        "  rollout: {name: vllm, tensor_model_parallel_size: '${cut}'}\n"
        "  actor:\n    megatron:\n      tensor_model_parallel_size: ${mul:${cut},1}\n"
        "trainer: {nnodes: 1, n_gpus_per_node: 4, resume_mode: disable}\n"
    )
    assert passes(preflight(script=file))
    assert passes(preflight(arguments=[f"--config-path={tmp_path}", "--config-name", "job"]))
    report = preflight(script=file, arguments=["cut=3"])
    found = [(finding.code, finding.actual) for finding in report.findings]
    assert ("CK722", f"4 GPUs: trainer.nnodes ({file}:13) 1 x trainer.n_gpus_per_node ({file}:13) 4") in found
    assert ("CK703", "num_attention_heads = 10") in found


def test_sizes_and_paths_that_are_not_right_are_found(hf, torch_dist, only):
    key = "megatron.tensor_model_parallel_size"
    finding = only(preflight(arguments=words(hf, f"{ACTOR}.use_kl_loss=true", f"{REF}.{key}=2", NEW)))
    assert (finding.code, finding.severity) == ("CK722", "warning")
    assert (finding.expected, finding.actual) == (f"{ACTOR}.{key} = 1", f"{REF}.{key} (the command line) = 2")
    finding = only(preflight(arguments=words(hf, *dist("actor", torch_dist.parent), NEW)))
    assert (finding.code, finding.actual) == ("CK711", text_with("iterations"))
    assert finding.hint == text_with(str(torch_dist))
    finding = only(preflight(arguments=words(torch_dist, NEW)))
    assert (finding.code, finding.actual) == ("CK714", "a Megatron checkpoint")
    # A path without its switch is ignored.
    report = preflight(arguments=words(hf, dist("actor", torch_dist)[1], NEW))
    assert (only(report).code, only(report).severity) == ("CK711", "warning")
    assert loads(report)[0].startswith(f"actor loads {hf} (HF)")


@pytest.mark.parametrize(
    ("more", "code", "actual"),
    [
        (["actor_rollout_ref.model.path=/nowhere/model"], "CK714", "no such directory"),
        (dist("actor", Path("/nowhere")), "CK711", "no such directory"),
        (dist("actor", Path("/nowhere"))[:1], "CK711", "is not set"),
        ([*dist("ref", Path("/nowhere")), f"{ACTOR}.use_kl_loss=true"], "CK712", "no such directory"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere/global_step_8"], *("CK713", "missing")),
    ],
)
def test_a_path_that_is_not_there_is_found(more, code, actual, hf, only):
    finding = only(preflight(arguments=words(hf, NEW, *more)))
    assert (finding.code, finding.severity, finding.actual) == (code, "error", text_with(actual))


@pytest.mark.parametrize(
    ("tracker", "code", "actual"),
    [
        ("30", "CK713", "global_step_20"),
        (None, "CK711", "global_step_20"),
        ("soon", "CK711", "'soon'"),
        ("20", "CK713", "no such directory"),
    ],
)
def test_a_run_that_would_not_resume_is_found(tracker, code, actual, hf, tmp_path, only):
    (tmp_path / "global_step_20").mkdir()
    if tracker:
        (tmp_path / TRACKER).write_text(tracker)
    finding = only(preflight(arguments=words(hf, f"trainer.default_local_dir={tmp_path}")))
    assert (finding.code, finding.actual) == (code, text_with(actual))


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["actor_rollout_ref.model.path=hdfs://models/qwen3"], "machine"),
        (["actor_rollout_ref.model.path=${oc.env:CKPTKIT_TEST_NO_SUCH}"], "CKPTKIT_TEST_NO_SUCH is not set"),
        (["~actor_rollout_ref.model.path"], "actor_rollout_ref.model.path is not"),
        (["trainer.nnodes=${nodes}"], "trainer.nnodes ${nodes}"),
        (["trainer.nnodes=${now:%Y}"], "resolver now"),
        (["++actor_rollout_ref.model.override_config.model_config.num_hidden_layers=2"], "2:"),
    ],
)
def test_what_cannot_be_told_makes_the_report_inconclusive(more, line, hf):
    report = preflight(arguments=words(hf, NEW, *more))
    assert (report.status, report.findings) == ("inconclusive", [])
    assert any(one == text_with(line) for one in report.facts["not read"])


def test_options_of_the_command_line_count_before_the_settings_or_are_refused(hf, torch_dist):
    report = preflight(hf_checkpoint=hf, arguments=words(Path("/elsewhere/model"), NEW))
    assert passes(report)
    note = f"--hf-checkpoint {hf} actor_rollout_ref.model.path (the command line) /elsewhere/model"
    assert report.facts["notes"] == [text_with(note)]
    given = words(hf, *dist("actor", torch_dist), NEW)
    assert passes(preflight(load=torch_dist, hf_checkpoint=hf, arguments=given))
    refused = {
        "the actor loads": {"load": torch_dist.parent},
        "reference": {"ref_load": torch_dist},
        "--tp is 2.*1": {"tp": 2},
        "--ckpt-step.*verl": {"ckpt_step": 2},
    }
    for said, options in refused.items():
        with pytest.raises(CkptkitError, match=said):
            preflight(arguments=given, **options)
    for value in ("two", "0"):
        with pytest.raises(CkptkitError, match="trainer.nnodes"):
            preflight(arguments=words(hf, f"trainer.nnodes={value}"))


# A bash script that launches verl: its overrides with their lines, and `$DATA`, which is not known and decides nothing.
SCRIPT = """#!/bin/bash
MODEL=HF
PP=${PP:-2}
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\
    algorithm.adv_estimator=grpo data.train_files=$DATA/train.parquet actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP \\
    trainer.nnodes=NODES trainer.n_gpus_per_node=8 trainer.resume_mode=disable $@
"""


def test_a_script_of_verl_is_read_with_its_lines(hf, tmp_path, only):
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.replace("HF", str(hf)).replace("NODES", "1"))
    report = preflight(script=script)
    assert passes(report)
    assert loads(report)[0].startswith(f"actor loads {hf} (HF)")
    size = f"{ACTOR}.megatron.pipeline_model_parallel_size"
    finding = only(preflight(script=script, arguments=[f"{size}=3"]))
    assert (finding.code, f"{size} ({script}:8)" in finding.expected) == ("CK722", True)
    assert finding.actual == f"8 GPUs: trainer.nnodes ({script}:8) 1 x trainer.n_gpus_per_node ({script}:8) 8"
    script.write_text(SCRIPT.replace("HF", str(hf)).replace("NODES", "$NOBODY_SETS_IT"))
    report = preflight(script=script)
    assert (report.status, report.findings) == ("inconclusive", [])
    (line,) = report.facts["not read"]
    assert line == text_with("trainer.nnodes: NOBODY_SETS_IT")
