"""What other libraries raise becomes one readable line: real exceptions, and expectations written by hand."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.core.errors import words_of
from ckptkit.core.printable import one_line, printable


def error_of(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call()
    return caught.value


def test_refusal_of_pydantic_names_every_field_and_its_value() -> None:
    from compressed_tensors.quantization import QuantizationConfig

    weights = {"num_bits": "x", "type": "int", "strategy": "group", "group_size": 32, "actorder": "sideways", "foo": 3}
    content = {"format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    error = error_of(lambda: QuantizationConfig.model_validate(content))
    assert "function-after" in str(error)
    words = words_of(error)
    assert re.match(r"\d+ validation errors for QuantizationConfig: config_groups\.group_0\.weights\.", words)
    assert "config_groups.group_0.weights.num_bits: Input should be a valid integer" in words
    assert "; config_groups.group_0.weights.foo: Extra inputs are not permitted (it is 3)" in words
    assert "(it is 'sideways')" in words
    assert printable(words) == words
    assert not any(part in words for part in ("errors.pydantic.dev", "function-after", "[type="))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stack_inside_a_message_is_left_out(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    error = error_of(lambda: dcp.load({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True))
    assert "site-packages" in str(error)
    assert words_of(error) == "CheckpointException ranks:dict_keys([0]); AssertionError: metadata is None"


def test_config_that_transformers_refuses(tmp_path: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": "many"}))
    assert words_of(error_of(lambda: AutoConfig.from_pretrained(tmp_path))) == (
        "Validation error for field 'hidden_size': TypeError: Field 'hidden_size' expected int, got str (value: 'many')"
    )


def test_class_stands_before_a_key_and_instead_of_nothing() -> None:
    assert words_of(error_of(lambda: {}["layers.0"])) == "KeyError: 'layers.0'"
    assert words_of(AssertionError()) == "AssertionError"
    assert words_of(ValueError("no")) == "no"


LINES = {
    'File "/opt/x/lib/python3.11/site-packages/sglang/srt/a.py", line 3': 'File "sglang/srt/a.py", line 3',
    "(from /usr/lib/python3/dist-packages/numpy/b.so)": "(from numpy/b.so)",
    "at /usr/lib/python3.12/json/decoder.py:4": "at json/decoder.py:4",
    "/data/models/qwen/config.json is not there": "/data/models/qwen/config.json is not there",
    "first\nsecond": "first; second",
    "first:\n\tsecond\n\tthird": "first: second; third",
    "one \nsentence.\n\nAnother": "one sentence. Another",
    "\x1b[31mred\x1b[0m\nblack": "red; black",
    "": "",
    "\n \n": "",
}


def test_text_on_one_line() -> None:
    assert {text: one_line(text) for text in LINES} == LINES


def test_long_text_takes_no_time() -> None:
    for part in ("a", "/", "a/", "function-a[", "[", " [type=a, input_value=", "\n", ":\n "):
        started = time.monotonic()
        one_line(part * 1_000_000)
        assert time.monotonic() - started < 5, part
