"""DeepSeek-V4: the names, dtypes and formats of its releases, and saves that are others."""

import re

import pytest
import torch
from families import UNWITNESSED
from families.case import build
from mutations.edits import edit_config, replace
from support import floats, models
from support.nightly import daily
from transformers import AutoModelForCausalLM

from ckptkit.app.api import inspect
from ckptkit.verify.run import verify

TABLE = "layers.1.ffn.gate.tid2eid"


@pytest.fixture
def release(releases):
    return releases("deepseek_v4")


@pytest.fixture(scope="module")
def published(releases, tmp_path_factory):
    path = tmp_path_factory.mktemp("v4") / "published"
    return floats.write(releases("deepseek_v4"), path, floats.DEEPSEEK_V4, is_quantized)


def is_quantized(name):
    return floats.V4_QUANTIZED.fullmatch(name) is not None


def findings(path, **options):
    return [(one.code, one.severity, str(one.tensor)) for one in verify(path, **options).findings]


def test_transformers_finds_every_tensor_of_the_release_where_its_class_wants_it(release):
    """All but the multi-token prediction layer, which it leaves out."""
    model = build("deepseek_v4", UNWITNESSED["deepseek_v4"], torch.bfloat16)
    loaded, info = AutoModelForCausalLM.from_pretrained(release, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert {name.split(".")[0] for name in info["unexpected_keys"]} <= {"mtp"}
    found = loaded.state_dict()
    differing = [name for name, tensor in model.state_dict().items() if not found[name].equal(tensor.to(found[name]))]
    assert {name.rpartition(".")[2] for name in differing} == {"e_score_correction_bias"}  # float32 in the release


def test_formats_of_the_release_are_read_and_found_sound(release, published):
    text = inspect(published)["quantization"]
    assert re.search(r"FP8 .* 128 x 128\): 111 tensors and MXFP4 .*: 468 tensors", text), text
    assert findings(published) == []
    assert findings(published, source=release) == []
    assert findings(release, source=release) == []


def test_the_format_of_the_experts_must_be_the_one_that_config_json_states(release, published, copy_of, tmp_path):
    """vLLM builds experts by `expert_dtype`, SGLang by the dtype of the first one."""
    all_fp8 = floats.Spelling(_in_fp8, floats.DEEPSEEK_V4.config)
    for path, right, wrong in (
        (copy_of(published), "fp4", "fp8"),
        (floats.write(release, tmp_path / "fp8", all_fp8, is_quantized), "fp8", "fp4"),
    ):
        edit_config(path, expert_dtype=right)
        assert findings(path) == []
        edit_config(path, expert_dtype=wrong)
        assert {code for code, *_ in findings(path)} == {"CK303"}


def _in_fp8(module, weight):
    codes, scale = floats.fp8_block(weight, powers=True)
    return {f"{module}.weight": codes, f"{module}.scale": scale}


TABLES = {
    "zeros": (torch.zeros_like, "CK205"),
    "lost": (lambda table: None, "CK104"),
    "bfloat16": (lambda table: table.bfloat16(), "CK107"),
    "no such expert": (lambda table: torch.where(table == 11, 12, table), "CK215"),
    "less than none": (lambda table: table - 1, "CK215"),
    "int32": (lambda table: table.int(), "CK203"),
    "rows moved": (lambda table: table.roll(1, 0), "CK202"),
}


@pytest.mark.parametrize("fault", daily(TABLES, ("zeros", "bfloat16", "no such expert", "int32")))
def test_a_wrong_table_is_found(release, copy_of, fault):
    (change, code), path = TABLES[fault], copy_of(release)
    models.edit(path, TABLE, change(models.tensors(path)[TABLE]))
    assert (code, "error", TABLE) in findings(path, source=release)
    assert (code in {found for found, *_ in findings(path)}) == (code not in ("CK202", "CK203"))


def test_tables_that_repeat_in_every_layer_are_not_suspicious(release, copy_of):
    """SGLang's own default is the same in all layers; nothing says that releases differ there."""
    path = copy_of(release)
    table = models.tensors(path)[TABLE]
    replace(path, {f"layers.{layer}.ffn.gate.tid2eid": table for layer in range(3)})
    assert findings(path) == []
