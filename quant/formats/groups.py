"""Reads the config_groups of a compressed-tensors config: their modules, and the parts that readers refuse.

Several groups may quantize a model: INT4 and FP8, or INT4 in several group sizes. Imports no compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ckptkit.core.errors import CkptkitError
from ckptkit.core.installation import package_release
from ckptkit.core.printable import shortened
from ckptkit.formats.hf.side_files import quantization_of
from ckptkit.quant.formats.scheme import FORMAT
from ckptkit.quant.ignore.readers import BY_CLASS, SGLANG
from ckptkit.quant.patterns import REGEX, matcher

# A group stores its modules as packed integers, in another format, or unquantized.
Kind = Literal["packs", "other", "keeps"]
# Widths that every engine loads from packed words. Source: `WNA16_SUPPORTED_BITS` of SGLang 0.5.16; vLLM has more.
PACKED_BITS = (4, 8)
_REORDERED = ("group", "dynamic", True)
_REFUSES_REORDERED = (0, 19)  # of compressed-tensors
_IN_ORDER = ("weight", "static")
_PLAIN = (None, "dense", "fakequant")  # formats with unquantized weights
_IN_WEIGHTS = ("weight_input", "weight_output")  # locations of transforms that are part of the stored weights
# Models without a class in these releases, by `model_type`. SGLang runs them with transformers' modules, and rewrites
# `targets` and `ignore` as names of weights: "Linear" becomes "model.Linear". Source: SGLang's `ModelRegistry` and
# `TransformersBase.hf_to_sglang_mapper`, run.
RUN_BY_TRANSFORMERS = {"seed_oss": "SeedOssForCausalLM", "gemma4_unified_text": "Gemma4UnifiedForCausalLM"}


@dataclass(frozen=True)
class Group:
    """One config group: its `targets` (module names, `re:` patterns, classes) and its QuantizationArgs."""

    targets: tuple[str, ...]
    weights: Mapping[str, Any]
    activations: bool
    format: object = None  # None: that of the config

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.targets)

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(target for target in dict.fromkeys(self.targets) if target.startswith("re:"))

    def naming(self, module: str) -> list[str]:
        """The targets that name a module itself, in their order."""
        patterns = [target for target in self._patterns if matcher(target)(module)]
        return sorted([*patterns, module], key=self.targets.index) if module in self.names else patterns

    @property
    def kind(self) -> Kind:
        """Whether its modules are packed integers with plain activations (W4A16, W8A16)."""
        if not self.weights:
            return "keeps"
        is_plain = self.weights.get("type", "int") == "int" and not self.activations
        return "packs" if is_plain and self.weights.get("num_bits") in PACKED_BITS else "other"


@dataclass(frozen=True)
class Target:
    """One entry of `targets`, and the kind of its group."""

    pattern: str
    kind: Kind
    group: int = 0  # the number of its group


LINEAR = (Target("Linear", "packs"),)


@dataclass(frozen=True)
class Refusal:
    """A part of a quantization_config that some readers refuse, and the next move."""

    readers: tuple[str, ...]
    what: str
    hint: str


def groups_of(config: Mapping[str, Any]) -> tuple[Group, ...]:
    """The config groups of a config.json in order. Raises CkptkitError unless compressed-tensors could write them."""
    content = quantization_of(config)
    groups = content.get("config_groups") if isinstance(content, Mapping) else None
    if not isinstance(groups, Mapping) or not all(
        isinstance(group, Mapping)
        and isinstance(group.get("targets"), list)
        and isinstance(group.get("weights") or {}, Mapping)
        for group in groups.values()
    ):
        message = f"config.json: config_groups are not valid for compressed-tensors: {shortened(groups)}"
        raise CkptkitError(message, "restore config.json from the release")
    return tuple(
        Group(
            tuple(map(str, group["targets"])),
            group.get("weights") or {},
            bool(group.get("input_activations") or group.get("output_activations")),
            group.get("format"),
        )
        for group in groups.values()
    )


def is_cache_calibrated(content: Any) -> bool:
    """Whether a quantization_config is compressed-tensors' with stored scales of a cache of keys and values."""
    if not isinstance(content, Mapping) or content.get("quant_method") != "compressed-tensors":
        return False
    scheme = content.get("kv_cache_scheme")
    return isinstance(scheme, Mapping) and scheme.get("dynamic") is not True


def targets_of(groups: Sequence[Group]) -> tuple[Target, ...]:
    """The targets of all groups in the order of engines; of groups with the same target the last counts."""
    pairs = [
        (target, Target(target, group.kind, index)) for index, group in enumerate(groups) for target in group.targets
    ]
    return tuple(dict(pairs).values())


def by_priority(targets: Iterable[Target]) -> list[Target]:
    """The targets as compressed-tensors `match_targets` (`utils/match.py`) sorts them: names before expressions."""
    return sorted(targets, key=lambda target: _priority(target.pattern))


def _priority(pattern: str) -> tuple[bool, str]:
    return REGEX in pattern, pattern


def group_of(groups: Sequence[Group], module: str) -> Group | None:
    """The group that quantizes a Linear module in compressed-tensors: its name counts before its class."""
    named = {target for group in groups for target in group.naming(module)}
    order = sorted(named, key=_priority) or ("Linear", "Module")
    return next((group for target in order for group in reversed(groups) if target in group.names), None)


def find_refusals(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yields the parts of a valid config that readers refuse or ignore. Raises CkptkitError as `groups_of`.

    Source: runs of SGLang 0.5.16 (`tests/verify/witnesses/test_sglang_groups.py`), of transformers 5.12.1
    (`tests/verify/checks/test_transformers_configs.py`) and of compressed-tensors 0.15.0.1 to 0.20.0,
    `QuantizationArgs.validate_actorder`; refusals of compressed-tensors depend on the installed release.
    """
    groups, content = groups_of(config), quantization_of(config)
    packed = [group.weights for group in groups if group.kind == "packs"]
    form = content.get("format")
    if _rewritten(config):
        yield Refusal(
            SGLANG,
            f"SGLang has no class for {config.get('model_type')}, so it runs transformers' modules and looks for the "
            'target "model.Linear" instead of "Linear"',
            "serve the model with vLLM (--reader vllm), or pass --scheme fp8-block with another --rounding than "
            "compressed-tensors",
        )
    yield from _not_compressed(content, groups)
    yield from _ignored(content)
    yield from find_rounded_activations(content)
    if packed and isinstance(form, str) and form != FORMAT:
        yield Refusal(
            SGLANG,
            f"format is {form!r}, but SGLang loads INT4 weights only with format {FORMAT!r}",
            f"set `format` to {FORMAT!r} if weight_packed, weight_scale and weight_shape are stored; config groups of "
            "other formats can have a `format` of their own",
        )
    if strategies := [name for name in map(_strategy, packed) if name not in ("group", "channel")]:
        yield Refusal(
            SGLANG,
            f"strategy is {strategies[0]!r}, for which SGLang has no INT4 scheme",
            "quantize with groups of 32, 64 or 128 inputs, or with one scale per row (strategy 'channel')",
        )
    reordered = any(weights.get("actorder") in _REORDERED for weights in packed)
    if reordered and package_release("compressed-tensors") >= _REFUSES_REORDERED:
        yield Refusal(
            (*BY_CLASS, *SGLANG),
            "actorder is 'group' (or its alias 'dynamic'), but compressed-tensors from 0.19 on refuses it, also in "
            "engines",
            "quantize with actorder 'weight' or null, or use compressed-tensors up to 0.18",
        )
    if any(weights.get("actorder") in _IN_ORDER and _strategy(weights) == "channel" for weights in packed):
        yield Refusal(
            ("vLLM 0.26",),  # the nearest reader
            "actorder is set with one scale per row, which compressed-tensors up to 0.15 (vLLM 0.19 to 0.22) refuses",
            "set `actorder` to null: with one scale per row it has no effect",
        )


def _not_compressed(content: Mapping[str, Any], groups: Sequence[Group]) -> Iterator[Refusal]:
    """Weights that transformers does not decompress, but uses codes or random numbers; engines read no status."""
    status, form = content.get("quantization_status", "initialized"), content.get("format")
    if status != "compressed" and form not in _PLAIN and any(group.weights for group in groups):
        is_there = "quantization_status" in content
        actual = f"is {status!r}" if is_there else "is missing, which compressed-tensors treats as 'initialized'"
        yield Refusal(
            BY_CLASS,
            f"quantization_status {actual}, but format is {form!r}: transformers decompresses no weight and computes "
            "with codes or random numbers",
            "set `quantization_status` to 'compressed'",
        )
    for group in groups:
        if group.kind == "packs" and group.format not in (None, FORMAT):
            yield Refusal(
                BY_CLASS,
                f"format of a config group is {group.format!r}, but its weights are packed integers: transformers "
                "decompresses them by the format of the group",
                f"set `format` of the group to {FORMAT!r} or null",
            )
        if group.weights and (classes := [one for one in group.targets if one.endswith("Attention")]):
            yield Refusal(
                BY_CLASS,
                f"`targets` has the class {shortened(classes[0])}, in which compressed-tensors quantizes no weights",
                "remove it from `targets`: its projections belong to Linear",
            )


def _ignored(content: Mapping[str, Any]) -> Iterator[Refusal]:
    """Ignored settings that change the meaning of weights. Source: compressed-tensors `TransformLocation.is_online`."""
    if locations := list(_online_transforms(content.get("transform_config"))):
        yield Refusal(
            ("transformers", "SGLang 0.5.16"),
            f"transform_config has transforms of {' and '.join(dict.fromkeys(locations))}, which transformers 5.12 and "
            "SGLang 0.5.16 do not apply",
            "serve it with an engine that applies transforms, or quantize again without transforms; if the weights "
            "were not transformed, remove transform_config",
        )
    sparsity = content.get("sparsity_config")
    form = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if form not in (None, "dense"):
        yield Refusal(
            (*BY_CLASS, "SGLang 0.5.16"),
            f"sparsity_config has format {form!r}, but compressed-tensors from 0.15 on does not read it, and "
            "transformers 5.12 and SGLang 0.5.16 ignore or refuse it",
            "quantize again without sparsity; if the stored weights are dense, remove sparsity_config",
        )


def find_rounded_activations(content: Mapping[str, Any]) -> Iterator[Refusal]:
    """Activations and cached keys and values of integers below 8 bits, to which transformers rounds them."""
    groups = [group for group in content["config_groups"].values() if group.get("weights")]
    schemes = [("kv_cache_scheme", content.get("kv_cache_scheme"))]
    schemes += [(key, group.get(key)) for key in ("input_activations", "output_activations") for group in groups]
    for key, scheme in schemes:
        bits = scheme.get("num_bits") if isinstance(scheme, Mapping) and scheme.get("type", "int") == "int" else None
        if isinstance(bits, int) and bits < 8:
            message = f"{key} has {bits}-bit integers, to which transformers rounds: the model's outputs change"
            yield Refusal(("transformers",), message, f"set {key} to null unless you want this rounding")


def _online_transforms(transforms: Any) -> Iterator[str]:
    """The locations of transforms that are applied while the model runs, such as "input"."""
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else transforms
    if groups and not isinstance(groups, Mapping):
        yield "an unknown structure"
        return
    for scheme in (groups or {}).values():
        applied = scheme.get("apply") if isinstance(scheme, Mapping) else None
        for one in applied if isinstance(applied, list) else [None]:
            location = one.get("location") if isinstance(one, Mapping) else None
            if location not in _IN_WEIGHTS:
                yield shortened(location) if location is not None else "an unknown location"


def _rewritten(config: Mapping[str, Any]) -> bool:
    """Whether SGLang runs the model with transformers' modules, and a target is not the full name of one."""
    classes = config.get("architectures") or [RUN_BY_TRANSFORMERS.get(str(config.get("model_type")))]
    if not isinstance(classes, list) or any(one not in RUN_BY_TRANSFORMERS.values() for one in classes):
        return False
    targets = [target for group in groups_of(config) if group.weights for target in group.targets]
    return not all(target.startswith("model.") for target in targets)


def _strategy(weights: Mapping[str, Any]) -> object:
    """The strategy, or compressed-tensors' default for it."""
    size = weights.get("group_size")
    return weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
