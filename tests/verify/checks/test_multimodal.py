"""CK104 and CK730: a multimodal config without its vision tower, and one class's config over another's names."""

import json
import shutil

import pytest
import torch
from families import CASES, case
from safetensors.torch import save_file
from support import models
from support.messages import text_with
from support.nightly import daily
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DeepseekV3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ckptkit
from ckptkit.app.api import convert
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.ignore import tiles
from ckptkit.quant.ignore.tiles import fused_in_transformers
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

# Test models with a vision tower, and how the names of what is beside their language model begin.
TOWERS = {
    "qwen2_5_vl": ["visual.*"],
    "qwen3_vl-tied": ["model.visual.*"],
    "qwen3_vl_moe": ["model.visual.*"],
    "qwen3_5": ["model.visual.*"],
    "gemma3": ["vision_tower.*", "multi_modal_projector.*"],
    "kimi_k25": ["vision_tower.*", "mm_projector.*"],
}


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    root = tmp_path_factory.mktemp("multimodal")

    def made(name):
        if not (root / name).exists():
            case.save(name, CASES[name], root / name, torch.bfloat16)
        return root / name

    return made


def config_of(path):
    return dict(json.loads((path / "config.json").read_text()))


def stored(source, path, tensors, config=None):
    """The release with other tensors, in one file, and perhaps another config."""
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def without(source, path, *begins):
    tensors = models.tensors(source)
    return stored(source, path, {key: value for key, value in tensors.items() if not key.startswith(begins)})


@pytest.mark.parametrize("name", daily(TOWERS, ("qwen2_5_vl", "qwen3_vl-tied", "gemma3", "kimi_k25")))
def test_a_lost_vision_tower_is_found_in_headers(name, release, tmp_path, codes, passes):
    """SGLang builds it all the same and leaves it unwritten: tests/verify/witnesses/test_sglang_configs.py."""
    passes("CK730", release(name))
    path = without(release(name), tmp_path / "model", *(tower.removesuffix("*") for tower in TOWERS[name]))
    report = verify(path)
    assert codes(report) == ["CK730"]
    assert "CK730" in codes(preflight(hf_checkpoint=path))
    assert [finding.tensor for finding in report.findings] == TOWERS[name]
    assert {finding.severity for finding in report.findings} == {"error"}


@pytest.mark.parametrize(
    ("name", "lost"),
    [("qwen3_vl-tied", "model.visual.blocks.1."), ("gemma3", "vision_tower.encoder.layers.1.")],
)
def test_a_lost_block_of_a_tower_is_named(name, lost, release, tmp_path, alone):
    tensors = models.tensors(release(name)).items()
    matrices = {key for key, value in tensors if key.startswith(lost) and key.endswith("weight") and value.ndim == 2}
    _, found = alone("CK730", without(release(name), tmp_path / "model", lost))
    assert {str(finding.tensor) for finding in found} == matrices


def test_a_class_of_the_language_model_alone_needs_no_tower(release, alone):
    for name in ("gemma3_text", "qwen3_5_text-tied", "qwen3-tied"):
        assert alone("CK730", release(name)) == (None, [])


def test_convert_refuses_to_write_a_class_without_its_tower(release, tmp_path):
    """As after training on text: the Megatron checkpoint has no tower, and --hf names a directory with a config."""
    source = release("qwen3_vl-tied")
    convert(source, tmp_path / "megatron")
    shutil.rmtree(tmp_path / "megatron" / "carried")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(source / "config.json", bare)
    with pytest.raises(CkptkitError, match=r"model\.visual\.\*.*Qwen3VLForConditionalGeneration") as error:
        convert(tmp_path / "megatron", tmp_path / "hf", hf=bare)
    assert "--hf" in error.value.hint
    assert not (tmp_path / "hf").exists()
    tower = {key: value for key, value in models.tensors(source).items() if key.startswith("model.visual.")}
    save_file(tower, bare / "model.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "megatron", tmp_path / "hf", hf=bare)
    assert models.unequal(tmp_path / "hf", source) == []


def test_convert_says_that_its_source_has_no_tower(release, tmp_path):
    path = without(release("qwen3_vl-tied"), tmp_path / "model", "model.visual.")
    (note,) = convert(path, tmp_path / "megatron").notes
    assert note == text_with("model.visual.*")


def text_of(source, **changes):
    config = config_of(source)
    return dict(config["text_config"]) | {"tie_word_embeddings": config.get("tie_word_embeddings", True)} | changes


GEMMA3 = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}


# A release, changes that make its config that of the language model alone, how names begin by the config's class, and
# how they do.
RENAMED = (
    ("gemma3", GEMMA3, "model.", "language_model.model."),
    ("qwen3_vl-tied", None, "model.language_model.", "model."),
    ("gemma3", None, "language_model.model.", "model."),
    ("gemma3", None, "language_model.model.", "model.language_model."),
    ("kimi_k25", None, "language_model.model.", "model."),
    ("qwen2_5_vl", None, "model.", "model.language_model."),
)


@pytest.mark.parametrize("which", daily(RENAMED, [RENAMED[0], RENAMED[1], RENAMED[5]]), ids=str)
def test_names_of_another_class_are_one_finding(which, release, tmp_path, only):
    name, changes, root, other = which
    source, config = release(name), config_of(release(name))
    tensors = models.tensors(source)
    if changes is None:
        tensors = {
            f"{other}{key.removeprefix(root)}" if key.startswith(root) else key: value for key, value in tensors.items()
        }
    else:
        tensors, config = (
            {key: one for key, one in tensors.items() if key.startswith(other)},
            text_of(source, **changes),
        )
    finding = only(verify(stored(source, tmp_path / "model", tensors, config)))
    assert (finding.code, finding.severity) == ("CK104", "error")
    assert finding.expected == text_with(f"{root}* {config['architectures'][0]} config.json")
    assert f"{other}*" in finding.actual
    assert f"{root}*" in finding.hint


def test_the_names_that_transformers_has_inside_are_loaded_by_it_alone(release, tmp_path):
    """As the hint says; SGLang refuses them with a KeyError (test_sglang_configs.py)."""
    tensors = {
        key.replace("language_model.model.", "model.language_model.")
        .replace("vision_tower.", "model.vision_tower.")
        .replace("multi_modal_projector.", "model.multi_modal_projector."): value
        for key, value in models.tensors(release("gemma3")).items()
    }
    path = stored(release("gemma3"), tmp_path / "model", tensors)
    _, info = AutoModelForImageTextToText.from_pretrained(path, output_loading_info=True)
    assert (set(info["missing_keys"]), set(info["unexpected_keys"])) == (set(), set())
    (finding,) = verify(path).findings
    assert "save_original_format=True" in finding.hint


def test_a_renamed_language_model_of_qwen3_5_is_a_warning(release, tmp_path, only):
    """transformers loads these whole, and AutoModelForCausalLM saves them so; SGLang's class has other names."""
    source = release("qwen3_5")
    tensors = {
        key: value
        for key, value in models.tensors(source).items()
        if key.startswith(("model.language_model.", "lm_head."))
    }
    config = text_of(source, model_type="qwen3_5_text", architectures=["Qwen3_5ForCausalLM"], mtp_num_hidden_layers=0)
    path = stored(source, tmp_path / "model", tensors, config)
    _, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert (set(info["missing_keys"]), set(info["unexpected_keys"])) == (set(), set())
    finding = only(verify(path))
    assert (finding.code, finding.severity) == ("CK104", "warning")
    assert finding.expected == text_with("model.* Qwen3_5ForCausalLM")
    renamed = {key.replace("model.language_model.", "model."): value for key, value in tensors.items()}
    assert verify(stored(source, tmp_path / "sound", renamed, config)).findings == []


def test_what_is_wrong_beside_the_spelling_is_still_said(release, tmp_path):
    source = release("qwen3_vl-tied")
    tensors = {
        key.replace("model.language_model.", "model."): value
        for key, value in models.tensors(source).items()
        if "layers.3.mlp.up_proj" not in key
    }
    report = verify(stored(source, tmp_path / "model", tensors))
    assert {finding.tensor for finding in report.findings} == {None, "model.language_model.layers.3.mlp.up_proj.weight"}


# CK302 with `--reader transformers`: packed experts, which transformers 5 holds fused and initializes anew.


@pytest.fixture(scope="module")
def int4(releases, tmp_path_factory):
    path = tmp_path_factory.mktemp("fused") / "int4"
    ckptkit.quantize(releases("qwen3_moe"), path, int4_scheme(group_size=32))
    return path


def test_packed_experts_are_an_error_for_transformers_alone(int4):
    report = ckptkit.verify(int4, readers=["transformers"])
    assert report.status == "failed"
    assert {(finding.code, finding.severity) for finding in report.findings} == {("CK302", "error")}
    assert all(".experts." in str(finding.tensor) for finding in report.findings)
    assert "Qwen3MoeExperts" in report.findings[0].actual
    assert ckptkit.verify(int4).status == "passed"
    assert ckptkit.verify(int4, readers=["sglang", "vllm", "slime", "miles"]).findings == []


def test_dense_model_and_plain_experts_have_no_finding_for_transformers(releases, tmp_path):
    for name, ignore in (("qwen2-untied", ()), ("qwen3_moe", (r"re:.*\.experts\..*",))):
        scheme = int4_scheme(group_size=32, ignore=ignore)
        ckptkit.quantize(releases(name), tmp_path / name, scheme, readers=["transformers"])
        assert ckptkit.verify(tmp_path / name, readers=["transformers"]).findings == []


def test_quantize_for_transformers_refuses_experts(releases, tmp_path):
    scheme = int4_scheme(group_size=32)
    with pytest.raises(CkptkitError, match="--reader") as caught:
        ckptkit.quantize(releases("qwen3_moe"), tmp_path / "int4", scheme, readers=["transformers", "vllm"])
    assert "--ignore" in str(caught.value.hint)
    assert not (tmp_path / "int4").exists()


def test_model_that_transformers_has_no_class_for_is_not_judged(monkeypatch):
    assert fused_in_transformers({"model_type": "kimi_k2"}) is None
    # As `import sglang` registers it, in the process where it happens.
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "kimi_k2", DeepseekV3Config)
    assert "kimi_k2" in CONFIG_MAPPING
    assert fused_in_transformers({"model_type": "kimi_k2"}) is None


def test_experts_that_a_target_names_are_left_to_a_later_transformers(monkeypatch):
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 64, "num_experts": 4}
    named = config | {"quantization_config": {"config_groups": {"group_0": {"targets": [r"re:.*experts.*"]}}}}
    assert fused_in_transformers(named) is not None
    monkeypatch.setattr(tiles, "find_spec", lambda name: object())
    assert fused_in_transformers(named) is None
    assert fused_in_transformers(config) is not None
