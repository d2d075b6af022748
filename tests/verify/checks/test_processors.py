"""Settings of processors next to the weights, compared as the real classes of transformers read them."""

import json
import shutil
from pathlib import Path

import pytest
import transformers
from support.libraries import ask_here
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from ckptkit.verify.evidence.side.processors import processor_differences
from ckptkit.verify.evidence.side_files import SideFiles

QWEN2 = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 3136, "longest_edge": 12845056},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48, 0.45, 0.40],
    "image_std": [0.26, 0.26, 0.27],
}
PRE, VIDEO, PROCESSOR = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"
OF_4 = {PRE: QWEN2}
OF_5 = {PROCESSOR: {"image_processor": {**QWEN2, "processor_class": None}, "processor_class": "Qwen2VLProcessor"}}
# preprocessor_config.json as releases have it, and the class that joins the parts.
RELEASES = json.loads(Path(__file__).with_name("processors.json").read_text())


@pytest.fixture
def compare(tmp_path, monkeypatch):
    ask_here(monkeypatch, tmp_path)

    def differences(copy, source, model="qwen2_vl"):
        sides = []
        for name, files in (("copy", copy), ("source", source)):
            (tmp_path / name).mkdir(exist_ok=True)
            for file, content in {"config.json": {"model_type": model}, **files}.items():
                (tmp_path / name / file).write_text(json.dumps(content))
            sides.append(SideFiles(tmp_path / name))
        return list(processor_differences(*sides, "in the source"))

    return differences


def changed(files, without="", **values):
    made = json.loads(json.dumps(files))
    settings = made[PRE] if PRE in made else made[PROCESSOR]["image_processor"]
    settings.update(values)
    settings.pop(without, None)
    return made


ONLY_THE_TYPE = {PROCESSOR: {"image_processor": {"image_processor_type": "Qwen2VLImageProcessor"}}}
FAULTS = {
    "value": (changed(OF_5, patch_size=16), OF_4, "patch_size"),
    "mean dropped": (changed(OF_5, without="image_mean"), OF_4, "image_mean"),
    "size dropped": (changed(OF_5, without="size"), OF_5, "size"),
    "all dropped": (ONLY_THE_TYPE, OF_4, "size"),
    "not rescaled": (changed(OF_5, do_rescale=False), OF_4, "do_rescale"),
    "not normalized, both of 5": (changed(OF_5, do_normalize=False), OF_5, "do_normalize"),
    "setting of the class without a default": (changed(OF_5, min_pixels=56), OF_5, "size"),
    "nested contradicts": ({**OF_4, **changed(OF_5, patch_size=16)}, OF_4, "patch_size"),
    "file contradicts": ({**OF_5, **changed(OF_4, patch_size=16)}, OF_5, "patch_size"),
    "another class": (changed(OF_5, image_processor_type="CLIPImageProcessor"), OF_4, "image_processor_type"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_another_processor_comes_of_is_an_error(name, compare):
    copy, source, key = FAULTS[name]
    errors = [one for one in compare(copy, source) if one.severity == "error"]
    assert errors
    assert key in errors[0].what


SOUND = {
    "equal": (OF_4, OF_4),
    "layout of 5": (OF_5, OF_4),
    "Fast": (changed(OF_5, image_processor_type="Qwen2VLImageProcessorFast"), OF_4),
    "defaults written": (changed(OF_4, do_normalize=True, do_rescale=True, resample=3), OF_4),
    "default left out": (changed(OF_5, without="patch_size"), OF_4),
    "a null": (changed(OF_5, device=None), OF_4),
    "class by config.json": (changed(OF_5, without="image_processor_type"), OF_4),
    "pixels for sizes": (changed(changed(OF_4, without="size"), min_pixels=3136, max_pixels=12845056), OF_4),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_the_same_processor_comes_of_is_no_difference(name, compare):
    copy, source = SOUND[name]
    assert compare(copy, source) == []


def saved_by_5(source, copy, processor):
    """Saves the whole processor of a release as transformers 5 does."""
    if processor == "WhisperProcessor":
        transformers.AutoFeatureExtractor.from_pretrained(source).save_pretrained(copy)
        nested = {"feature_extractor": json.loads((copy / PRE).read_text()), "processor_class": processor}
        (copy / PRE).unlink()
        (copy / PROCESSOR).write_text(json.dumps(nested))
        return
    special = ["<image>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|image_pad|>", "<|video_pad|>", "<image_soft_token>"]
    special += ["<|vision_start|>", "<|vision_end|>", "<start_of_image>", "<end_of_image>", "<unk>"]
    backend = Tokenizer(WordLevel({token: number for number, token in enumerate(special)}, "<unk>"))
    tokens = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    extra = {"extra_special_tokens": tokens} if processor == "Gemma3Processor" else {}
    parts = {
        "tokenizer": transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **extra),  # noqa: S106
        "image_processor": transformers.AutoImageProcessor.from_pretrained(source),
    }
    if "Qwen" in processor:
        parts["video_processor"] = transformers.AutoVideoProcessor.from_pretrained(source)
    own = json.loads((source / PROCESSOR).read_text()) if (source / PROCESSOR).exists() else {}
    own.pop("processor_class", None)
    getattr(transformers, processor)(**parts, **own).save_pretrained(copy)


@pytest.mark.parametrize("model", RELEASES)
def test_a_processor_that_transformers_saves_again_is_no_difference(model, tmp_path, compare):
    processor, files = RELEASES[model]
    assert compare(files, files, model) == []  # which writes the source
    shutil.rmtree(tmp_path / "copy")
    saved_by_5(tmp_path / "source", tmp_path / "copy", processor)
    assert (tmp_path / "copy" / PROCESSOR).exists()
    assert not (tmp_path / "copy" / PRE).exists()
    assert compare({}, files, model) == []


def nested(model, **values):
    """A release in the layout of transformers 5, with other settings of its part, or less those that are None."""
    files = RELEASES[model][1]
    parts = {PRE: "feature_extractor" if model == "whisper" else "image_processor", VIDEO: "video_processor"}
    made = {parts[file]: dict(content) for file, content in files.items() if file in parts}
    part = made["video_processor" if VIDEO in files else parts[PRE]]
    part.update(values)
    for key in [key for key, value in values.items() if value is None]:
        del part[key]
    return {PROCESSOR: {**files.get(PROCESSOR, {}), **made}}


@pytest.mark.parametrize(
    ("model", "values", "key"),
    [
        ("whisper", {"hop_length": 80}, "hop_length"),
        ("whisper", {"sampling_rate": None, "padding_value": None}, ""),
        ("qwen3_vl", {"do_sample_frames": False}, "do_sample_frames"),
        ("qwen3_vl", {"size": None}, "size"),
        ("qwen3_vl", {"fps": 2, "do_sample_frames": True}, ""),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("gemma3", {"resample": None, "do_rescale": None}, ""),
        ("mistral3", {"patch_size": None}, "patch_size"),
        ("mistral3", {"size": "large"}, "accepts"),
        ("llava", {"_valid_processor_keys": None}, ""),
    ],
)
def test_sound_and_video_are_compared_in_the_same_way(model, values, key, compare):
    errors = [one for one in compare(nested(model, **values), RELEASES[model][1], model) if one.severity == "error"]
    assert [key in one.what for one in errors] == ([True] if key else [])


@pytest.mark.parametrize(
    ("model", "values", "severities"),
    [
        ("gemma3", {"image_seq_length": 512}, ["error"]),
        ("mistral3", {"patch_size": 16}, ["error"]),
        ("llava", {"image_token": "<image>"}, ["error"]),
    ],
)
def test_settings_that_join_the_parts_have_the_defaults_of_the_class(model, values, severities, compare):
    files = RELEASES[model][1]
    own = {"processor_class": files[PROCESSOR]["processor_class"], **values}
    assert [one.severity for one in compare({**files, PROCESSOR: own}, files, model)] == severities


def test_videos_are_read_from_the_settings_of_images_where_no_others_are(compare):
    video = {**QWEN2, "video_processor_type": "Qwen2VLVideoProcessor"}
    del video["image_processor_type"]
    assert compare({**OF_4, VIDEO: video}, OF_4) == []
    for settings in ({**video, "do_rescale": False}, {"do_rescale": False}):
        (found,) = compare({**OF_4, VIDEO: settings}, OF_4)
        assert (found.file, found.severity) == (VIDEO, "error")


@pytest.mark.parametrize("layout", [4, 5])
def test_a_key_of_a_class_that_transformers_does_not_have_is_a_warning(layout, compare):
    settings = {"image_processor_type": "OurImageProcessor", "limit": 4096}

    def severities(copy):
        source = {PRE: settings} if layout == 4 else {PROCESSOR: {"image_processor": settings}}
        return [one.severity for one in compare({PRE: copy}, source, "kimi_vl")]

    assert severities(settings) == []
    assert severities({**settings, "do_rescale": False}) == ["warning"]
    assert severities({**settings, "limit": 1}) == ["error"]
