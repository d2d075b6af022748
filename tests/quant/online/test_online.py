"""What comes out of the online quantizer and in which buckets; SGLang's side is in test_online_sglang.py."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import models, quantized
from support.online_model import GLM, GROUP, QWEN, config, flat, names_of, quantizer, release, same
from torch import Tensor

import quant.online.form
from ckptkit.app.api import quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import INDEX, HfCheckpoint
from quant.formats.scheme import QuantScheme
from quant.online.quantizer import OnlineQuantizer
from quant.online.trainer_hooks import UpdateCheck, quantize_params


def test_parts_come_in_order_and_are_what_compressed_tensors_makes() -> None:
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    weight = release()[name]
    parts, _ = quantized.int4(strategy="group", group_size=GROUP, symmetric=True)(weight)
    bucket = quantizer().quantize([(name, weight)])
    assert [part for part, _ in bucket] == [f"{name}_packed", f"{name}_scale", f"{name}_shape"]
    same(
        dict(bucket),
        {
            f"{name}_packed": parts["_packed"],
            f"{name}_scale": parts["_scale"],
            f"{name}_shape": torch.tensor([128, 64]),
        },
    )


def test_everything_else_passes_untouched_under_its_own_name() -> None:
    """Router and embeddings without an entry (D3), `.weight` inside a name, a draft layer (D8), a convolution (D9)."""
    more = {
        "model.layers.2.eh_proj.weight": torch.ones(8, 16),
        "model.layers.0.linear_attn.conv1d.weight": torch.ones(8, 1, 4),
    }
    tensors = {name: tensor for name, tensor in release().items() if ".experts." not in name} | more
    passed = OnlineQuantizer(config(), names_of(release() | more)).quantize(tensors.items())
    assert [name for name, _ in passed] == list(tensors)
    assert all(tensor.data_ptr() == tensors[name].data_ptr() for name, tensor in passed)


def test_only_the_last_part_of_a_name_changes() -> None:
    name = "model.weight_tower.layers.0.mlp.experts.0.up_proj.weight"
    bucket = OnlineQuantizer(config(), names_of([name])).quantize([(name, torch.ones(8, 32).bfloat16())])
    assert [part for part, _ in bucket] == [f"{name}_packed", f"{name}_scale", f"{name}_shape"]


@pytest.mark.parametrize("grid", ["qmax7", "minmax"])
def test_the_bytes_are_those_of_ckptkit_quantize(grid: Any, releases: Callable[[str], Path], tmp_path: Path) -> None:
    quantize(releases("glm4_moe"), tmp_path / "int4", QuantScheme(GROUP, grid, GLM))
    stored = models.tensors(tmp_path / "int4")
    assert sum(name.endswith("_packed") for name in stored) == 10 * 12 * 3  # two of twelve layers are dense
    online = OnlineQuantizer(HfCheckpoint(tmp_path / "int4").config, tmp_path / "int4")
    for _ in range(2):
        same(flat(online.stream(models.tensors(releases("glm4_moe")).items())), stored)


def test_a_grid_that_the_config_does_not_say_can_be_given() -> None:
    foreign = config()
    foreign["quantization_config"]["config_groups"]["group_0"]["weights"]["observer_kwargs"] = {}
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    one, other = (
        OnlineQuantizer(foreign, names_of(release()), **options).quantize([(name, release()[name])])
        for options in ({}, {"grid": "qmax7"})
    )
    recorded = OnlineQuantizer(config(grid="qmax7"), names_of(release())).quantize([(name, release()[name])])
    same(dict(other), dict(recorded))
    assert not torch.equal(one[0][1], other[0][1])


def test_a_layers_experts_come_in_one_bucket_from_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(
        quant.online.form, "quantize_pack", lambda weights, scheme, names: calls.append(names) or [*map(Fake, weights)]
    )
    tensors = release()
    # Experts of both layers in turn, each layer's last: only then is a bucket due.
    order = sorted(tensors, key=lambda name: ("experts" in name, name.rpartition("experts")[2], name))
    buckets = [[name for name, _ in bucket] for bucket in quantizer().stream((name, tensors[name]) for name in order)]
    experts = [bucket for bucket in buckets if ".experts." in bucket[0]]
    assert [len(bucket) for bucket in experts] == [27, 27]
    assert [len(names) for names in calls] == [9, 9]
    assert all(
        {name.partition(".mlp")[0] for name in bucket} == {f"model.layers.{layer}"}
        for layer, bucket in enumerate(experts)
    )


class Fake:
    words = scale = torch.zeros(1)

    def __init__(self, weight: Tensor) -> None: ...


def test_siblings_come_together_whatever_stands_between_them() -> None:
    names = [f"model.layers.0.self_attn.{name}_proj.{leaf}" for leaf in ("weight", "bias") for name in "qkvo"]
    names += [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    names += [f"model.layers.0.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    expert = "model.layers.1.mlp.experts.0.up_proj.weight"
    online = OnlineQuantizer(config(), [*names, *names_of([expert])])
    buckets = online.stream([(name, torch.zeros(8, 32)) for name in (*names[::2], *names[1::2], expert)])
    short = [
        "+".join(name.removeprefix("model.layers.0.").removesuffix(".weight") for name, _ in bucket)
        for bucket in buckets
    ]
    assert short[:-1] == [
        "mlp.down_proj",
        "self_attn.q_proj+self_attn.v_proj+self_attn.k_proj",
        "self_attn.o_proj",
        "self_attn.q_proj.bias+self_attn.v_proj.bias+self_attn.k_proj.bias",
        "self_attn.o_proj.bias",
        "mlp.gate_proj+mlp.up_proj",
        "self_attn.kv_a_proj_with_mqa+self_attn.q_a_proj",
    ]


def test_a_bound_on_waiting_bytes_splits_a_layer() -> None:
    """Three matrices of 16 KiB wait, the fourth is one too many; q_a_proj waits all the same."""
    tensors = release()
    experts = {name: tensor for name, tensor in tensors.items() if "layers.0.mlp.experts" in name}
    session = quantizer(waiting_bytes=3 * 2**14).begin()
    assert (
        session.add([("model.layers.0.self_attn.q_a_proj.weight", tensors["model.layers.0.self_attn.q_a_proj.weight"])])
        == []
    )
    sizes = [[len(bucket) for bucket in session.add([pair])] for pair in experts.items()]
    assert sizes == [[], [], [], [12], [], [], [], [12], [3]]
    assert [len(bucket) for bucket in quantizer(waiting_bytes=0).begin().add(experts.items())] == [27]


def test_nothing_is_kept_once_it_came_out() -> None:
    session = quantizer().begin()
    tensors = {name: tensor for name, tensor in release().items() if "layers.0.mlp.experts" in name}
    kept = [weakref.ref(tensor.untyped_storage()) for tensor in tensors.values()]
    buckets = [bucket for name in list(tensors) for bucket in session.add([(name, tensors.pop(name))])]
    assert len(buckets) == 1
    assert [reference() for reference in kept] == [None] * 9


def test_ranks_can_share_an_update() -> None:
    tensors = release()
    first, second = quantizer().begin(), quantizer().begin()
    parts = [
        {name: tensor for name, tensor in tensors.items() if (".experts.2." in name) == third}
        for third in (False, True)
    ]
    buckets = [*first.add(parts[0].items()), *second.add(parts[1].items())]
    assert not any(".experts." in name for bucket in buckets for name, _ in bucket)
    buckets += [*first.finish(second.delivered), *second.finish(first.delivered)]
    same(flat(buckets), flat(quantizer().stream(tensors.items())))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("model.", "model.language_model."), ("model.", "language_model.model."), ("model.language_model.", "model.")],
)
def test_names_are_matched_in_the_checkpoints_namespace(theirs: str, ours: str) -> None:
    reference = {
        name.replace("lm_head", "language_model.lm_head") if "language" in ours else name: 0 for name in release(ours)
    }
    online = OnlineQuantizer(config(), names_of(reference))
    assert flat(online.stream(release(theirs).items())).keys() == set(names_of(reference))


def test_without_a_reference_the_classes_decide(releases: Callable[[str], Path], tmp_path: Path) -> None:
    quantize(releases("qwen3_moe"), tmp_path / "int4", QuantScheme(GROUP, "qmax7", QWEN))
    config = HfCheckpoint(tmp_path / "int4").config
    same(
        flat(OnlineQuantizer(config).stream(models.tensors(releases("qwen3_moe")).items())),
        models.tensors(tmp_path / "int4"),
    )
    with pytest.raises(
        CkptkitError,
        match=r"model\.layers\.0\.mlp\.experts\.0\.w1\.weight \[8, 32\] is not a tensor of the engine's checkpoint",
    ):
        OnlineQuantizer(config).quantize([("model.layers.0.mlp.experts.0.w1.weight", torch.zeros(8, 32))])


def test_an_index_without_shards_is_reference_enough(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(names_of(release()), "model-00001-of-00001.safetensors")})
    )
    same(
        flat(OnlineQuantizer(config(), tmp_path).stream(release().items())), flat(quantizer().stream(release().items()))
    )


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A directory with config and index, as the trainers' --hf-checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps(config()))
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(names_of(release()), "model-00001-of-00001.safetensors")})
    )
    return tmp_path


def test_the_hook_of_the_trainers_gives_the_same_one_parameter_at_a_time(served: Path) -> None:
    sent = flat(quantize_params([pair], served) for pair in release().items())
    same(sent, flat(quantizer().stream(release().items())))


def test_the_check_of_the_trainers_names_what_was_not_sent(served: Path) -> None:
    whole, part, rest = UpdateCheck(served), UpdateCheck(served), UpdateCheck(served)
    for pair in release().items():
        sent = quantize_params([pair], served)
        whole.saw(sent)
        (rest if ".experts.1.down_proj" in pair[0] else part).saw(sent)
    whole.finish()
    part.finish(rest.delivered)
    with pytest.raises(
        CkptkitError,
        match=r"left out 2 packed weight\(s\).*: model\.layers\.\{0\.\.1\}\.mlp\.experts\.1\.down_proj\.weight",
    ):
        part.finish()
