"""Describes what an engine serves, by the names of its checkpoint.

It tells what is packed, which tensors go in one bucket, and what cannot be updated online.
"""

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
    """The parameters that a trainer may send; `N.weight` stands for the engine's `N.weight_packed`."""

    bucket: Mapping[str, str]  # parameter -> key of its bucket (for packed experts, the layer's `….experts`)
    sizes: Mapping[str, int]  # bucket key -> number of parameters
    packed: frozenset[str]  # parameters that are quantized
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of weight matrices, where known
    whole: bool = True  # every parameter is known, not only matrices
    namesakes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # name without its namespace -> full names

    def name(self, name: str, tensor: Tensor) -> str:
        """Returns the name in the checkpoint. Raises CkptkitError if none or several match, or if shapes differ."""
        known = name if name in self.bucket else self._translated(name, tensor)
        shape = self.shapes.get(known)
        if shape is not None and shape != tuple(tensor.shape):
            raise CkptkitError(
                f"{name} is {list(tensor.shape)}, the engine's checkpoint has it as {list(shape)}",
                "send whole tensors: gather the shards of all ranks first",
            )
        return known

    def _translated(self, name: str, tensor: Tensor) -> str:
        if not self.whole and not (name.endswith(".weight") and tensor.dim() > 1):
            return name
        found = self.namesakes.get(_bare(name), ()) if self.whole else ()
        if len(found) == 1:
            return found[0]
        if found:
            raise CkptkitError(
                f"{name} may be any of {summarize(found)} of the engine's checkpoint", "send it under its name there"
            )
        raise CkptkitError(
            f"{name} {list(tensor.shape)} is not a tensor of the engine's checkpoint, so SGLang would drop it silently",
            "send parameters under their names there, one tensor an expert"
            + ("" if self.whole else ", and give those names as `reference`"),
        )


def _bare(name: str) -> str:
    """Removes the namespace that trainers and releases put before `layers`, `embed_tokens`, `norm` and `lm_head`."""
    match = _NAMESPACE.match(name)
    return name[match.end() :] if match else name


def served(config: Mapping[str, Any], scheme: QuantScheme, reference: str | Path | Iterable[str] | None) -> Served:
    """Returns what an engine with this config serves. `reference`: its checkpoint's directory, or tensor names.

    With None the model's classes and `ignore` decide, and only matrices are known by name. Raises CkptkitError if
    nothing is packed, if names and `ignore` contradict each other, or if SGLang cannot update part of it online.
    """
    names, specs = names_of(reference)
    weights, whole = _weights(names, config)
    packed = frozenset(name for name, is_packed in weights.items() if is_packed)
    if not packed:
        raise CkptkitError(
            "the engine's checkpoint has no weight_packed",
            "give the INT4 checkpoint that the engine serves, not the BF16 one",
        )
    _check_reloadable(packed, scheme)
    holders = (config, config.get("text_config") or {})
    layers = next((int(holder["num_hidden_layers"]) for holder in holders if holder.get("num_hidden_layers")), 0)
    _check_layers(weights, scheme.ignore, layers)
    return served_of(weights, _shapes(specs, packed), whole=whole)


def served_in_fp8(reference: str | Path | Iterable[str] | None) -> Served:
    """What an engine serves from the FP8 checkpoint at `reference`: its directory, or its tensor names.

    Every tensor that has a `_scale_inv` there is quantized. Raises CkptkitError without a reference, and where that has
    no such tensor.
    """
    names, specs = names_of(reference)
    if names is None:
        raise CkptkitError(
            "which weights an engine has in FP8 is not known from its config alone",
            "give `reference`, the checkpoint that it serves, or the names of its tensors",
        )
    known = set(names)
    scales = {name + FP8_SCALE_INV for name in known} & known
    weights = {name: name + FP8_SCALE_INV in scales for name in names if name not in scales}
    if not any(weights.values()):
        raise CkptkitError(
            f"the engine's checkpoint has no tensor that ends in {FP8_SCALE_INV}",
            "give the FP8 checkpoint that the engine serves, not the BF16 one",
        )
    shapes = {name: specs[name].shape for name in weights if name in specs and len(specs[name].shape) > 1}
    return served_of(weights, shapes, together=False)


def served_of(
    weights: Mapping[str, bool], shapes: Mapping[str, tuple[int, ...]], *, whole: bool = True, together: bool = True
) -> Served:
    """Sorts parameters, given with whether each is quantized, into buckets.

    `shapes`: of matrices, where known. `whole`: these are all parameters. `together`: a layer's quantized experts are
    one bucket.
    """
    packed = frozenset(name for name, is_packed in weights.items() if is_packed)
    bucket = {name: _bucket_of(name, together and name in packed) for name in weights}
    namesakes: dict[str, list[str]] = {}
    for name in weights:
        namesakes.setdefault(_bare(name), []).append(name)
    return Served(
        bucket,
        Counter(bucket.values()),
        packed,
        shapes,
        whole,
        {bare: tuple(several) for bare, several in namesakes.items()},
    )


def names_of(reference: str | Path | Iterable[str] | None) -> tuple[Collection[str] | None, Mapping[str, TensorSpec]]:
    """The tensor names of a checkpoint, and the specs if no shard is missing: an index alone gives names only."""
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
    """Returns parameter -> whether it is packed, and whether these are all parameters."""
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
        raise CkptkitError(
            "SGLang cannot take INT4 Linear layers a second time, since it repacks them for Marlin "
            f"and keeps no way back: {summarize(sorted(linears))}",
            f"quantize the checkpoint that the engine serves again with {ignore_options(sorted(linears))}",
        )
    if not scheme.symmetric:
        raise CkptkitError(
            "SGLang reads zero points of routed experts in another layout than compressed-tensors writes",
            "quantize the checkpoint that the engine serves again with symmetric scales",
        )


def _check_layers(weights: Mapping[str, bool], ignore: Collection[str], layers: int) -> None:
    """Raises CkptkitError if a layer's routed experts are only partly packed, or contradict `ignore`."""
    seen: dict[str, dict[bool, list[str]]] = {}
    for name, is_packed in weights.items():
        if match := _EXPERT.fullmatch(_module(name)):
            seen.setdefault(match["experts"], {}).setdefault(is_packed, []).append(name)
    for experts, both in seen.items():
        if len(both) > 1:
            raise CkptkitError(
                f"{experts} is packed in part, and SGLang looks at the first expert only: "
                f"{summarize(both[False])} would be dropped",
                f"quantize the checkpoint again with --ignore '{entry_for(_module(both[False][0]))}', "
                "or with no entry for these experts",
            )
        number = _LAYER.search(experts)
        if number is None or int(number[1]) < layers:  # readers skip draft layers, whatever `ignore` says
            ((is_packed, names),) = both.items()
            _check_ignore([name for name in names if name.startswith(f"{experts}.0.")], is_packed, ignore)


def _check_ignore(names: Iterable[str], is_packed: bool, ignore: Collection[str]) -> None:
    """Raises CkptkitError unless `ignore` covers none of these if they are packed, and all if they are not."""
    for name in names:
        covering = [pattern for pattern in ignore if ignored([_module(name)], [pattern])]
        if is_packed == bool(covering):
            reading = f"covers it with {covering[0]!r}" if covering else "does not cover it"
            raise CkptkitError(
                f"{name} is {'' if is_packed else 'not '}packed in the engine's checkpoint, "
                f"but `ignore` in its config {reading}",
                "config and weights belong to different checkpoints; `ckptkit lint` names the entries",
            )


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
