"""Directories whose weights are not safetensors, or not only: what they hold is named, with the way out."""

import json
import shutil

import pytest
from safetensors.torch import save_file
from support.messages import refusal, text_with
from support.models import edit_metadata
from support.whole_files import write

from ckptkit.app.api import convert, inspect
from ckptkit.core.errors import CkptkitError
from ckptkit.verify.run import verify

# Files of a directory or a single file, and words of the way out.
OTHER = {
    "pytorch_model.bin": "save_pretrained",
    "model.pt": "save_pretrained",
    "model-Q4_K_M.gguf": "llama.cpp's",
    "consolidated.00.pth": "original/",
    "original/consolidated.00.pth": "original/",
    "consolidated.safetensors": "Mistral's own format",
}


@pytest.mark.parametrize("file", OTHER)
def test_other_weights_are_named(tmp_path, file):
    source = tmp_path / "source"
    write(source / file, "x")
    for message in ("contains no checkpoint", "neither"):
        for run in (inspect, lambda path: convert(path, tmp_path / "out")):
            error = refusal(message, run, source)
            assert str(error.hint) == text_with(OTHER[file])
            assert file.partition("/")[0] in str(error.hint)
            assert str(source) in error.message
        write(source / "config.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_safetensors_that_nothing_names(tmp_path):
    write(tmp_path / "config.json", "{}")
    error = refusal("has neither", inspect, tmp_path)
    assert str(error.hint) == text_with("download")
    write(tmp_path / "model-00001-of-00002.safetensors", "{}")
    error = refusal("has neither", inspect, tmp_path)
    assert str(error.hint) == text_with("model-00001-of-00002.safetensors model.safetensors.index.json index")


def test_the_folder_of_the_authors_format(releases, copy_of):
    source = copy_of(releases("qwen2-tied"))
    shutil.copytree(releases("qwen2-tied"), source / "original")
    assert refusal("authors", inspect, source / "original").hint.endswith(f": {source}")
    assert inspect(source)["tensors"] == inspect(releases("qwen2-tied"))["tensors"]


def test_safetensors_beside_pickles_are_used(releases, copy_of, tmp_path):
    source = copy_of(releases("qwen2-tied"))
    for name in ("pytorch_model-00001-of-00001.bin", "consolidated.00.pth", "model.gguf"):
        write(source / name, "x")
    index = {"weight_map": {"model.norm.weight": "pytorch_model-00001-of-00001.bin"}}
    write(source / "pytorch_model.bin.index.json", json.dumps(index))
    convert(source, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    expected = {path.name for path in releases("qwen2-tied").iterdir()} | {"ckptkit.json"}
    assert {path.name for path in (tmp_path / "back").iterdir()} == expected


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *((name, hint) for name, hint in OTHER.items() if name.startswith("model") or "safetensors" in name),
        ("llama.nemo", "llama.nemo NeMo 1"),
        ("model-00001-of-00002.safetensors", "directory"),
        ("config.json", "directory"),
        ("notes.txt", "config.json"),
    ],
)
def test_a_file_instead_of_a_directory(tmp_path, name, hint):
    write(tmp_path / name, "x")
    assert str(refusal("directory", inspect, tmp_path / name).hint) == text_with(hint)


@pytest.mark.parametrize(
    "file",
    [
        "checkpoint-500/model.safetensors",
        "snapshots/abc/model.safetensors.index.json",
        "global_step_7/actor/model_world_size_2_rank_0.pt",
        "pytorch_model_fsdp_0/.metadata",
        "global_step5/mp_rank_00_model_states.pt",
    ],
)
def test_a_checkpoint_further_down_is_named(tmp_path, file):
    write(tmp_path / file, "x")
    assert refusal("contains no checkpoint", inspect, tmp_path).hint == text_with(f"{(tmp_path / file).parent}")


def test_verify_does_not_fail_the_root_of_a_run_for_a_layout_of_megatron(tmp_path):
    """Of verl and of miles' FSDP trainer; a tracker of Megatron's whose iteration is gone fails."""
    folders = {"verl": "global_step_7/actor/dist_ckpt", "fsdp": "iter_0000007/model", "megatron": "iter_0000006"}
    for name, folder in folders.items():
        write(tmp_path / name / folder / ".metadata", "x")
        write(tmp_path / name / "latest_checkpointed_iteration.txt", "7")
    for run in (inspect, verify):
        error = refusal("iter_0000007/", run, tmp_path / "verl")
        assert error.hint == text_with(f"{tmp_path / 'verl' / folders['verl']}")
    error = refusal("FSDP", verify, tmp_path / "fsdp")
    assert f"--input-dir {tmp_path / 'fsdp/iter_0000007'}," in (error.hint or "")
    report = verify(tmp_path / "megatron")
    assert (report.status, report.findings[0].code) == ("failed", "CK111")


def test_config_beside_the_weights_of_verl_names_the_command_that_merges_them(tmp_path):
    config = tmp_path / "actor/huggingface"
    write(config / "config.json", '{"model_type": "qwen3"}')
    write(tmp_path / "actor/model_world_size_2_rank_0.pt", "x")
    (found,) = (one for one in verify(config).findings if one.code == "CK103")
    assert f"verl.model_merger merge --backend fsdp --local_dir {tmp_path / 'actor'} --target_dir" in found.hint


@pytest.mark.parametrize("kind", ["index", "file", "adapter", "Megatron"])
def test_a_source_without_tensors_is_refused_and_nothing_is_written(kind, tmp_path, releases, converted):
    release, source = releases("qwen2-tied"), tmp_path / "source"
    options = {"merge": source} if kind == "adapter" else {}
    if kind == "Megatron":
        shutil.copytree(converted("qwen2-tied"), source)
        edit_metadata(source / "release", lambda one: (one.state_dict_metadata.clear(), one.storage_data.clear()))
    else:
        write(source / "config.json", (release / "config.json").read_bytes())
        write(source / "adapter_config.json", '{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}')
        if kind == "index":
            write(source / "model.safetensors.index.json", '{"weight_map": {}}')
        else:
            save_file({}, source / ("adapter_model.safetensors" if kind == "adapter" else "model.safetensors"))
    with pytest.raises(CkptkitError, match=f"{source}.*has no (tensors|pair)|changes nothing") as error:
        convert(release if kind == "adapter" else source, tmp_path / "out", **options)
    assert error.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
