"""Configs of compressed-tensors that are read without it, against what it makes of them itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptkit.core.errors import CkptkitError
from quant.formats.compressed import judged_format, stated_scheme, usual_int4
from quant.formats.scheme import QuantScheme, quantization_config, read_scheme

RECORDS = Path(__file__).parents[2] / "releases" / "records"
# By key of `weights`, what may stand there; every one is tried in a config that is otherwise usual.
ODD: dict[str, list[Any]] = {
    "type": ["float", "INT", None, 4],
    "num_bits": [8, "4", None, 3],
    "symmetric": [False, None, 1, "true"],
    "strategy": ["channel", "tensor", "block", "token", "GROUP", None],
    "group_size": [None, 0, -1, -2, 32.0, "32", 64, 7],
    "block_structure": [[4, 4], "2x4"],
    "dynamic": [True, "local", 0, None],
    "actorder": ["weight", "static", False, 0, True, "group"],
    "observer": [None, "mse", "minmax", 7],
    "observer_kwargs": [None, {}, [], {"grid": "qmax7"}],
    "scale_dtype": [None, "torch.bfloat16", "bfloat16", "torch.float99"],
    "zp_dtype": ["torch.int8", "torch.uint4", 8],
    "unknown": [None, 1],
}
# The same of the group and of the whole config.
ODD_GROUP: dict[str, list[Any]] = {
    "targets": [[], ["re:.*"], None, "Linear", [1]],
    "input_activations": [{"num_bits": 8}, {}, {"num_bits": 8, "dynamic": True, "strategy": "token"}],
    "output_activations": [{"num_bits": 8}],
    "format": [None, "float-quantized", "no-such"],
    "unknown": [None, 1],
}
ODD_TOP: dict[str, list[Any]] = {
    "ignore": [None, [], ["lm_head", 1], "lm_head"],
    "format": ["float-quantized", "no-such", None],
    "kv_cache_scheme": [{"num_bits": 8}],
    "quantization_status": ["frozen", "no-such", None],
    "config_groups": [{}, None, [], {"W4A16": ["Linear"]}],
    "unknown": [1],
}


@pytest.fixture(params=["group", "channel", "asymmetric"])
def usual(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What ckptkit itself writes."""
    size = None if request.param == "channel" else 32
    return quantization_config(QuantScheme(size, "minmax", ("lm_head",), request.param != "asymmetric"))


def judged(content: dict[str, Any]) -> object:
    """The format that compressed-tensors reads, or None where it refuses."""
    try:
        return judged_format(content)
    except CkptkitError:
        return None


def test_config_that_ckptkit_writes_is_read_without_compressed_tensors(usual: dict[str, Any]) -> None:
    assert usual_int4(usual) == judged_format(usual) is not None


def test_configs_of_releases_are_read_as_compressed_tensors_reads_them() -> None:
    configs = [json.loads(file.read_text())["config"] for file in RECORDS.glob("*.json")]
    found = [
        config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
        for config in configs
    ]
    packed = [content for content in found if content and content.get("quant_method") == "compressed-tensors"]
    packed = [content for content in packed if content["format"] != "mxfp4-pack-quantized"]  # that is no INT4
    assert len(packed) > 3
    for content in packed:
        content["ignore"] = ["lm_head"]  # records have it folded
        assert usual_int4(content) == judged_format(content)


def odd_configs(usual: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """A key, its value, and the usual config with it."""
    places: list[tuple[dict[str, list[Any]], tuple[str, ...]]] = [
        (ODD, ("config_groups", "group_0", "weights")),
        (ODD_GROUP, ("config_groups", "group_0")),
        (ODD_TOP, ()),
    ]
    for odd, path in places:
        for key, value in [(key, value) for key, values in odd.items() for value in values]:
            content = copy.deepcopy(usual)
            holder = content
            for name in path:
                holder = holder[name]
            holder[key] = value
            yield key, value, content


def test_odd_config_is_left_to_compressed_tensors_or_read_alike(usual: dict[str, Any]) -> None:
    read = [(found, one) for one in odd_configs(usual) if (found := usual_int4(one[2])) is not None]
    for found, (key, value, content) in read:
        assert found == judged(content), (key, value)
    assert len(read) > 3


def outcome(read: Callable[[dict[str, Any]], QuantScheme], content: dict[str, Any]) -> object:
    """The scheme, or why there is none."""
    try:
        return read({"quantization_config": content})
    except CkptkitError as error:
        return str(error)


# compressed-tensors 0.18 says so of one of the odd configs.
@pytest.mark.filterwarnings("ignore:No observer is used for dynamic quant:UserWarning")
def test_stated_scheme_is_the_one_that_compressed_tensors_reads(usual: dict[str, Any]) -> None:
    usual |= {"quant_method": "compressed-tensors"}
    assert isinstance(outcome(stated_scheme, usual), QuantScheme)
    for key, value, content in [("", None, usual), *odd_configs(usual)]:
        assert outcome(stated_scheme, content) == outcome(read_scheme, content), (key, value)
