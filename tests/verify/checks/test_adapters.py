"""What `verify` says of LoRA adapters that PEFT saved: nothing of sound ones, and each fault by its check."""

import json
import math
import os
import subprocess

import pytest
import torch
import transformers
from families import HF_CASES, case
from mutations.edits import edit_config, tensor
from peft import LoraConfig, PeftModel, get_peft_model
from reports.adapters import CONFIG, WEIGHTS, pairs, save
from safetensors.torch import load_file, save_file
from support import models
from support.adapters import KINDS, made, randomized
from support.forking import run_script
from support.messages import text_with
from support.nightly import daily
from transformers import AutoModelForCausalLM

from ckptkit.app.api import convert, inspect
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.verify.run import verify

pytestmark = [
    pytest.mark.usefixtures("peft_here"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning"),
]

LAYER = "base_model.model.model.layers.5.self_attn.q_proj"
# Scales that engines do not give a pair.
BOTH, SGLANG, VLLM = text_with("SGLang 0.5.16 2 vLLM 0.26 2"), text_with("SGLang 0.5.16 2"), text_with("vLLM 0.26 2")
OTHER_SCALES = {"patterns": [BOTH, VLLM], "rslora": [SGLANG]}
# Parts that an engine's manager refuses or leaves out (test_adapter_managers.py).
WITHOUT_V, ONE_PAIR = ("SGLang 0.5.16 refuses q_proj without v_proj", text_with("SGLang 0.5.16 vLLM 2026-08 #52194"))
STACKED = text_with("SGLang 0.5.16 vLLM 0.26 PEFT 0.21")
NOT_TAKEN = {
    "shared outer": [STACKED],
    "patterns": [text_with("SGLang 0.5.16 4 adapter_config.json")],
    "dora": [text_with("SGLang 0.5.16 DoRA vLLM 0.26"), WITHOUT_V],
    "saved": [WITHOUT_V, text_with("SGLang 0.5.16 vLLM 0.26")],
    "fused experts": [ONE_PAIR, WITHOUT_V],
    "all linear": [ONE_PAIR],
    "mtp": [WITHOUT_V],
    "other names": [ONE_PAIR, WITHOUT_V],
    "nested": [WITHOUT_V],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


def of_kind(kind, root):
    if not (root / kind).exists():
        made(kind, root / kind)
    return root / kind


@pytest.mark.parametrize("kind", daily(KINDS, ("dense", "fused experts", "rslora", "shared outer")))
def test_a_sound_adapter_and_what_it_is_merged_to_have_no_finding(kind, root, tmp_path):
    path = of_kind(kind, root)
    report = verify(path / "adapter", source=path / "base")
    words = {code: sorted(one.actual for one in report.findings if one.code == code) for code in ("CK135", "CK137")}
    assert words == {"CK135": OTHER_SCALES.get(kind, []), "CK137": NOT_TAKEN.get(kind, [])}
    assert {finding.code for finding in report.findings} <= {"CK135", "CK137"}
    assert (report.status, report.asked) == ("passed", ["adapter"])
    assert verify(path / "adapter").status == "passed"
    assert verify(path / "adapter", source=path / "adapter").findings == []
    if kind == "shared outer":
        with pytest.raises(UnsupportedError, match="PEFT 0.21"):
            convert(path / "base", tmp_path / "merged", merge=path / "adapter")
        base = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32)
        before = {name: one.clone() for name, one in base.state_dict().items()}
        merged = PeftModel.from_pretrained(base, str(path / "adapter")).merge_and_unload().state_dict()
        assert all(torch.equal(merged[name], one) for name, one in before.items())  # PEFT knows no such module
        return
    convert(path / "base", tmp_path / "merged", merge=path / "adapter")
    report = verify(tmp_path / "merged", source=path / "base", adapter=path / "adapter")
    assert (report.findings, report.status) == ([], "passed")
    assert "LORA" in str(inspect(path / "adapter")["format"])


def over_tied(path, **options):
    """What PEFT makes with these options of `base`, which ties its output layer, saved as `adapter`."""
    case.save("qwen3-tied", HF_CASES["qwen3-tied"], path / "base", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32)
    tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **options))
    randomized(tuned)
    tuned.save_pretrained(str(path / "adapter"))
    return tuned


HEAD, EMBEDDING = ["lm_head"], ["embed_tokens"]


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "modules_to_save": HEAD},
        {"target_modules": ["q_proj", "lm_head"]},
        pytest.param({"target_modules": ["q_proj"], "modules_to_save": EMBEDDING + HEAD}, marks=pytest.mark.nightly),
    ],
    ids=["output layer saved", "output layer adapted", "both saved"],
)
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`", "ignore:Model has `tie_word_embeddings")
def test_an_output_layer_that_the_base_ties_is_parted_from_its_embedding(options, tmp_path):
    """PEFT gives the module a copy of its own: the merged model has two matrices, and its config says so."""
    base, adapter, tuned = tmp_path / "base", tmp_path / "adapter", over_tied(tmp_path, **options)
    head = tuned.base_model.model.lm_head
    if "modules_to_save" in options:
        head.modules_to_save.default.weight.data += 0.05  # or it would be the embedding once more
        meant = head.modules_to_save.default.weight.detach().clone()
    else:
        meant = head.base_layer.weight.detach() + head.get_delta_weight("default").detach()
    tuned.save_pretrained(str(adapter))
    report = verify(adapter, source=base)
    assert (report.status, {finding.code for finding in report.findings}) == ("passed", {"CK137"})
    convert(base, tmp_path / "merged", merge=adapter)
    assert torch.equal(models.tensors(tmp_path / "merged")["lm_head.weight"], meant)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    assert verify(tmp_path / "merged", source=base, adapter=adapter).status == "passed"
    edit_config(tmp_path / "merged", tie_word_embeddings=True)
    again = verify(tmp_path / "merged", source=base, adapter=adapter)
    assert {"CK211", "CK702"} <= {finding.code for finding in again.findings if finding.severity == "error"}


SAVED = {"target_modules": ["q_proj"], "modules_to_save": EMBEDDING}
# PEFT's options, and whether the output layer was trained together with the embedding.
SHARED = {
    "a pair of both": ({"target_modules": EMBEDDING + HEAD}, True),
    "a whole embedding": (SAVED, True),
    "a whole embedding, tied": (SAVED | {"ensure_weight_tying": True}, True),
    "a whole embedding, a pair of the output layer": ({"target_modules": HEAD, "modules_to_save": EMBEDDING}, True),
    "a pair of the embedding": ({"target_modules": [*EMBEDDING, "q_proj"]}, False),
}


@pytest.mark.parametrize("what", daily(SHARED, ("a pair of both", "a pair of the embedding")))
def test_what_ties_embedding_and_output_layer_is_merged_as_peft_merges_it(what, tmp_path):
    """It answers as it was trained, unless the output layer was the base's meanwhile."""
    options, is_trained_so = SHARED[what]
    base, adapter, tuned = tmp_path / "base", tmp_path / "adapter", over_tied(tmp_path, **options)
    convert(base, tmp_path / "merged", merge=adapter)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert verify(tmp_path / "merged", source=base, adapter=adapter).status == "passed"
    if is_trained_so:
        tokens = torch.arange(5, 25)[None]
        own, other = tuned.eval()(tokens).logits, AutoModelForCausalLM.from_pretrained(base)(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, own, rtol=1e-3, atol=1e-3)
        assert float((own - other).abs().max()) > 0.02
    else:
        found, expected = merged.state_dict(), tuned.merge_and_unload().state_dict()
        assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_a_pair_that_embedding_and_output_layer_share_is_inconclusive(tmp_path):
    over_tied(tmp_path, target_modules=["embed_tokens"], ensure_weight_tying=True)
    report = verify(tmp_path / "adapter", source=tmp_path / "base")
    assert (report.findings, report.status) == ([], "inconclusive")
    assert any("ensure_weight_tying" in reason for reason in report.reasons)


def test_an_output_layer_that_repeats_the_adapters_embedding_stays_tied(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    case.save("qwen3-tied", HF_CASES["qwen3-tied"], base, torch.float32)
    rows = torch.randn_like(tensor(base, "model.embed_tokens.weight"))
    whole = {"model.embed_tokens": rows, "lm_head": rows.clone()}
    save(adapter, pairs(base, "q_proj") | whole, ["q_proj"], modules_to_save=EMBEDDING + HEAD)
    convert(base, tmp_path / "merged", merge=adapter)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is True
    assert verify(tmp_path / "merged", source=base, adapter=adapter).status == "passed"


def edited(path, target, change, **config):
    target.mkdir()
    tensors = load_file(path / "adapter" / WEIGHTS)
    change(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, target / WEIGHTS, metadata={"format": "pt"})
    stated = json.loads((path / "adapter" / CONFIG).read_text()) | config
    (target / CONFIG).write_text(json.dumps(stated))
    return target


def drop(*endings):
    def change(tensors):
        for name in [name for name in tensors if name.endswith(endings)]:
            del tensors[name]

    return change


def swap(tensors):
    for name in [name for name in tensors if "lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def nothing(tensors): ...


def rolled(tensors):
    for name in [name for name in tensors if "experts" in name]:
        axis, size = (0, 4) if "lora_A" in name else (1, 1)
        tensors[name] = tensors[name].roll(size, axis)


def other_base(tensors):
    (name,) = (name for name in tensors if "base_layer" in name)
    tensors[name] += 1


def bare(tensors):
    for name in [*tensors]:
        tensors[name.removeprefix("base_model.model.")] = tensors.pop(name)


# The kind, what is changed, keys of the config, and the checks that find it beside the base, and beside the trainer's.
FAULTS = {
    "A without B": ("dense", drop(f"{LAYER}.lora_B.weight"), {}, "CK131", "CK131"),
    "names without PEFT's prefix": ("dense", bare, {}, "CK133", "CK133 CK136"),
    "a layer is missing": ("dense", drop(f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight"), {}, "CK132", "CK136"),
    "A and B are exchanged": ("dense", swap, {}, "CK132", "CK136"),
    "alpha is doubled": ("dense", nothing, {"lora_alpha": 16}, "", "CK136"),
    "not a number": ("dense", lambda own: own[f"{LAYER}.lora_A.weight"].fill_(math.nan), {}, "CK133", "CK133 CK136"),
    "B was never gathered": ("dense", lambda own: own[f"{LAYER}.lora_B.weight"].zero_(), {}, "CK133", "CK133 CK136"),
    "experts in another order": ("fused experts", rolled, {}, "", "CK136"),
    "a base of another family": ("dense", nothing, {}, "CK132", ""),
    "a sibling of the base": ("dense", nothing, {"base_model_name_or_path": "Qwen/Qwen3-0.6B-Base"}, "CK134", ""),
    "other embeddings": ("embedding", other_base, {}, "CK134", "CK136"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, root, tmp_path):
    kind, change, config, beside_base, beside_other = FAULTS[fault]
    path = of_kind(kind, root)
    wrong = edited(path, tmp_path / "wrong", change, **config)
    base = of_kind("fused experts" if fault == "a base of another family" else kind, root) / "base"
    found = {finding.code for finding in verify(wrong, source=base).findings} - {"CK137"}
    assert found >= {*beside_base.split()}
    assert bool(found) is bool(beside_base)
    against = verify(wrong, source=path / "adapter").findings
    assert {finding.code for finding in against} == {*beside_other.split()}


def test_options_of_models_are_refused(root):
    path = of_kind("dense", root)
    with pytest.raises(UsageError, match="--source and --against-transformers"):
        verify(path / "adapter", against=frozenset({"sglang"}))
    with pytest.raises(UsageError, match="adapter"):
        verify(path / "merged", adapter=path / "adapter")


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
SIZES |= {"intermediate_size": 64, "num_key_value_heads": 2, "num_labels": 1}
PARTS = {"text_config": SIZES | {"head_dim": 8}, "vision_config": SIZES | {"image_size": 28, "patch_size": 14}}
CONFIGS = {"GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}, "Gemma3": PARTS}
PAIR = [f"1.mlp.c_proj.lora_{part}.weight" for part in "AB"]
Q_AND_V, OF_TEXT = ["q_proj", "v_proj"], {"target_modules": r".*language_model.*\.[qv]_proj"}
ALPHAS, SCORES = [{"alpha_pattern": {name: 8}} for name in ("q_proj", "^q_proj")], {"task_type": "SEQ_CLS"}
# Rows of lab/reports-chosen.md, and a base of another kind: the class that PEFT adapts, how, the tensors that are lost
# of what it saves, fields that are sound and that are not, and what is found.
CHOSEN = {
    "D1": ("Qwen2ForCausalLM", {"bias": "lora_only"}, [".bias"], {}, {}, "0..1}.self_attn.q_proj.base_layer.bias"),
    "D2": ("LlamaForCausalLM", {}, [], *ALPHAS, "alpha_pattern '^q_proj'"),
    "D5": ("Gemma3ForConditionalGeneration", OF_TEXT, [], {}, {"target_modules": Q_AND_V}, "vision_tower.encoder"),
    "A9": ("LlamaForSequenceClassification", SCORES, ["score.weight"], {}, {"modules_to_save": None}, "score.weight"),
    "GPT-2": ("GPT2LMHeadModel", {"target_modules": ["c_proj"]}, PAIR, {}, {}, "h.1.mlp.c_proj"),
}


@pytest.mark.parametrize(("kind", "options", "lost", "sound", "broken", "words"), CHOSEN.values(), ids=CHOSEN)
def test_what_peft_saves_is_sound_and_what_it_misses_is_found(kind, options, lost, sound, broken, words, tmp_path):
    name = kind.partition("For")[0].removesuffix("LMHeadModel")
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**CONFIGS.get(name, SIZES)))
    # A reward model is trained over a language model, whose config.json knows nothing of its labels.
    reward = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"num_labels": 2}))
    (reward if "task_type" in options else model).save_pretrained(tmp_path / "base")
    tuned = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": Q_AND_V} | options))
    randomized(tuned)
    tuned.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    tuned.save_pretrained(str(tmp_path / "adapter"))
    twin = edited(tmp_path, tmp_path / "twin", nothing, **sound)
    for source in (None, tmp_path / "base"):
        report = verify(twin, source=source)
        assert ([str(one) for one in report.findings if one.code == "CK132"], report.status) == ([], "passed")
    findings = verify(edited(tmp_path, tmp_path / "wrong", drop(*lost), **broken), source=tmp_path / "base").findings
    (finding,) = [one for one in findings if one.code == "CK132"]
    assert words in f"{finding.tensor} {finding.actual}"
    assert finding.severity == ("warning" if "alpha_pattern" in broken else "error")


def test_names_that_the_base_may_only_spell_otherwise_are_inconclusive(root, tmp_path, monkeypatch):
    def in_the_tower(tensors):
        tower = "base_model.model.model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"
        tensors |= {f"{tower}.lora_A.weight": torch.ones(4, 8), f"{tower}.lora_B.weight": torch.ones(8, 4)}

    path = of_kind("nested", root)
    targets = ["q_proj", "down_proj"]
    monkeypatch.setattr(
        "ckptkit.verify.checks.adapters.lora.find_spec", {"torch": 1, "transformers": 1}.get
    )  # PEFT knows them
    report = verify(edited(path, tmp_path / "adapter", in_the_tower, target_modules=targets), source=path / "base")
    assert ({one.code for one in report.findings}, report.status) == ({"CK137"}, "inconclusive")
    assert any("base model" in reason for reason in report.reasons)


@pytest.mark.parametrize(("experts", "severity"), [((7,), "warning"), (range(12), "error")], ids=["one", "all"])
def test_an_expert_that_was_not_trained_is_a_warning_and_a_layer_an_error(experts, severity, root, tmp_path):
    def untrained(tensors):
        for number in experts:
            tensors[f"base_model.model.model.layers.2.mlp.experts.{number}.up_proj.lora_B.weight"].zero_()

    report = verify(edited(of_kind("experts one by one", root), tmp_path / "adapter", untrained))
    assert [(one.code, one.severity, one.count) for one in report.findings] == [("CK133", severity, len(experts))]


STATED = {"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4, "lora_alpha": 8}
STATED |= {"use_rslora": True, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"q_proj": 9}}
OWN_SCALE = {
    "sglang": """
from types import SimpleNamespace
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig
found = LoRAAdapter("one", LoRAConfig.from_dict(stated), SimpleNamespace(num_hidden_layers=2), None, None).scaling
""",
    "vllm": """
from vllm.lora.peft_helper import PEFTHelper
found = PEFTHelper.from_dict(stated).vllm_lora_scaling_factor
""",
}


@pytest.mark.parametrize(
    ("engine", "scale"),
    [pytest.param("sglang", 2.0, marks=pytest.mark.sglang), pytest.param("vllm", 4.0, marks=pytest.mark.vllm)],
)
def test_engines_have_one_scale_for_all_pairs(engine, scale, tmp_path):
    """SGLang's is alpha / r, vLLM's that or alpha / sqrt(r), whatever the patterns say."""
    code = f"stated = {STATED!r}{OWN_SCALE[engine]}print('scale', found)"
    if engine == "sglang":
        printed = run_script("sglang", code)
    else:
        words = [os.environ["CKPTKIT_VLLM_PYTHON"], "-c", code]
        printed = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert printed.splitlines()[-1] == f"scale {scale}"
