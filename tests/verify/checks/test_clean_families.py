"""`verify` is silent on sound checkpoints of every family, all bytes compared: releases, Megatron, INT4."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from families import CASES, HF_CASES, OF_A_KIND, case
from support.megatron_layouts import EXPERTS, judge, two_of
from support.nightly import daily

from ckptkit.app.api import convert, quantize
from ckptkit.converters.planner import dims_of
from ckptkit.converters.registry import FAMILIES
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.megatron.run import run_megatron


@pytest.fixture(scope="module", params=daily(CASES, OF_A_KIND[::2]))
def made(request, tmp_path_factory):
    """A model of one family: as its release, as Megatron, and in INT4 where that is supported."""
    name, root = request.param, tmp_path_factory.mktemp("clean") / request.param
    case.save(name, CASES[name], root / "hf", torch.bfloat16)
    convert(root / "hf", root / "megatron")
    config = json.loads((root / "hf" / "config.json").read_text())
    if FAMILIES[config["model_type"]].release:
        quantize(root / "hf", root / "int4", QuantScheme(None, "qmax7"))
    yield {path.name: path for path in root.iterdir()}
    shutil.rmtree(root)


# What reads bytes: of one checkpoint, and beside its source.
VALUES, COMPARED = {"CK201", "CK204", "CK205", "CK206", "CK207", "CK208"}, {"CK202", "CK203"}
# The source of each, and checks that it must have passed besides those.
RUNS = {
    "hf": ("megatron", {"CK101", "CK104"}),
    "megatron": ("hf", {"CK101", "CK104", "CK111", "CK114", "CK701"}),
    "int4": ("hf", {"CK301", "CK302", "CK303", "CK304", "CK305"}),
}


def test_nothing_is_found_in_what_is_made_of_a_release(made):
    for form, path in made.items():  # no INT4 where no reader knows the experts one by one
        source, codes = RUNS[form]
        report = verify(path, source=made[source])
        assert [str(finding) for finding in report.findings] == [], form
        assert {check.code: check.reason for check in report.checks if check.status != "passed"} == {}, form
        assert {check.code for check in report.checks} >= codes | VALUES | COMPARED, form


# References of these tests leave their weights as memory was; transformers has no class.
_WITHOUT_CLASS = ("step3p5", "step3p7", "kimi_k3", "glm5_next")
FRESH = [name for name in HF_CASES if name not in _WITHOUT_CLASS]


@pytest.mark.parametrize("name", daily(FRESH, ("glm4_moe", "gemma3_text")))
def test_model_as_transformers_initializes_it_is_sound(name, tmp_path):
    """Biases of zeros, norms around zero or one, and matrices that a class begins with as a constant."""
    fresh = replace(HF_CASES[name], value=lambda key, tensor, dtype: tensor)
    _, added = case.save(name, fresh, tmp_path, torch.bfloat16)
    report = verify(tmp_path)
    assert [str(one) for one in report.findings if one.severity == "error"] == []
    if not added:  # what only a release has is random in these tests
        assert [str(one) for one in report.findings if one.code in VALUES] == []


# Models that Megatron cannot have at some layouts, and what is said then.
REFUSED = {
    "mimo-tied-two-layers": "tied",
    "moonlight": "linear_q_proj",
    "deepseek_v32": "the indexer of megatron-core 0.1[0-8]",
    "glm_moe_dsa": "the indexer of megatron-core 0.1[0-8]",
    "glm_moe_dsa-shared": "the indexer of megatron-core 0.1[0-8]",
    "nemotron_h": r"megatron-core 0\.16\S* .*several chunks",
    "nemotron_h-latent": r"megatron-core 0\.16\S* .*multi-token prediction",
}
# Layouts that a model cannot have whatever megatron-core it is: biases of experts that tensor parallel ranks would cut,
# and 13 layers.
IMPOSSIBLE = {
    **dict.fromkeys(("gpt_oss", "gpt_oss-v4"), ("TP2", "TP2 EP2", "TP2 PP2")),
    "nemotron_h-latent": ("PP2", "VPP2", "TP2 PP2"),
}


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("layout", daily((0, 1), (0,)))
def test_every_rank_of_megatron_holds_its_slice(layout, made):
    """At two layouts. test_families.py loads the same models on one rank, and runs them."""
    name, dims = made["hf"].parent.name, dims_of(json.loads((made["hf"] / "config.json").read_text()))
    label = two_of(list(CASES).index(name), dims.experts > 0, IMPOSSIBLE.get(name, ()))[layout]
    options = VerifyOptions(**{"against": frozenset({"megatron"}), **EXPERTS[label]})
    subject = Subject(made["megatron"], made["hf"], options=options)
    refused = None
    try:
        findings, results = judge(subject)
    except CannotCheck as unable:
        refused = str(unable)
    if refused is not None:
        assert re.search(REFUSED[name], refused), label
        return
    assert findings == [], label
    run = run_megatron(subject)
    stages = run.sizes.pipeline(dims).stages
    assert [report.layers for report in run.reports] == [stages[report.pp] for report in run.reports], label
    assert results["CK402"].tensors_compared >= len(subject.checkpoint.specs), label
