"""What comes out of the online quantizer, and what it refuses; SGLang's side is in test_online_sglang.py."""

import json
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from support import models, quantized
from support.engine_models import saved
from support.messages import refusal, text_with
from support.online_model import GLM, GROUP, KIMI, QWEN, config, flat, names_of, quantizer, release, same

import ckptkit.quant.online.form
from ckptkit.app.api import quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import INDEX, HfCheckpoint
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.online.quantizer import OnlineQuantizer
from ckptkit.quant.online.trainer_hooks import UpdateCheck, quantize_params
from ckptkit.quant.schemes.floats import FloatScheme
from ckptkit.verify.evidence.extremes import same_bytes


def test_parts_come_in_order_and_are_what_compressed_tensors_makes():
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    weight = release()[name]
    parts, _ = quantized.int4(strategy="group", group_size=GROUP, symmetric=True)(weight)
    bucket = quantizer().quantize([(name, weight)])
    assert [part for part, _ in bucket] == [f"{name}_packed", f"{name}_scale", f"{name}_shape"]
    same(dict(bucket), {f"{name}{ending}": part for ending, part in parts.items()})


def test_everything_else_passes_untouched_under_its_own_name():
    """Router and embeddings without an entry (D3), `.weight` inside a name, a draft layer (D8), a convolution (D9)."""
    convolution = "model.layers.0.linear_attn.conv1d.weight"
    tensors = release() | {"model.layers.2.eh_proj.weight": torch.ones(8, 16), convolution: torch.ones(8, 1, 4)}
    names = names_of(tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    passed = OnlineQuantizer(config(), names).quantize(tensors.items())
    assert [name for name, _ in passed] == list(tensors)
    assert all(tensor.data_ptr() == tensors[name].data_ptr() for name, tensor in passed)


@pytest.mark.parametrize("grid", ["qmax7", "minmax"])
def test_the_bytes_are_those_of_ckptkit_quantize(grid, releases, tmp_path):
    quantize(releases("glm4_moe"), tmp_path / "int4", QuantScheme(GROUP, grid, GLM))
    stored = models.tensors(tmp_path / "int4")
    assert sum(name.endswith("_packed") for name in stored) == 10 * 12 * 3  # two of twelve layers are dense
    online = OnlineQuantizer(HfCheckpoint(tmp_path / "int4").config, tmp_path / "int4")
    for _ in range(2):
        same(flat(online.stream(models.tensors(releases("glm4_moe")).items())), stored)


def test_a_grid_that_the_config_does_not_say_can_be_given():
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


def test_a_layers_experts_come_in_one_bucket_from_one_call(monkeypatch):
    calls = []
    fake = SimpleNamespace(words=torch.zeros(1), scale=torch.zeros(1))

    def count(weights, scheme, names):
        calls.append(len(names))
        return [fake for _ in weights]

    monkeypatch.setattr(ckptkit.quant.online.form, "quantize_pack", count)
    tensors = release()
    # Experts of both layers in turn, each layer's last: only then is a bucket due.
    order = sorted(tensors, key=lambda name: ("experts" in name, name.rpartition("experts")[2], name))
    buckets = [[name for name, _ in bucket] for bucket in quantizer().stream((name, tensors[name]) for name in order)]
    experts = [bucket for bucket in buckets if ".experts." in bucket[0]]
    assert [len(bucket) for bucket in experts] == [27, 27]
    assert calls == [9, 9]
    roots = [{name.partition(".mlp")[0] for name in bucket} for bucket in experts]
    assert roots == [{"model.layers.0"}, {"model.layers.1"}]


def test_siblings_come_together_whatever_stands_between_them():
    names = [f"model.layers.0.self_attn.{name}_proj.{leaf}" for leaf in ("weight", "bias") for name in "qkvo"]
    names += [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    names += [f"model.layers.0.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    expert = "model.layers.1.mlp.experts.0.up_proj.weight"
    online = OnlineQuantizer(config(), [*names, *names_of([expert])])
    buckets = online.stream([(name, torch.zeros(8, 32)) for name in (*names[::2], *names[1::2], expert)])
    shorter = [[name.removeprefix("model.layers.0.").removesuffix(".weight") for name, _ in one] for one in buckets]
    short = ["+".join(names) for names in shorter]
    assert short[:-1] == [
        "mlp.down_proj",
        "self_attn.q_proj+self_attn.v_proj+self_attn.k_proj",
        "self_attn.o_proj",
        "self_attn.q_proj.bias+self_attn.v_proj.bias+self_attn.k_proj.bias",
        "self_attn.o_proj.bias",
        "mlp.gate_proj+mlp.up_proj",
        "self_attn.kv_a_proj_with_mqa+self_attn.q_a_proj",
    ]


def test_a_bound_on_waiting_bytes_splits_a_layer():
    """Three matrices of 16 KiB wait, the fourth is one too many; q_a_proj waits all the same."""
    tensors = release()
    experts = {name: tensor for name, tensor in tensors.items() if "layers.0.mlp.experts" in name}
    session = quantizer(waiting_bytes=3 * 2**14).begin()
    waiting = "model.layers.0.self_attn.q_a_proj.weight"
    assert session.add([(waiting, tensors[waiting])]) == []
    sizes = [[len(bucket) for bucket in session.add([pair])] for pair in experts.items()]
    assert sizes == [[], [], [], [12], [], [], [], [12], [3]]
    assert [len(bucket) for bucket in quantizer(waiting_bytes=0).begin().add(experts.items())] == [27]


def test_nothing_is_kept_once_it_came_out():
    session = quantizer().begin()
    tensors = {name: tensor for name, tensor in release().items() if "layers.0.mlp.experts" in name}
    kept = [weakref.ref(tensor.untyped_storage()) for tensor in tensors.values()]
    buckets = [bucket for name in list(tensors) for bucket in session.add([(name, tensors.pop(name))])]
    assert len(buckets) == 1
    assert [reference() for reference in kept] == [None] * 9


def test_ranks_can_share_an_update():
    tensors = release()
    first, second = quantizer().begin(), quantizer().begin()
    third = {name: tensor for name, tensor in tensors.items() if ".experts.2." in name}
    parts = [{name: tensor for name, tensor in tensors.items() if name not in third}, third]
    buckets = [*first.add(parts[0].items()), *second.add(parts[1].items())]
    assert not any(".experts." in name for bucket in buckets for name, _ in bucket)
    buckets += [*first.finish(second.delivered), *second.finish(first.delivered)]
    same(flat(buckets), flat(quantizer().stream(tensors.items())))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("model.", "model.language_model."), ("model.", "language_model.model."), ("model.language_model.", "model.")],
)
def test_names_are_matched_in_the_checkpoints_namespace(theirs, ours):
    head = "language_model.lm_head" if "language" in ours else "lm_head"
    reference = [name.replace("lm_head", head) for name in release(ours)]
    online = OnlineQuantizer(config(), names_of(reference))
    assert flat(online.stream(release(theirs).items())).keys() == set(names_of(reference))


def test_without_a_reference_the_classes_decide(releases, tmp_path):
    quantize(releases("qwen3_moe"), tmp_path / "int4", QuantScheme(GROUP, "qmax7", QWEN))
    config = HfCheckpoint(tmp_path / "int4").config
    source = models.tensors(releases("qwen3_moe"))
    same(flat(OnlineQuantizer(config).stream(source.items())), models.tensors(tmp_path / "int4"))
    with pytest.raises(CkptkitError, match=r"model\.layers\.0\.mlp\.experts\.0\.w1\.weight \[8, 32\]"):
        OnlineQuantizer(config).quantize([("model.layers.0.mlp.experts.0.w1.weight", torch.zeros(8, 32))])


def test_the_hooks_of_the_trainers_send_the_same_and_name_what_was_not_sent(tmp_path):
    """One parameter at a time, by a directory with config and index, as the trainers' --hf-checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps(config()))
    weight_map = dict.fromkeys(names_of(release()), "model-00001-of-00001.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    whole, part, rest = (UpdateCheck(tmp_path) for _ in range(3))
    sent = {name: quantize_params([(name, tensor)], tmp_path) for name, tensor in release().items()}
    same(flat(sent.values()), flat(quantizer().stream(release().items())))
    for name, bucket in sent.items():
        whole.record(bucket)
        (rest if ".experts.1.down_proj" in name else part).record(bucket)
    whole.finish()
    part.finish(rest.delivered)
    refusal(r" 2 .*: model\.layers\.\{0\.\.1\}\.mlp\.experts\.1\.down_proj\.weight", part.finish)


CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
NAME = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("model", "scheme"),
    [("mla", FloatScheme("fp8-block")), ("dense", FloatScheme("fp8-block", "deepgemm")), ("moe", FloatScheme("mxfp8"))],
    ids=lambda value: value if isinstance(value, str) else f"{value.name} {value.formula}",
)
def test_an_update_has_the_bytes_of_the_file(model, scheme, tmp_path):
    source = saved(model, tmp_path)
    quantize(source, tmp_path / "served", scheme)
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    online = OnlineQuantizer(config, tmp_path / "served")
    found = {name: tensor for bucket in online.stream(models.tensors(source).items()) for name, tensor in bucket}
    wanted = models.tensors(tmp_path / "served")
    assert found.keys() == wanted.keys()
    assert all(same_bytes(found[name], wanted[name]) for name in wanted)


def test_a_scale_follows_its_weight_and_what_is_not_fp8_passes():
    online = OnlineQuantizer(CONFIG, [NAME, f"{NAME}_scale_inv", "lm_head.weight"])
    weight, head = torch.ones(130, 256).bfloat16(), torch.ones(8, 256).bfloat16()
    bucket = online.quantize([("lm_head.weight", head), (NAME, weight)])
    assert [(name, tuple(tensor.shape)) for name, tensor in bucket] == [
        ("lm_head.weight", (8, 256)),
        (NAME, (130, 256)),
        (f"{NAME}_scale_inv", (2, 2)),
    ]
    assert bucket[0][1].data_ptr() == head.data_ptr()


def test_a_part_of_the_weights_may_be_sent_but_no_half_of_what_an_engine_joins():
    parts = [f"model.layers.0.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    online = OnlineQuantizer(CONFIG, [*parts, *(f"{name}_scale_inv" for name in parts), NAME, f"{NAME}_scale_inv"])
    weight = torch.ones(128, 128).bfloat16()
    session = online.begin()
    assert session.add([(parts[0], weight)]) == []
    (bucket,) = session.add([(parts[1], weight)])
    assert [name for name, _ in bucket] == [part for name in parts for part in (name, f"{name}_scale_inv")]
    assert session.finish() == []
    torn = online.begin()
    torn.add([(parts[0], weight)])
    refusal(r"q_a_proj\.weight", torn.finish)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
    ],
)
def test_what_trainers_do_not_send_is_refused(change, message):
    config = {"quantization_config": CONFIG["quantization_config"] | change}
    refusal(message, OnlineQuantizer, config, [NAME, f"{NAME}_scale_inv"])


def test_a_reference_is_needed_must_be_in_fp8_and_have_the_tensor():
    refusal("config", OnlineQuantizer, CONFIG)
    refusal("_scale_inv", OnlineQuantizer, CONFIG, [NAME])
    refusal("INT4", OnlineQuantizer, CONFIG, [NAME, f"{NAME}_scale_inv"], grid="qmax7")
    with pytest.raises(CkptkitError, match="tensor"):
        online = OnlineQuantizer(CONFIG, [NAME, f"{NAME}_scale_inv"])
        online.quantize([("model.layers.9.self_attn.o_proj.weight", torch.ones(128, 128))])


UNPACKED = names_of(release(), lambda name: ".experts." in name and "layers.1.mlp.experts.2.up_proj" not in name)
FIRST_LAYER = names_of(release(), lambda name: "layers.0.mlp.experts" in name)
OUTPUTS = names_of(release(), lambda name: ".experts." in name or ".o_proj." in name)
SHARED = [*names_of(release()), *names_of(["model.layers.1.mlp.shared_experts.up_proj.weight"], lambda name: True)]
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
BY_LAYER = {"model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4"}}
MIXED = NVFP4 | {"quant_algo": "MIXED_PRECISION", "quantized_layers": BY_LAYER}
OUTPUT_PACKED = config([entry for entry in KIMI if "self_attn" not in entry])
SECOND_LAYER_LEFT = config([*KIMI, r"re:.*layers\.1\.mlp\.experts.*"])


def in_two_groups():
    """D7: slime reads the first one only."""
    both = config()
    groups = both["quantization_config"]["config_groups"]
    groups["group_1"] = groups["group_0"] | {"targets": ["re:.*down_proj"]}
    return both


@pytest.mark.parametrize(
    ("config", "reference", "message", "hint"),
    [
        (OUTPUT_PACKED, OUTPUTS, r"Linear .*\{0\.\.1\}\.self_attn\.o_proj", "--ignore 're:.*self_attn.*o_proj.*'"),
        (config(KIMI[:2]), SHARED, r"layers\.1\.mlp\.shared_experts\.up_proj", "--ignore 're:.*shared_experts.*'"),
        (config(symmetric=False), names_of(release()), "points", "symmetric"),
        (in_two_groups(), names_of(release()), "config_groups is 2", ""),
        # D5: SGLang looks at expert 0 and would drop what it does not expect
        (config(), UNPACKED, r"layers\.1\.mlp\.experts .*\.experts\.2\.up_proj\.weight would be dropped", ""),
        (SECOND_LAYER_LEFT, names_of(release()), r"layers\.1\.mlp\.experts\.0\.gate_proj\.weight is packed", ""),
        (config(), FIRST_LAYER, r"layers\.1\.mlp\.experts\.0\.gate_proj\.weight is not packed", ""),
        (config(), list(release()), "weight_packed", "BF16"),
        ({"num_hidden_layers": 2}, names_of(release()), "no quantization_config", ""),
        (config() | {"quantization_config": NVFP4}, names_of(release()), "NVFP4", "fp8-block"),
        (config() | {"quantization_config": MIXED}, names_of(release()), "NVFP4", "fp8-block"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_sglang_cannot_load_online_is_refused(config, reference, message, hint):
    assert re.search(hint, refusal(message, OnlineQuantizer, config, reference).hint or "")


def test_a_draft_layer_that_ignore_does_not_cover_may_be_plain():
    in_a_draft_layer = config() | {"num_hidden_layers": 1}
    OnlineQuantizer(in_a_draft_layer, FIRST_LAYER)
    quantization = in_a_draft_layer["quantization_config"]
    OnlineQuantizer({"text_config": in_a_draft_layer, "quantization_config": quantization}, FIRST_LAYER)


EXPERT = "mlp.experts.0.up_proj.weight"
TWO_ROOTS = [*names_of(release("language_model.model.")), *names_of(release("model.language_model."))]


@pytest.mark.parametrize(
    ("name", "shape", "reference"),
    [
        (f"model.layers.2.{EXPERT}", (64, 128), names_of(release())),
        ("model.layers.0.mlp.experts.gate_up_proj", (3, 128, 128), names_of(release())),
        ("vision.layers.0.mlp.gate.weight", (3, 128), names_of(release())),
        ("model.layers.0.mlp.gate.weight", (3, 128), TWO_ROOTS),  # it may mean two tensors
    ],
)
def test_unknown_names_are_refused(name, shape, reference):
    with pytest.raises(CkptkitError, match=re.escape(name)):
        OnlineQuantizer(config(), reference).quantize([(name, torch.zeros(shape, dtype=torch.bfloat16))])


def test_a_shard_of_a_tensor_is_refused(releases, tmp_path):
    quantize(releases("qwen3_moe"), tmp_path / "int4", QuantScheme(GROUP, "qmax7", QWEN))
    online = OnlineQuantizer(HfCheckpoint(tmp_path / "int4").config, tmp_path / "int4")
    for name, shape, whole in ((EXPERT, (48, 128), (96, 128)), ("self_attn.o_proj.weight", (128, 160), (128, 320))):
        error = refusal("", online.quantize, [(f"model.layers.0.{name}", torch.zeros(shape, dtype=torch.bfloat16))])
        assert error.message == text_with(f"model.layers.0.{name} {list(shape)} {list(whole)}")


def test_a_tensor_that_comes_twice_or_after_the_end_is_refused():
    session, norm = quantizer().begin(), "model.norm.weight"
    session.add(release().items())
    refusal(r"model\.norm\.weight .*twice", session.add, [(norm, release()[norm])])
    session = quantizer().begin()
    session.add(release().items())
    assert session.finish() == []
    refusal("finished", session.add, release().items())


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("layers.1.mlp.experts.0", r" 3 .*: model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight"),
        ("layers.1.self_attn.kv_a", r"model\.layers\.1\.self_attn\.q_a_proj\.weight"),
    ],
)
def test_an_update_that_leaves_experts_or_a_sibling_out_is_refused(left_out, message):
    session = quantizer().begin()
    session.add((name, tensor) for name, tensor in release().items() if left_out not in name)
    refusal(message, session.finish)
