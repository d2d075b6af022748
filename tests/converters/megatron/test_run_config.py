"""run_config.yaml of Megatron-Bridge gives the arguments that Megatron-LM's own namespace gives otherwise."""

import pytest
import torch
import yaml
from families import CASES
from mutations.edits import edit_common
from support import models
from support.forking import run_module
from support.installed import require_megatron
from support.messages import refusal, text_with
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckptkit.app.api import convert
from ckptkit.app.inspection import inspect
from ckptkit.converters.megatron.run_config import NEMO_MODEL, RUN_CONFIG, args_of, model_settings
from ckptkit.converters.planner import dims_of
from ckptkit.core.errors import UnsupportedError
from ckptkit.verify.checks.config.arguments import mismatches
from ckptkit.verify.run import verify

# Models of GPTModel whose settings differ in kind: dense and not, latent attention, sinks, YaRN, linear attention.
MODELS = ("qwen2-tied", "qwen3_moe", "glm4_moe-mtp", "deepseek_v3", "gpt_oss", "qwen3_next")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    require_megatron()
    folder = tmp_path_factory.mktemp("run_configs")
    run_module("megatron", "support.run_configs", folder, *MODELS)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_the_arguments_are_those_of_the_model_that_was_built(name, written):
    found = args_of(model_settings(written / f"{name}.yaml"))
    assert list(mismatches(dims_of(CASES[name].config().to_dict()), found)) == []
    assert found["padded_vocab_size"] % 256 == 0
    assert found["tensor_model_parallel_size"] == 2


@pytest.fixture
def bridge(written, converted, copy_of):
    """A checkpoint as Megatron-Bridge leaves it: no arguments of Megatron-LM, and run_config.yaml in the iteration."""
    root = copy_of(converted("qwen3_moe"))
    edit_common(root, lambda common: common.pop("args"))
    (root / "release" / RUN_CONFIG).write_text((written / "qwen3_moe.yaml").read_text())
    return root


def test_inspect_and_verify_read_it(bridge, converted):
    args, own = inspect(bridge)["args"], inspect(converted("qwen3_moe"))["args"]
    same = ("num_layers", "hidden_size", "num_query_groups", "num_experts", "moe_router_topk", "rotary_base", "swiglu")
    assert {name: args[name] for name in same} == {name: own[name] for name in same}
    report = verify(bridge)
    assert report.findings == []
    assert {one.code: one.status for one in report.checks}["CK701"] == "passed"


def test_a_setting_of_another_model_is_named_with_its_file(bridge):
    file = bridge / "release" / RUN_CONFIG
    file.write_text(file.read_text().replace("moe_router_topk: 3", "moe_router_topk: 7"))
    (finding,) = verify(bridge).findings
    assert (finding.code, finding.actual, finding.file) == ("CK701", "moe_router_topk = 7", str(file))


@pytest.fixture
def nemo(written, converted, copy_of):
    """A checkpoint as NeMo 2 leaves it: weights/ under the wrapper's name, and what made them in context/."""
    root = copy_of(converted("qwen3_moe"))
    edit_common(root, lambda common: common.pop("args"))
    models.edit_metadata(root / "release", under_a_wrapper)
    (root / "release").rename(root / "weights")
    (root / "latest_checkpointed_iteration.txt").unlink()
    (root / "context").mkdir()
    settings = yaml.safe_load((written / "qwen3_moe.yaml").read_text())["model"]
    content = {"_target_": "nemo.collections.llm.gpt.model.qwen3.Qwen3Model", "config": settings}
    (root / "context" / NEMO_MODEL).write_text(yaml.safe_dump(content))
    return root


def under_a_wrapper(content):
    content.state_dict_metadata = {f"module.{key}": one for key, one in content.state_dict_metadata.items()}
    content.storage_data = {
        MetadataIndex(f"module.{at.fqn}", at.offset, at.index): info for at, info in content.storage_data.items()
    }


def test_a_checkpoint_of_nemo_is_read_and_exported(nemo, converted, releases, tmp_path):
    facts = inspect(nemo)
    assert (facts["iteration"], facts["args"]["num_experts"]) == ("weights", 12)
    assert facts["names"] == inspect(converted("qwen3_moe"))["names"]
    report = verify(nemo, source=releases("qwen3_moe"))
    assert report.findings == []
    assert {one.code: one.status for one in report.checks}["CK701"] == "passed"
    convert(nemo, tmp_path / "back")
    assert models.unequal(tmp_path / "back", releases("qwen3_moe")) == []


def test_settings_that_leave_some_to_a_class_and_keys_that_megatron_does_not_look_for_are_not_compared(nemo):
    file = nemo / "context" / NEMO_MODEL
    file.write_text("config: {_target_: nemo.collections.llm.gpt.model.llama.Llama3Config8B, num_layers: 7}")
    assert inspect(nemo)["args"] == {}
    assert verify(nemo).findings == []
    report = verify(nemo, against=frozenset({"megatron"}))
    assert (report.status, report.findings) == ("inconclusive", [])
    assert report.reasons[0] == text_with("NeMo torch_dist")


def test_nemo_weights_in_zarr_are_refused_with_the_way_out(nemo):
    (nemo / "weights" / ".metadata").unlink()
    for verb in (inspect, verify):
        with pytest.raises(UnsupportedError, match="NeMo 2.*torch_dist"):
            verb(nemo)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("model: [1, 2", "line|expected|parsing"),
        ("train: {}", "settings"),
        ("model: {a: 1, a: 2}", "twice in one mapping"),
        ("a: &a [1]\nmodel: " + "[" * 70 + "]" * 70, "more than 64 levels"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, text, why):
    file = tmp_path / RUN_CONFIG
    file.write_text(text)
    refusal(why, model_settings, file)


def test_nothing_that_the_file_names_is_run(tmp_path):
    file = tmp_path / RUN_CONFIG
    file.write_text(
        "model:\n  num_layers: !!python/object/apply:os.abort []\n  params_dtype: {_target_: torch.float16}"
    )
    found = args_of(model_settings(file))
    assert found["num_layers"] == []
    assert found["params_dtype"].name == str(torch.float16).removeprefix("torch.")
