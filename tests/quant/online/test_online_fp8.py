"""A trainer's tensors for an engine in FP8: the bytes of the file that `ckptkit quantize` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import models
from support.engine_models import saved

from ckptkit.app.api import quantize
from ckptkit.core.errors import CkptkitError
from quant.online.quantizer import OnlineQuantizer
from quant.schemes.floats import FloatScheme

CONFIG: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
NAME = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("model", "scheme"),
    [("mla", FloatScheme("fp8-block")), ("dense", FloatScheme("fp8-block", "deepgemm")), ("moe", FloatScheme("mxfp8"))],
    ids=lambda value: value if isinstance(value, str) else f"{value.name} {value.formula}",
)
def test_an_update_has_the_bytes_of_the_file(model: str, scheme: FloatScheme, tmp_path: Path) -> None:
    source = saved(model, tmp_path)
    quantize(source, tmp_path / "served", scheme)
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    online = OnlineQuantizer(config, tmp_path / "served")
    found = {name: tensor for bucket in online.stream(models.tensors(source).items()) for name, tensor in bucket}
    wanted = models.tensors(tmp_path / "served")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_scale_follows_its_weight_and_what_is_not_fp8_passes() -> None:
    online = OnlineQuantizer(CONFIG, [NAME, f"{NAME}_scale_inv", "lm_head.weight"])
    weight, head = torch.ones(130, 256).bfloat16(), torch.ones(8, 256).bfloat16()
    bucket = online.quantize([("lm_head.weight", head), (NAME, weight)])
    assert [(name, tuple(tensor.shape)) for name, tensor in bucket] == [
        ("lm_head.weight", (8, 256)),
        (NAME, (130, 256)),
        (f"{NAME}_scale_inv", (2, 2)),
    ]
    assert bucket[0][1].data_ptr() == head.data_ptr()


def test_a_part_of_the_weights_may_be_sent_but_no_half_of_what_an_engine_joins() -> None:
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
    with pytest.raises(CkptkitError, match="what SGLang joins with .*q_a_proj.weight was not sent"):
        torn.finish()


def test_a_tensor_that_the_engine_lacks_is_refused() -> None:
    online = OnlineQuantizer(CONFIG, [NAME, f"{NAME}_scale_inv"])
    with pytest.raises(CkptkitError, match="is not a tensor of the engine's checkpoint"):
        online.quantize([("model.layers.9.self_attn.o_proj.weight", torch.ones(128, 128))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [64, 64]}, r"fp8 with weight_block_size \[64, 64\] are not sent"),
        ({"weight_block_size": None}, "fp8 with weight_block_size None are not sent"),
        ({"activation_scheme": "static"}, "fp8 with activation_scheme 'static' are not sent"),
    ],
)
def test_what_trainers_do_not_send_is_refused(change: dict[str, Any], message: str) -> None:
    config = {"quantization_config": CONFIG["quantization_config"] | change}
    with pytest.raises(CkptkitError, match=message):
        OnlineQuantizer(config, [NAME, f"{NAME}_scale_inv"])


def test_a_reference_is_needed_and_must_be_in_fp8() -> None:
    with pytest.raises(CkptkitError, match="not known from its config alone"):
        OnlineQuantizer(CONFIG)
    with pytest.raises(CkptkitError, match="no tensor that ends in _scale_inv"):
        OnlineQuantizer(CONFIG, [NAME])
    with pytest.raises(CkptkitError, match="a grid is of INT4"):
        OnlineQuantizer(CONFIG, [NAME, f"{NAME}_scale_inv"], grid="qmax7")
