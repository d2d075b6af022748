"""Directories whose weights are not safetensors, or not only: what they hold is named, with the way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.messages import text_with
from support.models import edit_metadata

from ckptkit.app.api import convert, inspect
from ckptkit.core.errors import CkptkitError
from ckptkit.verify.run import verify

PICKLE = "save_pretrained"
ORIGINAL = "original/"


@pytest.mark.parametrize("config", [True, False], ids=["with config.json", "without"])
@pytest.mark.parametrize(
    ("files", "hint"),
    [
        (["pytorch_model.bin"], f"pytorch_model.bin {PICKLE}"),
        (["model.pt"], f"model.pt {PICKLE}"),
        (["model-Q4_K_M.gguf"], "model-Q4_K_M.gguf llama.cpp's"),
        (["consolidated.00.pth", "consolidated.01.pth", "params.json"], f"consolidated.00.pth {ORIGINAL}"),
        (["original/consolidated.00.pth"], "original/"),
    ],
)
def test_other_weights_are_named(tmp_path: Path, files: list[str], hint: str, config: bool) -> None:
    source = tmp_path / "source"
    for file in files:
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_bytes(b"x")
    if config:
        (source / "config.json").write_text("{}")
    for run in (inspect, lambda path: convert(path, tmp_path / "out")):
        with pytest.raises(CkptkitError, match="neither" if config else "holds no checkpoint") as error:
            run(source)
        assert str(error.value.hint) == text_with(hint)
        assert str(source) in error.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        (("consolidated.safetensors",), "consolidated.safetensors is Mistral's own format"),
        (("consolidated.safetensors", "config.json"), "consolidated.safetensors is Mistral's own format"),
        (
            ("model-00001-of-00002.safetensors", "config.json"),
            "model-00001-of-00002.safetensors is there without model.safetensors.index.json: restore the index",
        ),
        (("config.json",), "download"),
    ],
    ids=str,
)
def test_safetensors_that_nothing_names(tmp_path: Path, files: tuple[str, ...], hint: str) -> None:
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(CkptkitError, match="has neither" if "config.json" in files else "holds no checkpoint") as error:
        inspect(tmp_path)
    assert str(error.value.hint) == text_with(hint)


def test_the_folder_of_the_authors_format(releases: Callable[[str], Path], copy_of: Callable[[Path], Path]) -> None:
    source = copy_of(releases("qwen2-tied"))
    shutil.copytree(releases("qwen2-tied"), source / "original")
    with pytest.raises(CkptkitError, match="authors") as error:
        inspect(source / "original")
    assert error.value.hint == f"give the HF directory around it: {source}"
    assert inspect(source)["tensors"] == inspect(releases("qwen2-tied"))["tensors"]


def test_safetensors_beside_pickles_are_used(
    releases: Callable[[str], Path], copy_of: Callable[[Path], Path], tmp_path: Path
) -> None:
    source = copy_of(releases("qwen2-tied"))
    for name in ("pytorch_model-00001-of-00001.bin", "consolidated.00.pth", "model.gguf"):
        (source / name).write_bytes(b"x")
    (source / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "pytorch_model-00001-of-00001.bin"}})
    )
    convert(source, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    assert {path.name for path in (tmp_path / "back").iterdir()} == {
        path.name for path in releases("qwen2-tied").iterdir()
    } | {"ckptkit.json"}


def test_one_file_without_an_index(releases: Callable[[str], Path], tmp_path: Path) -> None:
    """Small models are released as one model.safetensors."""
    source = tmp_path / "source"
    source.mkdir()
    names: dict[str, torch.Tensor] = {}
    for file in releases("qwen2-tied").iterdir():
        if file.suffix == ".safetensors":
            names |= load_file(file)
        elif not file.name.endswith(".index.json"):
            shutil.copy(file, source)
    save_file(names, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("model-Q4_K_M.gguf", "model-Q4_K_M.gguf is llama.cpp's format"),
        ("llama.nemo", "llama.nemo is of NeMo 1"),
        ("model.pt", f"model.pt {PICKLE}"),
        ("consolidated.safetensors", "consolidated.safetensors is Mistral's own format"),
        ("model-00001-of-00002.safetensors", "directory"),
        ("config.json", "directory"),
        ("model.safetensors.index.json", "directory"),
        ("notes.txt", "config.json"),
    ],
)
def test_a_file_instead_of_a_directory(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CkptkitError, match="directory") as error:
        inspect(tmp_path / name)
    assert str(error.value.hint) == text_with(hint)


@pytest.mark.parametrize(
    ("file", "folder"),
    [
        ("checkpoint-500/model.safetensors", "checkpoint-500"),
        ("snapshots/abc/model.safetensors.index.json", "snapshots/abc"),
        ("global_step_7/actor/model_world_size_2_rank_0.pt", "global_step_7/actor"),
        ("pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0"),
        ("global_step5/mp_rank_00_model_states.pt", "global_step5"),
    ],
)
def test_a_checkpoint_further_down_is_named(tmp_path: Path, file: str, folder: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(CkptkitError, match="holds no checkpoint") as error:
        inspect(tmp_path)
    assert error.value.hint == text_with(f"{tmp_path / folder}")


def test_the_root_of_a_run_of_verl_is_told_from_one_of_megatron(tmp_path: Path) -> None:
    step = tmp_path / "global_step_7/actor/dist_ckpt"
    step.mkdir(parents=True)
    (step / ".metadata").write_bytes(b"x")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(CkptkitError, match="iter_0000007/ is not there") as error:
        inspect(tmp_path)
    assert error.value.hint == text_with(f"{step}")


def test_verify_does_not_fail_the_root_of_a_run_for_a_layout_of_megatron(tmp_path: Path) -> None:
    """Of verl and of miles' FSDP trainer; a tracker of Megatron's whose iteration is gone fails."""
    for name, folder in (("verl", "global_step_7/actor"), ("fsdp", "iter_0000007/model"), ("megatron", "iter_0000006")):
        (tmp_path / name / folder).mkdir(parents=True)
        (tmp_path / name / folder / ".metadata").write_bytes(b"x")
        (tmp_path / name / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(CkptkitError, match="iter_0000007/ is not there"):
        verify(tmp_path / "verl")
    with pytest.raises(CkptkitError, match="saved by miles' FSDP trainer") as error:
        verify(tmp_path / "fsdp")
    assert f"--input-dir {tmp_path / 'fsdp/iter_0000007'}," in (error.value.hint or "")
    report = verify(tmp_path / "megatron")
    assert (report.status, report.findings[0].code) == ("failed", "CK111")


def test_config_beside_the_weights_of_verl_names_the_command_that_merges_them(tmp_path: Path) -> None:
    config = tmp_path / "actor/huggingface"
    config.mkdir(parents=True)
    (config / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "actor/model_world_size_2_rank_0.pt").write_bytes(b"x")
    (found,) = (one for one in verify(config).findings if one.code == "CK103")
    assert f"verl.model_merger merge --backend fsdp --local_dir {tmp_path / 'actor'} --target_dir" in found.hint


@pytest.mark.parametrize("kind", ["index", "file", "adapter", "Megatron"])
def test_a_source_without_tensors_is_refused_and_nothing_is_written(
    kind: str, tmp_path: Path, releases: Callable[[str], Path], converted: Callable[[str], Path]
) -> None:
    release, source = releases("qwen2-tied"), tmp_path / "source"
    options = {"merge": source} if kind == "adapter" else {}
    if kind == "Megatron":
        shutil.copytree(converted("qwen2-tied"), source)
        edit_metadata(source / "release", lambda one: (one.state_dict_metadata.clear(), one.storage_data.clear()))
    else:
        source.mkdir()
        shutil.copy(release / "config.json", source)
        (source / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}')
        if kind == "index":
            (source / "model.safetensors.index.json").write_text('{"weight_map": {}}')
        else:
            save_file({}, source / ("adapter_model.safetensors" if kind == "adapter" else "model.safetensors"))
    with pytest.raises(CkptkitError, match=f"{source}.*has no (tensors|pair)|changes nothing") as error:
        convert(release if kind == "adapter" else source, tmp_path / "out", **options)
    assert error.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
