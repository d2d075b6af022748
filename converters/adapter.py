"""LoRA adapters: which weights of a model each pair of factors changes, by how much, and the merged model.

Source: peft 0.21, `Linear.get_delta_weight`, `ParamWrapper.get_delta_weight` (all experts of a layer in one pair),
`DoraLinearVariant.merge_safe`, `get_pattern_key`; factors with an axis of experts, of which 1 stands for all: SGLang
0.5.16, `lora_manager.py` and `mem_pool.py`.
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
    dropped,
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

# For factors with an axis of experts.
FLAT = (
    "export one pair a layer where it was trained (`experts.base_layer` and `experts`, [rank x experts, inputs] and "
    "[outputs, rank x experts]), which PEFT and vLLM read too"
)
_SAVED = re.compile(r"\.modules_to_save(\.default)?(?=\.)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class Targets:
    """The weights that a pair changes, as one matrix [rows, columns], or one an expert.

    `specs`: one matrix; of experts those of one after the other, gate before up; or the one tensor that holds all,
    `turned`: [experts, columns, rows]. `part`: of one expert's projection in that tensor, the expert and its first row.
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

    Of experts A is [experts x rank, columns] and B [rows, rank x experts], ranks outermost, or both have a first axis
    of experts, of which 1 stands for all. `magnitude`: of DoRA, the length of each row, of an embedding of each column.
    `embedding`: A is of the rows.
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
        """What is read to merge it."""
        own = (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)
        return tuple(spec.name for spec in (*self.targets.specs, *own))

    def delta(self, a: Tensor, b: Tensor) -> Tensor:
        """What is added, in float32: [rows, columns], or [experts, rows, columns]."""
        import torch

        experts, a, b = self.targets.experts, a.float(), b.float()
        if a.ndim == 3:
            return (b @ a).expand(experts, -1, -1) * self.scale
        if experts:
            a, b = a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts)
            return torch.einsum("ore,eri->eoi", b, a) * self.scale
        return (b @ a).T * self.scale if self.embedding else b @ a * self.scale

    def merged(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The targets with what is added, computed in float32 and rounded once."""
        import torch

        count, experts = len(self.targets.specs), self.targets.experts
        weights, delta = tensors[:count], self.delta(tensors[count], tensors[count + 1])
        if self.magnitude is not None:
            whole = weights[0].float() + delta
            rows = whole.T if self.embedding else whole
            factor = tensors[-1].float().reshape(-1) / torch.linalg.norm(rows, dim=1)
            return [(factor.view((1, -1) if self.embedding else (-1, 1)) * whole).to(weights[0].dtype)]
        parts = [delta.mT if self.targets.turned else delta]
        if count > 1:
            parts = [part for expert in delta for part in expert.chunk(count // experts)]
        return [(weight.float() + part).to(weight.dtype) for weight, part in zip(weights, parts, strict=True)]


class Adapter:
    """An adapter over a base model: its pairs, whole tensors that replace the base's, and what does not fit.

    `base`: the base, with an output layer of its own where it ties that to the embedding and the adapter changes it.
    `saved`: the adapter's tensors by the base's names; `copies`: those that are the base's own, which PEFT saves beside
    the factors of an embedding; `repeated`: an output layer that is the adapter's embedding once more.
    `unknown`: modules whose names in the base are not known. `accepted`: as of LoraSettings.

    Raises CkptkitError for kinds of adapters that are not read, and for a base of no known family.
    """

    def __init__(self, files: AdapterFiles, base: Checkpoint, where: str, accepted: Collection[str] = ()) -> None:
        self.files, self.where = files, where
        self.family = family_of(base.config)
        self.settings = LoraSettings(files, where, accepted)
        self.repeated: str | None = None
        self.base = base
        self.base = self._parted(base)
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

    def _parted(self, base: Checkpoint) -> Checkpoint:
        """The base; with an output layer of its own where it ties that to the embedding, and the adapter changes it."""
        head, embedding = tied_head(base.config) or ("", "")
        changed = {ROOT + head.removesuffix(".weight"), ROOT + (self.family.release or Release()).head}
        own = [name for name in self.files.specs if name.startswith(tuple(f"{one}." for one in changed))]
        # The embedding as a whole is a copy of its own in PEFT too, and the output layer keeps the base's.
        whole = self._is_saved(embedding) and not self.settings.ties
        if not (own or whole) or head in base.specs or embedding not in base.specs or self._repeats(own):
            return base
        spec = base.specs[embedding]
        copy = Step(
            (embedding,), (spec, TensorSpec(head, spec.shape, spec.dtype)), lambda one: [one[0], one[0].clone()], "part"
        )
        steps = [identity(one) for name, one in base.specs.items() if name != embedding]
        return View(base, Plan((*steps, copy), base.specs, frozenset(), self.where, _untied(base.config)))

    def _is_saved(self, weight: str) -> bool:
        """Whether the adapter has a weight of the base as a whole."""
        names = (_SAVED.sub("", name.removeprefix(ROOT)) for name in self.files.specs if ".base_layer." not in name)
        return any(weight in self._names(name) for name in names if ".lora_" not in name)

    def _repeats(self, own: Sequence[str]) -> bool:
        """Whether the adapter's output layer is its embedding, as PEFT keeps them with `ensure_weight_tying`."""
        whole = [name for name in self.files.specs if name.endswith(".embed_tokens.weight")]
        if len(own) != 1 or len(whole) != 1 or self.files.specs[own[0]].shape != self.files.specs[whole[0]].shape:
            return False
        one, other = (self.files.read([name])[name] for name in (*own, *whole))
        self.repeated = own[0] if bool((one == other).all()) else None
        return self.repeated is not None

    def _fault(self, name: str, expected: str, actual: str) -> None:
        self.faults.append(Fault(expected, actual, name))

    def _lost(self, name: str, module: str) -> None:
        """A name that the base does not have: a fault, or `unknown` where the base may only spell it otherwise.

        transformers renames towers, and whole models of families of which no spelling of releases is stated.
        """
        towers = {part.strip(".").rpartition(".")[2] for part in self.family.carried}
        release = self.family.release
        if release is None or release.own_tree or not towers.isdisjoint(module.split(".")):
            self.unknown.append(module)
        else:
            self._fault(name, "a tensor of the base model", f"the base has no {module}")

    def _add_saved(self, spec: TensorSpec) -> None:
        """A whole tensor (`modules_to_save`)."""
        own = _SAVED.sub("", spec.name.removeprefix(ROOT)).replace(".base_layer.", ".")
        if _SAVED.search(spec.name):
            expected = _SAVED.sub("", spec.name)
            self._fault(
                spec.name, f"the name {expected}, where PEFT looks for it", "another name, for which PEFT stops"
            )
        target = next((self.base.specs[one] for one in self._names(own) if one in self.base.specs), None)
        if target is None:
            self._lost(spec.name, own)
        elif target.shape != spec.shape:
            self._fault(spec.name, f"shape {list(target.shape)}, as in the base", f"{list(spec.shape)}")
        else:
            is_copy = ".base_layer." in spec.name and not spec.name.endswith(".bias")
            (self.copies if is_copy else self.saved)[target.name] = spec

    def _require_saved(self) -> None:
        """PEFT needs a tensor for each weight of the base that `modules_to_save` names."""
        known = [*self.saved, *self.copies, *((tied_head(self.base.config) or ("",))[:1] if self.repeated else ())]
        for one in self.settings.whole:
            module = re.compile(rf"(?:.+\.)?{re.escape(one)}\..+")
            lost = [name for name in self.base.specs if module.fullmatch(name) and name not in known]
            if lost:
                self._fault(lost[0], f"a tensor, since modules_to_save has {one} ({ADAPTER_CONFIG})", "missing")

    @cached_property
    def unpaired(self) -> Sequence[str]:
        """Weights of the base that adapter_config.json targets, and that have no pair.

        None of multi-token prediction layers, which transformers' classes do not have. Of modules that no layer has a
        pair for, those that are surely Linear and have one name in the base and in transformers.
        """
        release, layers = self.family.release or Release(own_tree=True), dims_of(self.base.config).layers
        drafts = tuple(one.prefix for one in release.drafts(release.text(self.base.config), release.root))
        changed = {spec.name for pair in self.pairs for spec in pair.targets.specs}
        kinds = {_NUMBER.sub("#", name) for name in changed}
        lost = []
        for name, spec in self.base.specs.items():
            if name in changed or (layer_of(name) or 0) >= layers or name.startswith(drafts):
                continue
            module = name.removesuffix(".weight")
            is_linear = module != name and len(spec.shape) == 2 and not module.endswith(ROUTERS)
            is_known = is_linear and ".experts." not in name and not (release.own_tree or self.family.carries(name))
            if not is_known and _NUMBER.sub("#", name) not in kinds:
                continue
            spellings = {module, release.own_name(module)} if name.startswith(release.root) else {module}
            if all(self.settings.left_out(one) is None for one in spellings):
                lost.append(name)
        return lost

    def _add_pair(self, name: PairName, parts: Mapping[str, TensorSpec]) -> None:
        module, embedding = name.module, name.is_embedding
        some = next(iter(parts.values()))
        if lost := [one for one in "AB" if one not in parts]:
            return self._fault(some.name, "factors A and B in pairs", f"lora_{lost[0]} is missing")
        a, b, magnitude = parts["A"], parts["B"], parts.get("magnitude_vector")
        candidates = self._targets(module)
        if not candidates:
            return self._lost(a.name, module)
        targets = next((one for one in candidates if _fit(a, b, magnitude, one, embedding)), None)
        if targets is None:
            one = candidates[0]
            of = f" of {one.experts} experts" if one.experts else ""
            expected = f"A [rank, {one.columns}] and B [{one.rows}, rank]{of}, for {one.specs[0]}"
            return self._fault(a.name, expected, f"A {list(a.shape)}, B {list(b.shape)}")
        rank = a.shape[1] if len(a.shape) == 3 else a.shape[0] // (targets.experts or 1)
        whole = module if module.endswith("_proj") or not targets.experts else f"{module}.{targets.leaf}"
        stated, scale = self.settings.scale_of(whole)
        if stated != rank:
            self._fault(a.name, f"rank {stated}, as {ADAPTER_CONFIG} says", f"rank {rank}")
        for spec in parts.values():
            if (wanted := dropped(spec.name)) is not None:
                self._fault(
                    spec.name, f"the name {wanted}, under which PEFT loads it", "another name, which PEFT drops"
                )
        for fault in self.settings.faults(name, parts, targets.leaf):
            self._fault((a if magnitude is None else magnitude).name, fault.expected, fault.actual)
        self.pairs.append(Pair(module, a, b, magnitude, targets, rank, scale, embedding))
        return None

    def _names(self, own: str) -> Iterator[str]:
        """What the base may call a module or tensor of transformers' class."""
        yield own
        inner = own.removeprefix("model.")
        if inner.startswith("model."):
            return  # a level more than any class has
        yield inner
        if (release := self.family.release) and inner != own:
            has_towers = "text_config" in self.base.config
            yield release.name(inner.removeprefix("language_model.") if has_towers else inner)
        if release:
            yield own.replace("lm_head", release.head, 1)

    def _targets(self, module: str) -> list[Targets]:
        """The weights that a module's pair may change; of a layer's experts both projections, in PEFT's order."""
        found: list[Targets] = []
        for name in self._names(module):
            if (spec := self.base.specs.get(f"{name}.weight")) is not None and len(spec.shape) == 2:
                return [Targets((spec,), *spec.shape)]
            block, _, leaf = (name, "", "") if name.endswith(".experts") else name.rpartition(".")
            found += [one for one in self._experts(block) if leaf in ("", one.leaf)]
            found += self._of_one(name)
        return found

    def _of_one(self, name: str) -> Iterator[Targets]:
        """One expert's projection, where the base has those of a layer in one tensor."""
        match, turned = EXPERT.fullmatch(name), self.family.fused.transposed
        if match is None or self.family.fused.interleaved:
            return
        block, expert, leaf = match[1], int(match[2]), match[3]
        for whole, leaves in ((_GATE_UP, GATE_UP), (leaf, (leaf,))):
            spec = self.base.specs.get(f"{block}.{whole}")
            if spec is not None and leaf in leaves and len(spec.shape) == 3 and expert < spec.shape[0]:
                rows, columns = spec.shape[:0:-1] if turned else spec.shape[1:]
                rows //= len(leaves)
                yield Targets((spec,), rows, columns, turned=turned, part=(expert, leaves.index(leaf) * rows))

    @cached_property
    def _blocks(self) -> Mapping[str, dict[str, dict[int, TensorSpec]]]:
        """Experts that stand one by one in the base: by block, projection and number."""
        found: dict[str, dict[str, dict[int, TensorSpec]]] = {}
        for name, spec in self.base.specs.items():
            module = name.removesuffix(".weight")
            if module != name and (match := EXPERT.fullmatch(module)):
                found.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = spec
        return found

    def _experts(self, block: str) -> Iterator[Targets]:
        """The projections of a block of experts, gate and up together too."""
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

        Raises CkptkitError where anything does not fit, PEFT would not load it, or it changes nothing, and
        UnsupportedError for factors with an axis of experts, which PEFT drops.
        """
        if stacked := next((pair.a.name for pair in self.pairs if len(pair.a.shape) == 3), None):
            message = f"{self.where}: {stacked} has an axis of experts: PEFT 0.21 drops it, and merges to the base"
            raise UnsupportedError(message, FLAT)
        if self.unknown:
            message = f"{self.where}: the base has no {self.unknown[0]}, and how it would spell that is not known"
            raise UnsupportedError(message, BY_HAND)
        hint = f"ckptkit verify {self.where} --source BASE says what does not fit"
        if self.faults:
            more = f", and {len(self.faults) - 1} more faults" if self.faults[1:] else ""
            raise CkptkitError(f"{self.where}: {self.faults[0]}{more}", hint)
        if self.pairs and self.unpaired:
            message = f"{self.where} has no pair for {summarize(self.unpaired)}, which {ADAPTER_CONFIG} targets"
            raise CkptkitError(message, "export the adapter again from the run")
        if bare := [name for name in self.files.specs if not name.startswith(ROOT)]:
            message = f"{self.where}: {bare[0]} is stored without {ROOT}, where PEFT looks for it"
            raise CkptkitError(message, f"put {ROOT} before each name")
        for name, spec in self.copies.items():
            if not self.is_copy(name, spec):
                message = f"{self.where}: {spec.name} has other values than the base's {name}"
                raise CkptkitError(message, "give the base that the adapter was trained on")
        if (why := self.idle()) is not None:
            raise CkptkitError(f"{self.where} changes nothing: {why}", "export the adapter again from the run")
        changed = {spec.name for step in self._steps for spec in step.outputs}
        steps = [identity(spec) for name, spec in self.base.specs.items() if name not in changed]
        joined = Joined(self.base, self.files)
        dropped = {*self.saved, *(spec.name for spec in self.copies.values())}
        dropped |= {self.repeated} if self.repeated else set()
        plan = Plan((*steps, *self._steps), joined.specs, frozenset(dropped), self.where, self.base.config)
        return View(joined, plan)

    @cached_property
    def _steps(self) -> Sequence[Step]:
        """What changes weights. Raises CkptkitError for a weight that is quantized, or is changed twice."""
        parts: dict[str, list[Pair]] = {}
        for pair in self.pairs:
            if pair.targets.part is not None:
                parts.setdefault(pair.targets.specs[0].name, []).append(pair)
        whole = [pair for pair in self.pairs if pair.targets.part is None]
        made = [spec for pair in whole for spec in pair.targets.specs]
        made += [pairs[0].targets.specs[0] for pairs in parts.values()]
        if odd := [spec for spec in made if spec.dtype not in COMPUTED]:
            raise CkptkitError(f"{odd[0]} cannot have an adapter merged into it", "give the plain release as the base")
        changed = Counter([*(spec.name for spec in made), *self.saved])
        if twice := [name for name, count in changed.items() if count > 1]:
            raise CkptkitError(f"{self.where} changes {twice[0]} twice", BY_HAND)
        steps = [Step(pair.inputs, pair.targets.specs, pair.merged, "merge LoRA") for pair in whole]
        steps += [_of_parts(pairs) for pairs in parts.values()]
        return [*steps, *(self._taken(name, spec) for name, spec in self.saved.items())]

    def idle(self) -> str | None:
        """Why the base with this adapter is the base, bit for bit; None where it is not.

        Reads until the first weight that changes, small ones first. Raises as `_steps`.
        """
        if not self.pairs:
            return "it has no pair of lora_A and lora_B"
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
            return idle_reason(self.files) or "every pair has a factor of zeros"
        return "each merged weight, rounded to the dtype of the base, is the base's"

    def _is_zero(self, pair: Pair) -> bool:
        """Whether a pair adds nothing, whatever its base."""
        factors = (self.files.read([name])[name] for name in (pair.b.name, pair.a.name))
        return pair.magnitude is None and not all(bool(factor.any()) for factor in factors)

    def pair_of(self, weight: str) -> Pair | None:
        """The pair that changes a weight; of a fused tensor of experts also by the name of one expert's."""
        if weight in self._pair_of:
            return self._pair_of[weight]
        block, dot, rest = weight.partition(".experts.")
        fused = (pair for name, pair in self._pair_of.items() if dot and name.startswith(f"{block}{dot}"))
        return next((pair for pair in fused if (_DOWN in rest) == (_DOWN in pair.targets.specs[0].name)), None)

    @cached_property
    def _pair_of(self) -> Mapping[str, Pair]:
        return {spec.name: pair for pair in self.pairs for spec in pair.targets.specs}

    def is_copy(self, name: str, spec: TensorSpec) -> bool:
        """Whether a tensor of `copies` has the values of the base's `name`, which PEFT would replace by it."""
        tensor, own = self.files.read([spec.name])[spec.name], self.base.read([name])[name]
        return bool((tensor.to(own.dtype) == own).all())

    def _taken(self, name: str, spec: TensorSpec) -> Step:
        whole = TensorSpec(name, spec.shape, self.base.specs[name].dtype)
        return Step((spec.name,), (whole,), lambda one: [one[0].to(whole.torch_dtype)], "take from the adapter")


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    below = (
        {"text_config": {**text, "tie_word_embeddings": False}}
        if isinstance(text, Mapping) and "tie_word_embeddings" in text
        else {}
    )
    return {**config, **below, "tie_word_embeddings": False}


def _of_parts(pairs: Sequence[Pair]) -> Step:
    """Merges the pairs of single experts into the tensor that holds all, in float32 and rounded once."""
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
    """Whether factors of these shapes change such a weight."""
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
