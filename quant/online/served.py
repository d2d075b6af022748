"""Describes the tensors of an engine by the names of its checkpoint: which are packed, and which share a bucket."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.converters.hf_names import GATE_UP, LATENT_DOWN, QKV
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.formats.hf.reader import HfCheckpoint, shard_names
from ckptkit.quant.formats.packing import CODES_PER_WORD
from ckptkit.quant.formats.part_names import FP8_SCALE_INV, INT4_ENDINGS, PACKED, packed_in, unpacked_name
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.ignore.matching import ignored
from ckptkit.quant.ignore.names import entry_for, ignore_options

if TYPE_CHECKING:
    from torch import Tensor

_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.[^.]+")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_NAMESPACE = re.compile(r"(model\.language_model|language_model\.model|language_model|model)\.")
# DeepSeek's loader in SGLang 0.5.16 joins q_a_proj and kv_a_proj_with_mqa; it loses one if the other is not in the same
# call of load_weights. The others are loaded one by one; keeping them together means no batch holds half a layer.
_SIBLINGS = (LATENT_DOWN, QKV, GATE_UP)


@dataclass(frozen=True)
class Served:
    """The parameters that a trainer may send; `N.weight` means the engine's `N.weight_packed`."""

    bucket: Mapping[str, str]  # parameter -> key of its bucket (for packed experts, the layer's `….experts`)
    sizes: Mapping[str, int]  # bucket key -> number of parameters
    packed: frozenset[str]  # parameters that are quantized
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of weight matrices, where known
    whole: bool = True  # every parameter is known, not only matrices
    namesakes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # name without its namespace -> full names

    def name(self, name: str, tensor: Tensor) -> str:
        """Returns the name in the checkpoint. Raises CkptkitError if none or several match, or if shapes differ."""
        known = name if name in self.bucket else self._translate(name, tensor)
        shape = self.shapes.get(known)
        if shape is not None and shape != tuple(tensor.shape):
            message = f"{name} is {list(tensor.shape)} but {list(shape)} in the engine's checkpoint"
            raise CkptkitError(message, "send complete tensors: gather the shards of all ranks first")
        return known

    def _translate(self, name: str, tensor: Tensor) -> str:
        if not self.whole and not (name.endswith(".weight") and tensor.dim() > 1):
            return name
        matches = self.namesakes.get(_bare(name), ()) if self.whole else ()
        if len(matches) == 1:
            return matches[0]
        if matches:
            message = f"{name} matches several tensors of the engine's checkpoint: {summarize(matches)}"
            raise CkptkitError(message, "send it under its name in that checkpoint")
        message = f"{name} {list(tensor.shape)} is not a tensor of the engine's checkpoint"
        hint = "send parameters under the names of that checkpoint, one tensor per expert"
        hint += "" if self.whole else ", and pass these names as `reference`"
        raise CkptkitError(f"{message}, so SGLang would drop it silently", hint)


def _bare(name: str) -> str:
    """Removes the namespace that trainers and releases put before `layers`, `embed_tokens`, `norm` and `lm_head`."""
    match = _NAMESPACE.match(name)
    return name[match.end() :] if match else name


def served(config: Mapping[str, Any], scheme: QuantScheme, reference: str | Path | Iterable[str] | None) -> Served:
    """Returns the tensors of an engine with this config. `reference`: its checkpoint's directory, or tensor names.

    With None the model's classes and `ignore` decide, and only matrices are known by name. Raises CkptkitError if
    nothing is packed, if names and `ignore` contradict each other, or if SGLang cannot update part of it online.
    """
    names, specs = names_of(reference)
    weights, whole = _weights(names, config)
    packed = frozenset(name for name, is_packed in weights.items() if is_packed)
    if not packed:
        hint = "pass the INT4 checkpoint that the engine serves, not the BF16 one"
        raise CkptkitError("the engine's checkpoint has no weight_packed", hint)
    _check_reloadable(packed, scheme)
    holders = (config, config.get("text_config") or {})
    layers = next((int(holder["num_hidden_layers"]) for holder in holders if holder.get("num_hidden_layers")), 0)
    _check_layers(weights, scheme.ignore, layers)
    return _sort(weights, _shapes(specs, packed), whole=whole)


def served_in_fp8(reference: str | Path | Iterable[str] | None) -> Served:
    """Returns the tensors of an engine with the FP8 checkpoint at `reference`. Raises CkptkitError without scales."""
    names, specs = names_of(reference)
    if names is None:
        message = "the config of an engine does not determine which weights are FP8"
        raise CkptkitError(message, "pass `reference`: the checkpoint that the engine serves, or its tensor names")
    known = set(names)
    scales = {name + FP8_SCALE_INV for name in known} & known
    weights = {name: name + FP8_SCALE_INV in scales for name in names if name not in scales}
    if not any(weights.values()):
        message = f"the engine's checkpoint has no tensor that ends in {FP8_SCALE_INV}"
        raise CkptkitError(message, "pass the FP8 checkpoint that the engine serves, not the BF16 one")
    shapes = {name: specs[name].shape for name in weights if name in specs and len(specs[name].shape) > 1}
    return _sort(weights, shapes, joins_experts=False)


def _sort(
    weights: Mapping[str, bool],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    whole: bool = True,
    joins_experts: bool = True,
) -> Served:
    """Sorts parameters, given with whether each is quantized, into buckets."""
    packed = frozenset(name for name, is_packed in weights.items() if is_packed)
    bucket = {name: _bucket_of(name, joins_experts and name in packed) for name in weights}
    namesakes: dict[str, tuple[str, ...]] = {}
    for name in weights:
        namesakes[_bare(name)] = (*namesakes.get(_bare(name), ()), name)
    return Served(bucket, Counter(bucket.values()), packed, shapes, whole, namesakes)


def names_of(reference: str | Path | Iterable[str] | None) -> tuple[Collection[str] | None, Mapping[str, TensorSpec]]:
    """The tensor names of a checkpoint, and the specs if no shard is missing: without shards the index has names."""
    if reference is None:
        return None, {}
    if not isinstance(reference, str | Path):
        return list(reference), {}
    root = Path(reference)
    index = shard_names(root)
    if index is not None and not all((root / file).exists() for file in set(index.values())):
        return list(index), {}
    specs = HfCheckpoint(root).specs
    return list(specs), specs


def _weights(names: Collection[str] | None, config: Mapping[str, Any]) -> tuple[dict[str, bool], bool]:
    """Returns whether each parameter is packed, and whether these are all parameters."""
    if names is not None:
        modules = set(packed_in(names))
        parts = {module + part for module in modules for part in INT4_ENDINGS if part != PACKED}
        return {unpacked_name(name): name.endswith(PACKED) for name in names if name not in parts}, True
    # Imported here because they import transformers, which takes seconds.
    from ckptkit.quant.ignore.select import packed_modules
    from ckptkit.quant.ignore.tree import class_tree

    tree, packed = class_tree(config), packed_modules((), config)
    return {f"{module}.weight": module in packed for module in (*sorted(tree.linears), *tree.others)}, False


def _check_reloadable(packed: Iterable[str], scheme: QuantScheme) -> None:
    linears = [name for name in packed if not _EXPERT.fullmatch(_module(name))]
    if linears:
        message = "SGLang cannot load INT4 Linear layers a second time, since it repacks them for Marlin "
        hint = f"quantize the engine's checkpoint again with {ignore_options(sorted(linears))}"
        raise CkptkitError(f"{message}and cannot undo that: {summarize(sorted(linears))}", hint)
    if not scheme.symmetric:
        message = "SGLang reads zero points of routed experts in another layout than compressed-tensors writes"
        raise CkptkitError(message, "quantize the engine's checkpoint again with symmetric scales")


def _check_layers(weights: Mapping[str, bool], ignore: Collection[str], layers: int) -> None:
    """Raises CkptkitError if a layer's routed experts are only partly packed, or contradict `ignore`."""
    seen: dict[str, dict[bool, list[str]]] = {}
    for name, is_packed in weights.items():
        if match := _EXPERT.fullmatch(_module(name)):
            seen.setdefault(match["experts"], {}).setdefault(is_packed, []).append(name)
    for experts, both in seen.items():
        if len(both) > 1:
            message = f"{experts} is partly packed, but SGLang checks only the first expert: "
            hint = f"quantize the checkpoint again with --ignore '{entry_for(_module(both[False][0]))}', "
            hint += "or with no entry for these experts"
            raise CkptkitError(f"{message}{summarize(both[False])} would be dropped", hint)
        number = _LAYER.search(experts)
        if number is None or int(number[1]) < layers:  # readers skip draft layers, regardless of `ignore`
            ((is_packed, names),) = both.items()
            _check_ignore([name for name in names if name.startswith(f"{experts}.0.")], is_packed, ignore)


def _check_ignore(names: Iterable[str], is_packed: bool, ignore: Collection[str]) -> None:
    """Raises CkptkitError unless `ignore` covers none of these if they are packed, and all if they are not."""
    for name in names:
        covering = [pattern for pattern in ignore if ignored([_module(name)], [pattern])]
        if is_packed == bool(covering):
            reading = f"covers it with {covering[0]!r}" if covering else "does not cover it"
            state = "packed" if is_packed else "not packed"
            message = f"{name} is {state} in the engine's checkpoint, but `ignore` in its config {reading}"
            hint = "run `ckptkit lint`, which lists the entries: config and weights differ"
            raise CkptkitError(message, hint)


def _bucket_of(name: str, is_packed: bool) -> str:
    module, _, leaf = name.rpartition(".")
    if is_packed and (match := _EXPERT.fullmatch(module)):
        return match["experts"]
    parent, _, projection = module.rpartition(".")
    for family in _SIBLINGS:
        if projection in family:
            return f"{parent}.{'+'.join(family)}.{leaf}"
    return name


def _shapes(specs: Mapping[str, TensorSpec], packed: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Returns the unpacked shape of every weight in `specs` with two or more axes."""
    plain = {name: spec.shape for name, spec in specs.items() if len(spec.shape) > 1 and name.endswith(".weight")}
    words = {name: specs[_module(name) + PACKED].shape for name in packed if specs}
    return plain | {name: (rows, count * CODES_PER_WORD) for name, (rows, count) in words.items()}


def _module(name: str) -> str:
    return name.removesuffix(".weight")
