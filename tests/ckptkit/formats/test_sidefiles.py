"""What travels beside the weights, and a manifest that nobody should have to trust."""

import json
import os
import shutil
from pathlib import Path

import pytest
from support import models
from support.messages import refusal
from support.whole_files import write

from ckptkit.app.api import convert, make_manifest, quantize
from ckptkit.app.inspection import inspect
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.transfer.manifest import read_manifest
from ckptkit.verify.run import verify


def link(source, name, target):
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(target)


def test_side_files_come_back_and_hidden_and_weight_files_do_not(releases, copy_of, tmp_path):
    source = copy_of(releases("qwen2-tied"))
    carried = ("templates/chat.jinja", "metadata.json")
    for name in (*carried, ".git/config", "pytorch_model.bin"):
        write(source / name, "{{ x }}")
    convert(source, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    for name in (*carried, "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "back/.git").exists()
    assert not (tmp_path / "back/pytorch_model.bin").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "pkg/x.py", "additional_chat_templates/x.jinja", "model.bin"])
def test_a_side_file_that_is_a_link_to_nothing_is_named(name, releases, copy_of, tmp_path):
    source = copy_of(releases("qwen2-tied"))
    link(source, name, "gone")
    refusal(name, convert, source, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()
    (finding,) = [one for one in verify(source).findings if one.code == "CK102"]
    assert (finding.severity, finding.count) == ("error", 1)


@pytest.mark.parametrize("name", ["README.md", "old/model.safetensors"])
def test_a_link_to_nothing_that_no_loader_reads_is_left_out_and_noted(name, releases, copy_of, tmp_path):
    source = copy_of(releases("qwen2-tied"))
    link(source, name, "gone")
    made = convert(source, tmp_path / "megatron")
    assert [note for note in made.notes if f"1 link leads nowhere: {name} to gone" in note]
    assert not (tmp_path / "megatron/hf" / name).exists()
    assert convert(tmp_path / "megatron", tmp_path / "back").notes == ()
    report = verify(source)
    (finding,) = report.findings
    assert (finding.code, finding.severity, report.status) == ("CK102", "warning", "passed")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("README.md", "/nowhere/x"),
        ("figures/x.png", "../../../nowhere"),
        ("tokenizer.json", "../gone"),
        ("figures/x.png", "../.git/gone"),
    ],
)
def test_a_link_to_nothing_outside_the_checkpoint_is_refused_by_every_verb(name, target, releases, copy_of, tmp_path):
    source = copy_of(releases("qwen2-tied"))
    link(source, name, target)
    for verb in (verify, inspect, make_manifest, lambda path: convert(path, tmp_path / "megatron")):
        refusal(rf"{name} is a link to {target}.*(outside|hidden)", verb, source)
    assert not (tmp_path / "megatron").exists()


LATIN = b"na\xe4me.txt"  # not UTF-8


def named_in_latin(root, name=LATIN):
    """A file whose name JSON cannot hold."""
    path = Path(os.fsdecode(os.fsencode(root) + b"/" + name))
    path.parent.mkdir(exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize("name", [LATIN, b"\xe4/x.json", b"\xed\xb3\xa4.txt"])
def test_a_name_that_is_not_utf8_is_refused_before_anything_is_written(releases, copy_of, tmp_path, name):
    source, out = copy_of(releases("qwen2-tied")), tmp_path / "out"
    named_in_latin(source, name)
    out.mkdir()
    for verb in (
        lambda: convert(source, out / "megatron"),
        lambda: quantize(source, out / "int4", int4_scheme(group_size=32)),
        lambda: make_manifest(source, out / "manifest.json"),
        lambda: make_manifest(source),
    ):
        assert str(refusal(r"UTF-8, .*\\x", verb)).encode()
        assert list(out.iterdir()) == []
    assert not (source / "ckptkit.json").exists()


def test_a_name_that_is_not_utf8_beside_megatron_is_refused_where_it_would_be_carried(converted, copy_of, tmp_path):
    source = copy_of(converted("qwen2-tied"))
    file = named_in_latin(source / "hf")
    refusal("UTF-8", convert, source, tmp_path / "back")
    file.rename(source / "hf" / "näme.txt")
    named_in_latin(source)
    convert(source, tmp_path / "back")
    assert (tmp_path / "back/näme.txt").exists()


def test_hidden_names_and_paths_that_are_not_utf8_pass(releases, tmp_path):
    source = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xe4"))
    shutil.copytree(releases("qwen2-tied"), source)
    named_in_latin(source, b".git/\xe4")
    convert(source, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    assert read_manifest(tmp_path / "megatron/ckptkit.json").files
    assert convert(source, tmp_path / "megatron", resume=True).was_whole


def all_names(layout):
    return [name for names in layout.values() for name in names]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layout: {"../../escaped.safetensors": all_names(layout)}, "safetensors"),
        (lambda layout: {"/tmp/escaped.safetensors": all_names(layout)}, "safetensors"),
        (lambda layout: {"config.json": all_names(layout)}, "safetensors"),
        (lambda layout: layout | {"more.safetensors": ["model.norm.weight"]}, "twice: model.norm.weight"),
        (lambda layout: {file: names[1:] for file, names in layout.items()}, "tensors"),
        (lambda layout: dict.fromkeys(layout, 1), "hf_layout"),
        (lambda layout: None, "hf_layout"),
    ],
)
def test_a_manifest_that_lies_is_refused(converted, copy_of, tmp_path, change, message):
    source = copy_of(converted("qwen2-tied"))
    content = json.loads((source / "ckptkit.json").read_text())
    write(source / "ckptkit.json", json.dumps(content | {"hf_layout": change(content["hf_layout"])}))
    refusal(message, convert, source, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["qwen2-tied"]


def test_the_int4_release_may_give_config_and_tokenizer_on_the_way_back(releases, converted, tmp_path):
    quantize(releases("qwen3_moe"), tmp_path / "int4", QuantScheme(32, "qmax7"))
    convert(converted("qwen3_moe"), tmp_path / "back", hf=tmp_path / "int4")
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    assert models.unequal(tmp_path / "back", releases("qwen3_moe")) == []
    (tmp_path / "nothing").mkdir()
    refusal("nothing has no config.json", convert, converted("qwen3_moe"), tmp_path / "other", hf=tmp_path / "nothing")


def test_a_destination_beside_an_iteration_is_fine_and_one_on_its_side_files_is_not(converted, copy_of):
    source = copy_of(converted("qwen2-tied"))
    convert(source / "release", source / "back")
    assert (source / "back/config.json").exists()
    for taken in (source, source / "hf", source / "release", source / "release/inside"):
        refusal("overlaps", convert, source / "release", taken, overwrite=True)
    assert (source / "hf/config.json").exists()
