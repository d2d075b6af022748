"""CK541: names and shapes as transformers' own class has them, for models of any type, saved by transformers itself."""

import json
import shutil
from dataclasses import replace
from tempfile import mkdtemp

import pytest
import torch
import transformers
from click.testing import CliRunner
from huggingface_hub.errors import StrictDataclassError
from mutations.edits import edit_config
from safetensors.torch import load_file, save_file
from support import models
from support.nightly import daily
from support.other_models import class_for, save_small, small_config

from ckptkit.app.cli import cli
from ckptkit.converters.registry import FAMILIES
from ckptkit.core.specs import TensorSpec
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.process.exit_report import ExitReport
from ckptkit.verify.witnesses.reference.job import NamesJob, NamesReport
from ckptkit.verify.witnesses.reference.names import load_names, run

# Outside our families: language models dense and with experts, encoders, classifiers, vision, audio.
TYPES = (
    *("afmoe", "apertus", "arcee", "aria", "aya_vision", "bart", "bert", "biogpt", "bitnet", "bloom", "codegen"),
    *("cohere", "cohere2", "diffllama", "doge", "electra", "ernie4_5", "exaone4", "falcon"),
    *("flex_olmo", "fuyu", "gemma", "gemma2", "glm", "gpt2", "gpt_neox", "gptj", "granite"),
    *("granitemoe", "helium", "idefics2", "idefics3", "internvl", "jetmoe", "kosmos-2", "lfm2", "llava"),
    *("llava_onevision", "marian", "minimax", "mllama", "modernbert", "mt5", "nanochat", "olmo", "olmo2", "opt"),
    *("paligemma", "persimmon", "phi", "phimoe", "qwen2_audio", "qwen2_vl", "smollm3", "stablelm", "starcoder2", "t5"),
    *("video_llava", "whisper", "xglm", "xlm-roberta"),
)


DAILY = ("bart", "granitemoe", "idefics3", "whisper")


def _stored(path):
    files = path.glob("*.safetensors")
    return {name: TensorSpec.of(name, tensor) for file in files for name, tensor in load_file(file).items()}


def _load(path, tensors, **changes):
    """What transformers makes of these tensors under the config of a model, with changes."""
    config = json.loads((path / "config.json").read_text()) | changes
    return load_names(NamesJob(config, list(tensors), f"{mkdtemp(dir=path.parent)}/report.json"))


def _is_clean(report):
    return bool(report.model_class) and not any((report.missing, report.unexpected, report.other_shapes, report.errors))


@pytest.mark.parametrize("model_type", daily(TYPES, DAILY))
def test_sound_ones_pass_and_a_dropped_an_added_and_a_transposed_tensor_are_named(model_type, tmp_path):
    assert model_type not in FAMILIES
    path = save_small(model_type, tmp_path / "model")
    tensors = _stored(path)
    assert _is_clean(_load(path, tensors.values()))
    in_layers = [name for name, one in tensors.items() if ".0." in name and len({*one.shape}) == len(one.shape) == 2]
    changed = tensors.pop(in_layers[-1])
    module, _, leaf = changed.name.rpartition(".")
    without = _load(path, tensors.values())
    (lacking,) = [*without.missing, *without.errors]
    assert lacking.endswith(leaf) or "experts" in changed.name, (changed.name, lacking)
    more = _load(path, [*tensors.values(), changed, replace(changed, name=f"{module}.extra")])
    assert [one.rpartition(".")[2] for one in more.unexpected] == ["extra"], more
    turned = replace(changed, shape=changed.shape[::-1])
    other = _load(path, [*tensors.values(), turned])
    assert [one.stored for one in other.other_shapes] == [list(turned.shape)] or other.errors, other


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_no_class_that_can_be_built_small_gives_a_false_alarm(tmp_path):
    built, alarms = 0, {}
    asked = [one for one in transformers.CONFIG_MAPPING if one not in FAMILIES and class_for(one) is not None]
    unbuilt = (AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError)
    for model_type in asked:
        try:
            path = save_small(model_type, tmp_path / model_type)
        except (*unbuilt, StrictDataclassError):
            continue  # sizes that do not go together, or another library; counted below
        built += 1
        report = _load(path, _stored(path).values())
        if not _is_clean(report):
            alarms[model_type] = report
        shutil.rmtree(path)
    print(f"{built} of {len(asked)} types built, {len(alarms)} false alarms")
    assert alarms == {}
    assert built >= 200


@pytest.fixture(scope="module")
def cohere(tmp_path_factory):
    return save_small("cohere2", tmp_path_factory.mktemp("cohere") / "model")


def test_verify_names_what_is_missing_unexpected_and_misshapen(cohere, copy_of):
    report = verify(cohere)
    assert (report.status, "transformers" in report.asked) == ("passed", True)
    assert "CK541" in {one.code for one in report.checks if one.status == "passed"}
    names = ("layers.1.self_attn.k_proj", "layers.0.mlp.up_proj", "layers.0.self_attn.q_norm")
    gone, moved, new = (f"model.{name}.weight" for name in names)
    path = copy_of(cohere)
    models.edit(path, gone, None)
    _edit(path, lambda weights: weights.update({moved: weights[moved].T.contiguous(), new: torch.ones(16)}))
    report = verify(path)
    assert report.status == "failed"
    found = {one.tensor: one.code for one in report.findings if one.severity == "error"}
    assert [found.get(name) for name in (gone, moved, new)] == ["CK541"] * 3


def test_a_classifier_of_a_known_type_is_transformers_too(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=16, vocab_size=128, num_labels=1)
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    assert verify(tmp_path / "reward").status == "passed"
    _edit(tmp_path / "reward", lambda weights: weights.pop("score.weight"))
    report = verify(tmp_path / "reward")
    assert [(one.code, one.tensor) for one in report.findings if one.severity == "error"] == [("CK541", "score.weight")]


def _edit(path, change):
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def _small(model_class, model_type, path):
    model = getattr(transformers, model_class)(small_config(transformers.CONFIG_MAPPING[model_type]))
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.02 + (parameter.dim() == 1)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = torch.rand(buffer.shape) + 0.5
    model.save_pretrained(path)
    return path


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("saved", "model_type", "named"),
    [
        ("RTDetrForObjectDetection", "rt_detr", "RTDetrModel"),
        pytest.param("SEWDModel", "sew-d", "SEWDForCTC", marks=pytest.mark.nightly),
    ],
)
def test_architectures_of_another_class_of_the_same_config_are_one_finding(saved, model_type, named, tmp_path):
    path = _small(saved, model_type, tmp_path / "model")
    assert verify(path).status == "passed"
    edit_config(path, architectures=[named])
    (error,) = [one for one in verify(path).findings if one.severity == "error"]
    assert (error.code, error.file) == ("CK541", str(path / "config.json"))
    assert saved in error.expected


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_whole_numbers_where_the_class_has_floats_are_named(tmp_path):
    """The class has whole numbers too: the batches that its norms have seen."""
    path = _small("RTDetrForObjectDetection", "rt_detr", tmp_path / "model")
    name = next(one for one in _stored(path) if one.endswith("running_mean"))
    _edit(path, lambda weights: weights.update({name: torch.arange(weights[name].numel())}))
    assert ("CK541", name) in {(one.code, one.tensor) for one in verify(path).findings}


def test_a_tied_weight_that_is_not_stored_takes_one_of_several_values(tmp_path):
    path = _small("T5ForConditionalGeneration", "t5", tmp_path / "model")

    def found():
        report = verify(path)
        assert "CK541" in {one.code for one in report.checks}
        return {one.tensor for one in report.findings if one.code == "CK541"}

    assert found() == set()
    shared = load_file(path / "model.safetensors")["shared.weight"]
    _edit(path, lambda weights: weights.update({"lm_head.weight": shared * 2}))
    assert found() == set()  # an own head of tied embeddings is no fault of names
    _edit(path, lambda weights: weights.update({"decoder.embed_tokens.weight": weights.pop("shared.weight")}))
    assert found() == {"shared.weight", "encoder.embed_tokens.weight"}
    _edit(path, lambda weights: weights.update({"lm_head.weight": shared.clone()}))
    assert found() == set()


def test_a_tower_that_is_not_stored_is_one_finding(tmp_path):
    path = save_small("qwen2_vl", tmp_path / "model")
    tower = [name for name in _stored(path) if name.startswith("visual.")]
    _edit(path, lambda weights: [weights.pop(name) for name in tower])
    found = [one for one in verify(path).findings if one.code == "CK541"]
    assert [one.count for one in found] == [len(tower)]


def test_families_of_ours_are_asked_on_request(releases):
    done = CliRunner().invoke(cli, ["verify", str(releases("qwen3_moe")), "--against-transformers", "--json"])
    checks = {one["code"]: one["status"] for one in json.loads(done.stdout)["checks"]}
    assert checks["CK541"] == "passed", done.output


def test_an_engine_that_was_asked_for_is_inconclusive_for_a_type_of_no_family(cohere):
    report = verify(cohere, against=frozenset({"sglang"}))
    assert report.status == "inconclusive"
    assert any("CK501" in reason for reason in report.reasons)


@pytest.mark.parametrize("name", ["pipeline", "AutoTokenizer", "NoSuchForCausalLM"])
def test_what_is_no_model_class_is_not_asked(name, cohere):
    assert _load(cohere, [], architectures=[name]) == NamesReport()


def test_a_config_that_transformers_refuses_is_a_finding_and_a_fault_of_ours_is_not(cohere, tmp_path, monkeypatch):
    config, report = json.loads((cohere / "config.json").read_text()), tmp_path / "report.json"
    refused = run(NamesJob(config | {"hidden_size": "wide"}, [], str(report)), ExitReport(report)).refused
    assert "hidden_size" in refused
    monkeypatch.setattr(transformers.Cohere2ForCausalLM, "from_pretrained", _without_values)
    with pytest.raises(RuntimeError, match="meta tensors"):
        run(NamesJob(config, [], str(report)), ExitReport(report))


def _without_values(*_, **__):
    torch.empty(1, device="meta").item()
