"""CK541: names and shapes as transformers' own class has them, for models of any type, saved by transformers itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from support.other_models import class_for, save_small, small_config

from ckptkit.app.cli import cli
from ckptkit.converters.registry import FAMILIES
from ckptkit.core.specs import TensorSpec
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.process.exit_report import PhaseLog
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

_UNBUILT = (AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError)


def _stored(path: Path) -> dict[str, TensorSpec]:
    files = path.glob("*.safetensors")
    return {name: TensorSpec.of(name, tensor) for file in files for name, tensor in load_file(file).items()}


def _loaded(path: Path, tensors: Mapping[str, TensorSpec], scratch: Path) -> NamesReport:
    scratch.mkdir()
    return load_names(
        NamesJob(json.loads((path / "config.json").read_text()), list(tensors.values()), str(scratch / "report.json"))
    )


def _is_clean(report: NamesReport) -> bool:
    return bool(report.model_class) and not any((report.missing, report.unexpected, report.other_shapes, report.errors))


@pytest.mark.parametrize("model_type", TYPES)
def test_sound_ones_pass_and_a_dropped_an_added_and_a_transposed_tensor_are_named(
    model_type: str, tmp_path: Path
) -> None:
    assert model_type not in FAMILIES
    path = save_small(model_type, tmp_path / "model")
    tensors = _stored(path)
    assert _is_clean(_loaded(path, tensors, tmp_path / "sound"))
    in_layers = [name for name, one in tensors.items() if ".0." in name and len({*one.shape}) == len(one.shape) == 2]
    name = in_layers[-1]
    module, _, leaf = name.rpartition(".")
    without = _loaded(path, {one: tensor for one, tensor in tensors.items() if one != name}, tmp_path / "dropped")
    lacking = [*without.missing, *without.errors]
    assert len(lacking) == 1, without
    assert lacking[0].endswith(leaf) or "experts" in name, (name, lacking)
    more = _loaded(path, tensors | {"extra": replace(tensors[name], name=f"{module}.extra")}, tmp_path / "added")
    assert [one.rpartition(".")[2] for one in more.unexpected] == ["extra"], more
    turned = replace(tensors[name], shape=tensors[name].shape[::-1])
    other = _loaded(path, tensors | {name: turned}, tmp_path / "transposed")
    assert [one.stored for one in other.other_shapes] == [list(turned.shape)] or other.errors, other


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_no_class_that_can_be_built_small_gives_a_false_alarm(tmp_path: Path) -> None:
    built, alarms = [], {}
    asked = [one for one in transformers.CONFIG_MAPPING if one not in FAMILIES and class_for(one) is not None]
    for model_type in asked:
        try:
            path = save_small(model_type, tmp_path / model_type)
        except (*_UNBUILT, StrictDataclassError):
            continue  # sizes that do not go together, or another library; counted below
        built.append(model_type)
        report = _loaded(path, _stored(path), tmp_path / f"{model_type} report")
        if not _is_clean(report):
            alarms[model_type] = report
        for file in path.iterdir():
            file.unlink()
    print(f"{len(built)} of {len(asked)} types built, {len(alarms)} false alarms")
    assert alarms == {}
    assert len(built) >= 200


@pytest.fixture(scope="module")
def cohere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small("cohere2", tmp_path_factory.mktemp("cohere") / "model")


def test_verify_asks_transformers_about_a_type_of_no_family(cohere: Path) -> None:
    report = verify(cohere)
    assert report.status == "passed", report
    assert "transformers" in report.asked
    assert "CK541" in {one.code for one in report.checks if one.status == "passed"}


def test_verify_names_what_is_missing_unexpected_and_misshapen(cohere: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((cohere / "config.json").read_bytes())
    weights = load_file(cohere / "model.safetensors")
    gone, moved = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"
    del weights[gone]
    weights[moved] = weights[moved].T.contiguous()
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    report = verify(broken)
    assert report.status == "failed"
    found = {one.tensor: one.code for one in report.findings if one.severity == "error"}
    assert found[gone] == found[moved] == found["model.layers.0.self_attn.q_norm.weight"] == "CK541"


def test_a_classifier_of_a_known_type_is_transformers_too(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=16, vocab_size=128, num_labels=1)
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    assert verify(tmp_path / "reward").status == "passed"
    _edit(tmp_path / "reward", lambda weights: weights.pop("score.weight"))
    report = verify(tmp_path / "reward")
    assert [(one.code, one.tensor) for one in report.findings if one.severity == "error"] == [("CK541", "score.weight")]


def _randomized(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.02 + (parameter.dim() == 1)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = torch.rand(buffer.shape) + 0.5
    return model


def _edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes the tensors of a directory with one file."""
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def _small(model_class: str, model_type: str, path: Path) -> Path:
    config = small_config(transformers.CONFIG_MAPPING[model_type])
    _randomized(getattr(transformers, model_class)(config)).save_pretrained(path)
    return path


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("saved", "model_type", "named"),
    [("RTDetrForObjectDetection", "rt_detr", "RTDetrModel"), ("SEWDModel", "sew-d", "SEWDForCTC")],
)
def test_architectures_of_another_class_of_the_same_config_are_one_finding(
    saved: str, model_type: str, named: str, tmp_path: Path
) -> None:
    path = _small(saved, model_type, tmp_path / "model")
    assert verify(path).status == "passed"
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [named]}))
    errors = [one for one in verify(path).findings if one.severity == "error"]
    assert [(one.code, one.file) for one in errors] == [("CK541", str(config))]
    assert saved in errors[0].expected


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_whole_numbers_where_the_class_has_floats_are_named(tmp_path: Path) -> None:
    """The class has whole numbers too: the batches that its norms have seen."""
    path = _small("RTDetrForObjectDetection", "rt_detr", tmp_path / "model")
    name = next(one for one in _stored(path) if one.endswith("running_mean"))
    _edit(path, lambda weights: weights.update({name: torch.arange(weights[name].numel())}))
    assert ("CK541", name) in {(one.code, one.tensor) for one in verify(path).findings}


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_weight_that_is_not_stored_takes_one_of_several_values(same: bool, tmp_path: Path) -> None:
    path = _small("T5ForConditionalGeneration", "t5", tmp_path / "model")
    assert verify(path).status == "passed"
    weights = load_file(path / "model.safetensors")
    shared = weights.pop("shared.weight")
    weights |= {"decoder.embed_tokens.weight": shared, "lm_head.weight": shared.clone() if same else shared * 100}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    found = {one.tensor for one in verify(path).findings if one.code == "CK541"}
    assert found == (set() if same else {"shared.weight", "encoder.embed_tokens.weight"})


def test_an_own_head_of_tied_embeddings_is_no_fault_of_names(tmp_path: Path) -> None:
    path = _small("T5ForConditionalGeneration", "t5", tmp_path / "model")
    _edit(path, lambda weights: weights.update({"lm_head.weight": weights["shared.weight"] * 2}))
    assert "CK541" in {one.code for one in verify(path).checks if one.status == "passed"}


def test_a_tower_that_is_not_stored_is_one_finding(tmp_path: Path) -> None:
    path = save_small("qwen2_vl", tmp_path / "model")
    tower = [name for name in _stored(path) if name.startswith("visual.")]
    _edit(path, lambda weights: [weights.pop(name) for name in tower])
    found = [one for one in verify(path).findings if one.code == "CK541"]
    assert [one.count for one in found] == [len(tower)]


def test_a_type_that_transformers_does_not_have_either_is_inconclusive_once(cohere: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes((cohere / "model.safetensors").read_bytes())
    config = json.loads((cohere / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps(config | {"model_type": "cohere9", "architectures": ["Cohere9ForCausalLM"]})
    )
    report = verify(other)
    assert report.status == "inconclusive"
    assert len(report.reasons) == 1, report.reasons
    assert "CK541" in report.reasons[0]


def test_families_of_ours_are_asked_on_request(releases: Callable[[str], Path]) -> None:
    done = CliRunner().invoke(cli, ["verify", str(releases("qwen3_moe")), "--against-transformers", "--json"])
    checks = {one["code"]: one["status"] for one in json.loads(done.stdout)["checks"]}
    assert checks["CK541"] == "passed", done.output


def test_an_engine_that_was_asked_for_is_inconclusive_for_a_type_of_no_family(cohere: Path) -> None:
    report = verify(cohere, against=frozenset({"sglang"}))
    assert report.status == "inconclusive"
    assert any("CK501" in reason for reason in report.reasons)


@pytest.mark.parametrize("name", ["pipeline", "AutoTokenizer", "logging", "PretrainedConfig", "NoSuchForCausalLM"])
def test_what_is_no_model_class_is_not_asked(name: str, cohere: Path, tmp_path: Path) -> None:
    config = json.loads((cohere / "config.json").read_text()) | {"architectures": [name]}
    assert load_names(NamesJob(config, [], str(tmp_path / "report.json"))) == NamesReport()


def test_a_config_that_transformers_refuses_is_a_finding_and_a_fault_of_ours_is_not(
    cohere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((cohere / "config.json").read_text())

    def asked(more: Mapping[str, object], folder: str) -> NamesReport:
        (tmp_path / folder).mkdir()
        job = NamesJob({**config, **more}, [], str(tmp_path / folder / "report.json"))
        return run(job, PhaseLog(tmp_path / folder / "report.json"))

    assert "hidden_size" in asked({"hidden_size": "wide"}, "refused").refused
    monkeypatch.setattr(transformers.Cohere2ForCausalLM, "from_pretrained", _without_values)
    with pytest.raises(RuntimeError, match="meta tensors"):
        asked({}, "ours")


def _without_values(*_: object, **__: object) -> None:
    torch.empty(1, device="meta").item()
