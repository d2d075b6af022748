"""Each field of adapter_config.json: what it makes of a merge is PEFT's, bit for bit, or it is refused by name."""

import dataclasses
import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.adapters import randomized
from support.messages import refusal
from support.nightly import daily
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ckptkit.app.api import convert, inspect
from ckptkit.converters.adapter import Adapter
from ckptkit.converters.lora_settings import APPLIED, FIELDS, HARMLESS
from ckptkit.core.errors import UnsupportedError
from ckptkit.formats.hf.adapter import AdapterFiles
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.verify.run import verify

pytestmark = [
    pytest.mark.usefixtures("peft_here"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning"),
]

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q_AND_V = ["q_proj", "v_proj"]


def without_null(value):
    if isinstance(value, dict):
        return {key: without_null(one) for key, one in value.items()}
    return None if value == "null" else value


SETTINGS = {
    name: [without_null(row) for row in rows]
    for name, rows in tomllib.loads(Path(__file__).with_name("lora_settings.toml").read_text()).items()
}
# As Unsloth writes it for models with a tower.
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj|o_proj"
    r"|gate_proj|up_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|"
    r"dense)\.(?:(?:k_proj|v_proj|q_proj|o_proj|gate_proj|up_proj|down_proj)))"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(path / "base")
    return path


def model(root, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(root / "base", dtype=dtype)


def made(root, **options):
    """What PEFT saves of an adapter with these options; one folder for each."""
    path = root / "adapter {}".format("-".join(f"{key}={options[key]}" for key in sorted(options)))
    if not path.exists():
        tuned = get_peft_model(
            model(root), LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": Q_AND_V} | options)
        )
        randomized(tuned)
        tuned.save_pretrained(str(path))
    return path


def edited(path, target, change=dict, **config):
    shutil.copytree(path, target)
    save_file(change(load_file(path / WEIGHTS)), target / WEIGHTS)
    (target / CONFIG).write_text(json.dumps(json.loads((path / CONFIG).read_text()) | config))
    return target


def by_peft(root, adapter):
    """What PEFT merges, or None where it refuses the adapter."""
    try:
        return PeftModel.from_pretrained(model(root), str(adapter)).merge_and_unload().state_dict()
    except (ValueError, KeyError, AttributeError, RuntimeError, TypeError, NotImplementedError, ImportError):
        return None


def over(root, adapter):
    return Adapter(AdapterFiles(adapter), HfCheckpoint(root / "base"), "adapter")


def merged(root, adapter):
    return over(root, adapter).merged()


def by_hand(root, adapter):
    """The base with 2 B A added to each weight that has factors: what a reader of tensors alone merges."""
    weights = load_file(root / "base" / "model.safetensors")
    factors = load_file(adapter / WEIGHTS)
    for name, a in factors.items():
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{module}.weight"] += factors[name.replace("lora_A", "lora_B")] @ a * 2
    return weights


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def errors_in(report):
    return [one for one in report.findings if one.severity == "error"]


def without(*parts):
    return lambda tensors: {name: one for name, one in tensors.items() if not all(part in name for part in parts)}


def times(factor, *parts):
    return lambda tensors: {
        name: one * factor if all(part in name for part in parts) else one for name, one in tensors.items()
    }


def plus(name, *shape):
    return lambda tensors: tensors | {f"base_model.model.{name}": torch.ones(shape)}


def named(old, new, *parts):
    return lambda tensors: {
        name.replace(old, new) if all(part in name for part in parts) else name: one for name, one in tensors.items()
    }


def reshaped(part, *shape):
    return lambda tensors: {name: one.reshape(shape) if part in name else one for name, one in tensors.items()}


# The last has names of factors with the name of the adapter, as PEFT has them in memory.
CHANGED = {"small": times(1e-3, "lora_B"), "zeros": times(0, "layers.0"), "default": named("_A.", "_A.default.")}


@pytest.mark.parametrize(
    ("options", "change", "config"),
    [
        *((options, dict, {}) for options in SETTINGS["made"]),
        *(({}, dict, config) for config in SETTINGS["unchanged"]),
        *(({}, change, {}) for change in CHANGED.values()),
    ],
    ids=[*map(str, SETTINGS["made"] + SETTINGS["unchanged"]), *CHANGED],
)
def test_an_adapter_is_merged_as_peft_merges_it(options, change, config, root, tmp_path):
    adapter = edited(made(root, **options), tmp_path / "adapter", change, **config)
    view, expected = over(root, adapter).merged(), by_peft(root, adapter)
    assert same(view.read(list(view.specs)), expected)
    report = verify(adapter, source=root / "base")
    zeros = {"CK133"} if change is CHANGED["zeros"] else set()
    assert {one.code for one in errors_in(report)} == zeros
    assert (report.status == "failed") == bool(zeros)
    assert "changes" not in inspect(adapter)


@pytest.mark.parametrize("config", daily(SETTINGS["dropped"], SETTINGS["dropped"][::2]), ids=str)
def test_factors_that_peft_drops_are_named_with_the_field(config, root, tmp_path, monkeypatch):
    adapter = edited(made(root), tmp_path / "adapter", **config)
    expected = by_peft(root, adapter)
    assert expected is None or not same(expected, by_hand(root, adapter))
    refused = refusal("", merged, root, adapter)
    fields = [f"{field} {value!r}" for field, value in config.items()]
    assert all(field in refused.message for field in fields)
    assert ".self_attn." in refused.message
    for code in ("CK132", "CK131"):  # PEFT's word, and where it is not installed the rules that imitate it
        findings = errors_in(verify(adapter, source=root / "base"))
        assert {one.code for one in findings} == {code}
        assert any(all(field in one.actual for field in fields) and "lora_A" in str(one.tensor) for one in findings)
        monkeypatch.setattr("ckptkit.verify.checks.adapters.lora.find_spec", {"torch": 1, "transformers": 1}.get)
    refusal("PEFT ignores", verify, root / "base", source=root / "base", adapter=adapter)


@pytest.mark.parametrize("targets", [[*Q_AND_V, "o_proj"], UNSLOTH, "ALL-linear"], ids=str)
def test_a_target_without_a_pair_is_an_error(targets, root, tmp_path):
    adapter = edited(made(root), tmp_path / "adapter", target_modules=targets)
    tuned = PeftModel.from_pretrained(model(root), str(adapter))
    assert not any(one.any() for name, one in tuned.named_parameters() if "o_proj.lora_B" in name)
    assert "model.layers.2.self_attn.o_proj.weight" in over(root, adapter).unpaired
    refusal(r"self_attn\.o_proj", merged, root, adapter)
    refusal("pair", verify, root / "base", source=root / "base", adapter=adapter)
    (finding,) = errors_in(verify(adapter, source=root / "base"))
    assert (finding.code, "o_proj.lora_B" in str(sorted(finding.names))) == ("CK132", True)


@pytest.mark.parametrize("config", daily(SETTINGS["refused"], SETTINGS["refused"][::2]), ids=str)
def test_what_peft_does_otherwise_is_refused_by_the_field(config, root, tmp_path):
    adapter, (field,) = edited(made(root), tmp_path / "adapter", **config), config
    with pytest.raises(UnsupportedError, match=field):
        over(root, adapter).merged()
    # What PEFT loads as it does without the field, of a model of Linear layers that have no bias.
    only_loaded = field in ("bias", "fan_in_fan_out")
    for source in (None, root / "base"):
        report = verify(adapter, source=source)
        assert (errors_in(report), report.status) == ([], "passed" if only_loaded else "inconclusive")
        assert only_loaded or any(field in reason for reason in report.reasons)
    merged = verify(root / "base", source=root / "base", adapter=adapter)
    assert merged.status == "inconclusive"
    assert any(field in reason for reason in merged.reasons)


def test_every_field_of_peft_is_in_the_table():
    defaults = {one.name: getattr(LoraConfig(), one.name) for one in dataclasses.fields(LoraConfig)}
    assert defaults.keys() <= FIELDS.keys()
    refused = {field for field, why in FIELDS.items() if why not in (HARMLESS, APPLIED)}
    assert {field for field in refused if defaults[field] not in (None, False, "none")} == set()
    tested = {field for config in SETTINGS["refused"] for field in config}
    assert refused == tested - {"peft_type", "init_lora_weights", "of_another_release"}


@pytest.mark.parametrize("config", daily(SETTINGS["impossible"], SETTINGS["impossible"][::2]), ids=str)
def test_values_that_cannot_be_are_named_with_file_and_field(config, root, tmp_path):
    adapter = edited(made(root), tmp_path / "adapter", **config)
    refused = refusal("", merged, root, adapter)
    assert CONFIG in refused.message
    assert any(field in refused.message for field in config) or "rank" in refused.message
    (finding,) = verify(adapter, source=root / "base").findings
    assert (finding.code, finding.severity, CONFIG in finding.actual) == ("CK131", "error", True)


MODEL = "base_model.model.model."
EMBEDDING = {"target_modules": ["embed_tokens", "q_proj"]}
DORA = {"use_dora": True, "target_modules": ["q_proj"]}
HEAD = {"modules_to_save": ["lm_head"]}
Q0 = "model.layers.0.self_attn.q_proj"
# Of which adapter, what is changed, in tensors and fields, and data that the error names.
TENSORS = {
    "a level less": ({}, named(MODEL, "base_model.model."), {}, ""),
    "a level of a model with towers": ({}, named(MODEL, f"{MODEL}language_model."), {}, ""),
    "a wrapped layer": ({}, named("q_proj.lora", "q_proj.base_layer.lora"), {}, ""),
    "no .weight": ({}, named(".weight", ""), {}, ""),
    "no prefix": ({}, named("base_model.model.", ""), {}, "base_model.model."),
    "an embedding's with .weight": (EMBEDDING, named("embedding_A", "embedding_A.weight"), {}, ""),
    "magnitudes of two axes": (DORA, reshaped("magnitude", 1, -1), {}, ""),
    "a whole module under the wrapper's name": (
        HEAD,
        named("lm_head.weight", "lm_head.modules_to_save.default.weight"),
        {},
        "",
    ),
    "a whole norm a level less": (
        {"modules_to_save": ["norm"]},
        named(f"{MODEL}norm", "base_model.model.norm"),
        {},
        "",
    ),
    "DoRA without magnitudes": ({}, dict, {"use_dora": True}, "use_dora"),
    "DoRA without one": ({"use_dora": True}, without("magnitude", "layers.1"), {}, "use_dora"),
    "magnitudes without DoRA": ({"use_dora": True}, dict, {"use_dora": False}, "use_dora"),
    "A without B": ({}, without("layers.1.self_attn.v_proj.lora_B"), {}, "lora_B"),
    "B without A": ({}, without("layers.1.self_attn.v_proj.lora_A"), {}, "lora_A"),
    "a whole module that is not there": ({}, dict, HEAD, "lm_head"),
    "a whole weight next to its pair": ({}, plus(f"{Q0}.weight", 32, 32), {}, f"{Q0}.weight"),
    "another base below a pair": ({}, plus(f"{Q0}.base_layer.weight", 32, 32), {}, Q0),
    "another embedding": (EMBEDDING, times(2, "base_layer"), {}, "model.embed_tokens.weight"),
    "an embedding that is no Linear": (EMBEDDING, dict, {"target_modules": "all-linear"}, "all-linear"),
    "a bias of B": ({}, plus(f"{Q0}.lora_B.bias", 32), {}, "lora_B.bias"),
}


@pytest.mark.parametrize(("options", "change", "config", "words"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_peft_would_not_merge_so_are_refused(options, change, config, words, root, tmp_path):
    sound = made(root, **options)
    adapter = edited(sound, tmp_path / "adapter", change, **config)
    meant, found = by_peft(root, sound), by_peft(root, adapter)
    has_more = len(load_file(adapter / WEIGHTS)) > len(load_file(sound / WEIGHTS))  # of which PEFT loads the known ones
    assert found is None or has_more or not same(meant, found)
    over(root, sound).merged()
    refused = refusal("", merged, root, adapter)
    assert words in refused.message
    assert errors_in(verify(adapter, source=root / "base"))
    refusal("", verify, root / "base", source=root / "base", adapter=adapter)


@pytest.mark.parametrize("config", SETTINGS["not_wrapped"], ids=str)
def test_parameters_that_peft_does_not_wrap_are_an_error(config, root, tmp_path):
    adapter = edited(made(root, use_dora="use_dora" in config), tmp_path / "adapter", **config)
    assert by_peft(root, adapter) is None
    (finding,) = errors_in(verify(adapter, source=root / "base"))
    assert (finding.code, "PEFT 0.21.2 stops: " in finding.actual) == ("CK132", True)


@pytest.mark.parametrize("fault", ["DoRA without one", "magnitudes without DoRA"])
def test_magnitudes_that_contradict_the_field_are_found_without_a_base(fault, root, tmp_path, monkeypatch):
    options, change, config, words = TENSORS[fault]
    adapter = edited(made(root, **options), tmp_path / "adapter", change, **config)
    for code in ("CK132", "CK131"):  # PEFT has the base's config.json by base_model_name_or_path
        (finding,) = verify(adapter).findings
        assert (finding.code, finding.severity) == (code, "error")
        assert words in finding.expected or (code == "CK132" and "magnitude_vector" in str(finding.tensor))
        monkeypatch.setattr("ckptkit.verify.checks.adapters.lora.find_spec", {"torch": 1, "transformers": 1}.get)


# Adapters that change nothing: what is changed of which, and the code that says so, if any.
IDLE = {
    "no tensor": ({}, lambda tensors: {}, {}, "CK131"),
    "every B is zero": ({}, times(0, "lora_B"), {}, "CK133"),
    "every A is zero": ({}, times(0, "lora_A"), {}, "CK133"),
    "some A and the other B are zero": (
        {},
        lambda tensors: times(0, "q_proj", "lora_A")(times(0, "v_proj", "lora_B")(tensors)),
        {},
        "CK133",
    ),
    "alpha is 0": ({}, dict, {"lora_alpha": 0}, "CK133"),
    "too little for float32": ({}, times(1e-30), {}, ""),
    "whole tensors alone": ({"modules_to_save": ["lm_head"]}, without("lora_"), {}, "CK131"),
}


@pytest.mark.parametrize(("options", "change", "config", "code"), IDLE.values(), ids=IDLE)
def test_an_adapter_that_changes_nothing_is_an_error(options, change, config, code, root, tmp_path):
    adapter = edited(made(root, **options), tmp_path / "adapter", change, **config)
    refusal("changes nothing", merged, root, adapter)
    refusal("changes nothing", verify, root / "base", source=root / "base", adapter=adapter)
    for source in (None, root / "base") if code else ():
        assert {one.code for one in errors_in(verify(adapter, source=source))} == {code}
    if code == "CK133" or not load_file(adapter / WEIGHTS):
        assert str(inspect(adapter)["changes"]).startswith("nothing: ")


@pytest.mark.parametrize("options", [{"use_dora": True}, HEAD], ids=["dora", "whole"])
def test_an_adapter_as_it_is_before_the_first_step_is_an_error(options, root, tmp_path):
    tuned = get_peft_model(model(root), LoraConfig(r=4, target_modules=Q_AND_V, **options))
    tuned.save_pretrained(str(tmp_path / "adapter"))
    refusal("changes nothing", merged, root, tmp_path / "adapter")
    report = verify(tmp_path / "adapter", source=root / "base")
    assert report.status == "failed"
    assert "CK132" in {one.code for one in errors_in(report)}


@pytest.mark.parametrize(
    ("options", "stored"), [({}, torch.float32), ({"use_dora": True}, torch.bfloat16)], ids=["plain", "dora"]
)
def test_a_bfloat16_base_is_rounded_as_peft_rounds_it(options, stored, root, tmp_path):
    """With factors in float32, as `PeftModel.from_pretrained` has them however they are stored."""

    def cast(factors):
        return {name: factor.to(stored) for name, factor in factors.items()}

    adapter = edited(made(root, **options), tmp_path / "adapter", cast)
    model(root, torch.bfloat16).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    expected = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().state_dict()
    view = Adapter(AdapterFiles(adapter), HfCheckpoint(tmp_path / "base"), "adapter").merged()
    assert same(view.read(list(view.specs)), expected)


Q0_PAIR, K0 = f"2 x lora_B lora_A of {Q0}", "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("name", "factor", "options", "words"),
    [
        (f"{Q0}.weight", None, {}, [Q0_PAIR, "convert BASE DST --merge ADAPTER"]),
        (f"{Q0}.weight", 1.5, {}, [Q0_PAIR, "--adapter"]),
        (f"{Q0}.weight", None, {"use_dora": True}, [Q0_PAIR, "lora_magnitude_vector"]),
        (K0, 1.5, {}, ["adapter does not", "--source"]),
        ("lm_head.weight", None, HEAD, ["base_model.model.lm_head.weight"]),
    ],
    ids=["not added", "something else", "DoRA", "without a pair", "a whole tensor"],
)
def test_a_weight_of_a_merged_checkpoint_that_is_another_is_named(name, factor, options, words, root, tmp_path):
    adapter, file = made(root, **options), tmp_path / "merged" / "model.safetensors"
    convert(root / "base", tmp_path / "merged", merge=adapter)
    tensors = load_file(file)
    own = load_file(root / "base" / "model.safetensors")[name] if factor is None else tensors[name] * factor
    save_file(tensors | {name: own}, file, metadata={"format": "pt"})
    (finding,) = errors_in(verify(tmp_path / "merged", source=root / "base", adapter=adapter))
    assert (finding.code, str(finding.tensor)) == ("CK202", name)
    said = f"{finding.expected}: {finding.actual} {finding.hint}"
    assert [one for one in words if one not in said] == []
    assert ("not merged" in said) == (factor is None)
