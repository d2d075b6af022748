"""`preflight`: which weights each side of a launch would really load, by Megatron's and slime's rules."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from support.launch_scripts import loads
from support.messages import text_with
from support.miles_checkout import write_checkout

from ckptkit.app.api import quantize
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.launch.preflight import preflight

TRACKER = "latest_checkpointed_iteration.txt"
NAME = "glm4_moe"


@pytest.fixture
def run_of(converted, tmp_path):
    root = tmp_path / "run"
    for step in (10, 20):
        weights = shutil.copytree(converted(NAME) / "release", root / f"iter_{step:07d}")
        common = torch.load(weights / "common.pt", weights_only=False)
        torch.save({**common, "iteration": step}, weights / "common.pt")
    shutil.copytree(converted(NAME) / "hf", root / "hf")
    (root / TRACKER).write_text("20")
    return root


def test_a_resumed_run_loads_what_its_tracker_says(releases, converted, run_of):
    report = preflight(hf_checkpoint=releases(NAME), load=run_of, ref_load=converted(NAME))
    assert report.findings == []
    path, why = run_of / "iter_0000020", "the tracker of --load names iter_0000020"
    assert loads(report)[0] == f"actor loads {path} (Megatron): {why}"
    report = preflight(load=run_of, ckpt_step=10)
    assert report.findings == []
    assert loads(report) == [f"actor loads {run_of / 'iter_0000010'} (Megatron): --ckpt-step 10 of --load"]
    assert "iter_0000020" in loads(preflight(load=run_of, ckpt_step=0))[0]  # no step


def test_a_step_that_is_not_there(run_of, only):
    report = preflight(load=run_of, ckpt_step=30)
    finding = only(report)
    assert (finding.code, finding.actual) == ("CK713", "only iter_0000010, iter_0000020")
    assert "iter_0000030" in finding.expected
    assert loads(report) == [f"actor cannot start: Megatron stops: {run_of / 'iter_0000030'} is missing"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_step_of_a_run_that_is_not_there_is_no_first_start(is_there, converted, tmp_path, only):
    if is_there:
        (tmp_path / "save").mkdir()
    finding = only(preflight(load=tmp_path / "save", ref_load=converted(NAME), ckpt_step=100))
    assert (finding.code, finding.severity, finding.file) == ("CK713", "error", str(tmp_path / "save"))
    assert finding.actual == ("an empty directory" if is_there else "no such directory")


def test_a_save_directory_that_is_not_there_yet_is_right_for_a_first_start(converted, tmp_path, only):
    report = preflight(load=tmp_path / "save", ref_load=converted(NAME))
    assert (report.status, report.findings) == ("passed", [])
    assert "the actor loads --ref-load" in loads(report)[0]
    report = preflight(load=tmp_path / "save")  # nothing to fall back to
    assert (only(report).code, only(report).severity) == ("CK711", "error")
    assert loads(report) == [text_with(f"actor cannot start --load {tmp_path / 'save'} --ref-load slime miles")]


def test_an_iteration_instead_of_its_parent(run_of, converted, only):
    finding = only(preflight(load=run_of / "iter_0000010", ref_load=converted(NAME)))
    assert (finding.code, finding.severity) == ("CK711", "error")
    assert finding.hint == text_with(f"--load {run_of} --ckpt-step 10")


def test_a_reference_iteration_instead_of_its_parent(converted, only):
    report = preflight(ref_load=converted(NAME) / "release")
    finding = only(report)
    assert finding.code == "CK712"
    assert finding.hint == text_with(f"--ref-load {converted(NAME)}")
    # slime and miles know an iteration by its name alone, and release/ is no such name.
    said = f"--ref-load {converted(NAME) / 'release'} tracker slime miles HF Megatron-LM"
    assert loads(report) == [
        text_with(f"actor cannot start --load {said}"),
        text_with(f"reference cannot start {said}"),
    ]


def test_a_reference_called_iteration_is_random_in_megatron(run_of, only):
    """slime hands a directory of this name to Megatron, which finds no tracker in it, prints a warning and goes on."""
    path = run_of / "iter_0000010"
    report = preflight(ref_load=path)
    assert only(report).code == "CK712"
    said = f"--ref-load {path} tracker Megatron"
    assert loads(report) == [text_with(f"actor RANDOM --load {said}"), text_with(f"reference RANDOM {said}")]


def test_a_step_beside_a_release_in_load_is_a_warning(converted, run_of, only):
    """Source: Megatron-LM `get_checkpoint_name`, which looks at the number only where the tracker has one."""
    finding = only(preflight(load=converted(NAME), ckpt_step=10))
    assert (finding.code, finding.severity, finding.file) == ("CK713", "warning", str(converted(NAME) / TRACKER))
    # The run takes the step; the release of --ref-load takes none, and nothing is wrong with that.
    assert preflight(load=run_of, ref_load=converted(NAME), ckpt_step=10).findings == []
    assert preflight(ref_load=converted(NAME), ckpt_step=10).findings == []


def test_what_does_not_apply_is_listed(releases, converted):
    """A check that ran for one directory is not among them, though it does not apply to another."""
    report = preflight(hf_checkpoint=releases(NAME), ref_load=converted(NAME))
    lines = report.facts["not applicable"]
    listed = {code for line in lines for code in line.partition(": ")[0].split(", ")}
    assert {"CK703", "CK709", "CK718", "CK722", "CK740"} <= listed
    assert listed.isdisjoint(check.code for check in report.checks)
    assert text_with("CK718 CK719") in lines
    assert report.to_json()["facts"]["not applicable"] == lines


def test_a_wrong_path_is_one_finding(releases, converted, only):
    report = preflight(hf_checkpoint=releases("qwen3_moe"), load=converted(NAME))
    finding = only(report)
    assert (finding.code, finding.severity, finding.file) == ("CK701", "error", str(converted(NAME) / "release"))
    assert finding.expected == f"the model of {releases('qwen3_moe')}/config.json"
    assert "num_layers" not in finding.actual
    for part in ("another model: ", "rotary_percent = 0.5", "more arguments", "names or shapes"):
        assert part in finding.actual
    folded = report.facts["of another model"]
    assert len(folded) > 15
    assert "CK701: expected moe_router_score_function = softmax, found moe_router_score_function = sigmoid" in folded
    assert any(line.startswith("CK104: decoder.layers.{0..11}.self_attention.linear_qkv.bias: ") for line in folded)


def test_broken_files_are_found_on_every_side(releases, converted, copy_of, run_of):
    hf = copy_of(releases(NAME))
    shard, distcp = sorted(hf.glob("*.safetensors"))[3], run_of / "iter_0000020" / "__0_0.distcp"
    shard.unlink()
    distcp.unlink()
    report = preflight(hf_checkpoint=hf, load=run_of)
    found = {(finding.code, finding.file) for finding in report.findings}
    assert (report.status, found) == ("failed", {("CK102", str(shard)), ("CK112", str(distcp))})


def written(folder, *lines):
    (folder / "run.sh").write_text("\n".join(lines) + "\n")
    return folder / "run.sh"


def test_int4_training_of_another_group_size_names_file_and_line(releases, tmp_path):
    quantize(releases("qwen3_moe"), tmp_path / "int4", QuantScheme(32, "qmax7", (r"re:.*\.self_attn\..*",)))
    flag, group = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "OPEN_TRAINING_INT4_GROUP_SIZE"
    command = f"python3 train.py --hf-checkpoint {tmp_path / 'int4'}"
    script = written(tmp_path, "#!/bin/bash", f"export {flag}=1", f"export {group}=128", command)
    (finding,) = [one for one in preflight(script=script).findings if one.code == "CK709"]
    assert finding.file == str(script)
    assert finding.expected == f"group_size = 128, as training rounds ({flag} at line 2, {group} at line 3)"
    environment = json.dumps({"env_vars": {flag: "1", group: "128"}})
    submit = f"ray job submit --runtime-env-json='{environment}' -- {command}"
    (finding,) = [one for one in preflight(script=written(tmp_path, submit)).findings if one.code == "CK709"]
    assert (finding.file, "at line 1)" in finding.expected) == (str(script), True)


# Scripts that hand a secret to an option by each way in which bash has a variable.
HIDDEN_IN = [
    "python3 train.py --load /x/$HF_TOKEN",
    "python3 train.py --load /x/${!N}",
    "python3 train.py --load /x/${HF_TOKEN:-none}",
    "python3 train.py --load /x/${HF_TOKEN:3:9}",
    "python3 train.py --load /x/$(echo $HF_TOKEN)",
    "python3 train.py --load /x/$(printenv HF_TOKEN)",
    "python3 train.py --tensor-model-parallel-size $HF_TOKEN",
    "python3 train.py --$HF_TOKEN 1",
    "python3 train.py --load ${SIGNED}",
    "A=(--load /x/$HF_TOKEN)\npython3 train.py ${A[@]}",
    'read -r A <<< "$HF_TOKEN"\npython3 train.py --load /x/$A',
    "eval A=\\$HF_TOKEN\npython3 train.py --load /x/$A",
    "cd /x/$HF_TOKEN\npython3 train.py --load run",
    "source /x/$HF_TOKEN.sh\npython3 train.py --load /x",
    "A=$((HF_TOKEN + 1))\npython3 train.py --load /x/$A",
    "python3 -m verl.trainer.main_ppo 'actor_rollout_ref.model.path=${oc.env:HF_TOKEN}'",
]
IN_YAML = ["${oc.env:HF_TOKEN}", "/x/${oc.env:AWS_SECRET_ACCESS_KEY,none}", "${oc.env:${oc.env:N}}"]
IN_PYTHON = ['os.environ["HF_TOKEN"]', 'os.getenv("HF_TOKEN")', "os.environ[os.environ['N']]"]


@pytest.fixture
def secrets(monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "TOPSECRET")
    monkeypatch.setenv("SIGNED", "https://host/x?X-Amz-Signature=TOPSECRET")
    monkeypatch.setenv("N", "HF_TOKEN")


def shown(script, ending=".json"):
    report = script.with_name(f"report{ending}")
    done = CliRunner().invoke(cli, ["preflight", str(script), "--report", str(report)])
    assert done.exit_code in (1, 2), done.output
    return done.output + str(done.exception) + (report.read_text() if report.exists() else "")


def test_secrets_of_the_environment_are_not_shown(secrets, tmp_path):
    for text in HIDDEN_IN:
        assert "topsecret" not in shown(written(tmp_path, text)).lower(), text
    for value in IN_YAML:
        (tmp_path / "job.yaml").write_text(json.dumps({"actor_rollout_ref": {"model": {"path": value}}}))
        assert "topsecret" not in shown(tmp_path / "job.yaml").lower(), value
    for ending in (".html", ".md", ".sarif", ".xml"):
        assert "topsecret" not in shown(written(tmp_path, HIDDEN_IN[0]), ending).lower(), ending


@pytest.mark.parametrize("value", IN_PYTHON)
def test_secrets_that_a_python_launcher_names_are_not_shown(secrets, value, tmp_path):
    write_checkout(tmp_path)
    (tmp_path / "run.py").write_text(
        "import os\nimport miles.utils.external_utils.command_utils as U\n\n"
        f"secret = {value}\n"
        'U.execute_train(train_args=f"--hf-checkpoint /x/{secret}", num_gpus_per_node=8, megatron_model_type=None)\n'
    )
    output = shown(tmp_path / "run.py")
    assert "secret" in output  # the launcher was read to its end
    assert "topsecret" not in output.lower()


def test_variables_that_are_no_secrets_are_read(tmp_path, monkeypatch):
    for name in ("GITHUB_WORKSPACE", "WANDB_DIR", "AWS_PROFILE", "N"):
        monkeypatch.setenv(name, "GITHUB_WORKSPACE" if name == "N" else f"/nowhere/{name}")
    for value in ("$GITHUB_WORKSPACE", "${!N}", "$(echo $WANDB_DIR)", "${AWS_PROFILE:-none}"):
        report = preflight(script=written(tmp_path, f"python3 train.py --load {value}/ckpt"))
        assert [one.file for one in report.findings if str(one.file).startswith("/nowhere/")], value
    report = preflight(arguments=["actor_rollout_ref.model.path=${oc.env:GITHUB_WORKSPACE}/model", "trainer.nnodes=1"])
    assert "/nowhere/GITHUB_WORKSPACE/model" in str(report.findings)


def test_a_launch_that_uses_secrets_for_other_things_passes(secrets, releases, converted, tmp_path):
    words = f"python3 train.py --hf-checkpoint {releases('qwen2-tied')} --ref-load {converted('qwen2-tied')}"
    plain = preflight(script=written(tmp_path, words))
    used = [
        'if [ -z "$HF_TOKEN" ]; then echo "set HF_TOKEN"; exit 1; fi',
        '[ -n "${WANDB_API_KEY:-}" ] && wandb login $WANDB_API_KEY',
        'export HF_TOKEN=$HF_TOKEN OTHER="key $WANDB_API_KEY"',
    ]
    report = preflight(script=written(tmp_path, *used, f"{words} --wandb-key $WANDB_API_KEY"))
    assert (report.status, report.reasons) == (plain.status, plain.reasons)


def test_nothing_given_is_bad_usage():
    with pytest.raises(CkptkitError, match="no path"):
        preflight()


def test_a_step_counts_for_the_reference_too(run_of, converted, tmp_path):
    other = shutil.copytree(run_of, tmp_path / "other")
    shutil.rmtree(other / "iter_0000010")
    report = preflight(load=run_of, ref_load=other, ckpt_step=10)
    assert [(finding.code, finding.actual) for finding in report.findings] == [("CK713", "only iter_0000020")]
    assert loads(report)[1] == f"reference cannot start: Megatron stops: {other / 'iter_0000010'} is missing"
