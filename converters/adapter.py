"""LoRA adapters: the weights that each pair of factors changes, the change, and the merged model.

Source: peft 0.21, `Linear.get_delta_weight`, `ParamWrapper.get_delta_weight` (all experts of a layer in one pair),
`DoraLinearVariant.merge_safe`, `get_pattern_key`; factors with an axis of experts, where size 1 is shared by all:
SGLang 0.5.16, `lora_manager.py` and `mem_pool.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckptkit.converters.family import Release
from ckptkit.converters.hf_names import EXPERT, GATE_UP, GATE_UP_DOWN, layer_of
from ckptkit.converters.lora_settings import (
    BY_HAND,
    ROOT,
    ROUTERS,
    LoraSettings,
    PairName,
    corrected_name,
    idle_reason,
    pairs_in,
)
from ckptkit.converters.planner import dims_of, tied_head
from ckptkit.converters.registry import family_of
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.plan import Joined, Plan, Step, View, identity
from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.formats.hf.adapter import ADAPTER_CONFIG, AdapterFiles
from ckptkit.formats.hf.shard import Fault

if TYPE_CHECKING:
    from torch import Tensor

# The hint for factors with an axis of experts.
FLAT = (
    "export the adapter again with factors of two axes ([rank x experts, inputs] and [outputs, rank x experts], as "
    "`experts.base_layer` and `experts`), which PEFT and vLLM read"
)
_SAVED = re.compile(r"\.modules_to_save(\.default)?(?=\.)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class Targets:
    """The weights that a pair changes, as one matrix [rows, columns], or one per expert.

    `specs`: one matrix; or the matrices of all experts in order, gate before up; or one tensor with all experts, which
    is [experts, columns, rows] if `turned`. `part`: expert and first row, for one expert's projection in that tensor.
    """

    specs: tuple[TensorSpec, ...]
    rows: int
    columns: int
    experts: int = 0
    leaf: str = ""
    turned: bool = False
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class Pair:
    """Factors A [rank, columns] and B [rows, rank], and the weights that `scale` x B A is added to.

    For experts, A is [experts x rank, columns] and B [rows, rank x experts], ranks outermost, or both have a first axis
    of experts (or of 1, shared by all). `magnitude`: the DoRA length of each row, or of each column of an embedding.
    `embedding`: A belongs to the rows.
    """

    module: str
    a: TensorSpec
    b: TensorSpec
    magnitude: TensorSpec | None
    targets: Targets
    rank: int
    scale: float
    embedding: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors that the merge reads."""
        factors = (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)
        return tuple(spec.name for spec in (*self.targets.specs, *factors))

    def delta(self, a: Tensor, b: Tensor) -> Tensor:
        """The change to add, in float32: [rows, columns], or [experts, rows, columns]."""
        import torch

        experts, a, b = self.targets.experts, a.float(), b.float()
        if a.ndim == 3:
            return (b @ a).expand(experts, -1, -1) * self.scale
        if experts:
            a, b = a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts)
            return torch.einsum("ore,eri->eoi", b, a) * self.scale
        return (b @ a).T * self.scale if self.embedding else b @ a * self.scale

    def merged(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The changed targets, computed in float32 and rounded once."""
        import torch

        count, experts = len(self.targets.specs), self.targets.experts
        weights, delta = tensors[:count], self.delta(tensors[count], tensors[count + 1])
        if self.magnitude is not None:
            weight = weights[0].float() + delta
            rows = weight.T if self.embedding else weight
            factor = tensors[-1].float().reshape(-1) / torch.linalg.norm(rows, dim=1)
            return [(factor.view((1, -1) if self.embedding else (-1, 1)) * weight).to(weights[0].dtype)]
        parts = [delta.mT if self.targets.turned else delta]
        if count > 1:
            parts = [part for expert in delta for part in expert.chunk(count // experts)]
        return [(weight.float() + part).to(weight.dtype) for weight, part in zip(weights, parts, strict=True)]


class Adapter:
    """An adapter over a base model: its pairs, its complete tensors that replace the base's, and its faults.

    `base`: the base, with a separate output layer if the adapter changes an output layer that is tied to the embedding.
    `saved`: the adapter's tensors by the base's names; `copies`: copies of the base's tensors, which PEFT saves with
    the factors of an embedding; `repeated`: an output layer that repeats the adapter's embedding. `unknown`: modules
    without a known name in the base. `accepted`: like in LoraSettings.

    Raises CkptkitError for unsupported kinds of adapters, and for a base of an unknown family.
    """

    def __init__(self, files: AdapterFiles, base: Checkpoint, where: str, accepted: Collection[str] = ()) -> None:
        self.files, self.where = files, where
        self.family = family_of(base.config)
        self.settings = LoraSettings(files, where, accepted)
        self.repeated: str | None = None
        self.base = base
        self.base = self._untie_output(base)
        self.faults: list[Fault] = []
        self.unknown: list[str] = []
        self.pairs: list[Pair] = []
        self.saved: dict[str, TensorSpec] = {}
        self.copies: dict[str, TensorSpec] = {}
        pairs = pairs_in(files.specs)
        for pair, parts in pairs.items():
            self._add_pair(pair, {part: files.specs[name] for part, name in parts.items()})
        factors = {name for parts in pairs.values() for name in parts.values()}
        for name, spec in files.specs.items():
            if name not in factors and name != self.repeated:
                self._add_saved(spec)
        self._require_saved()

    def _untie_output(self, base: Checkpoint) -> Checkpoint:
        head, embedding = tied_head(base.config) or ("", "")
        changed = {ROOT + head.removesuffix(".weight"), ROOT + (self.family.release or Release()).head}
        heads = [name for name in self.files.specs if name.startswith(tuple(f"{one}." for one in changed))]
        # PEFT replaces only the embedding by a complete copy; the output layer keeps the base's weight.
        is_copied = self._is_saved(embedding) and not self.settings.ties
        if not (heads or is_copied) or head in base.specs or embedding not in base.specs or self._is_tied_copy(heads):
            return base
        spec = base.specs[embedding]
        copy = Step(
            (embedding,), (spec, TensorSpec(head, spec.shape, spec.dtype)), lambda one: [one[0], one[0].clone()], "part"
        )
        steps = [identity(one) for name, one in base.specs.items() if name != embedding]
        return View(base, Plan((*steps, copy), base.specs, frozenset(), self.where, _untied(base.config)))

    def _is_saved(self, weight: str) -> bool:
        names = (_SAVED.sub("", name.removeprefix(ROOT)) for name in self.files.specs if ".base_layer." not in name)
        return any(weight in self._names(name) for name in names if ".lora_" not in name)

    def _is_tied_copy(self, heads: Sequence[str]) -> bool:
        """Whether the adapter's output layer equals its embedding, like PEFT saves them with `ensure_weight_tying`."""
        specs = self.files.specs
        embeddings = [name for name in specs if name.endswith(".embed_tokens.weight")]
        if len(heads) != 1 or len(embeddings) != 1 or specs[heads[0]].shape != specs[embeddings[0]].shape:
            return False
        head, embedding = (self.files.read([name])[name] for name in (*heads, *embeddings))
        self.repeated = heads[0] if bool((head == embedding).all()) else None
        return self.repeated is not None

    def _fault(self, name: str, expected: str, actual: str) -> None:
        self.faults.append(Fault(expected, actual, name))

    def _add_missing(self, name: str, module: str) -> None:
        """Records a name that the base lacks: a fault, or `unknown` if the base may only spell it differently.

        transformers renames towers, and all modules of families without `Release`.
        """
        towers = {part.strip(".").rpartition(".")[2] for part in self.family.passthrough}
        release = self.family.release
        if release is None or release.own_tree or not towers.isdisjoint(module.split(".")):
            self.unknown.append(module)
        else:
            self._fault(name, "a tensor of the base model", f"the base has no {module}")

    def _add_saved(self, spec: TensorSpec) -> None:
        own = _SAVED.sub("", spec.name.removeprefix(ROOT)).replace(".base_layer.", ".")
        if _SAVED.search(spec.name):
            expected = _SAVED.sub("", spec.name)
            self._fault(spec.name, f"the name {expected}, which PEFT reads", "PEFT rejects this name")
        target = next((self.base.specs[one] for one in self._names(own) if one in self.base.specs), None)
        if target is None:
            self._add_missing(spec.name, own)
        elif target.shape != spec.shape:
            self._fault(spec.name, f"shape {list(target.shape)}, as in the base", f"{list(spec.shape)}")
        else:
            is_copy = ".base_layer." in spec.name and not spec.name.endswith(".bias")
            (self.copies if is_copy else self.saved)[target.name] = spec

    def _require_saved(self) -> None:
        """PEFT needs a tensor for each weight of the base that `modules_to_save` names."""
        stored = [*self.saved, *self.copies, *((tied_head(self.base.config) or ("",))[:1] if self.repeated else ())]
        for one in self.settings.replaced_modules:
            module = re.compile(rf"(?:.+\.)?{re.escape(one)}\..+")
            missing = [name for name in self.base.specs if module.fullmatch(name) and name not in stored]
            if missing:
                self._fault(missing[0], f"a tensor, since modules_to_save contains {one} ({ADAPTER_CONFIG})", "missing")

    @cached_property
    def unpaired(self) -> Sequence[str]:
        """Weights of the base that adapter_config.json targets but that have no pair.

        Excludes multi-token prediction layers, which transformers' classes lack. Modules without a pair in any layer
        are included only if they are certainly Linear and have the same name in transformers.
        """
        release, layers = self.family.release or Release(own_tree=True), dims_of(self.base.config).layers
        drafts = tuple(one.prefix for one in release.drafts(release.text(self.base.config), release.root))
        changed = {spec.name for pair in self.pairs for spec in pair.targets.specs}
        kinds = {_NUMBER.sub("#", name) for name in changed}
        unpaired = []
        for name, spec in self.base.specs.items():
            if name in changed or (layer_of(name) or 0) >= layers or name.startswith(drafts):
                continue
            module = name.removesuffix(".weight")
            is_linear = module != name and len(spec.shape) == 2 and not module.endswith(ROUTERS)
            is_text = not (release.own_tree or self.family.passes_through(name))
            is_known = is_linear and is_text and ".experts." not in name
            if not is_known and _NUMBER.sub("#", name) not in kinds:
                continue
            spellings = {module, release.own_name(module)} if name.startswith(release.root) else {module}
            if all(self.settings.exclusion_reason(one) is None for one in spellings):
                unpaired.append(name)
        return unpaired

    def _add_pair(self, name: PairName, parts: Mapping[str, TensorSpec]) -> None:
        module, embedding = name.module, name.is_embedding
        if missing := [one for one in "AB" if one not in parts]:
            stored = next(iter(parts.values()))
            return self._fault(stored.name, "both lora_A and lora_B", f"lora_{missing[0]} is missing")
        a, b, magnitude = parts["A"], parts["B"], parts.get("magnitude_vector")
        candidates = self._targets(module)
        if not candidates:
            return self._add_missing(a.name, module)
        targets = next((one for one in candidates if _fit(a, b, magnitude, one, embedding)), None)
        if targets is None:
            one = candidates[0]
            of = f" of {one.experts} experts" if one.experts else ""
            expected = f"A [rank, {one.columns}] and B [{one.rows}, rank]{of}, for {one.specs[0]}"
            return self._fault(a.name, expected, f"A {list(a.shape)}, B {list(b.shape)}")
        rank = a.shape[1] if len(a.shape) == 3 else a.shape[0] // (targets.experts or 1)
        projection = module if module.endswith("_proj") or not targets.experts else f"{module}.{targets.leaf}"
        config_rank, scale = self.settings.scale_of(projection)
        if config_rank != rank:
            self._fault(a.name, f"rank {config_rank}, as in {ADAPTER_CONFIG}", f"rank {rank}")
        for spec in parts.values():
            if (loaded := corrected_name(spec.name)) is not None:
                self._fault(spec.name, f"the name {loaded}, which PEFT loads", "PEFT ignores this name")
        for fault in self.settings.faults(name, parts, targets.leaf):
            self._fault((a if magnitude is None else magnitude).name, fault.expected, fault.actual)
        self.pairs.append(Pair(module, a, b, magnitude, targets, rank, scale, embedding))
        return None

    def _names(self, own: str) -> Iterator[str]:
        """The base's possible names of a module or tensor of transformers' class."""
        yield own
        inner = own.removeprefix("model.")
        if inner.startswith("model."):
            return  # no class has this level
        yield inner
        if (release := self.family.release) and inner != own:
            has_towers = "text_config" in self.base.config
            yield release.name(inner.removeprefix("language_model.") if has_towers else inner)
        if release:
            yield own.replace("lm_head", release.head, 1)

    def _targets(self, module: str) -> list[Targets]:
        """The weights that a module's pair may change; both projections of a layer's experts, in PEFT's order."""
        targets: list[Targets] = []
        for name in self._names(module):
            if (spec := self.base.specs.get(f"{name}.weight")) is not None and len(spec.shape) == 2:
                return [Targets((spec,), *spec.shape)]
            block, _, leaf = (name, "", "") if name.endswith(".experts") else name.rpartition(".")
            targets += [one for one in self._experts(block) if leaf in ("", one.leaf)]
            targets += self._split_expert(name)
        return targets

    def _split_expert(self, name: str) -> Iterator[Targets]:
        """One expert's projection, if the base has fused experts."""
        match, turned = EXPERT.fullmatch(name), self.family.fused.transposed
        if match is None or self.family.fused.interleaved:
            return
        block, expert, leaf = match[1], int(match[2]), match[3]
        for fused, leaves in ((_GATE_UP, GATE_UP), (leaf, (leaf,))):
            spec = self.base.specs.get(f"{block}.{fused}")
            if spec is not None and leaf in leaves and len(spec.shape) == 3 and expert < spec.shape[0]:
                rows, columns = spec.shape[:0:-1] if turned else spec.shape[1:]
                rows //= len(leaves)
                yield Targets((spec,), rows, columns, turned=turned, part=(expert, leaves.index(leaf) * rows))

    @cached_property
    def _blocks(self) -> Mapping[str, dict[str, dict[int, TensorSpec]]]:
        blocks: dict[str, dict[str, dict[int, TensorSpec]]] = {}
        for name, spec in self.base.specs.items():
            module = name.removesuffix(".weight")
            if module != name and (match := EXPERT.fullmatch(module)):
                blocks.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = spec
        return blocks

    def _experts(self, block: str) -> Iterator[Targets]:
        """The projections of a block of experts, including gate and up together."""
        own = self.family.release.experts if self.family.release else GATE_UP_DOWN
        *into, out = zip(GATE_UP_DOWN[-len(own) :], own, strict=True)
        sides = {_GATE_UP: into, _DOWN: [out], **{one[0]: [one] for one in into}}
        for leaf, parts in sides.items():
            if (fused := self.base.specs.get(f"{block}.{leaf}")) is not None and len(fused.shape) == 3:
                experts, *sizes = fused.shape
                turned = self.family.fused.transposed
                rows, columns = reversed(sizes) if turned else sizes
                yield Targets((fused,), rows, columns, experts, leaf, turned)
            elif (block_of := self._blocks.get(block)) and all(name in block_of for _, name in parts):
                numbers = sorted(block_of[parts[0][1]])
                specs = tuple(block_of[name][at] for at in numbers for _, name in parts if at in block_of[name])
                rows = sum(spec.shape[0] for spec in specs[: len(parts)])
                yield Targets(specs, rows, specs[0].shape[-1], len(numbers), leaf)

    def merged(self) -> View:
        """The base with the adapter merged into it, lazily. Reads factors until a weight changes.

        Raises CkptkitError if a tensor does not fit, PEFT would not load it, or the adapter changes no weight, and
        UnsupportedError for factors with an axis of experts, which PEFT drops.
        """
        if stacked := next((pair.a.name for pair in self.pairs if len(pair.a.shape) == 3), None):
            message = f"{self.where}: {stacked} has three axes, but PEFT 0.21 ignores such factors of experts"
            raise UnsupportedError(message, FLAT)
        if self.unknown:
            message = f"{self.where} adapts {self.unknown[0]}, but ckptkit does not know its name in this base"
            raise UnsupportedError(message, BY_HAND)
        hint = f"run `ckptkit verify {self.where} --source BASE` to list all faults"
        if self.faults:
            more = f", and {len(self.faults) - 1} more faults" if self.faults[1:] else ""
            raise CkptkitError(f"{self.where}: {self.faults[0]}{more}", hint)
        if self.pairs and self.unpaired:
            message = f"{self.where} has no factors for {summarize(self.unpaired)}, which {ADAPTER_CONFIG} targets"
            raise CkptkitError(message, "export the adapter again from the training run")
        if bare := [name for name in self.files.specs if not name.startswith(ROOT)]:
            message = f"{self.where}: {bare[0]} lacks the prefix {ROOT}, which PEFT requires"
            raise CkptkitError(message, f"add the prefix {ROOT} to every tensor name")
        for name, spec in self.copies.items():
            if not self.is_copy(name, spec):
                message = f"{self.where}: {spec.name} differs from {name} of the base"
                raise CkptkitError(message, "pass the base that the adapter was trained on")
        if (why := self.idle()) is not None:
            raise CkptkitError(f"{self.where} changes nothing: {why}", "export the adapter again from the training run")
        changed = {spec.name for step in self._steps for spec in step.outputs}
        steps = [identity(spec) for name, spec in self.base.specs.items() if name not in changed]
        joined = Joined(self.base, self.files)
        dropped = {*self.saved, *(spec.name for spec in self.copies.values())}
        dropped |= {self.repeated} if self.repeated else set()
        plan = Plan((*steps, *self._steps), joined.specs, frozenset(dropped), self.where, self.base.config)
        return View(joined, plan)

    @cached_property
    def _steps(self) -> Sequence[Step]:
        """The steps that change weights. Raises CkptkitError for a weight that is quantized, or is changed twice."""
        parts: dict[str, list[Pair]] = {}
        for pair in self.pairs:
            if pair.targets.part is not None:
                parts.setdefault(pair.targets.specs[0].name, []).append(pair)
        complete = [pair for pair in self.pairs if pair.targets.part is None]
        targets = [spec for pair in complete for spec in pair.targets.specs]
        targets += [pairs[0].targets.specs[0] for pairs in parts.values()]
        if quantized := [spec for spec in targets if spec.dtype not in COMPUTED]:
            message = f"{self.where} cannot be merged into {quantized[0]}: the base is quantized"
            raise CkptkitError(message, "pass the unquantized release as the base")
        changed = Counter([*(spec.name for spec in targets), *self.saved])
        if twice := [name for name, count in changed.items() if count > 1]:
            raise CkptkitError(f"{self.where} changes {twice[0]} by several tensors or pairs", BY_HAND)
        steps = [Step(pair.inputs, pair.targets.specs, pair.merged, "merge LoRA") for pair in complete]
        steps += [_merge_parts(pairs) for pairs in parts.values()]
        return [*steps, *(self._replace(name, spec) for name, spec in self.saved.items())]

    def idle(self) -> str | None:
        """Why the adapter changes no bit of the base, or None if it changes a weight.

        Reads until the first weight that changes, small ones first. Raises like `_steps`.
        """
        if not self.pairs:
            return "no lora_A with its lora_B is stored"
        if all(pair.scale == 0 for pair in self.pairs) and not self.saved:
            return f"lora_alpha is 0 ({ADAPTER_CONFIG})"
        joined, pair_of = Joined(self.base, self.files), {pair.b.name: pair for pair in self.pairs}
        only_zeros = True
        for step in sorted(self._steps, key=lambda step: sum(spec.nbytes for spec in step.outputs)):
            pairs = [pair_of[name] for name in step.inputs if name in pair_of]
            if pairs and all(self._is_zero(pair) for pair in pairs):
                continue
            only_zeros, tensors = False, joined.read(step.inputs)
            for spec, tensor in zip(step.outputs, step.run([tensors[name] for name in step.inputs]), strict=True):
                if not bool((tensor == self.base.read([spec.name])[spec.name]).all()):
                    return None
        if only_zeros:
            return idle_reason(self.files) or "lora_A or lora_B of every pair is zero"
        return "every merged weight equals the base's after rounding to its dtype"

    def _is_zero(self, pair: Pair) -> bool:
        factors = (self.files.read([name])[name] for name in (pair.b.name, pair.a.name))
        return pair.magnitude is None and not all(bool(factor.any()) for factor in factors)

    def pair_of(self, weight: str) -> Pair | None:
        """The pair that changes a weight; the name of one expert's weight also finds the pair of a fused tensor."""
        if weight in self._pair_of:
            return self._pair_of[weight]
        block, dot, leaf = weight.partition(".experts.")
        fused = (pair for name, pair in self._pair_of.items() if dot and name.startswith(f"{block}{dot}"))
        return next((pair for pair in fused if (_DOWN in leaf) == (_DOWN in pair.targets.specs[0].name)), None)

    @cached_property
    def _pair_of(self) -> Mapping[str, Pair]:
        return {spec.name: pair for pair in self.pairs for spec in pair.targets.specs}

    def is_copy(self, name: str, spec: TensorSpec) -> bool:
        """Whether a tensor of `copies` has the values of the base's `name`, which PEFT would replace with it."""
        tensor, own = self.files.read([spec.name])[spec.name], self.base.read([name])[name]
        return bool((tensor.to(own.dtype) == own).all())

    def _replace(self, name: str, spec: TensorSpec) -> Step:
        target = TensorSpec(name, spec.shape, self.base.specs[name].dtype)
        return Step((spec.name,), (target,), lambda one: [one[0].to(target.torch_dtype)], "take from the adapter")


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    below = (
        {"text_config": {**text, "tie_word_embeddings": False}}
        if isinstance(text, Mapping) and "tie_word_embeddings" in text
        else {}
    )
    return {**config, **below, "tie_word_embeddings": False}


def _merge_parts(pairs: Sequence[Pair]) -> Step:
    """Merges the pairs of single experts into their fused tensor, in float32 and rounded once."""
    (spec,) = pairs[0].targets.specs

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        merged = tensors[0].float().clone()
        for pair, a, b in zip(pairs, tensors[1::2], tensors[2::2], strict=True):
            expert, row = pair.targets.part or (0, 0)
            matrix = merged[expert].T if pair.targets.turned else merged[expert]
            matrix[row : row + pair.targets.rows] += pair.delta(a, b)
        return [merged.to(tensors[0].dtype)]

    inputs = (spec.name, *(one.name for pair in pairs for one in (pair.a, pair.b)))
    return Step(inputs, (spec,), run, "merge LoRA of experts")


def _fit(a: TensorSpec, b: TensorSpec, magnitude: TensorSpec | None, targets: Targets, embedding: bool) -> bool:
    rows, columns, experts = targets.rows, targets.columns, targets.experts
    lengths = columns if embedding else rows
    if magnitude is not None and (experts or targets.part is not None or magnitude.shape != (lengths,)):
        return False
    if len(a.shape) == len(b.shape) == 3 and experts:
        outer = {a.shape[0], b.shape[0]} <= {1, experts}
        return outer and (a.shape[2], b.shape[1]) == (columns, rows) and a.shape[1] == b.shape[2] > 0
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or a.shape[0] % (experts or 1):
        return False
    return a.shape[0] > 0 and (a.shape[1], b.shape[0]) == ((rows, columns) if embedding else (columns, rows))
