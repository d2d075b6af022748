"""Multi-token prediction (MTP): repeated tensors, and configs that say more or less than the weights."""

import shutil

import pytest
import torch
from families import CASES
from families.case import save
from families.mtp import promising, small, with_tensors
from support import models
from support.messages import refusal

from ckptkit.app.api import convert

EMBED, HEAD = "model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"

SMALL = small(CASES["glm4_moe-mtp"], 3)


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    path = tmp_path_factory.mktemp("mtp") / "release"
    save("mtp", SMALL, path, torch.bfloat16)
    return path


@pytest.fixture(scope="module")
def megatron(release):
    path = release.parent / "megatron"
    convert(release, path)
    return path


@pytest.mark.parametrize(("copy", "original"), [(EMBED, "model.embed_tokens.weight"), (HEAD, "lm_head.weight")])
def test_a_copy_that_differs_is_refused_with_both_names(release, copy_of, tmp_path, copy, original):
    changed = copy_of(release)
    tensor = models.tensors(changed)[copy]
    tensor.view(torch.int16)[7, 5] ^= 1
    models.edit(changed, copy, tensor)
    refusal(f"{copy}.*{original}.*Megatron", convert, changed, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


@pytest.mark.parametrize("names", [(), (EMBED,), (HEAD,)], ids=["none", "embedding", "output layer"])
def test_only_the_copies_of_the_release_come_back(tmp_path, names):
    case = with_tensors(SMALL, lambda name: name not in {EMBED, HEAD} or name in names)
    save("mtp", case, tmp_path / "release", torch.bfloat16)
    convert(tmp_path / "release", tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    assert models.unequal(tmp_path / "back", tmp_path / "release") == []
    assert {EMBED, HEAD} & models.tensors(tmp_path / "back").keys() == set(names)


def test_megatron_without_the_mtp_layer_becomes_a_release_without_it(release, tmp_path):
    """A run without --mtp-num-layers takes config and tokenizer from a copy of the release that has no weights."""
    plain, bare = tmp_path / "plain", tmp_path / "bare"
    save("mtp", with_tensors(SMALL, lambda name: False), plain, torch.bfloat16)
    convert(plain, tmp_path / "megatron")
    refusal("multi-token(?s:.*)--hf", convert, tmp_path / "megatron", tmp_path / "back", hf=release)
    bare.mkdir()
    shutil.copy(release / "config.json", bare)
    assert convert(tmp_path / "megatron", tmp_path / "back", hf=bare).notes
    assert models.tensors(tmp_path / "back").keys() == models.tensors(plain).keys()


def test_weights_that_the_config_does_not_promise_are_refused(release, megatron, copy_of, tmp_path):
    silent = promising(copy_of(release), 0)
    refusal(r"58 tensor.*model\.layers\.3\.", convert, silent, tmp_path / "megatron")
    refusal(r"39 tensor.*mtp\.layers\.0\.", convert, megatron, tmp_path / "back", hf=silent)


def test_a_layer_that_is_half_there_is_named_tensor_by_tensor(tmp_path):
    save("mtp", with_tensors(SMALL, lambda name: ".experts.11." not in name), tmp_path / "half", torch.bfloat16)
    refusal(r"3.*model\.layers\.3\.mlp\.experts\.11\.gate_proj", convert, tmp_path / "half", tmp_path / "megatron")
