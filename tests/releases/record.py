"""A release as one JSON file in `records/`: its config.json, its tensors' names, shapes and dtypes, and their source.

Names are folded: `model.layers.{0..27}.mlp.{gate_proj,up_proj}.weight`, `{3..63/4}` for every fourth layer. A list of
config.json may be folded too: `{"names": [...]}`, or `{"repeat": [...], "times": 10}`.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"
# Bytes of an element, by safetensors' names of dtypes.
ELEMENT = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8}
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:/(\d+))?")


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self):
        return math.prod(self.shape) * ELEMENT[self.dtype]


@dataclass(frozen=True)
class Release:
    """What is published of a release.

    `known`: where the names come from. "index": the published index. "numbers": transformers' own class, saved under
    the names of the release, and the published numbers of tensors or bytes agree. "parameters": the same, and the hub's
    number of elements agrees. "class": transformers' class alone. `tensors`, `total_size`, `parameters`: the published
    numbers, None where unknown; `parameters` leaves scales out where `scales` is false. `index_size`: what the index
    says instead of `total_size`. `shards`: files, None where unknown. `first_shard`: the number of the first one.
    `findings`: what preflight and lint find for a reason that lies in the release, as "code severity" and "kind
    severity", with the reason under "why".
    """

    model: str
    known: str
    sources: Mapping[str, str]
    config: Mapping[str, Any]
    names: Mapping[str, Sequence[str]]
    tensors: int | None = None
    total_size: int | None = None
    parameters: int | None = None
    scales: bool = True
    index_size: int | None = None
    shards: int | None = None
    first_shard: int = 1
    findings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def tensors_in_order(self):
        found = []
        for kind, patterns in self.names.items():
            dtype, _, shape = kind.partition(" ")
            sizes = tuple(int(size) for size in shape.split("x")) if shape else ()
            found += [Tensor(name, dtype, sizes) for pattern in patterns for name in unfolded(pattern)]
        return sorted(found, key=lambda tensor: tensor.name)

    @cached_property
    def nbytes(self):
        return sum(tensor.nbytes for tensor in self.tensors_in_order)


def unfolded(pattern):
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [list(_choices(part)) if index % 2 else [part] for index, part in enumerate(parts)]
    return ("".join(choice) for choice in product(*choices))


def _choices(text):
    for item in text.split(","):
        if (found := _RANGE.fullmatch(item)) is None:
            yield item
        else:
            first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
            yield from map(str, range(first, last + 1, step))


def _unfolded_lists(value):
    if isinstance(value, list):
        return [_unfolded_lists(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"names"}:
        return [name for pattern in value["names"] for name in unfolded(pattern)]
    if value.keys() == {"repeat", "times"}:
        return value["repeat"] * value["times"]
    return {key: _unfolded_lists(item) for key, item in value.items()}


def load(model):
    content = json.loads((RECORDS / f"{model.replace('/', '--')}.json").read_text())
    config = _unfolded_lists(content.pop("config"))
    return Release(**content, config=config)


def models():
    return sorted(path.stem.replace("--", "/", 1) for path in RECORDS.glob("*.json"))


def one_of_each_type(models):
    """Of each `model_type` the one with the fewest layers."""
    configs = {model: load(model).config for model in models}
    layers = {model: one.get("text_config", one).get("num_hidden_layers", 99) for model, one in configs.items()}
    deepest_first = sorted(models, key=lambda model: -layers[model])
    return list({configs[model]["model_type"]: model for model in deepest_first}.values())
