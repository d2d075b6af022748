"""Checks if engines can load a layer: INT4 in SGLang's Marlin kernels, and packed experts in transformers.

NVFP4 weights without quantized activations also run on Marlin's kernels. Source: SGLang
`layers/quantization/marlin_utils.py`, `verify_marlin_supports_shape` and `check_moe_marlin_supports_layer`. For
compressed-tensors SGLang 0.5.16 ignores the result of the first and never calls the second, and then ends at its first
prompt: `jit_kernel/csrc/gemm/marlin`, `is_valid_config` of `gptq_marlin.cuh` and `moe_wna16_marlin.cuh`.

transformers 5 builds the routed experts of a layer as one parameter of three axes, initializes it anew, and only logs
the names of packed experts. Source: transformers 5.12.1, run in `tests/interop/test_transformers.py`. Later versions
may load experts that a `re:` target names (`integrations/compressed_tensors.py`; read, not run).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from ckptkit.converters.by_class import built_class
from ckptkit.converters.hf_names import GATE_UP_DOWN
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.formats.hf.side_files import quantization_of
from ckptkit.quant.ignore.names import fused_layer, leave_out
from ckptkit.quant.ignore.readers import ALL_READERS
from ckptkit.quant.ignore.tree import ClassTree, class_tree, config_for_class, release_of

_ROWS, _COLUMNS = 64, 128  # a tile of a layer
_TILES = ((128, 64), (64, 128))  # rows and columns of a tile of each kernel
_EXPERT_ROWS, _EXPERT_COLUMNS = 128, 64  # a tile of fused experts
_ROW_PARALLEL = ("o_proj", "down_proj", "w2")
_REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa")
_REQUIRES_GATE = {
    "sglang": "SGLang 0.5.16 does not load them",
    "vllm": "vLLM 0.26 leaves half of their memory uninitialized",
}
_SIZES = (64, 32, 16, 8, 4, 2, 1)


def unloadable(
    chosen: Sequence[TensorSpec], tree: ClassTree, config: Mapping[str, Any], group_size: int | None, tp: int, ep: int
) -> tuple[str, dict[str, str]] | None:
    """The next step, and by tensor the fault of those that SGLang's kernels cannot load at these sizes, or None."""
    if not (faults := _faults(chosen, tree, config, group_size, tp, ep)):
        return None
    fitting = [size for size in _SIZES if size < tp and not _faults(chosen, tree, config, group_size, size, ep)]
    other_size = f"serve with tensor parallel size {fitting[0]}, or " if fitting else ""
    return other_size + leave_out(faults, (spec.name for spec in chosen)), faults


def unrunnable(
    chosen: Sequence[TensorSpec], tree: ClassTree, config: Mapping[str, Any], group_size: int | None
) -> tuple[str, dict[str, str]] | None:
    """The next step, and by tensor the fault of layers without a kernel in SGLang at any size, or None."""
    faults: dict[str, str] = {}
    for specs in _by_layer(chosen, tree):
        if fault := _kernel_fault(specs, _is_expert(specs, tree), group_size):
            faults |= dict.fromkeys((spec.name for spec in specs), fault)
    return (leave_out(faults, (spec.name for spec in chosen)), faults) if faults else None


def kernel_notes(
    title: str,
    chosen: Sequence[TensorSpec],
    config: Mapping[str, Any],
    group_size: int | None,
    readers: Collection[str],
) -> tuple[str, ...]:
    """A note on layers in this format without a kernel in SGLang, if SGLang is a reader."""
    fault = unrunnable(chosen, class_tree(config), config, group_size) if "sglang" in readers else None
    if fault is None:
        return ()
    details = "; ".join(describe(fault[1]))
    return (f"SGLang has no {title} kernel for {details}, and would end at the first prompt; {fault[0]}",)


def ungated_notes(
    title: str,
    chosen: Sequence[TensorSpec],
    config: Mapping[str, Any],
    readers: Collection[str],
    engines: Collection[str] = ("sglang",),
) -> tuple[str, ...]:
    """A note on experts without a gate, in a format for which these `engines` require one, if they are `readers`.

    SGLang 0.5.16 allocates both and fails when it slices up's part; vLLM 0.26 continues. Run: `verify --against-sglang`
    and `--against-vllm` of nemotron_h in every scheme.
    """
    effects = [text for engine, text in _REQUIRES_GATE.items() if engine in engines and engine in readers]
    if not effects or len(release_of(config).experts) == len(GATE_UP_DOWN):
        return ()
    experts = class_tree(config).experts
    if not any(spec.name.removesuffix(".weight") in experts for spec in chosen):
        return ()
    return (f"experts without a gate in {title}: {', '.join(effects)}; --ignore 're:.*\\.experts\\..*' excludes them",)


def _kernel_fault(specs: Sequence[TensorSpec], is_expert: bool, group_size: int | None) -> str | None:
    rows, columns = sum(spec.shape[0] for spec in specs), specs[0].shape[1]
    if is_expert:
        return _expert_fault(specs, group_size, 1)
    if not any(rows % tile[0] == 0 and columns % tile[1] == 0 for tile in _TILES):
        return f"shape [{rows}, {columns}], which neither tiles of 128 x 64 nor of 64 x 128 divide"
    return f"{columns} columns, which groups of {group_size} do not divide" if columns % (group_size or 1) else None


def _is_expert(specs: Sequence[TensorSpec], tree: ClassTree) -> bool:
    return specs[0].name.removesuffix(".weight") in tree.experts


def _by_layer(chosen: Sequence[TensorSpec], tree: ClassTree) -> list[list[TensorSpec]]:
    """Groups tensors by their layer in SGLang."""
    layers: dict[str, list[TensorSpec]] = {}
    for spec in chosen:
        layers.setdefault(fused_layer(spec.name.removesuffix(".weight"), tree), []).append(spec)
    return list(layers.values())


def describe(faults: Mapping[str, str]) -> list[str]:
    """A line for each fault, with the names of its tensors."""
    kinds: dict[str, list[str]] = {}
    for name, fault in faults.items():
        kinds.setdefault(fault, []).append(name)
    return [f"{summarize(names)}: {fault}" for fault, names in kinds.items()]


def _faults(
    chosen: Sequence[TensorSpec], tree: ClassTree, config: Mapping[str, Any], group_size: int | None, tp: int, ep: int
) -> dict[str, str]:
    """The fault of each tensor that does not fit, by name. Shards of a fused layer are checked together."""
    text = release_of(config).text(config)
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads")
    heads = heads if isinstance(heads, int) else 1
    faults: dict[str, str] = {}
    for specs in _by_layer(chosen, tree):
        if _is_expert(specs, tree):
            fault = _expert_fault(specs, group_size, max(tp // ep, 1))
        else:
            fault = _layer_fault(specs, group_size, tp, heads)
        if fault:
            faults |= dict.fromkeys((spec.name for spec in specs), fault)
    return faults


def _layer_fault(specs: Sequence[TensorSpec], group_size: int | None, tp: int, heads: int) -> str | None:
    rows, columns = 0, specs[0].shape[1]
    for spec in specs:
        projection = spec.name.split(".")[-2]
        parts = 1 if projection in (*_ROW_PARALLEL, *_REPLICATED) else tp
        if projection in ("k_proj", "v_proj"):  # repeated if there are more ranks than heads
            parts = min(tp, heads)
        if spec.shape[0] % parts:
            return f"{spec.shape[0]} rows are not divisible by {parts}"
        rows += spec.shape[0] // parts
    if specs[0].name.split(".")[-2] in _ROW_PARALLEL:
        if columns % tp:
            return f"{columns} columns are not divisible by {tp}"
        columns //= tp
    if rows % _ROWS:
        return f"{rows} rows per rank, which must be divisible by {_ROWS}"
    if columns % _COLUMNS:
        return f"{columns} columns per rank, which must be divisible by {_COLUMNS}"
    if group_size and columns % group_size:
        return f"{columns} columns per rank, which must be divisible by the group size {group_size}"
    return None


def _expert_fault(specs: Sequence[TensorSpec], group_size: int | None, tp: int) -> str | None:
    down = next((spec for spec in specs if spec.name.split(".")[-2] in _ROW_PARALLEL), None)
    if down is None:
        return None
    hidden, inner = down.shape
    step = max(_EXPERT_COLUMNS, group_size or 0)
    if inner % tp or inner // tp % step:
        cut = f" on {tp} ranks: {inner / tp:g} on each" if tp > 1 else ""
        return f"experts of {inner} features{cut}, which is not a multiple of {step}"
    return f"experts of hidden size {hidden}, not divisible by {_EXPERT_ROWS}" if hidden % _EXPERT_ROWS else None


READER = "transformers"
UNPACKED = r"leave the experts unpacked: --ignore 're:.*\.experts\..*'"
_INTEGRATION = "transformers.integrations.compressed_tensors"


def fused_in_transformers(config: Mapping[str, Any]) -> str | None:
    """The reason why transformers cannot load packed experts, or None. Raises as `release_of` and `built_class`."""
    if _named(config) and find_spec(_INTEGRATION) is not None:
        return None
    release = release_of(config)
    content = config_for_class(release, config)
    if content["model_type"] != config["model_type"] and built_class(config) is None:
        return None
    if (built := built_class(content)) is None:
        return None
    if release.own_tree:
        return f"transformers {version('transformers')} has other modules than the release"
    name = next((one.module_class for one in built.tensors if one.is_fused), None)
    return name and f"transformers {version('transformers')} fuses the experts ({name}) and initializes them randomly"


def refuse_for_transformers(config: Mapping[str, Any], where: str, readers: Iterable[str]) -> None:
    """Raises CkptkitError if transformers is a reader, but not by default, and cannot load packed experts."""
    chosen = set(readers)
    if READER not in chosen or chosen == set(ALL_READERS):
        return
    if (reason := fused_in_transformers(config)) is not None:
        message = f"{where}: --reader {READER} cannot load packed experts: {reason}"
        raise CkptkitError(message, f"remove --reader {READER}, or {UNPACKED}")


def _named(config: Mapping[str, Any]) -> bool:
    """Whether a target of quantization_config names experts by a regular expression."""
    content = quantization_of(config)
    groups = content.get("config_groups") if isinstance(content, Mapping) else None
    for group in groups.values() if isinstance(groups, Mapping) else ():
        targets = group.get("targets") if isinstance(group, Mapping) else None
        if any(isinstance(one, str) and one.startswith("re:") and "experts" in one for one in targets or ()):
            return True
    return False
