"""What `verify` says of weights in FP8, MXFP8, MXFP4 and NVFP4: silent where all is sound, and each mutation found."""

import pytest
import torch
from mutations.edits import edit_json, replace
from support import floats
from support.nightly import daily

from ckptkit.verify.run import verify

MODELS = ("qwen2-untied", "qwen3_moe", "deepseek_v3")
CHECKS = ("CK301", "CK303", "CK304", "CK305", "CK306", "CK308")
# Those of which test_float_mutations.py has no sound twin.
OTHERS = ("fp8-channel", "fp8-modelopt", "mxfp8", "mxfp4-compressed", "nvfp4-quark")


@pytest.mark.parametrize("model", daily(MODELS, ("qwen2-untied",)))
@pytest.mark.parametrize("name", daily(floats.SPELLINGS, OTHERS))
def test_sound_weights_have_no_finding(name, model, releases, tmp_path):
    path = floats.write(releases(model), tmp_path / "floats", floats.SPELLINGS[name])
    report = verify(path, source=releases(model))
    assert [str(finding) for finding in report.findings] == []
    assert report.status == "passed"
    checks = {check.code: check for check in report.checks}
    for code in CHECKS:
        assert (code, checks[code].status) == (code, "passed")
        assert checks[code].tensors_compared


def test_a_scheme_that_is_not_read_is_inconclusive_and_no_part_of_it_is_a_fault(releases, tmp_path):
    """Parts whose names no format that is read has; a name that belongs to no module is found all the same."""
    path = floats.write(releases("qwen2-untied"), tmp_path / "floats", floats.SPELLINGS["nvfp4-quark"])
    scheme = {"global_quant_config": {"weight": {"dtype": "fp6_e3m2", "qscheme": "per_group", "group_size": 16}}}
    edit_json(path / "config.json", lambda config: config["quantization_config"].update(scheme))
    report = verify(path)
    assert (report.status, [str(finding) for finding in report.findings]) == ("inconclusive", [])
    replace(path, {"model.layers.12.self_attn.q_proj.weight": torch.zeros(4, 4)})
    assert "CK104" in [finding.code for finding in verify(path).findings]


def test_layers_that_quark_gives_a_scheme_of_their_own_are_read_by_it(releases, tmp_path, copy_of, alone):
    release, quark = releases("qwen3_moe"), floats.SPELLINGS["mxfp4-quark"]
    own = {"*.o_proj": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "input_tensors": None}}

    def store(module, weight):
        if not module.endswith(".o_proj"):
            return quark.store(module, weight)
        return {name: part for name, part in floats.modelopt_fp8(module, weight).items() if "input" not in name}

    content = quark.config["quantization_config"] | {"layer_quant_config": own}
    spelling = floats.Spelling(store, {"quantization_config": content}, columns=32)
    path = floats.write(release, tmp_path / "release" / "mixed", spelling)
    assert [str(finding) for finding in verify(path, source=release).findings] == []
    broken = copy_of(path)
    edit_json(broken / "config.json", lambda config: config["quantization_config"].update(layer_quant_config={}))
    (found,) = alone("CK303", broken)[1]
    assert (found.tensor, found.actual) == ("model.layers.{0..11}.self_attn.o_proj.weight", "float8_e4m3fn")
    by_class = {"layer_quant_config": {}, "layer_type_quant_config": {"RowParallelLinear": own["*.o_proj"]}}
    edit_json(broken / "config.json", lambda config: config["quantization_config"].update(by_class))
    assert alone("CK303", broken)[1] == []
