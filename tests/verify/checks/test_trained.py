"""`verify --source RELEASE --trained`: training moves values by little, and what else differs is found as ever."""

import math
import shutil

import pytest
import torch
from safetensors.torch import save_file
from support import models

from ckptkit.app.api import convert
from ckptkit.core.errors import UsageError
from ckptkit.verify.run import verify

LAYER = "model.layers.5."
QUERY, OUTPUT = f"{LAYER}self_attn.q_proj.weight", f"{LAYER}self_attn.o_proj.weight"


def rewrite(path, change):
    tensors = models.tensors(path)
    change(tensors)
    for file in (*path.glob("*.safetensors"), *path.glob("*.index.json")):
        file.unlink()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def train(path, frozen=(), size=0.02):
    """A step of training: noise of a part of each tensor's own size, but in tensors whose names begin as `frozen`."""

    def step(tensors):
        generator = torch.Generator().manual_seed(1)
        for name, one in tensors.items():
            if one.is_floating_point() and not name.startswith(tuple(frozen)):
                noise = torch.randn(one.shape, generator=generator) * size * one.float().square().mean().sqrt()
                tensors[name] = (one.float() + noise).to(one.dtype)

    return rewrite(path, step)


def exchange(first, second):
    return lambda tensors: tensors.update({first: tensors[second], second: tensors[first]})


def in_place(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


def errors(report):
    return [(one.code, one.tensor) for one in report.findings if one.severity == "error"]


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("deepseek_v3", ()),
        ("qwen2-tied", ("model.layers.0.", "model.layers.1.")),
        ("glm4_moe", ("model.embed_tokens", "lm_head")),
    ],
)
def test_a_trained_checkpoint_passes(name, frozen, releases, fresh):
    report = verify(train(fresh(name), frozen), source=releases(name), trained=True)
    assert (report.findings, report.status) == ([], "passed")
    assert {"CK202", "CK305"}.isdisjoint(one.code for one in report.checks)
    assert any(note.startswith("training") for note in report.facts.get("notes", ())) == bool(frozen)


def test_a_trained_megatron_checkpoint_passes_and_its_swapped_experts_are_found(releases, fresh, tmp_path):
    path = train(fresh("glm4_moe"))
    convert(path, tmp_path / "megatron")
    assert verify(tmp_path / "megatron", source=releases("glm4_moe"), trained=True).findings == []
    first, second = (f"{LAYER}mlp.experts.{number}.down_proj.weight" for number in (3, 7))
    convert(rewrite(path, exchange(first, second)), tmp_path / "swapped")
    report = verify(tmp_path / "swapped", source=releases("glm4_moe"), trained=True)
    assert errors(report) == [("CK216", f"{LAYER}mlp.experts.{{3,7}}.down_proj.weight")]


@pytest.mark.parametrize(
    ("change", "code", "tensor"),
    [
        (exchange(f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"), "CK216", "*"),
        (exchange(f"{LAYER}mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"), "CK216", "*"),
        (in_place(QUERY, lambda one: torch.cat([one[0::2], one[1::2]])), "CK216", QUERY),
        (in_place(OUTPUT, lambda one: torch.cat([one[:16].roll(1, 0), one[16:]])), "CK216", OUTPUT),
        (lambda tensors: tensors.pop(QUERY), "CK104", QUERY),
        (lambda tensors: tensors[OUTPUT][0, 0].fill_(math.nan), "CK204", OUTPUT),
    ],
)
def test_what_training_does_not_do_is_found(change, code, tensor, releases, fresh):
    report = verify(rewrite(train(fresh("qwen2-tied")), change), source=releases("qwen2-tied"), trained=True)
    found = [one for one in report.findings if one.severity == "error"]
    assert {one.code for one in found} == {code}
    assert tensor == "*" or tensor in {name for one in found for name in one.names}


def test_another_model_is_one_error_and_an_untrained_one_a_warning(releases, fresh, only):
    source = releases("qwen2-tied")
    finding = only(verify(train(fresh("qwen2-tied"), size=3.0), source=source, trained=True))
    assert (finding.code, finding.severity) == ("CK216", "error")
    assert finding.actual.endswith("another model")
    finding = only(verify(source, source=source, trained=True))
    assert (finding.code, finding.severity) == ("CK216", "warning")


def test_rows_of_new_words_move_and_a_frequency_table_does_not(fresh, tmp_path):
    source, name = fresh("qwen2-tied"), "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(source, lambda tensors: tensors.update({name: torch.rand(8)}))
    path = train(shutil.copytree(source, tmp_path / "trained"), [name])
    words = in_place(
        "model.embed_tokens.weight", lambda one: torch.cat([torch.randn(40, one.shape[1]).bfloat16(), one[40:]])
    )
    report = verify(rewrite(path, words), source=source, trained=True)
    assert "CK216" not in {code for code, _ in errors(report)}
    rewrite(path, in_place(name, torch.rand_like))
    assert ("CK216", name) in errors(verify(path, source=source, trained=True))


def test_without_it_one_finding_names_it(releases, fresh, only):
    finding = only(verify(train(fresh("glm4_moe")), source=releases("glm4_moe")))
    assert (finding.code, finding.severity) == ("CK202", "error")
    assert "--trained" in finding.hint


@pytest.mark.parametrize("options", [{}, {"adapter": "adapter"}])
def test_it_goes_with_a_source_and_no_adapter(options, releases):
    source = releases("qwen2-tied") if options else None
    with pytest.raises(UsageError):
        verify(releases("qwen2-tied"), source=source, trained=True, **options)
