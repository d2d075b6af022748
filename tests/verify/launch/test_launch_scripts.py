"""`preflight run.sh`: right launches are clean, and each planted contradiction is found with both values."""

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from mutations.edits import edit_config
from support.launch_scripts import FAMILIES, RAY, write_config, write_launch
from support.messages import text_with

from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.verify.core.check import all_checks
from ckptkit.verify.core.run import run_checks
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.launch.job import Launch
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.launch.shell.read import read_script
from ckptkit.verify.launch.stacks.which import read_job

ROWS = tomllib.loads((Path(__file__).parent / "jobs" / "contradictions.toml").read_text())
LAUNCH = ("CK703", "CK711", "CK712", "CK713", "CK714", "CK717", "CK718", "CK719", "CK721", "CK722", "CK745", "CK746")


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    root = tmp_path_factory.mktemp("configs")
    found = {name: write_config(root / name, name) for name in FAMILIES}
    return found.__getitem__


def of_launch(report):
    return [finding for finding in report.findings if finding.code in LAUNCH]


def launch_findings(script):
    job = read_job(Launch(read_script(script, environment={})))
    subject = Subject(job.root, job=job, arguments=job.actor)
    checks = [one for one in all_checks() if one.stage == "launch" and one.code in LAUNCH]
    return run_checks(subject, checks).findings


@pytest.mark.parametrize(("name", "before", "after", "expected", "actual", "where"), ROWS["model"])
def test_model_argument_that_contradicts_config_is_found_with_both_values(
    name, before, after, expected, actual, where, configs, tmp_path
):
    def planted(text):
        return text.replace(before, after, 1) if "MODEL=(" in text else text

    assert before in FAMILIES[name].model
    found = launch_findings(write_launch(tmp_path, name, configs(name), change=planted))
    found = [finding for finding in found if finding.code == "CK718" and finding.severity == "error"]
    assert [one for one in found if expected in one.expected and actual in one.actual and where in one.actual], found


def test_rope_factor_of_llama_that_no_builder_hands_on_is_found(tmp_path):
    """Llama 3.2's factor is 32. An option of latent attention does not set it, nor does its own reach the model."""
    root = write_config(tmp_path / "hf", "llama")
    rope = json.loads((root / "config.json").read_text())["rope_scaling"] | {"factor": 32.0}
    edit_config(root, rope_scaling=rope)
    for option in ("--rotary-scaling-factor 32.0", "--rope-scaling-factor 32.0"):
        script = write_launch(tmp_path, "llama", root, RAY.replace("OFF=(", f"OFF=({option} "))
        (found,) = [one for one in of_launch(preflight(script=script)) if "rope_scaling_factor" in one.expected]
        assert found.expected.startswith("rope_scaling_factor = 32.0")
        assert found.actual.startswith("rope_scaling_factor = 8.0")


@pytest.mark.parametrize("row", ROWS["launch"], ids="-".join)
def test_contradiction_in_a_launch_is_found_with_both_values(row, configs, tmp_path):
    name, before, after, code, severity, expected, actual = row
    template = RAY.replace(before, after, 1)
    script = write_launch(tmp_path, name, configs(name), template, lambda text: text.replace(before, after, 1))
    said = script.read_text() + (tmp_path / "models" / f"{name}.sh").read_text()
    assert after.replace("ROOT", str(configs(name))).replace("GPUS", FAMILIES[name].gpus) in said
    findings = of_launch(preflight(script=script)) if code == "CK703" else launch_findings(script)
    found = [(one.code, one.severity, one.expected, one.actual) for one in findings]
    assert [one for one in found if one[:2] == (code, severity) and expected in one[2] and actual in one[3]], found


def test_bridge_mode_takes_the_model_from_config(configs, tmp_path):
    """miles then builds it by Megatron-Bridge, and starts from --hf-checkpoint where --load holds nothing."""
    template = RAY.replace("  --ref-load ROOT\n", "  --megatron-to-hf-mode bridge --load ROOT/run\n")
    script = write_launch(tmp_path, "qwen3", configs("qwen3"), template, lambda text: text.replace("36", "35"))
    report = preflight(script=script)
    assert "CK718" not in [check.code for check in report.checks]
    root = configs("qwen3")
    assert report.facts["what would be loaded"][0] == (
        text_with(f"{root} HF --load {root}/run --hf-checkpoint --hf-checkpoint config.json")
    )


def test_pasted_commands_and_standard_input_are_read(configs, tmp_path):
    pasted = f"python3 train.py --hf-checkpoint {configs('qwen3')} --rotary-base 10000 --num-experts 8"
    for text in (pasted, f"bash -c '{pasted}'", f"ssh node1 'cd /x && {pasted}'", pasted.partition("train.py ")[2]):
        done = CliRunner().invoke(cli, ["preflight", "--json", "-"], input=text)
        found = [one for one in json.loads(done.output)["findings"] if one["code"] == "CK718"]
        assert [one["actual"].partition(" (")[0] for one in found] == ["rotary_base = 10000", "num_experts = 8"], text
    (tmp_path / "pasted").write_text(pasted)
    done = CliRunner().invoke(cli, ["preflight", str(tmp_path / "pasted"), "--", "--rotary-base", "1000000"])
    assert "num_experts = 8" in done.output
    assert "rotary_base" not in done.output


# What only running tells: the value of an option, words of any kind, a file, a condition, a module.
UNKNOWN = [
    ("--num-layers 36", "--num-layers $(cat layers)", "--num-layers $(cat layers)"),
    ("${OFF[@]}", "${OFF[@]} $NOBODY_SETS_IT", "${NOBODY_SETS_IT}"),
    ("ray start", "source missing.sh; ray start", "source missing.sh"),
    ("OFF=(", "[ -f flag ] && PARALLEL=(--tensor-model-parallel-size 4)\nOFF=(", "a condition at"),
    ("2>&1", "--megatron-config-path a.yaml 2>&1", "a.yaml"),
]


@pytest.mark.parametrize(("before", "after", "said"), UNKNOWN)
def test_what_cannot_be_told_makes_the_report_inconclusive_and_nothing_else(before, after, said, configs, tmp_path):
    template = RAY.replace(before, after, 1)
    script = write_launch(tmp_path, "qwen3", configs("qwen3"), template, lambda text: text.replace(before, after, 1))
    report = preflight(script=script)
    assert of_launch(report) == []
    (reason,) = (one for one in report.reasons if one.startswith("CK717"))
    assert any(said in line for line in (*report.facts["not read"], reason)), report.facts["not read"]


def test_words_behind_the_script_and_variables_of_the_environment_reach_it(configs, tmp_path, monkeypatch):
    script = write_launch(tmp_path, "qwen3", configs("qwen3"))
    (found,) = of_launch(preflight(script=script, arguments=["--rotary-base", "5000000"]))
    assert found.actual == text_with("rotary_base = 5000000 command")
    monkeypatch.setenv("THETA", "10000")
    (found,) = of_launch(preflight(script=script))
    assert (found.code, found.actual.partition(" (")[0]) == ("CK718", "rotary_base = 10000")
    template = RAY.replace("${OFF[@]}", '${OFF[@]} --rotary-base "${1:-1000000}"')
    script = write_launch(tmp_path, "qwen3", configs("qwen3"), template)
    assert of_launch(preflight(script=script)) == []
    (found,) = of_launch(preflight(script=script, arguments=["5000000"]))
    assert found.actual.startswith("rotary_base = 5000000")


@pytest.mark.parametrize("words", ['--spec "plugins.spec" "make_spec"', "--custom-model-provider-path plugins.make"])
def test_a_module_that_builds_the_model_is_not_judged(words, configs, tmp_path):
    script = write_launch(tmp_path, "qwen3", configs("qwen3"), RAY.replace("OFF=(", f"OFF=({words} "))
    report = preflight(script=script)
    assert of_launch(report) == []
    assert text_with(words.split()[0]) in report.facts["notes"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo python3 train.py", "starts"),
        ("exit 1\npython3 train.py --x 1", "run.sh:1"),
        ('A="--x 1\npython3 train.py', r'run.sh:1: " is never closed'),
        ("if true; then\npython3 train.py", "run.sh:1"),
        ("python3 train.py --x 1\r\n", "carriage returns"),
    ],
)
def test_script_that_is_no_launch_is_refused(text, said, tmp_path):
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(CkptkitError, match=said):
        preflight(script=tmp_path / "run.sh")


def test_two_trainers_in_one_script_are_inconclusive(configs, tmp_path):
    one = f"python3 train.py --hf-checkpoint {configs('qwen3')}"
    (tmp_path / "run.sh").write_text(f"{one} --num-layers 36\n{one} --num-layers 35\n")
    report = preflight(script=tmp_path / "run.sh")
    assert (report.status, report.findings) == ("inconclusive", [])
    assert "both" in report.reasons[0]
