"""Names of draft layers that `lint` works with where there is config.json alone: those that the releases have."""

import shutil

import pytest
import torch
from families import CASES, case
from families.table import config_of
from support import models, published

from ckptkit.converters.registry import FAMILIES
from ckptkit.formats.hf.reader import read_json
from ckptkit.quant.ignore import subject
from ckptkit.quant.ignore.lint import lint
from ckptkit.quant.ignore.readers import SGLANG, VLLM
from ckptkit.quant.ignore.subject import open_subject
from ckptkit.quant.ignore.tree import class_tree


def drafts(path):
    """Modules of draft layers among the matrices that lint looks at."""
    subject, _ = open_subject(path)
    return {matrix.module for matrix in subject.matrices if subject.tree.draft_of(matrix.module)}


def with_unfused(tensor):
    """A name, and those of the first expert where it is that of all experts in one."""
    yield tensor
    for fused, parts in ((".experts.gate_up_proj", ("gate", "up")), (".experts.down_proj", ("down",))):
        if tensor.endswith(fused):
            yield from (f"{tensor.removesuffix(fused)}.experts.0.{part}_proj.weight" for part in parts)


def test_every_draft_module_by_config_alone_is_in_the_release(tmp_path):
    """Test models are saved as releases are, draft layers under the published names; expert 0 stands for all."""
    compared = set()
    for name, one in CASES.items():
        model_type = config_of(one)["model_type"]
        known = FAMILIES[model_type].release and model_type not in compared
        promised = class_tree(config_of(one)).drafts if known else ()
        if not promised:
            continue
        case.save(name, one, tmp_path / name, torch.bfloat16)
        config = read_json(tmp_path / name / "config.json")
        stored = {name for tensor in models.tensors(tmp_path / name) for name in with_unfused(tensor)}
        shutil.rmtree(tmp_path / name)
        if any(tensor.startswith(draft.prefix) for draft in promised for tensor in stored):
            compared.add(model_type)
            found = drafts(published.write(tmp_path / name, config, ["lm_head"]))
            assert found
            assert {f"{module}.weight" for module in found} <= stored, name
    assert compared >= {"mimo", "glm4_moe", "deepseek_v3", "exaone_moe", "qwen3_5", "qwen3_next", "nemotron_h"}


def test_names_of_mimos_draft_layer_are_vllms_numbers_too(tmp_path):
    """vLLM builds layer `num_hidden_layers` of what the release calls mtp_layers.0; its source was read."""
    config = config_of(CASES["mimo"])
    layers = config["num_hidden_layers"]
    path = published.write(tmp_path / "mimo", config, ["lm_head", "model.embed_tokens", r"re:model\.mtp_layers\..*"])
    found = [one for one in lint(path).findings if any(".mtp_layers." in tensor for tensor in one.tensors)]
    assert {one.readers for one in found} == {("SGLang 0.5.16", "SGLang 0.5.23"), VLLM}
    (entry,) = {one.hint.partition("'")[2].strip("'") for one in found}
    assert rf"model\.layers\.({layers})" in entry
    whole = published.write(tmp_path / "whole", config, ["lm_head", "model.embed_tokens", entry])
    assert [one for one in lint(whole).findings if one.severity != "note"] == []


GLM_IGNORE = ["lm_head", "model.embed_tokens", r"re:.*\.mlp\.gate(\.weight)?$"]
JOINT = "model.layers.4.eh_proj"


def names_of(config, ignore, *unpacked, draft=True):
    """Names of a release whose list leaves nothing else out, with its draft layers packed or not."""
    tree = class_tree(config)
    found = []
    for module in [*tree.others, *sorted(tree.linears), *subject._draft_modules(tree)]:
        plain = module in unpacked or module in ignore or module in tree.others or module == tree.head
        plain = plain or (tree.draft_of(module) is not None and not draft) or module.endswith((".mlp.gate", ".eh_proj"))
        found += [f"{module}.weight"] if plain else published.packed(module)
    return found


def about_drafts(path, readers):
    """Severity, kind and readers of what `lint` finds of packed draft layers."""
    found = [one for one in lint(path, readers=readers).findings if any(".layers.4." in name for name in one.tensors)]
    return [(one.severity, one.kind, one.readers) for one in found if one.kind != "shared expert"]


@pytest.mark.parametrize("readers", [["vllm"], ["sglang"], ["transformers"], None])
def test_draft_layers_in_int4_are_for_whoever_builds_them(tmp_path, readers):
    """Both engines build GLM's draft layer as the list says; transformers does not load it. Run in SGLang 0.5.16."""
    ignore = [*GLM_IGNORE, "model.layers.4.mlp.gate", JOINT]
    path = published.write(tmp_path, published.GLM, ignore, names_of(published.GLM, ignore))
    assert about_drafts(path, readers) == []
    assert "packed" not in {one.kind for one in lint(path, readers=readers).findings}


@pytest.mark.parametrize(("readers", "who"), [(["vllm"], VLLM), (["sglang"], SGLANG)])
def test_a_draft_layer_that_the_list_leaves_out_is_not_looked_for_packed(tmp_path, readers, who):
    ignore = [*GLM_IGNORE, r"re:model\.(layers\.4|decoder)\..*"]
    path = published.write(tmp_path, published.GLM, ignore, names_of(published.GLM, ignore))
    assert {(one[0], one[2]) for one in about_drafts(path, readers)} == {("error", who)}
    sound = published.write(tmp_path / "sound", published.GLM, ignore, names_of(published.GLM, ignore, draft=False))
    assert about_drafts(sound, readers) == []


@pytest.mark.parametrize("readers", [["vllm"], ["sglang"]])
def test_what_joins_a_draft_layer_has_no_quantized_layer(tmp_path, readers):
    ignore = [*GLM_IGNORE, "model.layers.4.mlp.gate"]
    names = [name for name in names_of(published.GLM, ignore) if not name.startswith(JOINT)]
    path = published.write(tmp_path, published.GLM, ignore, [*names, *published.packed(JOINT)])
    (found,) = [one for one in lint(path, readers=readers).findings if f"{JOINT}.weight" in one.tensors]
    assert (found.severity, found.kind) == ("error", "disagreement")
    assert "quantized" in found.message


def test_draft_layers_that_sglang_cannot_tell_from_the_model_are_its_error_alone(tmp_path):
    """Qwen3-Next: it asks by the names of the model's own first layer."""
    config = config_of(CASES["qwen3_next"])
    tree = class_tree(config)
    plain = [one for one in tree.linears if ".linear_attn." in one or one.endswith("expert_gate")]
    ignore = ["lm_head", "model.embed_tokens", "mtp.fc", r"re:.*\.linear_attn\..*"]
    ignore.append(r"re:.*\.mlp\.(gate|shared_expert_gate)(\.weight)?$")
    names = [one for one in names_of(config, [], *plain) if "mtp.fc." not in one and ".shared_expert_gate." not in one]
    names.append("mtp.fc.weight")
    path = published.write(tmp_path, config, ignore, names)
    engines = {}
    for reader in ("vllm", "sglang"):
        found = [one for one in lint(path, readers=[reader]).findings if any("mtp." in name for name in one.tensors)]
        engines[reader] = {one.severity for one in found if one.kind in ("disagreement", "packed", "exposed")}
    assert engines == {"vllm": set(), "sglang": {"error"}}


@pytest.mark.parametrize(
    ("readers", "errors"), [(None, True), (["vllm"], False), (["transformers"], False), (["sglang", "vllm"], True)]
)
def test_what_sglang_alone_cannot_hold_is_an_error_for_it_alone(tmp_path, readers, errors):
    """Latent attention in INT4: SGLang reads its dense weights."""
    ignore = ["lm_head", "model.embed_tokens", r"re:.*\.mlp\.gate(\.weight)?$"]
    config = {**published.KIMI, "model_type": "deepseek_v3"}
    path = published.write(tmp_path, config, ignore, names_of(config, ignore))
    found = [one for one in lint(path, readers=readers).findings if one.kind == "packed"]
    assert bool(found) is errors
    assert all(set(one.readers) <= {*SGLANG, *VLLM, "compressed-tensors", "transformers", "slime"} for one in found)
