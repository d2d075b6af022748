"""`verify --against-megatron` of a checkpoint that holds a HybridModel: rank by rank, sound and broken."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from families import CASES
from families.case import save
from families.table import config_of
from mutations.ranks import layers_of
from support.forking import run_script
from support.installed import require_megatron
from support.megatron_layouts import EXPERTS, judge, two_of
from support.nightly import daily

from ckptkit.app.api import convert
from ckptkit.converters.megatron.hybrid_model import gpt_only, hybrid_dims, needs_release
from ckptkit.converters.planner import default_dialect, dims_of, rules_of
from ckptkit.core.errors import UsageError
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.megatron.run import run_megatron

require_megatron()

MEGATRON = frozenset({"megatron"})
RELEASE = tuple(map(int, version("megatron-core").split(".")[:2]))
HELD = [name for name in CASES if not list(gpt_only(dims_of(config_of(CASES[name]))))]
# One layout a model, and all models together have all of them.
LAYOUTS = {name: two_of(list(CASES).index(name), dims_of(config_of(CASES[name])).experts > 0)[0] for name in HELD}
LAYOUTS |= {
    "glm4_moe": "TP2 EP2",
    "qwen2-tied": "PP2 uneven",
    "deepseek_v3": "TP2 PP2",
    "nemotron_h": "TP2 PP2",
    "nemotron_h-latent": "TP2 EP2",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("hybrid")

    def make(name):
        if not (root / name).exists():
            save(name, CASES[name], root / name / "hf", torch.bfloat16)
            if default_dialect(config_of(CASES[name])) == "mcore":
                convert(root / name / "hf", root / name / "gpt")
            convert(root / name / "hf", root / name / "hybrid", dialect="hybrid")
        return root / name

    return make


def subject_of(path, source=None, **options):
    return Subject(path, source, options=VerifyOptions(against=MEGATRON, **options))


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("name", daily(HELD, ["glm4_moe", "deepseek_v3"]))
def test_every_rank_holds_its_slice(made, name):
    dims = dims_of(config_of(CASES[name]))
    options = EXPERTS[LAYOUTS[name]]
    subject = subject_of(made(name) / "hybrid", made(name) / "hf", **options)
    if any(since > RELEASE for _, since in needs_release(dims, options.get("vpp", 1))):
        with pytest.raises(CannotCheck, match=r"megatron-core 0\.1\d\.\d.* HybridModel has"):
            judge(subject)
        return
    if name == "mimo-tied-two-layers" and "PP" in LAYOUTS[name]:
        with pytest.raises(CannotCheck, match="tied"):
            judge(subject)
        return
    findings, results = judge(subject)
    assert findings == []
    ranks = [one for one in run_megatron(subject).reports if one.tp == one.ep == 0]
    held = [layer for report in ranks for chunk in report.layers for layer in chunk]
    assert sorted(held) == list(range(hybrid_dims(dims).layers))
    assert results["CK402"].tensors_compared >= len(subject.checkpoint.specs)
    assert ", HybridModel, " in results["CK401"].facts["megatron"][0]


# Prints each kind of layer whose norm is a module of its own.
OWN_SPEC = """
from ckptkit.verify.witnesses.megatron.imports import importing_megatron
with importing_megatron():
    from ckptkit.verify.witnesses.megatron.variants.hybrid_stack import ENGINE_STACK
    from megatron.core.transformer.identity_op import IdentityOp
for field, layer in vars(ENGINE_STACK.submodules).items():
    for norm in ("input_layernorm", "pre_mlp_layernorm"):
        if hasattr(getattr(layer, "submodules", None), norm):
            print("norm", field, norm, getattr(layer.submodules, norm) is not IdentityOp)
"""
# A test model with each kind, the number of a layer of it, and its norm.
OF_KIND = {
    "attention_layer": ("qwen2-tied", 0, "input_layernorm"),
    "mlp_layer": ("qwen2-tied", 1, "pre_mlp_layernorm"),
    "moe_layer": ("qwen3_moe", 1, "pre_mlp_layernorm"),
    "gdn_layer": ("qwen3_next", 0, "input_layernorm"),
    "mla_layer": ("deepseek_v3", 0, "input_layernorm"),
}


def test_norms_stand_alone_where_megatrons_own_spec_has_them_so():
    """Without Transformer Engine its spec cannot be built, but it says which norms are modules of their own."""
    lines = [line.split() for line in run_script("megatron", OWN_SPEC).splitlines() if line.startswith("norm ")]
    alone = {(field, norm): reported == "True" for _, field, norm, reported in lines}
    own = {field: alone[field, norm] for field, (_, _, norm) in OF_KIND.items() if (field, norm) in alone}
    assert own.keys() >= {"attention_layer", "mlp_layer", "moe_layer"}
    for field, expected in own.items():
        name, number, norm = OF_KIND[field]
        names = {rule.megatron for rule in rules_of(config_of(CASES[name]), "hybrid")}
        assert (f"decoder.layers.{number}.{norm}.weight" in names) == expected, field


@pytest.mark.usefixtures("served")
def test_source_may_be_a_gptmodel_and_logits_are_those_of_transformers(made):
    """Every check of files and values too, on two pipeline stages."""
    report = verify(
        made("glm4_moe") / "hybrid", source=made("glm4_moe") / "gpt", against=MEGATRON | {"logits"}, pp=2, ep=2
    )
    assert [str(finding) for finding in report.findings] == []
    assert {check.code: check.reason for check in report.checks if check.status != "passed"} == {}
    assert report.facts["pipeline stages"] == ["pp rank 0: layers 0..11", "pp rank 1: layers 12..23"]
    (found, _) = report.facts["log-probabilities in Megatron"]
    assert "from transformers in float32: mean 0.0000" in found


def test_pipeline_options_that_megatron_refuses_are_refused(made):
    with pytest.raises(UsageError, match="Megatron-LM refuses --account-for-loss-in-pipeline-split"):
        judge(subject_of(made("qwen2-tied") / "hybrid", pp=2, account_for_loss_in_pipeline_split=True))


@pytest.mark.usefixtures("served")
def test_attention_of_another_layer_is_named(made, copy_of):
    path = copy_of(made("qwen2-tied") / "hybrid")
    layers_of(lambda layer: {2: 4, 4: 2}.get(layer, layer))(path, "")
    findings, _ = judge(subject_of(path, made("qwen2-tied") / "hf"))
    assert {finding.code for finding in findings} == {"CK402"}
    assert "decoder.layers.{2,4}.self_attention.linear_proj.weight" in str([finding.tensor for finding in findings])


@pytest.mark.skipif(find_spec("megatron.training") is None, reason="it comes with megatron-core since 0.19")
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("name", ["qwen2-tied", "deepseek_v3"])
def test_megatron_lms_own_load_checkpoint_takes_it(made, name):
    findings, results = judge(subject_of(made(name) / "hybrid", made(name) / "hf", tp=2, trainer_loader=True))
    assert findings == []
    assert "Megatron-LM's load_checkpoint" in results["CK401"].facts["megatron"][0]
