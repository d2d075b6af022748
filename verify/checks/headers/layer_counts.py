"""For CK104: counts the tensors of each layer, and without a config finds layers that lack some."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptkit.core.specs import TensorSpec, ranges
from converters.config.dims import ModelDims
from converters.planner import dims_of
from verify.evidence.folding import LAYER, MTP_LAYER
from verify.issue import Issue

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
# The parts of a quantized weight: some layers may be left unquantized.
_PACKED = re.compile(r"\.weight_\w+$")


def layer_table(kinds: Iterable[Sequence[str]], config: dict[str, object] | None) -> list[str]:
    """`dense layers {0..1}: 14 tensors each`, a line for all layers of one kind and count.

    `kinds` are names that differ in numbers only, together.
    """
    dims = dims_of(config) if config else None
    counts: Counter[tuple[bool, int]] = Counter()
    for names in kinds:
        for mtp, pattern in ((False, LAYER), (True, MTP_LAYER)):
            if match := pattern.match(names[0]):
                counts.update({(mtp, int(layer)): count for layer, count in _layers(names, match.start(1)).items()})
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for (mtp, layer), count in counts.items():
        groups["MTP layers" if mtp else _kind_of_layer(layer, dims), count].append(layer)
    in_order = sorted(groups.items(), key=lambda item: (item[0][0] == "MTP layers", item[1]))
    return [f"{kind} {ranges(layers)}: {count} tensors each" for (kind, count), layers in in_order]


def _layers(names: Iterable[str], start: int) -> Counter[str]:
    """How many names have each layer number. They differ in numbers only, so it begins at the same place in all."""
    return Counter([name[start : name.index(".", start)] for name in names])


def _kind_of_layer(layer: int, dims: ModelDims | None) -> str:
    if dims is None:
        return "layers"
    if layer >= dims.layers:
        return "MTP layers" if layer < dims.layers + dims.mtp_layers else "layers beyond the config"
    return "MoE layers" if layer in dims.moe else "dense layers"


def uneven(specs: Mapping[str, TensorSpec], file: str) -> Iterator[Issue]:
    """Without a usable config: layers and experts that lack what others of their kind have."""
    yield from _uneven_layers(specs, file)
    yield from _uneven_experts(specs, file)


def _uneven_experts(names: Iterable[str], file: str) -> Iterator[Issue]:
    """Experts that lack in every layer what most of them have: the layers alone would agree on that."""
    having: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        if match := _EXPERT.fullmatch(_PACKED.sub(".weight", name)):
            having[match[3]][int(match[2])].add(match[1])
    everyone = {expert for experts in having.values() for expert in experts}
    for part, experts in having.items():
        if missing := everyone - experts.keys():
            yield Issue(
                "there, as in the other experts",
                "missing",
                "convert or download it again",
                names=[f"experts.{expert}.{part}" for expert in sorted(missing)],
                file=file,
            )


def _uneven_layers(specs: Iterable[str], file: str) -> Iterator[Issue]:
    """Without a usable config: a layer that is as several others are, less some tensors.

    What two layers or more have in common is a kind of layer: models mix full and linear attention, dense layers and
    experts, and some (Gemma 4) use keys as values, or those of an earlier layer.
    """
    parts: dict[int, set[str]] = defaultdict(set)
    for name in specs:
        if match := LAYER.match(name):
            parts[int(match[1])].add(_PACKED.sub(".weight", name[match.end() :]))
    counts = Counter(map(frozenset, parts.values()))
    for layer, names in parts.items():
        fuller = [kind for kind, count in counts.items() if count > 1 and names < kind]
        if counts[frozenset(names)] > 1 or not fuller:
            continue
        yield Issue(
            "there, as in the other layers of this kind",
            "missing",
            "convert or download it again",
            names=[f"layers.{layer}.{name}" for name in sorted(min(fuller, key=len) - names)],
            file=file,
        )
