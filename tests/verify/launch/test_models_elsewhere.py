"""Models that a launch names and preflight cannot judge: an unknown model_type, and names on a model hub."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from mutations.edits import edit_config
from support.fake_hub import download
from support.messages import text_with

from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.preflight import preflight

NAME = "qwen2-untied"
REPOSITORY = "some-org/Some-Model_1.5"
UNKNOWN = "nemotron_later"


JOBS = Path(__file__).with_name("jobs")
ROLL = (JOBS / "roll.yaml").read_text().replace("      expert_model_parallel_size: 2\n", "")
# A first run of every stack from an HF directory, or a name that stands for one. All but the first two may get a name.
LAUNCHES = {
    "slime": "python3 train.py --hf-checkpoint MODEL --ref-load MODEL",
    "vime": "python3 train.py --hf-checkpoint MODEL --load MODEL",
    "miles": "python3 train.py --hf-checkpoint MODEL --megatron-to-hf-mode bridge",
    "verl": "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml algorithm.adv_estimator=grpo "
    "actor_rollout_ref.model.path=MODEL actor_rollout_ref.rollout.name=sglang trainer.resume_mode=disable",
    "NeMo-RL": (JOBS / "nemo_rl.yaml").read_text().replace("???", "MODEL"),
    "ROLL": ROLL.split("reference:")[0] + "init_kl_coef: 0",
}
NAMING = list(LAUNCHES)[2:]


def write(folder, stack, hf):
    file = folder / ("job.yaml" if stack in ("NeMo-RL", "ROLL") else "run.sh")
    file.write_text(LAUNCHES[stack].replace("MODEL", str(hf)) + "\n")
    return file


def actor(report):
    return next(line for line in report.facts["what would be loaded"] if line.startswith("actor "))


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "copies"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def unknown(releases, copy_of):
    path = copy_of(releases(NAME))
    edit_config(path, model_type=UNKNOWN, architectures=["Later"])
    return path


@pytest.mark.parametrize("stack", LAUNCHES)
def test_right_launch_of_an_unknown_model_is_inconclusive(stack, unknown, releases, tmp_path):
    done = CliRunner().invoke(cli, ["preflight", str(write(tmp_path, stack, unknown)), "--json"])
    report = json.loads(done.stdout)
    assert (done.exit_code, report["status"], report["findings"]) == (2, "inconclusive", [])
    assert any(f"model_type '{UNKNOWN}'" in reason for reason in report["reasons"])
    assert not [line for line in report["facts"]["what would be loaded"] if "cannot start" in line]
    sound = preflight(script=write(tmp_path, stack, releases(NAME)))
    assert (sound.status, sound.findings, sound.reasons) == ("passed", [], [])


def in_cache(cache, release):
    snapshot = download(REPOSITORY, release, cache_dir=cache)
    assert snapshot_download(REPOSITORY, cache_dir=cache, local_files_only=True) == str(snapshot)
    return snapshot


@pytest.mark.parametrize(
    ("name", "value", "cache"),
    [
        ("HF_HOME", "{}/a", "a/hub"),
        ("HF_HUB_CACHE", "{}/b", "b"),
        ("XDG_CACHE_HOME", "{}/c", "c/huggingface/hub"),
        ("HOME", "{}/d", "d/.cache/huggingface/hub"),
    ],
)
def test_a_name_on_a_hub_is_its_snapshot_in_the_local_cache(name, value, cache, releases, tmp_path, monkeypatch):
    snapshot = in_cache(tmp_path / cache, releases(NAME))
    monkeypatch.setenv(name, value.format(tmp_path))
    for stack in NAMING if name == "HF_HOME" else ["miles"]:
        report = preflight(script=write(tmp_path, stack, REPOSITORY))
        assert (report.status, report.findings, report.reasons) == ("passed", [], [])
        assert actor(report).startswith(f"actor loads {snapshot} (HF): ")
        assert {"CK102", "CK105"} <= {one.code for one in report.checks if one.status == "passed"}


def test_a_cache_that_the_launch_itself_names_counts(releases, converted, tmp_path):
    in_cache(tmp_path / "shared", releases(NAME))
    text = f"python3 train.py --hf-checkpoint {REPOSITORY} --ref-load {converted(NAME)}"
    (tmp_path / "run.sh").write_text(f"export HF_HUB_CACHE={tmp_path / 'shared'}\n{text}\n")
    assert preflight(script=tmp_path / "run.sh").status == "passed"


@pytest.mark.parametrize("stack", NAMING)
def test_a_name_that_is_not_in_the_cache_is_downloaded_or_an_error_where_that_is_forbidden(
    stack, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(LocalEntryNotFoundError):  # what the trainer then ends with
        snapshot_download(REPOSITORY, cache_dir=tmp_path / "hub", local_files_only=True)
    launch = write(tmp_path, stack, REPOSITORY)
    report = preflight(script=launch)
    assert (report.status, report.findings) == ("inconclusive", [])
    assert any(REPOSITORY in line and str(tmp_path / "hub") in line for line in report.facts["not read"])
    assert not [line for line in report.facts["what would be loaded"] if "cannot start" in line]
    missing = tmp_path / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(variable, "true")
        report = preflight(script=launch)
        found = {(one.file, one.actual) for one in report.findings if one.code == "CK714"}
        assert (report.status, found) == ("failed", {(str(missing), "no such directory")})
        monkeypatch.setenv(variable, "0")


def test_of_a_part_in_the_cache_the_rest_is_downloaded_or_missing_where_that_is_forbidden(
    releases, tmp_path, monkeypatch
):
    snapshot = in_cache(tmp_path / "hub", releases(NAME))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert preflight(hf_checkpoint=REPOSITORY).status == "passed"
    sorted(snapshot.glob("*.safetensors"))[0].resolve().unlink()
    report = preflight(hf_checkpoint=REPOSITORY)
    assert (report.status, report.findings) == ("inconclusive", [])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "CK102" in [one.code for one in preflight(hf_checkpoint=REPOSITORY).findings]


def test_what_is_no_name_on_a_hub_is_a_path(releases, tmp_path):
    for name in ("org/model.git", "org/a--b", "org/a..b", "runs/model/hf", "./org/model", "org/" + "a" * 120):
        report = preflight(arguments=["--hf-checkpoint", name])
        assert [(one.code, one.actual) for one in report.findings] == [("CK714", "no such directory")], name
    # And a directory counts before the hub.
    shutil.copytree(releases(NAME), tmp_path / REPOSITORY)
    assert preflight(hf_checkpoint=REPOSITORY).status == "passed"


def test_preflight_takes_a_name_for_a_model_of_settings(releases, tmp_path, monkeypatch):
    launch = write(tmp_path, "verl", "another-org/model")
    with pytest.raises(CkptkitError, match=f"--hf-checkpoint {REPOSITORY}: not in"):
        preflight(hf_checkpoint=REPOSITORY, script=launch)
    in_cache(tmp_path / "hub", releases(NAME))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert preflight(hf_checkpoint=REPOSITORY, script=launch).status == "passed"


_ROLLS, _STUDENTS = "model_args.model_name_or_path", ("actor_train", "actor_infer")
# The key of a teacher, and what turns it on. Of ROLL's roles all have a model of their own, or none.
TEACHERS = {
    "verl": ("distillation.teacher_models.a.model_path", ["++distillation.enabled=true"]),
    "NeMo-RL": ("on_policy_distillation.teacher_model_by_agent_name.a", ["++on_policy_distillation.enabled=true"]),
    "ROLL": (f"teacher.{_ROLLS}", ["++use_opd=true", *(f"++{role}.{_ROLLS}=${{pretrain}}" for role in _STUDENTS)]),
}


@pytest.mark.parametrize("stack", TEACHERS)
def test_a_teacher_is_found_in_the_cache_and_by_its_path(stack, releases, tmp_path, monkeypatch):
    launch, (key, on) = write(tmp_path, stack, releases(NAME)), TEACHERS[stack]
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    words = [*on, f"++{key}={REPOSITORY}"]
    report = preflight(script=launch, arguments=words)
    assert (report.status, report.findings) == ("passed", [])
    assert text_with(f"{REPOSITORY} hub not in") in report.facts["notes"]
    snapshot = in_cache(tmp_path / "hub", releases(NAME))
    report = preflight(script=launch, arguments=words)
    assert (report.status, report.findings, report.reasons) == ("passed", [], [])
    assert f"teacher loads {snapshot} (HF): {key}" in report.facts["what would be loaded"]
    report = preflight(script=launch, arguments=[*on, f"++{key}=/nowhere/teacher"])
    assert [(one.code, one.file) for one in report.findings] == [("CK714", "/nowhere/teacher")]
    if stack != "ROLL":
        report = preflight(script=launch, arguments=[on[0].replace("true", "false"), f"++{key}=/nowhere/teacher"])
        assert (report.status, report.findings) == ("passed", [])


def test_a_teacher_of_an_unknown_family_and_a_reward_model_leave_the_launch_conclusive(unknown, releases, tmp_path):
    launch = write(tmp_path, "verl", releases(NAME))
    words = [f"++{TEACHERS['verl'][0]}={unknown}", f"++reward_model.model.path={REPOSITORY}"]
    report = preflight(script=launch, arguments=words)
    assert (report.status, report.findings) == ("passed", [])
    assert any("unsupported" in line for line in report.facts["notes"])
