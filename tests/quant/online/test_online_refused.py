"""What the online quantizer refuses before sending anything, and its errors for incomplete tensors and updates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.online_model import GROUP, KIMI, QWEN, config, names_of, quantizer, release

from ckptkit.app.api import quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import HfCheckpoint
from quant.formats.scheme import QuantScheme
from quant.online.quantizer import OnlineQuantizer


def refused(config: Mapping[str, Any], reference: Iterable[str] | None, message: str, hint: str = "") -> None:
    with pytest.raises(CkptkitError, match=message) as caught:
        OnlineQuantizer(config, reference)
    assert re.search(hint, caught.value.hint or "")


def test_int4_linear_layers_are_refused_with_the_entries_to_add() -> None:
    names = names_of(release(), lambda name: ".experts." in name or ".o_proj." in name)
    ignore = [entry for entry in KIMI if "self_attn" not in entry]
    refused(
        config(ignore),
        names,
        r"INT4 Linear layers a second time.*: model\.layers\.\{0\.\.1\}\.self_attn\.o_proj\.weight",
        "--ignore 're:.*self_attn.*o_proj.*'",
    )


def test_packed_shared_experts_are_refused() -> None:
    names = [*names_of(release()), *names_of(["model.layers.1.mlp.shared_experts.up_proj.weight"], lambda name: True)]
    refused(
        config(KIMI[:2]),
        names,
        r"second time.*: model\.layers\.1\.mlp\.shared_experts\.up_proj\.weight",
        "--ignore 're:.*shared_experts.*'",
    )


def test_asymmetric_scales_are_refused() -> None:
    refused(
        config(symmetric=False), names_of(release()), "zero points of routed experts in another layout", "symmetric"
    )


def test_several_groups_are_refused() -> None:
    """D7: slime reads the first one only."""
    both = config()
    groups = both["quantization_config"]["config_groups"]
    groups["group_1"] = groups["group_0"] | {"targets": ["re:.*down_proj"]}
    refused(both, names_of(release()), "number of config_groups is 2")


def test_a_layer_packed_in_part_is_refused() -> None:
    """D5: SGLang looks at expert 0 and would drop what it does not expect."""
    names = names_of(release(), lambda name: ".experts." in name and "layers.1.mlp.experts.2.up_proj" not in name)
    refused(
        config(),
        names,
        r"model\.layers\.1\.mlp\.experts is packed in part.*: "
        r"model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight would be dropped",
    )


def test_packed_experts_that_ignore_covers_are_refused() -> None:
    refused(
        config([*KIMI, r"re:.*layers\.1\.mlp\.experts.*"]),
        names_of(release()),
        r"layers\.1\.mlp\.experts\.0\.gate_proj\.weight is packed .* covers it with",
    )


def test_plain_experts_that_ignore_does_not_cover_are_refused() -> None:
    names = names_of(release(), lambda name: "layers.0.mlp.experts" in name)
    refused(config(), names, r"layers\.1\.mlp\.experts\.0\.gate_proj\.weight is not packed .* does not cover it")
    in_a_draft_layer = config() | {"num_hidden_layers": 1}
    OnlineQuantizer(in_a_draft_layer, names)
    OnlineQuantizer(
        {"text_config": in_a_draft_layer, "quantization_config": in_a_draft_layer["quantization_config"]}, names
    )


def test_a_reference_with_nothing_packed_is_refused() -> None:
    refused(config(), list(release()), "has no weight_packed", "not the BF16 one")


def test_a_config_without_quantization_is_refused() -> None:
    refused({"num_hidden_layers": 2}, names_of(release()), "no quantization_config")


def unsent(name: str, shape: tuple[int, ...], message: str, online: OnlineQuantizer | None = None) -> None:
    session = (online or quantizer()).begin()
    with pytest.raises(CkptkitError, match=message):
        session.add([(name, torch.zeros(shape, dtype=torch.bfloat16))])


def test_unknown_names_are_refused() -> None:
    unsent(
        "model.layers.2.mlp.experts.0.up_proj.weight",
        (64, 128),
        r"layers\.2\.mlp\.experts\.0\.up_proj\.weight \[64, 128\] is not a tensor",
    )
    unsent("model.layers.0.mlp.experts.gate_up_proj", (3, 128, 128), r"experts\.gate_up_proj \[3, 128, 128\] is not")
    unsent("vision.layers.0.mlp.gate.weight", (3, 128), r"vision\.layers\.0\.mlp\.gate\.weight")


def test_a_name_that_may_mean_two_tensors_is_refused() -> None:
    reference = [*names_of(release("language_model.model.")), *names_of(release("model.language_model."))]
    unsent(
        "model.layers.0.mlp.gate.weight",
        (3, 128),
        r"may be any of .*layers\.0\.mlp\.gate\.weight",
        OnlineQuantizer(config(), reference),
    )


def test_a_shard_of_a_tensor_is_refused(releases: Callable[[str], Path], tmp_path: Path) -> None:
    quantize(releases("qwen3_moe"), tmp_path / "int4", QuantScheme(GROUP, "qmax7", QWEN))
    online = OnlineQuantizer(HfCheckpoint(tmp_path / "int4").config, tmp_path / "int4")
    unsent(
        "model.layers.0.mlp.experts.0.up_proj.weight",
        (48, 128),
        r"up_proj\.weight is \[48, 128\], the engine's checkpoint has it as \[96, 128\]",
        online,
    )
    unsent(
        "model.layers.0.self_attn.o_proj.weight",
        (128, 160),
        r"o_proj\.weight is \[128, 160\], the engine's checkpoint has it as \[128, 320\]",
        online,
    )


def test_broken_weights_are_named() -> None:
    tensors = release()
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][3, 5] = torch.nan
    with pytest.raises(CkptkitError, match=r"model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight holds NaN"):
        list(quantizer().stream(tensors.items()))


def test_a_tensor_that_comes_twice_is_refused() -> None:
    tensors = release()
    session = quantizer().begin()
    session.add(tensors.items())
    with pytest.raises(CkptkitError, match=r"model\.norm\.weight came twice"):
        session.add([("model.norm.weight", tensors["model.norm.weight"])])


def test_an_update_that_leaves_experts_out_is_refused() -> None:
    tensors = {name: tensor for name, tensor in release().items() if "layers.1.mlp.experts.0" not in name}
    session = quantizer().begin()
    session.add(tensors.items())
    with pytest.raises(
        CkptkitError, match=r"left out 3 packed weight\(s\).*: model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight"
    ):
        session.finish()


def test_an_update_that_leaves_a_sibling_out_is_refused() -> None:
    session = quantizer().begin()
    session.add((name, tensor) for name, tensor in release().items() if "layers.1.self_attn.kv_a" not in name)
    with pytest.raises(CkptkitError, match=r"joins with model\.layers\.1\.self_attn\.q_a_proj\.weight was not sent"):
        session.finish()


def test_a_finished_update_takes_no_more() -> None:
    session = quantizer().begin()
    session.add(release().items())
    assert session.finish() == []
    with pytest.raises(CkptkitError, match="this update is finished"):
        session.add(release().items())


@pytest.mark.parametrize(
    "content",
    [
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4"}},
        },
    ],
    ids=["all", "by layer"],
)
def test_nvfp4_is_refused_since_sglang_repacks_it(content: dict[str, Any]) -> None:
    refused(
        config() | {"quantization_config": content}, names_of(release()), "NVFP4 weights a second time", "fp8-block"
    )
