"""Files of settings of slime and miles, and what miles loads otherwise than slime."""

import shutil

import pytest
from support.messages import text_with

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.preflight import preflight

NAME = "qwen3_moe"
TRACKER = "latest_checkpointed_iteration.txt"
MODE = ["--attention-dropout", "0.0", "--hidden-dropout", "0.0", "--megatron-to-hf-mode"]


@pytest.fixture
def run(converted, tmp_path):
    for step in (10, 20):
        shutil.copytree(converted(NAME) / "release", tmp_path / "run" / f"iter_{step:07d}")
    shutil.copytree(converted(NAME) / "hf", tmp_path / "run" / "hf")
    (tmp_path / "run" / TRACKER).write_text("20")
    return tmp_path / "run"


def loads(report):
    lines = (line for line in report.facts["what would be loaded"] if " loads " in line and "cannot start" not in line)
    return {line.partition(" loads ")[0]: line.partition(" loads ")[2].partition(" (")[0] for line in lines}


def test_a_role_of_the_megatron_config_loads_its_own_path(run, converted, tmp_path):
    file = tmp_path / "roles.yaml"
    file.write_text(
        "megatron:\n  - {name: a, role: actor, overrides: {lr: 1e-6}}\n"
        f"  - name: c\n    role: critic\n    overrides:\n      load: {run}\n      ckpt_step: 10\n"
    )
    words = ["--megatron-config-path", str(file), "--advantage-estimator", "ppo"]
    report = preflight(ref_load=converted(NAME), arguments=words)
    assert (report.status, report.findings) == ("passed", [])
    assert loads(report)["critic"] == str(run / "iter_0000010")
    assert report.facts["what would be loaded"][2].endswith(f"--ckpt-step 10 of --critic-load (load at {file}:6)")


def test_a_custom_config_replaces_load_and_nothing_stands_in_for_it(converted, tmp_path, only):
    file = tmp_path / "custom.yaml"
    file.write_text(f"load: {tmp_path / 'nowhere'}\nglobal_batch_size: 8\n")
    report = preflight(ref_load=converted(NAME), arguments=["--custom-config-path", str(file)])
    finding = only(report)
    assert (finding.code, finding.severity, finding.actual) == ("CK711", "error", "no such directory")
    assert "actor" not in loads(report)


def test_a_size_in_a_custom_config_counts_and_one_of_a_role_is_listed(converted, tmp_path):
    file, role = tmp_path / "custom.yaml", tmp_path / "megatron.yaml"
    file.write_text("expert_model_parallel_size: 4\nno_load_optim: true\n")
    given = ["--custom-config-path", str(file)]
    assert preflight(ref_load=converted(NAME), arguments=given).status == "passed"
    file.write_text("expert_model_parallel_size: 5\n")
    (found,) = preflight(ref_load=converted(NAME), arguments=given).findings
    assert (found.code, "by ep = 5" in found.expected) == ("CK703", True)
    role.write_text("megatron:\n  - {role: critic, overrides: {expert_model_parallel_size: 4}}\n")
    report = preflight(ref_load=converted(NAME), arguments=["--megatron-config-path", str(role)])
    assert report.status == "inconclusive"
    assert report.facts["not read"] == [text_with(f"{role}:2: expert_model_parallel_size: 4")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("critic: {}\n", "has no list `megatron`"),
        ("megatron:\n  - {role: critic, overrides: {}}\n  - {role: critic}\n", "role critic"),
        ("megatron:\n  - {role: critic, overrides: {load: a, load: b}}\n", "the key 'load' occurs twice"),
        ("megatron:\n  - {role: critic, overrides: {load: a, ckpt_step: soon}}\n", "ckpt_step"),
    ],
)
def test_a_megatron_config_that_slime_refuses_is_refused(text, said, converted, tmp_path):
    file = tmp_path / "roles.yaml"
    file.write_text(text)
    with pytest.raises(CkptkitError, match=said):
        preflight(ref_load=converted(NAME), arguments=["--megatron-config-path", str(file)])


def test_miles_passes_over_an_hf_directory_as_load(releases, converted, only):
    """slime loads it; miles takes the reference whatever the mode is, and says nothing."""
    hf, reference = releases(NAME), converted(NAME)
    assert loads(preflight(load=hf, ref_load=reference))["actor"] == str(hf)
    report = preflight(load=hf, ref_load=reference, arguments=[*MODE, "bridge"])
    finding = only(report)
    assert (finding.code, finding.severity) == ("CK711", "error")
    said = f"HF --ref-load {reference}"
    assert finding.actual == text_with(said)
    assert loads(report)["actor"] == str(reference / "release")


def test_mode_bridge_loads_an_hf_reference_and_mode_raw_does_not(releases, only):
    hf = releases(NAME)
    report = preflight(hf_checkpoint=hf, ref_load=hf, arguments=[*MODE, "bridge"])
    assert (report.status, report.findings) == ("passed", [])
    assert loads(report)["reference"] == str(hf)
    report = preflight(hf_checkpoint=hf, ref_load=hf, arguments=[*MODE, "raw"])
    finding = only(report)
    assert (finding.code, finding.actual) == ("CK712", text_with("HF mode"))
    assert set(loads(report)) == {"rollout engine"}


@pytest.mark.parametrize(
    ("words", "actor", "reference", "teacher"),
    [
        ([], "20", "20", "20"),
        (["--ckpt-step", "10"], "10", "10", "10"),
        (["--ref-ckpt-step", "10"], "10", "10", "10"),
        (["--ref-ckpt-step", "10", "--opd-teacher-ckpt-step", "20"], "10", "10", "20"),
        (["--ref-ckpt-step", "10", "--opd-teacher-ckpt-step", "20"], "20", "10", "20"),  # it resumes
    ],
)
def test_who_falls_back_to_the_reference_takes_its_step(words, actor, reference, teacher, run):
    """And lends it to a teacher that has none of its own: slime keeps it in `args.ckpt_step`."""
    given = ["--ref-load", str(run), "--opd-teacher-load", str(run), *words]
    given += ["--load", str(run)] * (actor != reference)
    steps = {"actor": actor, "reference": reference, "teacher": teacher}
    assert loads(preflight(arguments=given)) == {role: str(run / f"iter_00000{one}") for role, one in steps.items()}
