"""The Megatron witness on GPUs: NCCL, parameters in GPU memory and, if installed, Transformer Engine's layers."""

from importlib.util import find_spec

import pytest
import torch
from support import models

from ckptkit.app.api import convert
from ckptkit.verify.checks.witnesses.megatron import all_layers, right_slices, strict_load
from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def judge(subject):
    result = CheckResult("", "")
    return [
        finding for check in (strict_load, right_slices, all_layers) for finding in check(subject, result)
    ], result.facts


@pytest.mark.parametrize(
    ("name", "tp", "pp", "ep"),
    [
        ("glm4_moe", 1, 1, 1),
        ("qwen2-tied", 1, 1, 1),
        ("glm4_moe", 2, 1, 1),
        ("qwen2-tied", 1, 2, 1),
        ("qwen3_moe", 2, 1, 2),
        ("glm4_moe", 2, 2, 1),
    ],
)
def test_every_rank_holds_its_slice(releases, converted, name, tp, pp, ep):
    subject = Subject(converted(name), releases(name), options=VerifyOptions(tp=tp, pp=pp, ep=ep))
    if torch.cuda.device_count() < tp * pp:
        pytest.skip(f"needs {tp * pp} GPUs, there are {torch.cuda.device_count()}")
    findings, facts = judge(subject)
    assert findings == []
    assert "NCCL on GPUs" in facts["megatron"][0]
    assert ("Transformer Engine spec" in facts["megatron"][0]) == (find_spec("transformer_engine") is not None)


def test_one_changed_value_is_found(releases, copy_of, tmp_path):
    edited = copy_of(releases("glm4_moe"))
    name = "model.layers.9.mlp.experts.11.down_proj.weight"
    value = models.tensors(edited)[name]
    value[3, 5] += 1
    models.edit(edited, name, value)
    convert(edited, tmp_path / "broken")
    findings, _ = judge(Subject(tmp_path / "broken", releases("glm4_moe")))
    assert [(finding.code, finding.tensor) for finding in findings] == [
        ("CK402", "decoder.layers.9.mlp.experts.experts.11.linear_fc2.weight")
    ]
