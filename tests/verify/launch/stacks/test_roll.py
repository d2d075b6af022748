"""Launches of ROLL: what its roles load by its YAML files, and what is wrong with them."""

import shutil
from pathlib import Path

import pytest
from support.launch_scripts import loads, passes
from support.messages import text_with

from ckptkit.verify.launch.preflight import preflight

NAME = "qwen3_moe"
JOB = (Path(__file__).parents[1] / "jobs" / "roll.yaml").read_text()


@pytest.fixture
def hf(releases):
    return releases(NAME)


@pytest.fixture
def job(hf, tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "envs.yaml").write_text("custom_envs: {}\n")
    path = tmp_path / "jobs" / "job.yaml"
    path.parent.mkdir()
    path.write_text(JOB.replace("MODEL", str(hf)).replace("[]", "\n  - ../common/envs@_here_", 1))
    return path


def test_a_first_run_passes(job, hf):
    report = preflight(script=job)
    assert passes(report)
    assert loads(report) == [
        f"actor loads {hf} (HF): pretrain",
        f"reference loads {hf} (HF): pretrain",
        text_with(f"rollout engine {hf} HF sglang pretrain actor"),
    ]
    assert {"CK703", "CK714", "CK722"} <= {one.code for one in report.checks if one.status == "passed"}
    # Without a KL term there is no reference.
    report = preflight(script=job, arguments=["init_kl_coef=0"])
    assert passes(report)
    assert [line.partition(" loads ")[0] for line in loads(report)] == ["actor", "rollout engine"]


def test_a_critic_loads_reward_pretrain(job, releases):
    given = ["adv_estimator=gae", f"reward_pretrain={releases('qwen2-tied')}", "+critic.device_mapping=[0,1]"]
    report = preflight(script=job, arguments=[*given, "+critic.strategy_args.strategy_name=megatron_train"])
    assert passes(report)
    assert f"critic loads {releases('qwen2-tied')} (HF): reward_pretrain" in loads(report)


def test_megatron_weights_beside_the_model_count_instead(job, hf, converted, tmp_path):
    own = Path(shutil.copytree(hf, tmp_path / "model"))
    (own / "mca_config.json").write_text("{}")
    shutil.copytree(converted(NAME) / "release", own / "iter_0000001" / "dist_model")
    report = preflight(script=job, arguments=[f"pretrain={own}"])
    assert passes(report)
    assert loads(report)[0].startswith(f"actor loads {own / 'iter_0000001' / 'dist_model'} (Megatron): ")


def test_a_run_is_resumed_from_a_path(job, converted, tmp_path):
    step = tmp_path / "checkpoint-20"
    shutil.copytree(converted(NAME) / "release", step / "iter_0000001" / "dist_model")
    (step / "latest_checkpointed_iteration.txt").write_text("1")
    report = preflight(script=job, arguments=[f"resume_from_checkpoint={step}"])
    assert passes(report)
    assert loads(report)[0].startswith(f"actor loads {step / 'iter_0000001' / 'dist_model'} (Megatron): to resume")


def test_devices_that_do_not_divide_are_found_with_both_places(job):
    finding, experts = preflight(script=job, arguments=["actor_train.device_mapping=list(range(0,6))"]).findings
    config = "actor_train.strategy_args.strategy_config"
    assert finding.code == "CK722"
    places = f"{config}.tensor_model_parallel_size {job}:15 {config}.pipeline_model_parallel_size {job}:16"
    assert finding.expected == text_with(f"2 2 1 = 4 {places}")
    assert finding.actual == "6 GPUs: actor_train.device_mapping (the command line) list(range(0,6))"
    assert experts.expected == text_with("GPUs = 2 2 2 = 8")


def test_experts_take_the_tensor_parallel_size_where_they_have_none(job):
    """8 GPUs hold no 4 x 2 x 2."""
    report = preflight(script=job, arguments=["actor_train.strategy_args.strategy_config.expert_model_parallel_size=4"])
    found = [finding.expected.partition(" (")[0] for finding in report.findings if finding.code == "CK722"]
    assert found == [text_with("GPUs = 4 2 2 = 16")]
    # Sizes of the reference are its own.
    report = preflight(script=job, arguments=["reference.strategy_args.strategy_config.expert_model_parallel_size=5"])
    assert {finding.code for finding in report.findings} == {"CK703", "CK722"}


def test_paths_that_are_not_what_they_must_be_are_found(job, hf, converted, releases, only):
    other = releases("qwen2-tied")
    for word, code, actual in (
        ("resume_from_checkpoint=/nowhere/checkpoint-8", "CK713", "no such directory"),
        ("pretrain=/nowhere/model", "CK714", "no such directory"),
        (f"pretrain={converted(NAME)}", "CK714", "a Megatron checkpoint"),
        (f"+actor_train.model_args.model_name_or_path={other}", "CK711", f"{other}, "),
    ):
        finding = only(preflight(script=job, arguments=[word]))
        assert (finding.code, finding.actual.startswith(actual)) == (code, True), finding


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("actor_train.device_mapping=list(map(int,x))", "lists and ranges"),
        ("~reference.device_mapping", "reference.device_mapping is not"),
        ("resume_from_checkpoint=true", "the path"),
        ("actor_train.strategy_args.strategy_config.tensor_model_parallel_size=${tp}", "${tp}"),
    ],
)
def test_what_cannot_be_told_makes_the_report_inconclusive(word, line, job):
    report = preflight(script=job, arguments=[word])
    assert (report.status, report.findings) == ("inconclusive", [])
    assert any(one == text_with(line) for one in report.facts["not read"])


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("../config/traj_envs_gem_math@_here_", "passed"),
        ("../config/deepspeed_zero3_cpuoffload@_here_", "passed"),
        ("../config/envs_of_mine@_here_", "inconclusive"),
        ("../common/traj_envs@_here_", "inconclusive"),  # the folder is there, and the file is not
    ],
)
def test_files_of_rolls_own_examples_need_not_be_there(name, status, job):
    """They hold environments and settings of DeepSpeed, and no path or size of a role."""
    text = job.read_text().replace("../common/envs@_here_", name)
    job.write_text(text)
    report = preflight(script=job)
    assert (report.status, report.findings) == (status, [])
    # What depends on such a file is not known.
    job.write_text(text.replace("strategy_config: {expert_model_parallel_size: 4", "strategy_config: ${sizes} #"))
    report = preflight(script=job)
    assert (report.status, report.findings) == ("inconclusive", [])


TEACHER = "  model_args: {model_name_or_path: NAME}\n  strategy_args: {strategy_name: megatron_infer}\n"
OF_A_SUBJECT = (
    "  math:\n    model_args: {model_name_or_path: NAME}\n    strategy_args: {strategy_name: megatron_infer}\n"
)


def distillation(job, teacher):
    """The job as on-policy distillation, whose roles have other names in its file."""
    text = job.read_text().split("reference:")[0]
    text = text.replace("actor_infer:\n", "student_infer:\n  model_args: {model_name_or_path: '${pretrain}'}\n")
    text = text.replace("actor_train:\n", "student_train:\n")
    text = text.replace("{dtype", "{model_name_or_path: '${pretrain}', dtype")
    return f"{text}teacher:\n{teacher}"


@pytest.mark.parametrize("text", [TEACHER, OF_A_SUBJECT])
def test_distillation_reads_students_as_actors_and_finds_the_teacher(text, job, hf):
    first = job.read_text()
    for name, findings in ((str(hf), []), ("/nowhere/teacher", [("CK714", "no such directory")])):
        job.write_text(first)
        job.write_text(distillation(job, text.replace("NAME", name)))
        report = preflight(script=job)
        assert [(one.code, one.actual) for one in report.findings] == findings
        assert loads(report)[0] == f"actor loads {hf} (HF): actor_train.model_args.model_name_or_path"
    # Where a student has no model of its own, `pretrain` counts for the teacher too.
    job.write_text(job.read_text().replace("model_name_or_path: '${pretrain}', ", ""))
    finding = next(one for one in preflight(script=job).findings if one.code == "CK711")
    assert finding.actual.startswith("/nowhere/teacher, ")
    assert str(hf) in finding.actual


def test_devices_that_do_not_count_from_0_are_found(job, tmp_path):
    """ROLL counts the GPUs of device_mapping from the first of a node, and sets the variable for each worker."""
    script = tmp_path / "run.sh"
    start = f"python3 start_rlvr_pipeline.py --config_path {job.parent} --config_name {job.stem}\n"
    for devices, found in (("4,5", ["4,5"]), ("0,1", []), ("$NOBODY_SETS_IT", [])):
        script.write_text(f"export CUDA_VISIBLE_DEVICES={devices}\n{start}")
        issues = [one for one in preflight(script=script).findings if one.code == "CK722"]
        assert [one.actual.partition(" ")[0] for one in issues] == found
