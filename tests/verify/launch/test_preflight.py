"""`preflight`: which weights each side of a launch would really load, by Megatron's and slime's rules."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.fixture_types import CopyOf, OnlyFinding, PathOf
from support.launch_scripts import loads
from support.messages import text_with
from support.processes import python

from ckptkit.app.api import quantize
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.launch.shell.read import read_script

TRACKER = "latest_checkpointed_iteration.txt"
NAME = "glm4_moe"


@pytest.fixture
def run_of(converted: PathOf, tmp_path: Path) -> Path:
    """A training run's directory: iterations 10 and 20 of the model, the tracker at 20."""
    root = tmp_path / "run"
    for step in (10, 20):
        weights = shutil.copytree(converted(NAME) / "release", root / f"iter_{step:07d}")
        common = torch.load(weights / "common.pt", weights_only=False)
        torch.save({**common, "iteration": step}, weights / "common.pt")
    shutil.copytree(converted(NAME) / "hf", root / "hf")
    (root / TRACKER).write_text("20")
    return root


def test_preflight_of_a_first_start_passes(releases: PathOf, converted: PathOf) -> None:
    reference = converted(NAME)
    report = preflight(hf_checkpoint=releases(NAME), ref_load=reference, tp=2, pp=4, ep=4)
    assert report.findings == []
    assert report.status == "passed"
    assert loads(report) == [
        f"actor loads {reference / 'release'} (Megatron): --load is not given; the tracker of --ref-load says release",
        f"reference loads {reference / 'release'} (Megatron): the tracker of --ref-load says release",
        f"rollout engine loads {releases(NAME)} (HF): --hf-checkpoint",
    ]


def test_of_weights_samples_alone_are_read_and_none_of_a_run_that_resumes(
    releases: PathOf, converted: PathOf, run_of: Path, copy_of: CopyOf
) -> None:
    """At most 64 tensors, 96 KiB of each: `test_samples.py` has the kernel count what is read of them."""
    bare = copy_of(converted(NAME))
    (bare / "ckptkit.json").unlink()
    report = preflight(hf_checkpoint=releases(NAME), ref_load=bare)
    assert 0 < report.to_json()["counts"]["bytes_compared"] <= 64 * (96 << 10)
    assert {check.code for check in report.checks if check.bytes_compared} == {"CK723"}
    assert not [check.code for check in report.checks if check.code[:3] in ("CK2", "CK3", "CK4", "CK5", "CK6")]
    report = preflight(hf_checkpoint=releases(NAME), load=run_of)
    assert report.to_json()["counts"]["bytes_compared"] == 0
    report = preflight(hf_checkpoint=releases(NAME), load=run_of, ref_load=bare)
    (note,) = report.facts["notes"]
    assert note.startswith("reference and rollout engine: samples of 64 tensors compared")


def test_a_resumed_run_loads_what_its_tracker_says(releases: PathOf, converted: PathOf, run_of: Path) -> None:
    report = preflight(hf_checkpoint=releases(NAME), load=run_of, ref_load=converted(NAME))
    assert report.findings == []
    path, why = run_of / "iter_0000020", "the tracker of --load says iter_0000020"
    assert loads(report)[0] == f"actor loads {path} (Megatron): {why}"
    report = preflight(load=run_of, ckpt_step=10)
    assert report.findings == []
    assert loads(report) == [f"actor loads {run_of / 'iter_0000010'} (Megatron): --ckpt-step 10 of --load"]
    assert "iter_0000020" in loads(preflight(load=run_of, ckpt_step=0))[0]  # no step


def test_a_step_that_is_not_there(run_of: Path, only: OnlyFinding) -> None:
    report = preflight(load=run_of, ckpt_step=30)
    finding = only(report)
    assert (finding.code, finding.actual) == ("CK713", "only iter_0000010, iter_0000020")
    assert "iter_0000030" in finding.expected
    assert loads(report) == [f"actor cannot start: Megatron stops: {run_of / 'iter_0000030'} is not there"]


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("fallback", ["release", "hf", "none"])
def test_a_step_of_a_run_that_is_not_there_is_no_first_start(
    is_there: bool, fallback: str, releases: PathOf, converted: PathOf, tmp_path: Path, only: OnlyFinding
) -> None:
    if is_there:
        (tmp_path / "save").mkdir()
    start = {"release": converted(NAME), "hf": releases(NAME), "none": None}[fallback]
    finding = only(preflight(load=tmp_path / "save", ref_load=start, ckpt_step=100))
    assert (finding.code, finding.severity, finding.file) == ("CK713", "error", str(tmp_path / "save"))
    assert finding.actual == ("an empty directory" if is_there else "no such directory")
    assert "iter_0000100" in finding.expected


@pytest.mark.parametrize(
    ("words", "step"), [([], 0), ([], None), (["--ref-ckpt-step", "10"], None), (["--ckpt-step", "10"], None)]
)
def test_a_step_that_the_first_start_takes_elsewhere_is_right(
    words: list[str], step: int | None, run_of: Path, tmp_path: Path
) -> None:
    """Where --load is empty, slime takes --ref-load, and of it the iteration of --ckpt-step or --ref-ckpt-step."""
    report = preflight(load=tmp_path / "save", ref_load=run_of, arguments=words, ckpt_step=step)
    assert [(one.code, one.severity) for one in report.findings] == [("CK711", "warning")]


def test_a_save_directory_that_is_not_there_yet_is_a_warning(
    converted: PathOf, tmp_path: Path, only: OnlyFinding
) -> None:
    report = preflight(load=tmp_path / "save", ref_load=converted(NAME))
    finding = only(report)
    assert (finding.code, finding.severity, finding.file) == ("CK711", "warning", str(tmp_path / "save"))
    assert report.status == "passed"
    assert "so --ref-load is taken" in loads(report)[0]
    report = preflight(load=tmp_path / "save")  # nothing to fall back to
    assert (only(report).code, only(report).severity) == ("CK711", "error")
    assert loads(report) == [text_with(f"actor cannot start --load {tmp_path / 'save'} --ref-load slime miles")]


def test_a_run_whose_tracker_is_missing(run_of: Path, converted: PathOf, only: OnlyFinding) -> None:
    (run_of / TRACKER).unlink()
    report = preflight(load=run_of, ref_load=converted(NAME))
    finding = only(report)
    assert (finding.code, finding.severity) == ("CK711", "error")
    assert "iter_0000010, iter_0000020 but no tracker" in finding.actual
    assert str(converted(NAME) / "release") in loads(report)[0]


def test_an_iteration_instead_of_its_parent(run_of: Path, converted: PathOf, only: OnlyFinding) -> None:
    finding = only(preflight(load=run_of / "iter_0000010", ref_load=converted(NAME)))
    assert (finding.code, finding.severity) == ("CK711", "error")
    assert finding.hint == text_with(f"--load {run_of} --ckpt-step 10")


def test_a_reference_iteration_instead_of_its_parent(converted: PathOf, only: OnlyFinding) -> None:
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


def test_a_reference_called_iteration_is_random_in_megatron(run_of: Path, only: OnlyFinding) -> None:
    """slime hands a directory of this name to Megatron, which finds no tracker in it, prints a warning and goes on."""
    path = run_of / "iter_0000010"
    report = preflight(ref_load=path)
    assert only(report).code == "CK712"
    said = f"--ref-load {path} tracker Megatron"
    assert loads(report) == [text_with(f"actor RANDOM --load {said}"), text_with(f"reference RANDOM {said}")]


@pytest.mark.parametrize("made", [True, False])
def test_an_empty_reference_stops_the_trainers(made: bool, tmp_path: Path, only: OnlyFinding) -> None:
    path = tmp_path / "save"
    if made:
        path.mkdir()
    report = preflight(ref_load=path)
    assert only(report).code == "CK712"
    assert loads(report)[1] == text_with(f"reference cannot start --ref-load {path} tracker slime miles")


def test_a_step_beside_a_release_in_load_is_a_warning(converted: PathOf, run_of: Path, only: OnlyFinding) -> None:
    """Source: Megatron-LM `get_checkpoint_name`, which looks at the number only where the tracker has one."""
    report = preflight(load=converted(NAME), ckpt_step=10)
    finding = only(report)
    assert (finding.code, finding.severity, finding.file) == ("CK713", "warning", str(converted(NAME) / TRACKER))
    assert finding.actual == "release, which Megatron loads whatever --ckpt-step 10 says"
    path = converted(NAME) / "release"
    why = "the tracker of --load says release, beside which step 10 has no effect"
    assert loads(report) == [f"actor loads {path} (Megatron): {why}"]
    report = preflight(ref_load=converted(NAME), ckpt_step=10)
    assert report.findings == []
    assert all("the tracker of --ref-load says release" in line for line in loads(report))
    # The run takes the step; the release beside it takes none, and nothing is wrong with that.
    assert preflight(load=run_of, ref_load=converted(NAME), ckpt_step=10).findings == []


def test_what_does_not_apply_is_listed(releases: PathOf, converted: PathOf) -> None:
    """A check that ran for one directory is not among them, though it does not apply to another."""
    report = preflight(hf_checkpoint=releases(NAME), ref_load=converted(NAME))
    lines = report.facts["not applicable"]
    listed = {code for line in lines for code in line.partition(": ")[0].split(", ")}
    assert {"CK703", "CK709", "CK718", "CK722", "CK740"} <= listed
    assert listed.isdisjoint(check.code for check in report.checks)
    assert text_with("CK718 CK719") in lines
    assert report.to_json()["facts"]["not applicable"] == lines


def test_a_wrong_path_is_one_finding(releases: PathOf, converted: PathOf, only: OnlyFinding) -> None:
    report = preflight(hf_checkpoint=releases("qwen3_moe"), load=converted(NAME))
    finding = only(report)
    assert (finding.code, finding.severity, finding.file) == ("CK701", "error", str(converted(NAME) / "release"))
    assert finding.expected == f"the model of {releases('qwen3_moe')}/config.json"
    assert "num_layers" not in finding.actual
    for part in ("another one: ", "rotary_percent = 0.5", "more arguments", "names or shapes"):
        assert part in finding.actual
    folded = report.facts["of another model"]
    assert len(folded) > 15
    assert "CK701: expected moe_router_score_function = softmax, found moe_router_score_function = sigmoid" in folded
    assert any(line.startswith("CK104: decoder.layers.{0..11}.self_attention.linear_qkv.bias: ") for line in folded)


def test_a_step_counts_for_the_reference_too(run_of: Path, converted: PathOf, tmp_path: Path) -> None:
    other = shutil.copytree(run_of, tmp_path / "other")
    shutil.rmtree(other / "iter_0000010")
    report = preflight(load=run_of, ref_load=other, ckpt_step=10)
    assert [(finding.code, finding.actual) for finding in report.findings] == [("CK713", "only iter_0000020")]
    assert loads(report)[1] == f"reference cannot start: Megatron stops: {other / 'iter_0000010'} is not there"


@pytest.mark.parametrize("text", ["30", "soon"])
def test_tracker_that_names_no_stored_iteration_is_found(text: str, run_of: Path, only: OnlyFinding) -> None:
    (run_of / TRACKER).write_text(text)
    finding = only(preflight(load=run_of))
    assert (finding.code, finding.file) == ("CK711", str(run_of / TRACKER))


def test_a_directory_of_the_other_format(releases: PathOf, converted: PathOf, only: OnlyFinding) -> None:
    report = preflight(hf_checkpoint=releases(NAME), load=releases(NAME))
    assert report.findings == []
    assert loads(report)[0] == text_with(f"{releases(NAME)} HF --load config.json")
    assert only(preflight(hf_checkpoint=converted(NAME))).code == "CK714"


def test_broken_files_are_found_on_every_side(
    releases: PathOf, converted: PathOf, copy_of: CopyOf, run_of: Path
) -> None:
    hf = copy_of(releases(NAME))
    shard, distcp = sorted(hf.glob("*.safetensors"))[3], run_of / "iter_0000020" / "__0_0.distcp"
    shard.unlink()
    distcp.unlink()
    report = preflight(hf_checkpoint=hf, load=run_of)
    found = {(finding.code, finding.file) for finding in report.findings}
    assert (report.status, found) == ("failed", {("CK102", str(shard)), ("CK112", str(distcp))})


def written(folder: Path, *lines: str) -> Path:
    """A launch script of these lines."""
    (folder / "run.sh").write_text("\n".join(lines) + "\n")
    return folder / "run.sh"


def test_int4_training_of_another_group_size_names_file_and_line(releases: PathOf, tmp_path: Path) -> None:
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


HIDDEN_IN = {
    "a path": "--load /x/$HF_TOKEN",
    "a name in a variable": "--load /x/${!N}",
    "a default": "--load /x/${HF_TOKEN:-none}",
    "a part": "--load /x/${HF_TOKEN:3:9}",
    "a command": "--load /x/$(echo $HF_TOKEN)",
    "another command": "--load /x/$(printenv HF_TOKEN)",
    "a size": "--tensor-model-parallel-size $HF_TOKEN",
    "an option": "--$HF_TOKEN 1",
    "a signed URL": "--load ${SIGNED}",
}
BEFORE = {
    "an array": ("A=(--load /x/$HF_TOKEN)", "${A[@]}"),
    "read": ('read -r A <<< "$HF_TOKEN"', "--load /x/$A"),
    "eval": ("eval A=\\$HF_TOKEN", "--load /x/$A"),
    "cd": ("cd /x/$HF_TOKEN", "--load run"),
    "source": ("source /x/$HF_TOKEN.sh", "--load /x"),
    "arithmetic": ("A=$((HF_TOKEN + 1))", "--load /x/$A"),
}


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "TOPSECRET")
    monkeypatch.setenv("DATABASE_URL", "postgres://user:TOPSECRET@host/base")
    monkeypatch.setenv("SIGNED", "https://host/x?X-Amz-Signature=TOPSECRET")
    monkeypatch.setenv("N", "HF_TOKEN")


def test_variables_that_are_no_secrets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_WORKSPACE", "WANDB_DIR", "HF_HUB_URL", "AWS_PROFILE", "N"):
        monkeypatch.setenv(name, "GITHUB_WORKSPACE" if name == "N" else f"/nowhere/{name}")
    for value in ("$GITHUB_WORKSPACE", "${!N}", "$HF_HUB_URL", "$(echo $WANDB_DIR)", "${AWS_PROFILE:-none}"):
        text = read_script(None, f"python3 train.py --load {value}/ckpt\n", environment=dict(os.environ))
        assert text.unresolved == ()
        assert text.words[-1].text.startswith("/nowhere/")
    at = "actor_rollout_ref.model.path"
    report = preflight(arguments=[f"{at}=${{oc.env:GITHUB_WORKSPACE}}/model", "trainer.nnodes=1"])
    assert "/nowhere/GITHUB_WORKSPACE/model" in str(report.findings)


def assert_hidden(script: Path, *words: str) -> None:
    """No output of preflight, in any format, has the value of a secret."""
    reports = [script.with_name(f"report{ending}") for ending in (".json", ".html", ".md", ".sarif", ".xml")]
    for report in reports:
        done = CliRunner().invoke(cli, ["preflight", str(script), "--report", str(report), *words])
        assert "topsecret" not in (done.output + str(done.exception)).lower()
        assert "topsecret" not in (report.read_text().lower() if report.exists() else "")
        assert done.exit_code in (1, 2), done.output


@pytest.mark.parametrize(
    ("before", "words"), [*(("", words) for words in HIDDEN_IN.values()), *BEFORE.values()], ids=[*HIDDEN_IN, *BEFORE]
)
def test_secrets_of_the_environment_are_not_shown(secrets: None, before: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{before}\npython3 train.py --hf-checkpoint /nowhere {words}\n")
    assert_hidden(tmp_path / "run.sh")


@pytest.mark.parametrize(
    "value", ["${oc.env:HF_TOKEN}", "/x/${oc.env:AWS_SECRET_ACCESS_KEY,none}", "${oc.env:${oc.env:N}}"]
)
def test_secrets_that_a_yaml_file_names_are_not_shown(secrets: None, value: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps({"actor_rollout_ref": {"model": {"path": value}}}))
    assert_hidden(tmp_path / "job.yaml")
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo 'actor_rollout_ref.model.path={value}'\n")
    assert_hidden(tmp_path / "run.sh")


IN_PYTHON = [f"os.{one}" for one in ('environ["HF_TOKEN"]', 'environ.get("HF_TOKEN", "x")', 'getenv("HF_TOKEN")')]


@pytest.mark.parametrize("value", [*IN_PYTHON, "os.environ[os.environ['N']]"])
def test_secrets_that_a_python_launcher_names_are_not_shown(secrets: None, value: str, tmp_path: Path) -> None:
    utils = tmp_path / "miles/utils/external_utils"
    utils.mkdir(parents=True)
    for name in ("command_utils.py", "model_args_utils.py"):
        (utils / name).write_text("")
    (tmp_path / "run.py").write_text(
        "import os\nimport miles.utils.external_utils.command_utils as U\n\n\ndef main():\n"
        f"    secret = {value}\n"
        '    U.execute_train(train_args=f"--hf-checkpoint /x/{secret} --load /y/{secret} ", num_gpus_per_node=8, '
        'megatron_model_type=None)\n\n\nif __name__ == "__main__":\n    main()\n'
    )
    assert_hidden(tmp_path / "run.py")
    done = CliRunner().invoke(cli, ["preflight", str(tmp_path / "run.py")])
    assert "secret" in done.output  # the launcher was read to its end


@pytest.mark.parametrize(
    "before",
    [
        'if [ -z "$HF_TOKEN" ]; then echo "set HF_TOKEN"; exit 1; fi',
        '[ -n "${WANDB_API_KEY:-}" ] && wandb login $WANDB_API_KEY',
        'export HF_TOKEN=$HF_TOKEN OTHER="key $WANDB_API_KEY"',
    ],
)
def test_launches_that_use_secrets_for_other_things_pass(
    secrets: None, before: str, releases: PathOf, converted: PathOf, tmp_path: Path
) -> None:
    words = f"--hf-checkpoint {releases('qwen2-tied')} --ref-load {converted('qwen2-tied')}"
    (tmp_path / "run.sh").write_text(f"{before}\npython3 train.py {words} --wandb-key $WANDB_API_KEY\n")
    (tmp_path / "plain.sh").write_text(f"python3 train.py {words}\n")
    reports = [preflight(script=tmp_path / name) for name in ("run.sh", "plain.sh")]
    assert len({(one.status, *one.reasons) for one in reports}) == 1


def test_nothing_given_is_bad_usage() -> None:
    with pytest.raises(CkptkitError, match="nothing"):
        preflight()


# Runs preflight with these options, and writes which checks ran and the names of all modules that are there.
RUN = """
import json, sys
from ckptkit.verify.launch.preflight import preflight
report = preflight(**json.load(sys.stdin))
print(json.dumps([[one.code for one in report.checks if one.status != "skipped"], list(sys.modules)]))
"""


def test_preflight_of_int4_training_imports_neither_torch_nor_kernels(
    releases: PathOf, converted: PathOf, tmp_path: Path
) -> None:
    quantize(releases("qwen3_moe"), tmp_path / "int4", QuantScheme(32, "qmax7", (r"re:.*\.self_attn\..*",)))
    words = ["OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1", "--rollout-num-gpus-per-engine", "2"]
    load = str(converted("qwen3_moe"))
    given = json.dumps({"hf_checkpoint": str(tmp_path / "int4"), "load": load, "arguments": words})
    codes, modules = json.loads(python("-c", RUN, given=given).stdout)
    assert {"CK105", "CK301", "CK302", "CK307", "CK709", "CK715", "CK716"} <= set(codes)
    assert set(modules) & {"torch", "transformers", "compressed_tensors", "numba", "llvmlite", "sglang", "ray"} == set()
