"""Launches of NeMo-RL: what policy, reference and engine load by its YAML files, and what is wrong with them."""

import os
import shutil
from pathlib import Path

import pytest
from support.launch_scripts import loads, passes
from support.messages import text_with

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.preflight import preflight

NAME = "qwen3_moe"
BASE = (Path(__file__).parents[1] / "jobs" / "nemo_rl.yaml").read_text()


@pytest.fixture
def hf(releases):
    return releases(NAME)


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "copies"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def child(base, text):
    path = base.parent / "job.yaml"
    path.write_text(f"defaults: {base.name}\n{text}")
    return path


def model(base, hf, more=""):
    return child(base, f"policy:\n  model_name: {hf}\n{more}")


def test_a_first_run_converts_the_model_and_passes(base, hf):
    report = preflight(script=model(base, hf))
    assert passes(report)
    why = "policy.model_name NeMo-RL"
    assert loads(report) == [
        text_with(f"actor {hf} HF {why}"),
        text_with(f"reference {hf} HF {why}"),
        text_with(f"rollout engine {hf} HF vllm policy.model_name actor"),
    ]


def test_a_converted_copy_is_loaded_instead_of_the_model(base, releases, converted, only):
    own = Path(shutil.copytree(releases(NAME), base.parent / "model"))
    copy = base.parent / "copies" / f"model_{str(own).replace('/', '_')}" / "iter_0000000"
    shutil.copytree(converted(NAME) / "release", copy)
    file = model(base, own)
    report = preflight(script=file)
    assert passes(report)
    why = "the copy of policy.model_name that NeMo-RL converted before"
    assert loads(report)[0] == f"actor loads {copy} (Megatron): {why}"
    again = preflight(script=file, arguments=["policy.megatron_cfg.force_reconvert_from_hf=True"])
    assert loads(again)[0].startswith(f"actor loads {own} (HF)")
    for path in own.iterdir():
        os.utime(path, (4e9, 4e9))
    finding = only(preflight(script=file))
    assert (finding.code, finding.severity) == ("CK711", "warning")


def test_a_run_resumes_from_its_last_step(base, hf, converted, only):
    for step in (2, 10):
        weights = base.parent / "results" / f"step_{step}" / "policy" / "weights"
        shutil.copytree(converted(NAME) / "release", weights / "iter_0000000")
        (weights / "latest_train_state.pt").touch()
    file = model(base, hf, "checkpointing: {checkpoint_dir: results}\n")
    report = preflight(script=file)
    assert passes(report)
    why = "Megatron step_10 checkpointing.checkpoint_dir"
    assert loads(report)[0] == text_with(f"actor results/step_10/policy/weights/iter_0000000 {why}")
    assert loads(report)[1].startswith(f"reference loads {hf} (HF)")
    (weights / "latest_train_state.pt").unlink()
    finding = only(preflight(script=file))
    assert (finding.code, finding.severity, finding.file) == ("CK713", "error", "results/step_10/policy/weights")


def test_gpus_left_for_training_are_compared(base, hf, only):
    """One node of 8 less 2 GPUs, which 4 stages do not divide; of 3 nodes one generates."""
    resources = "  generation: {colocated: {enabled: false, resources: {%s}}}\n"
    assert passes(preflight(script=model(base, hf, f"{resources % 'num_nodes: 1'}cluster: {{num_nodes: 3}}\n")))
    text = f"  megatron_cfg: {{pipeline_model_parallel_size: 4}}\n{resources % 'gpus_per_node: 2'}"
    text += "loss_fn: {reference_policy_kl_penalty: 0}\n"
    file = model(base, hf, text)
    finding = only(preflight(script=file))
    assert finding.code == "CK722"
    assert finding.expected == text_with(
        f"GPUs = 1 4 1 = 4 policy.megatron_cfg.pipeline_model_parallel_size ({file}:4)"
    )
    assert finding.actual == (
        f"6 GPUs: cluster.num_nodes ({base}:26) 1 x cluster.gpus_per_node ({base}:26) 8, "
        f"less 2 for generation by policy.generation.colocated.resources.gpus_per_node ({file}:5) 2"
    )


@pytest.mark.parametrize(
    ("text", "code", "actual"),
    [
        ("  pretrained_checkpoint: {path: /nowhere, format: megatron_lm}\n", "CK711", "no such directory"),
        ("  pretrained_checkpoint: {path: ROOT, format: megatron_bridge}\n", "CK711", "run_config.yaml ROOT/release"),
        ("  pretrained_checkpoint: {path: ROOT}\n", "CK711", "not set"),
        ("  model_name: /nowhere/model\n", "CK714", "no such directory"),
    ],
)
def test_a_checkpoint_that_nemo_rl_refuses_is_found(text, code, actual, base, hf, converted, only):
    root = str(converted(NAME))
    policy = text if "model_name" in text else f"  model_name: {hf}\n{text.replace('ROOT', root)}"
    finding = only(preflight(script=child(base, f"policy:\n{policy}")))
    assert (finding.code, finding.actual) == (code, text_with(actual.replace("ROOT", root)))


def test_sglang_and_no_megatron_pass(base, hf):
    text = (
        "  megatron_cfg: {enabled: false}\n  dtensor_cfg: {enabled: true}\n  generation:\n    backend: sglang\n"
        "    sglang_cfg: {model_path: '${policy.model_name}', tp_size: 2}\n"
    )
    report = preflight(script=model(base, hf, text))
    assert passes(report)
    why = "sglang loads policy.generation.sglang_cfg.model_path first"
    assert loads(report)[2] == f"rollout engine loads {hf} (HF): {why}"


OF_MODEL = "policy: {model_name: MODEL, megatron_cfg: "


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "launch"),
        (f"{OF_MODEL}{{model_overrides: {{num_layers: 2}}}}}}\n", "2:"),
        (f"{OF_MODEL}{{tensor_model_parallel_size: '${{nodes}}'}}}}\n", "${nodes}"),
        (f"{OF_MODEL}{{context_parallel_size: null}}}}\n", "policy.megatron_cfg.context_parallel_size is not"),
    ],
)
def test_what_cannot_be_told_makes_the_report_inconclusive(text, line, base, hf):
    report = preflight(script=child(base, text.replace("MODEL", str(hf))))
    assert (report.status, report.findings) == ("inconclusive", [])
    assert any(one == text_with(line) for one in report.facts["not read"])


def test_a_section_that_says_override_replaces_the_inherited_one(base, hf):
    """`cluster` loses its number of GPUs, so nothing says how many there are."""
    report = preflight(script=model(base, hf, "cluster: {_override_: true, num_nodes: 2}\n"))
    assert next(one.status for one in report.checks if one.code == "CK722") == "skipped"
    assert report.facts["not read"] == [text_with("cluster.gpus_per_node NeMo-RL")]


def test_a_yaml_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("services: {web: {}}\n")
    with pytest.raises(CkptkitError, match="services"):
        preflight(script=tmp_path / "a.yaml")


def test_a_file_to_inherit_from_that_is_not_there_is_inconclusive(base, hf):
    file = model(base, hf)
    base.unlink()
    report = preflight(script=file)
    assert (report.status, report.findings) == ("inconclusive", [])
    assert text_with(f"{file}:1 base.yaml") in report.facts["not read"]
