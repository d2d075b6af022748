"""The weights that a reader might pack, by the names that it looks up in `ignore`, and portable entries for them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.converters.family import ModelFamily
from ckptkit.converters.hf_names import FUSED, GATE_UP_DOWN, IN_LAYER, LATENT_DOWN, name_in_layer
from ckptkit.converters.registry import family_of
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.quant.engines.registry import engine_class
from ckptkit.quant.formats.part_names import PACKED
from ckptkit.quant.ignore.readers import SGLANG
from ckptkit.quant.ignore.tree import UNPACKED_BY_CHOICE, ClassTree
from ckptkit.quant.patterns import matcher

_SHARD = re.compile(r"(?:\((?P<several>\w+(?:\|\w+)*)\)|\b(?P<one>q|k|v|gate|up))_proj")
# The shards of the layers that releases may also spell as one, and the fused name, without `_proj`.
_SHARDS = tuple(
    tuple(name.removesuffix("_proj") for name in (*FUSED[fused], fused)) for fused in ("qkv_proj", "gate_up_proj")
)
_LATENT = re.compile(rf"\b({'|'.join(LATENT_DOWN)})\b")
_LATENT_ALL = f"({'|'.join((*LATENT_DOWN, 'fused_qkv_a_proj_with_mqa'))})"
# Parts of a layer that are excluded completely.
_COMPLETE = re.compile(r"(.+\.)?(indexer|linear_attn|experts)\..*")
# Endings that restrict a regular expression to module names, or to parameter names.
_ENDING = re.compile(r"(?:\$|\(\\\.weight\)\?|\\?\.weight|\\?\.\.\*|\\\.\*|\\\.)+$")


def entry_for(module: str) -> str:
    """Returns an entry for this module in every layer, with all shards of a fused layer and all routed experts."""
    match = IN_LAYER.fullmatch(module)
    return rf"re:.*\.{_tail_pattern(match[3])}" if match else module


def _tail_pattern(tail: str) -> str:
    if match := _COMPLETE.fullmatch(tail):
        return rf"{re.escape(match[1] or '')}{match[2]}\..*"
    return rf"{with_fused(re.escape(tail))}(\.weight)?$"


def ignore_options(names: Iterable[str]) -> str:
    """The options that exclude these weights, for a message."""
    entries = dict.fromkeys(entry_for(name.removesuffix(".weight")) for name in names)
    return " ".join(f"--ignore '{entry}'" for entry in entries)


def leave_out(names: Collection[str], chosen: Iterable[str]) -> str:
    """The next step for weights of `chosen` that cannot be packed: to exclude them, if others are left."""
    excluded, every = ({entry_for(name.removesuffix(".weight")) for name in several} for several in (names, chosen))
    if excluded >= every:
        return "choose another --scheme: without them nothing is packed"
    return f"leave them out: {ignore_options(names)}"


def with_fused(pattern: str) -> str:
    """Extends each shard of a fused layer in a regular expression to all shards and the fused name."""
    return _LATENT.sub(_LATENT_ALL, _SHARD.sub(_all_shards, pattern))


def _all_shards(match: re.Match[str]) -> str:
    if match["one"]:
        return f"({'|'.join(next(family for family in _SHARDS if match['one'] in family))})_proj"
    names = match["several"].split("|")
    for family in _SHARDS:
        if set(family) & set(names):
            names += [name for name in family if name not in names]
    return f"({'|'.join(names)})_proj"


def entries_for(excluded: Mapping[str, str], packed: Collection[str]) -> list[str]:
    """Entries that cover `excluded` modules (given with their entries for all layers), and none of `packed`."""
    groups: dict[str, list[str]] = {}
    for module, entry in excluded.items():
        groups.setdefault(entry, []).append(module)
    entries: list[str] = []
    for entry, modules in groups.items():
        covers_packed = any(map(matcher(entry), packed)) if entry.startswith("re:") else entry in packed
        entries += _entries_by_layer(modules) if covers_packed else [entry]
    return list(dict.fromkeys(entries))


def _entries_by_layer(modules: Iterable[str]) -> list[str]:
    layers: dict[str, set[int]] = {}
    for match in filter(None, map(IN_LAYER.fullmatch, modules)):
        layers.setdefault(_tail_pattern(match[3]), set()).add(int(match[2]))
    return [rf"re:(.*\.)?layers\.({'|'.join(map(str, sorted(numbers)))})\.{tail}" for tail, numbers in layers.items()]


def candidates(pattern: str) -> Iterator[str]:
    """Possible entries with the same meaning for every reader as this one has for one reader."""
    if pattern.startswith("re:"):
        cores, ending = [_ENDING.sub("", pattern.removeprefix("re:"))], r"(\.weight)?$"
    else:
        plain = re.escape(pattern.removesuffix(".weight"))
        cores, ending = [plain, r".*\." + plain], r"(\..*)?$"
    for core in cores:
        end = "" if core.endswith(".*") else ending
        yield from filter(_compiles, (f"re:{core}{end}", f"re:{with_fused(core)}{end}"))
        before, experts, _ = core.partition("experts")
        if experts:
            yield from filter(_compiles, (rf"re:{before}experts\..*",))


def _compiles(pattern: str) -> bool:
    try:
        matcher(pattern)
    except CkptkitError:
        return False
    return True


# Readers look up only these names of the first routed expert, regardless of the names in the release.
FIRST_EXPERT = tuple(f"0.{name}" for name in GATE_UP_DOWN)
# Fused layers with another name in vLLM than in SGLang.
_OTHER_IN_VLLM = {"fused_qkv_a_proj_with_mqa": "fused_qkv_a_proj"}
_FUSED_IN_VLLM: Mapping[str, tuple[str, ...]] = {**FUSED, "fused_qkv_a_proj": LATENT_DOWN}
_FUSED_OF: Mapping[str, str] = {shard: fused for fused, shards in FUSED.items() for shard in shards}
# The indexer's key and head weights, which SGLang builds as one BF16 layer on CUDA, and gates of one row a head.
_DENSE_IN_SGLANG = (".indexer.wk", ".indexer.weights_proj", ".self_attn.g_proj")
# Projections that compress keys, which no engine looks up.
_NEVER_LOOKED_UP = (".compressor.wkv", ".compressor.wgate")
_NO_MATRIX = re.compile(r"(.*norm.*|(.*_)?ln\d*(_\w+)?)")
# Modules of a tower that are not Linear, by name, for models without known classes (`ClassTree.whole`).
_NO_LINEAR = re.compile(
    r"(.*\.)?([^.]*(embed(?!ding_projection)|pos_emb|conv|downsample)[^.]*|(patch_embed|embeddings)\.proj)"
)
_FUSED_EXPERTS = re.compile(r"(.*\.experts)\.(?:gate_up|down)_proj")  # all experts of a layer in one tensor
_FUSED_REASON = "experts fused in one tensor"


@dataclass(frozen=True)
class Matrix:
    """A `….weight` with two or more axes, or the fused experts of a layer."""

    tensor: str
    linear: bool  # readers that know classes treat it as a Linear
    reason: str | None  # why it is never INT4, or None if it may be
    sglang: str | None  # its fused layer or container of experts in SGLang, or None if SGLang never looks it up
    vllm: str | None  # the same in vLLM, in the names of the release
    entry: str  # the entry of `ignore` that excludes it for every reader
    expert: bool = False
    unfused: bool = True  # SGLang's class may split its fused layer
    sglang_own: str | None = None  # of a draft layer, the layer of the model that SGLang looks up instead
    transformers: str | None = None  # the module's name in transformers, if different from the release

    @property
    def module(self) -> str:
        return self.tensor.removesuffix(".weight")

    @property
    def torch_class(self) -> str | None:
        """The class of torch by which compressed-tensors quantizes the module, if any."""
        return "Linear" if self.linear else "Embedding" if self.reason == "Embedding is not a Linear" else None


def forbidden(matrix: Matrix, tree: ClassTree, readers: Collection[str]) -> str | None:
    """The reason why none of `readers` has a quantized layer for this matrix, or None if one may."""
    dense = tree.dense_for(matrix.module)
    of_sglang = dense is not None and matrix.reason == dense.reason
    if matrix.reason in UNPACKED_BY_CHOICE or (of_sglang and not set(SGLANG) & set(readers)):
        return None
    return matrix.reason


def matrices_of(specs: Mapping[str, TensorSpec], tree: ClassTree, config: Mapping[str, Any]) -> list[Matrix]:
    """The `….weight`s of two or more axes that readers may treat as Linear, and fused experts of draft layers."""
    weights = {name: len(spec.shape) for name, spec in specs.items() if name.endswith((".weight", PACKED))}
    axes = {_module_of(name): count for name, count in weights.items() if count >= 2}
    family = family_of(config)
    fused = [one for one in fused_experts(specs, tree, config) if tree.draft_of(one.module)]
    return [*(_matrix(module, tree, family, config, count > 2) for module, count in axes.items()), *fused]


def _module_of(name: str) -> str:
    return name.removesuffix(PACKED).removesuffix(".weight")


def fused_experts(names: Iterable[str], tree: ClassTree, config: Mapping[str, Any]) -> list[Matrix]:
    """The tensors among `names` that hold all experts of a layer, which engines look up like single ones."""
    family, matrices = family_of(config), []
    for name, match in ((name, _FUSED_EXPERTS.fullmatch(name)) for name in names):
        if match:
            matrix = _matrix(f"{match[1]}.{FIRST_EXPERT[0]}", tree, family, config)
            matrices.append(replace(matrix, tensor=name, linear=False, reason=matrix.reason or _FUSED_REASON))
    return matrices


def matrices_named(names: Iterable[str], tree: ClassTree, config: Mapping[str, Any]) -> list[Matrix]:
    """Like `matrices_of`, only from names: every `….weight` that is not a norm by its name."""
    family = family_of(config)
    modules = dict.fromkeys(_module_of(name) for name in names if name.endswith((".weight", PACKED)))
    matrices = [module for module in modules if not _NO_MATRIX.fullmatch(module.rpartition(".")[2])]
    return [_matrix(module, tree, family, config) for module in matrices]


def _matrix(module: str, tree: ClassTree, family: ModelFamily, config: Mapping[str, Any], deep: bool = False) -> Matrix:
    """`deep`: the weight has more than two axes, so that it is not a Linear."""
    sglang_class, vllm_class = (engine_class(name, config) for name in ("sglang", "vllm"))
    tensor, reason = f"{module}.weight", tree.reason_to_keep(module)
    if draft := tree.draft_of(module):
        rest = module.removeprefix(draft.prefix)
        asked = name_in_layer(rest) in tree.tails or module in draft.own
        in_sglang = asked and draft.sglang is not None and not module.endswith(_DENSE_IN_SGLANG)
        layer = fused_layer(f"{draft.sglang}{rest}", None) if in_sglang else None
        own = fused_layer(f"{draft.sglang_own}{rest}", None) if asked and draft.sglang_own is not None else None
        in_vllm = asked or (draft.vllm_joint and module == draft.joint)
        prefix = draft.prefix if draft.vllm is None else draft.vllm
        vllm = _in_vllm(fused_layer(f"{prefix}{rest}", None)) if in_vllm else None
        return Matrix(tensor, False, reason, layer, vllm, draft.entry, ".experts." in rest, draft.unfuses, own)
    if outside := next((prefix for prefix in tree.outside if module.startswith(prefix)), None):
        linear = not deep and (module in tree.linear_names if tree.whole else _NO_LINEAR.fullmatch(module) is None)
        entry = rf"re:.*{outside.split('.')[-2]}\..*"
        layer = sglang_class.layer_outside(fused_layer(module, None)) if linear else None
        asked_as = vllm_class.layer_outside(module) or module
        own = f"model.{module}".replace(".vision_model.", ".")  # transformers up to 4.57 has the latter part
        own_name = own if own in tree.linear_names else None
        return Matrix(tensor, linear, reason, layer, asked_as if linear else None, entry, transformers=own_name)
    if family.release is not None and module.endswith(family.release.stacked or ("\0",)):
        return _stacked(module, tree, family, config)
    release, asked = family.release, module in tree.linears and module not in tree.gates and module != tree.head
    asked = asked and not module.endswith(_NEVER_LOOKED_UP)
    fused = fused_layer(module, tree) if asked else None
    sglang = sglang_class.layer(fused) if fused and not module.endswith(_DENSE_IN_SGLANG) else None
    dense = tree.dense_for(module)
    # vLLM looks up a head or a router, which no other reader packs by class.
    is_own_layer = module == tree.head or (vllm_class.packs_routers and tree.is_router(module))
    vllm = module if is_own_layer else fused and vllm_class.layer(_in_vllm(fused))
    entry = dense.entry if dense else entry_for(module)
    own_name = release.own_name(module) if release and tree.outside and release.linears_outside else None
    is_expert = module in tree.experts
    return Matrix(tensor, module in tree.linears, reason, sglang, vllm, entry, is_expert, transformers=own_name)


def _stacked(module: str, tree: ClassTree, family: ModelFamily, config: Mapping[str, Any]) -> Matrix:
    """All experts of a layer in one `….weight`, which engines look up like single ones."""
    block = module.rpartition(".")[0]
    sglang, vllm = (engine_class(name, config).layer(f"{block}.experts") for name in ("sglang", "vllm"))
    blocks = "|".join(sorted({layer.split(".")[-2] for layer in (sglang, vllm)}))
    stacked = "|".join(map(re.escape, family.release.stacked if family.release else ()))
    entry = rf"re:.*\.(({blocks})\.experts\..*|({stacked})(\.weight)?$)"
    return Matrix(f"{module}.weight", False, tree.reason_to_keep(module), sglang, vllm, entry, expert=True)


def _in_vllm(layer: str) -> str:
    parent, _, name = layer.rpartition(".")
    return f"{parent}.{_OTHER_IN_VLLM[name]}" if name in _OTHER_IN_VLLM else layer


def fused_layer(module: str, tree: ClassTree | None) -> str:
    """The layer that holds a module: the container of experts, the fused layer if all its shards exist, or itself."""
    if ".experts." in module:
        return container_of(module)
    parent, _, name = module.rpartition(".")
    fused = _FUSED_OF.get(name)
    if fused is None:
        return module
    shards = FUSED[fused] if tree is not None and not tree.partly_fused else ()
    if tree is not None and any(f"{parent}.{shard}" not in tree.linears for shard in shards):
        return module
    return f"{parent}.{fused}"


def container_of(module: str) -> str:
    """The container of a routed expert's projection, or the name of any other module."""
    block, experts, _ = module.partition(".experts.")
    return f"{block}.experts" if experts else module


def parts_of(layer: str) -> tuple[str, ...]:
    """The parts of a fused layer by its name: some classes of an engine look up these, some the layer."""
    parent, _, name = layer.rpartition(".")
    return tuple(f"{parent}.{shard}" for shard in FUSED.get(name, ()))


def names_in_vllm(matrix: Matrix) -> tuple[str, ...]:
    """The names that vLLM looks up in `ignore` for a matrix's layer; every class declares the parts of fused layers."""
    # A layer with one matrix in the release is not a fused layer in vLLM.
    mapping = _FUSED_IN_VLLM if matrix.vllm != matrix.module else {}
    return names_of_layer(matrix.vllm, mapping) if matrix.vllm is not None else ()


def names_of_layer(layer: str, packed_modules: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The names that an engine looks up for a layer, which must have one answer.

    `packed_modules`: the parts of the fused layers that it splits. Source: SGLang's and vLLM's
    `CompressedTensorsConfig.get_moe_scheme` and `should_ignore_layer`.
    """
    name = layer.rpartition(".")[2]
    if name == "experts":
        return tuple(f"{layer}.{expert}" for expert in FIRST_EXPERT)
    # Every occurrence is replaced, as SGLang and vLLM do.
    return tuple(layer.replace(name, shard) for shard in packed_modules[name]) if name in packed_modules else (layer,)
