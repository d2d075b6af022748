"""mbridge, which slime, miles and verl have used: its conversions against ckptkit's, both ways, bit for bit."""

import re
from collections import Counter

import pytest
from families import CASES
from support import models

import ckptkit
from interop.beside import start_jobs
from interop.releases import release

SUPPORTED = ("llama", "qwen2-untied", "qwen2-tied", "qwen3_moe", "glm4_moe", "mixtral")
AGAIN = "qwen2-untied, after a tied model in the same process"
GATE, MTP, DEEPSEEK = "qwen2_moe", "glm4_moe-mtp", "deepseek_v3"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """By name of the model: `hf`, mbridge's `imported` and `exported`, and ckptkit's `megatron`."""
    return tmp_path_factory.mktemp("mbridge")


@pytest.fixture(scope="module")
def results(root):
    names = (*SUPPORTED, AGAIN, GATE, MTP, DEEPSEEK)
    for name in names:
        release(name, root / name / "hf", CASES[name.partition(",")[0]])
        ckptkit.convert(root / name / "hf", root / name / "megatron")
    jobs = [{part: str(root / name / part) for part in ("hf", "imported", "megatron", "exported")} for name in names]
    return dict(zip(names, start_jobs("mbridge_worker", root, jobs), strict=True))


@pytest.mark.parametrize("name", SUPPORTED)
def test_mbridge_exports_what_ckptkit_converted_and_ckptkit_what_mbridge_imported(root, results, name):
    assert "refused" not in results[name]
    ckptkit.convert(root / name / "imported", root / name / "back", hf=root / name / "hf")
    for made in ("exported", "back"):
        assert models.unequal(root / name / made, root / name / "hf") == [], made


def findings(root, name, made):
    hf = root / name / "hf"
    report = ckptkit.verify(root / name / made, hf, hf=hf if made == "imported" else None)
    assert report.status == "failed"
    return [(finding.code, finding.tensor, finding.count, finding.actual) for finding in report.findings]


def test_an_untied_model_after_a_tied_one_gets_the_embeddings_for_its_output_layer(root, results):
    # `_adjust_mapping_for_shared_weights` changes a dict of the class, and so every later model of the process.
    assert "refused" not in results[AGAIN]
    assert findings(root, AGAIN, "imported") == [
        ("CK202", "lm_head.weight", 1, "the values of model.embed_tokens.weight")
    ]


def test_the_gate_of_shared_experts_is_lost(root, results):
    # Its config does not set moe_shared_expert_gate, which megatron-core asks for.
    assert "refused" not in results[GATE]
    name = "decoder.layers.{0..11}.mlp.shared_experts.gate_weight"
    assert findings(root, GATE, "imported") == [("CK104", name, 12, "not in .metadata")]
    with pytest.raises(ckptkit.CkptkitError, match=re.escape(name)):
        ckptkit.convert(root / GATE / "imported", root / GATE / "back", hf=root / GATE / "hf")


def test_multi_token_prediction_layers_are_lost(root, results):
    assert "refused" not in results[MTP]
    found = findings(root, MTP, "imported")
    layer = [name for name in models.tensors(root / MTP / "hf") if name.startswith("model.layers.12.")]
    assert {code for code, *_ in found} == {"CK202"}
    assert all(str(tensor).startswith("model.layers.12.") for _, tensor, _, _ in found)
    assert sum(count for _, _, count, _ in found) == len(layer)


@pytest.mark.parametrize(("name", "shards", "config"), [(GATE, 12, 1), (MTP, 1, 0), (AGAIN, 1, 0)])
def test_a_shard_with_a_lost_tensor_is_not_written_though_the_index_names_it(root, results, name, shards, config):
    # The tokenizer is not copied (CK720), and transformers 4 writes config.json anew (CK702 for Qwen2-MoE).
    assert "refused" not in results[name]
    found = Counter[str]()
    for code, _, count, _ in findings(root, name, "exported"):
        found[code] += count
    assert found == Counter(CK102=shards, CK720=1, CK702=config)


def test_deepseek_is_refused_with_the_arguments_of_an_older_megatron(results):
    # megatron-core renamed `max_position_embeddings` of MLATransformerConfig in 0.14.
    assert "unexpected keyword argument 'max_position_embeddings'" in results[DEEPSEEK]["refused"]
