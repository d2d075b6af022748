"""The hooks of slime, miles and verl, called as the trainers call them, and the examples of docs/jobs.md."""

import importlib
import inspect
import re
import runpy
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save
from families.mtp import with_tensors
from support import models
from support.deltas import edit_index, publish, trained
from support.messages import refusal, text_with
from support.processes import python
from torch import nn

from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.planner import dims_of
from ckptkit.formats.hf.reader import HfCheckpoint

NAME = "glm4_moe"
PAGE = (Path(__file__).resolve().parents[3] / "docs/jobs.md").read_text()
TEXT = PAGE.partition("## Checks inside a job")[2].partition("\n## ")[0]
# The parameters of each hook, as the guides of slime and miles write them.
SIGNATURES = {
    "after_init": ["args"],
    "before_log_prob": ["args", "model", "store_prefix"],
    "before_train_step": ["args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"],
    "after_save": ["args", "rollout_id", "checkpoint_dir", "hf_checkpoint_dir"],
    "after_weight_write": ["args", "version_dir", "rollout_engines"],
}


def hook(path):
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert callable(found)
    return found


def arguments(release, **changes):
    args = megatron_args(dims_of(HfCheckpoint(release).config))
    return Namespace(**{**args, "hf_checkpoint": str(release), "rank": 0, **changes})


def test_hooks_have_the_signatures_that_the_trainers_call_and_are_in_the_table():
    found = {name: list(inspect.signature(hook(f"ckptkit.hooks.{name}")).parameters) for name in SIGNATURES}
    assert found == SIGNATURES
    assert set(re.findall(r"`ckptkit\.hooks\.(\w+)`", TEXT)) == {*SIGNATURES, "WeightSyncCheck", "watch_updates"}


def test_no_hook_is_imported_unless_asked_for():
    code = "import sys, ckptkit, ckptkit.app.api; print([name for name in sys.modules if 'hooks' in name])"
    assert "ckptkit" not in python("-c", code).stdout


def test_arguments_of_another_model_stop_the_job(releases):
    after_init = hook("ckptkit.hooks.after_init")
    after_init(arguments(releases(NAME)))
    after_init(arguments(releases(NAME), mtp_num_layers=None, vocab_size=None))
    raised = refusal("", after_init, arguments(releases(NAME), num_layers=11, rotary_base=10001))
    assert text_with("num_layers 11 12") in raised.details
    assert any(line.startswith("rotary_base is 10001") for line in raised.details)
    assert "--megatron-args" in str(raised.hint)
    for given in (None, "Qwen/Qwen3-30B-A3B"):
        refusal("--hf-checkpoint is", after_init, Namespace(hf_checkpoint=given))


def chunk(router, weight):
    """A model chunk with a router under Megatron's name, wrapped as Megatron wraps it."""
    router_module, linear = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    router_module.weight, linear.weight = nn.Parameter(router), nn.Parameter(weight)
    layer = nn.ModuleDict({"mlp": nn.ModuleDict({"router": router_module}), "linear": linear})
    return nn.ModuleDict({"module": layer})


@pytest.mark.parametrize(("name", "before"), [("before_log_prob", ("ref_",)), ("before_train_step", None)])
def test_parameters_are_looked_at_before_each_use(name, before):
    run = hook(f"ckptkit.hooks.{name}")

    def call(model):
        run(Namespace(), model, *before) if before else run(Namespace(), 3, 1, model, None, None)

    good, router = torch.ones(4, 4), torch.arange(8.0).reshape(2, 4)
    call([chunk(router, good), chunk(router.bfloat16(), good.half())])
    bad = good.clone()
    bad[1, 2] = float("nan")
    refusal(r"NaN.*module\.linear\.weight", call, [chunk(router, good), chunk(router, bad)])
    raised = refusal(r"module\.mlp\.router\.weight", call, [chunk(torch.zeros(2, 4), good)])
    assert ("ref_" if before else "step 1 of rollout 3") in raised.message


def test_save_that_is_sound_passes_and_one_that_lost_a_file_stops_the_job(releases, converted, copy_of, capsys):
    saved, exported, args = copy_of(converted(NAME)), releases(NAME), arguments(releases(NAME))
    after_save = hook("ckptkit.hooks.after_save")
    iteration = (saved / "release").rename(saved / "iter_0000010")
    capsys.readouterr()
    after_save(args, 10, str(iteration), None)
    after_save(args, 10, str(iteration), str(exported))
    assert capsys.readouterr() == ("", "")
    broken = saved / "exported"
    shutil.copytree(exported, broken)
    sorted(broken.glob("*.safetensors"))[3].unlink()
    raised = refusal("", after_save, args, 10, str(iteration), str(broken))
    assert any(line.startswith("CK102 ") for line in raised.details)
    next(iteration.glob("*.distcp")).unlink()
    raised = refusal("", after_save, args, 10, str(iteration), None)
    assert any(line.startswith("CK112 ") for line in raised.details)


def test_disk_update_that_is_sound_passes_and_a_dead_router_stops_the_job(releases, copy_of):
    version, args = copy_of(releases(NAME)), arguments(releases(NAME), update_weight_mode="full")
    written = hook("ckptkit.hooks.after_weight_write")
    written(args, str(version), [])
    dense = releases("qwen2-tied")
    written(arguments(dense), str(dense), [])
    name = "model.layers.4.mlp.gate.weight"
    models.edit(version, name, torch.zeros_like(models.tensors(version)[name]))
    refusal(name, written, args, str(version), [])
    sorted(version.glob("*.safetensors"))[3].unlink()
    assert any(line.startswith("CK102 ") for line in refusal("", written, args, str(version), []).details)


def test_disk_update_without_multi_token_prediction_layers_passes(tmp_path):
    whole = CASES["glm4_moe-mtp"]
    save("whole", whole, tmp_path / "whole", torch.bfloat16)
    pruned = with_tensors(whole, lambda key: not key.startswith("model.layers.12."))
    save("whole", pruned, tmp_path / "version", torch.bfloat16)
    args = Namespace(hf_checkpoint=str(tmp_path / "whole"))
    hook("ckptkit.hooks.after_weight_write")(args, str(tmp_path / "version"), [])


def test_delta_update_is_whole_and_of_the_release(releases, tmp_path):
    """It is known by its directory: miles has no argument that says so. Earlier versions may be pruned."""
    written, args = hook("ckptkit.hooks.after_weight_write"), Namespace(hf_checkpoint=str(releases(NAME)))
    written(args, str(tmp_path), [])  # before the first update the directory is empty
    old = models.tensors(releases(NAME))
    path = publish(tmp_path, 7, old, trained(old, 1))
    written(args, str(path), [])
    edit_index(path, base_version="000005")
    refusal(r"base_version '000005' \(expected version 7, based on 6\)", written, args, str(path), [])
    edit_index(path, base_version="000006")
    file = path / "model-00001-of-00002.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    refusal(f"{file.name}.*truncated", written, args, str(path), [])
    file.unlink()
    refusal(f"{file.name}. is missing", written, args, str(path), [])
    file.write_bytes(content)
    written(args, str(path), [])
    args.hf_checkpoint = str(releases("qwen2-tied"))
    refusal("base", written, args, str(path), [])


def test_only_rank_0_looks_at_a_disk_update(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    hook("ckptkit.hooks.after_weight_write")(Namespace(hf_checkpoint=None), "/absent", [])


@pytest.fixture
def verl(monkeypatch, capsys):
    """`verl(*overrides)`: what the module says when a driver with these overrides imports it. Raises what that does."""

    def imported(*overrides):
        monkeypatch.setattr(sys, "argv", ["main_ppo", *overrides])
        runpy.run_module("ckptkit.hooks_verl")
        return capsys.readouterr().err

    return imported


def test_verl_launch_is_checked_by_its_overrides(verl, releases, converted, tmp_path):
    path, prefix = converted(NAME) / "release", "actor_rollout_ref.actor.megatron"
    model = f"actor_rollout_ref.model.path={releases(NAME)}"
    switch, directory = f"{prefix}.use_dist_checkpointing=True", f"{prefix}.dist_checkpointing_path="
    said = f"ckptkit: preflight of {path}, {releases(NAME)}: passed\n"
    assert verl(model, switch, f"{directory}{path}") == said
    broken = shutil.copytree(releases(NAME), tmp_path / "broken")
    sorted(broken.glob("*.safetensors"))[2].unlink()
    for code, overrides in {
        "CK703": [model, switch, f"{directory}{path}", f"{prefix}.tensor_model_parallel_size=5"],
        "CK711": [model, switch, f"{directory}{path.parent}"],
        "CK102": [f"actor_rollout_ref.model.path={broken}"],
    }.items():
        refusal(code, verl, *overrides)


def test_verl_process_without_a_directory_checks_nothing(verl):
    assert verl("--node-ip-address=10.0.0.7") == ""
    assert "directory" in verl("actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B")
