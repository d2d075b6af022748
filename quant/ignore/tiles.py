"""Checks what engines can load: INT4 layers in Marlin's kernels of SGLang, and packed experts in transformers.

NVFP4 weights alone run on Marlin's kernels too. Source: SGLang `layers/quantization/marlin_utils.py`,
`verify_marlin_supports_shape` and `check_moe_marlin_supports_layer`. For compressed-tensors SGLang 0.5.16 asks the
first and drops the answer, and asks the second not at all. What no kernel can run ends the engine at its first prompt:
`jit_kernel/csrc/gemm/marlin`, `is_valid_config` of `gptq_marlin.cuh` and `moe_wna16_marlin.cuh`.

transformers 5 builds the routed experts of a layer as one parameter of three axes, so that targets of Linear modules
never reach them. It then initializes them anew, and only logs the names that it found and did not know.
Source: transformers 5.12.1, `AutoModelForCausalLM.from_pretrained`, run in `tests/interop/test_transformers.py`. Later
versions may take experts that a `re:` target names (`integrations/compressed_tensors.py`; read, not run).
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
from ckptkit.quant.ignore.names import fused_layer, ignore_options
from ckptkit.quant.ignore.readers import ALL_READERS
from ckptkit.quant.ignore.tree import ClassTree, class_tree, config_for_class, release_of

_ROWS, _COLUMNS = 64, 128  # a tile of a layer
_TILES = ((128, 64), (64, 128))  # rows and columns of which a layer must be made for one of the kernels
_EXPERT_ROWS, _EXPERT_COLUMNS = 128, 64  # a tile of fused experts
_ROW_PARALLEL = ("o_proj", "down_proj", "w2")
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")
_WANTING_A_GATE = {
    "sglang": "SGLang 0.5.16 does not load them",
    "vllm": "vLLM 0.26 leaves half of their memory as it was",
}
_SIZES = (64, 32, 16, 8, 4, 2, 1)


def check_tiles(
    chosen: Sequence[TensorSpec],
    tree: ClassTree,
    config: Mapping[str, Any],
    group_size: int | None,
    tp: int,
    ep: int = 1,
) -> None:
    """Raises CkptkitError naming tensors of `chosen` that SGLang's kernels cannot load at tensor parallel size `tp`.

    Each expert is cut over tp / ep ranks (SGLang `initialize_model_parallel`, `moe_tp_size`).
    """
    faults = _faults(chosen, tree, config, group_size, tp, ep)
    if not faults:
        return
    fitting = next(
        (size for size in _SIZES if size < tp and not _faults(chosen, tree, config, group_size, size, ep)), None
    )
    raise CkptkitError(
        f"SGLang's INT4 kernels cannot load at tensor parallel size {tp}",
        (f"serve with tensor parallel size {fitting}, or " if fitting else "")
        + f"leave them out: {ignore_options(faults)}",
        _describe(faults),
    )


def unrunnable(
    chosen: Sequence[TensorSpec], tree: ClassTree, config: Mapping[str, Any], group_size: int | None
) -> tuple[str, list[str]] | None:
    """The next move and a line a fault, where some of `chosen` have no kernel in SGLang at any cut; None: all have."""
    faults: dict[str, str] = {}
    for specs in _by_layer(chosen, tree).values():
        if fault := _kernel_fault(specs, specs[0].name.removesuffix(".weight") in tree.experts, group_size):
            faults.update(dict.fromkeys((spec.name for spec in specs), fault))
    return (f"leave them out: {ignore_options(faults)}", _describe(faults)) if faults else None


def kernel_notes(
    what: str, chosen: Sequence[TensorSpec], config: Mapping[str, Any], group_size: int | None, readers: Collection[str]
) -> tuple[str, ...]:
    """Layers in this format that none of SGLang's kernels runs; nothing where SGLang is not a reader."""
    fault = unrunnable(chosen, class_tree(config), config, group_size) if "sglang" in readers else None
    if fault is None:
        return ()
    hint, details = fault
    return (f"no {what} kernel of SGLang runs {'; '.join(details)}: an engine would end at its first prompt; {hint}",)


def ungated_notes(
    what: str,
    chosen: Sequence[TensorSpec],
    config: Mapping[str, Any],
    readers: Collection[str],
    wanting: Collection[str] = ("sglang",),
) -> tuple[str, ...]:
    """Experts without a gate, in a format for which engines among `readers` want one. `wanting`: those engines.

    Where they make room for both, SGLang 0.5.16 ends as it cuts up's part out of the tensor, and vLLM 0.26 goes on.
    Run: `verify --against-sglang` and `--against-vllm` of nemotron_h in every scheme.
    """
    found = [words for engine, words in _WANTING_A_GATE.items() if engine in wanting and engine in readers]
    if not found or len(release_of(config).experts) == len(GATE_UP_DOWN):
        return ()
    tree = class_tree(config)
    if not any(spec.name.removesuffix(".weight") in tree.experts for spec in chosen):
        return ()
    return (f"experts without a gate in {what}: {', '.join(found)}; --ignore 're:.*\\.experts\\..*' leaves them out",)


def _kernel_fault(specs: Sequence[TensorSpec], expert: bool, group_size: int | None) -> str | None:
    rows, columns = sum(spec.shape[0] for spec in specs), specs[0].shape[1]
    if expert:
        return _expert_fault(specs, group_size, 1)
    if not any(rows % tile[0] == 0 and columns % tile[1] == 0 for tile in _TILES):
        return f"{rows} rows of {columns} columns, which neither tiles of 128 by 64 nor of 64 by 128 divide"
    return f"{columns} columns, which groups of {group_size} do not divide" if columns % (group_size or 1) else None


def _by_layer(chosen: Sequence[TensorSpec], tree: ClassTree) -> dict[str, list[TensorSpec]]:
    """Tensors by the layer that SGLang holds them in."""
    layers: dict[str, list[TensorSpec]] = {}
    for spec in chosen:
        layers.setdefault(fused_layer(spec.name.removesuffix(".weight"), tree), []).append(spec)
    return layers


def _describe(faults: Mapping[str, str]) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for name, fault in faults.items():
        kinds.setdefault(fault, []).append(name)
    return [f"{summarize(names)}: {fault}" for fault, names in kinds.items()]


def _faults(
    chosen: Sequence[TensorSpec], tree: ClassTree, config: Mapping[str, Any], group_size: int | None, tp: int, ep: int
) -> dict[str, str]:
    """What is wrong with each tensor that does not fit, by name. Shards of a fused layer are looked at together."""
    text = release_of(config).text(config)
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads")
    heads = heads if isinstance(heads, int) else 1
    found = {}
    for specs in _by_layer(chosen, tree).values():
        expert = specs[0].name.removesuffix(".weight") in tree.experts
        fault = (
            _expert_fault(specs, group_size, max(tp // ep, 1)) if expert else _layer_fault(specs, group_size, tp, heads)
        )
        if fault:
            found.update(dict.fromkeys((spec.name for spec in specs), fault))
    return found


def _layer_fault(specs: Sequence[TensorSpec], group_size: int | None, tp: int, heads: int) -> str | None:
    rows, columns = 0, specs[0].shape[1]
    for spec in specs:
        projection = spec.name.split(".")[-2]
        parts = 1 if projection in (*_ROW_PARALLEL, *_WHOLE) else tp
        if projection in ("k_proj", "v_proj"):  # repeated where there are more ranks than heads
            parts = min(tp, heads)
        if spec.shape[0] % parts:
            return f"{spec.shape[0]} rows do not divide by {parts}"
        rows += spec.shape[0] // parts
    if specs[0].name.split(".")[-2] in _ROW_PARALLEL:
        if columns % tp:
            return f"{columns} columns do not divide by {tp}"
        columns //= tp
    if rows % _ROWS:
        return f"{rows} rows on a rank, which must divide by {_ROWS}"
    if columns % _COLUMNS:
        return f"{columns} columns on a rank, which must divide by {_COLUMNS}"
    if group_size and columns % group_size:
        return f"{columns} columns on a rank, which must divide by the group size {group_size}"
    return None


def _expert_fault(specs: Sequence[TensorSpec], group_size: int | None, tp: int) -> str | None:
    down = next((spec for spec in specs if spec.name.split(".")[-2] in _ROW_PARALLEL), None)
    if down is None:
        return None
    hidden, inner = down.shape
    step = max(_EXPERT_COLUMNS, group_size or 0)
    if inner % tp or inner // tp % step:
        return f"experts of {inner} features on {tp} ranks: {inner / tp:g} on a rank, which must divide by {step}"
    return f"experts of hidden size {hidden}, which must divide by {_EXPERT_ROWS}" if hidden % _EXPERT_ROWS else None


READER = "transformers"
UNPACKED = r"leave the experts unpacked: --ignore 're:.*\.experts\..*'"
_INTEGRATION = "transformers.integrations.compressed_tensors"


def fused_in_transformers(config: Mapping[str, Any]) -> str | None:
    """What transformers does with packed experts of this model, where it cannot load them; None where it can.

    Also None for a model that transformers has no class for: its release brings its own. Raises CkptkitError as
    `release_of` and `built_class`.
    """
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
    if name is None:
        return None
    return f"transformers {version('transformers')} holds them fused ({name}), and initializes them anew"


def refuse_for_transformers(config: Mapping[str, Any], where: str, readers: Iterable[str]) -> None:
    """Raises CkptkitError where transformers is a chosen reader of packed experts and cannot load them.

    All readers are the default, and no choice.
    """
    chosen = set(readers)
    if READER not in chosen or chosen == set(ALL_READERS):
        return
    if (reason := fused_in_transformers(config)) is not None:
        what = f"{where}: packed experts are not for --reader {READER}: {reason}"
        raise CkptkitError(what, f"leave out --reader {READER}, or {UNPACKED}")


def _named(config: Mapping[str, Any]) -> bool:
    """Whether a target of quantization_config names experts by a regular expression."""
    content = quantization_of(config)
    groups = content.get("config_groups") if isinstance(content, Mapping) else None
    targets = (
        target
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        for target in (group.get("targets") or () if isinstance(group, Mapping) else ())
    )
    return any(isinstance(target, str) and target.startswith("re:") and "experts" in target for target in targets)
