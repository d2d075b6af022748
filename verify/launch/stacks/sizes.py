"""The parallel sizes and GPUs of each role, and whether they divide each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ckptkit.verify.core.issue import Issue
from ckptkit.verify.launch.arguments import LaunchArguments, Server, server_of
from ckptkit.verify.launch.options.arguments import Arguments
from ckptkit.verify.launch.options.tables import MEGATRON_SIZES, SIZES
from ckptkit.verify.launch.settings.config import Config
from ckptkit.verify.launch.sides import ENGINE, Side
from ckptkit.verify.launch.words import Word, at_places, first_file, places_of


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a role."""

    count: int | None = None  # None if unknown
    source: str = ""  # the settings that give `count`, for messages
    node: int | None = None  # GPUs of one node
    first: int = 0  # the index of the first one among all GPUs of the job

    @staticmethod
    def read(settings: Config, nodes: str, each: str) -> Gpus:
        """Reads the number of nodes, and of GPUs per node, which is 8 by default."""
        count, node = settings.size(nodes), settings.size(each, 8)
        if count is None or node is None:
            return Gpus()
        return Gpus(count * node, f"{settings.cite(nodes)} {count} x {settings.cite(each)} {node}", node)

    def subtract(self, count: int, reason: str) -> Gpus:
        """The GPUs that remain without `count` GPUs of another role, at least 0."""
        left = None if self.count is None else max(self.count - count, 0)
        return replace(self, count=left, source=f"{self.source}, less {count} {reason}")


@dataclass(frozen=True)
class GpuGroup:
    """The GPUs of one role, and the products of sizes that must divide them, by name: `tp x pp x cp`."""

    role: str
    gpus: Gpus = Gpus()
    products: tuple[tuple[str, tuple[int, ...]], ...] = ()
    source: str = ""  # the places of the sizes
    file: Path | None = None
    is_engine: bool = False  # each product is an engine, of complete nodes or of a part of one node
    is_inside: bool = False  # the engine cannot have more than one node

    def issues(self) -> Iterator[Issue]:
        """Products that do not divide the GPUs, or an engine that does not fit on its nodes."""
        count, node = self.gpus.count, self.gpus.node if self.is_engine else None
        if count is None:
            return
        least = math.lcm(*(math.prod(sizes) for _, sizes in self.products))
        source = f" ({self.source})" if self.source else ""
        for names, sizes in self.products:
            ranks = math.prod(sizes)
            if count < 1 or count % ranks:
                product = f"{' x '.join(map(str, sizes))} = " * (len(sizes) > 1) + str(ranks)
                expected = f"a number of GPUs for the {self.role} divisible by {names} = {product}{source}"
                hint = f"choose a multiple of {least} GPUs, or other sizes"
                yield Issue(expected, f"{count} GPUs: {self.gpus.source}", hint, file=self.file)
            elif node and self.is_inside and ranks > node:
                expected = f"engines of at most {node} GPUs, since data parallel ranks must be on one node{source}"
                yield Issue(expected, f"{names} = {ranks} GPUs", "choose sizes that fit on a node", file=self.file)
            elif node and (crossing := across_nodes(ranks, node, count, self.gpus.first)):
                expected = f"engines that fit on nodes of {node} GPUs{source}"
                hint = "choose sizes that divide a node, or that fill complete nodes"
                yield Issue(expected, f"{crossing}: {self.gpus.source}", hint, file=self.file)


def across_nodes(engine: int, node: int, total: int, offset: int = 0) -> str | None:
    """Describes the first engine of `engine` GPUs that does not fit on nodes of `node` GPUs, or None if all do.

    The engines are consecutive from the GPU `offset` on. Each must occupy complete nodes, or a part of one node.
    """
    if engine > node and engine % node:
        return f"an engine has {engine} GPUs, which are {engine // node} nodes and {engine % node} GPUs"
    share = min(engine, node)
    for first in range(offset, offset + total - share + 1, share)[:node]:
        if first % node + share > node:
            return f"an engine has GPUs {first} to {first + share - 1} of the job, which are on two nodes"
    return None


@dataclass(frozen=True)
class ModelSplit:
    """The ranks that share a model without Megatron: of an engine, of Ulysses (a sequence), or of DTensor."""

    role: str
    by: Literal["sglang", "vllm", "ulysses", "dtensor"]
    ranks: int  # all tensor parallel ranks, or those of a sequence
    asked_by: str  # the option or setting that gives `ranks`
    # Of engines only:
    ep: int = 1
    attention: int | None = None  # the ranks of attention heads, or None for all
    dense: int | None = None  # the ranks of layers without experts, or None if unknown
    plain_experts: bool = True  # only `ranks` and `ep` cut experts
    online_fp8: bool = False  # it packs the weights that it gets in FP8 blocks of 128 by 128, without a config
    redundant: int = 0  # experts with a second copy
    ep_option: str = "ep_size"  # the option that gives `ep`
    words: Mapping[str, Word] = field(default_factory=dict)  # the words that give the sizes
    file: Path | None = None

    @staticmethod
    def ulysses(settings: Config, role: str, *keys: str) -> Iterator[ModelSplit]:
        """The ranks that share a sequence, by the first key with a value, if they are several."""
        key = settings.first(*keys)
        if (ranks := settings.size(key)) and ranks > 1:
            yield ModelSplit(role, "ulysses", ranks, settings.cite(key))

    def group(self, gpus: Gpus, name: str) -> GpuGroup:
        """The GPUs that these ranks must divide. `name` is the stack's name of the ranks."""
        return GpuGroup(self.role, gpus, ((name, (self.ranks,)),), self.asked_by)


@dataclass(frozen=True)
class GpuPlacement:
    """The GPUs and sizes of a job."""

    groups: tuple[GpuGroup, ...] = ()  # of each role or group of engines
    issues: tuple[Issue, ...] = ()  # other faults of sizes
    cuts: tuple[ModelSplit, ...] = ()  # of engines, and of trainers without Megatron


@dataclass(frozen=True)
class Sizes:
    """Megatron's sizes of a role, None if unknown. `etp` and `vpp` are None also if not given."""

    tp: int | None = 1
    pp: int | None = 1
    cp: int | None = 1
    ep: int | None = 1
    etp: int | None = None
    vpp: int | None = None
    source: str = ""
    file: Path | None = None

    @staticmethod
    def read(settings: Config, *prefixes: str) -> Sizes:
        """Reads each size under the first of these prefixes that has it."""
        keys = {short: settings.first(*(f"{one}.{name}" for one in prefixes)) for short, name in MEGATRON_SIZES.items()}
        tp, pp, cp, ep = (settings.size(keys[short]) for short in ("tp", "pp", "cp", "ep"))
        etp, vpp = (settings.size(keys[short], None) for short in ("etp", "vpp"))
        if not settings.get(keys["etp"]).known:
            tp = None
        return Sizes(tp, pp, cp, ep, etp, vpp, cite_all(settings, list(keys.values())))

    def group(self, role: str, gpus: Gpus) -> GpuGroup:
        """The divisors of the GPUs. Source: megatron-core `initialize_model_parallel`, where etp is tp by default."""
        etp = self.tp if self.etp is None else self.etp
        products = []
        if self.tp and self.pp and self.cp:
            products.append(("tp x pp x cp", (self.tp, self.pp, self.cp)))
        is_implied = self.tp and self.cp and self.ep and etp and self.tp * self.cp % (self.ep * etp) == 0
        if self.ep and etp and self.pp and not is_implied:
            products.append(("ep x etp x pp", (self.ep, etp, self.pp)))
        return GpuGroup(role, gpus, tuple(products), self.source, self.file)

    def arguments(self, engine: LaunchArguments, settings: Config, prefix: str) -> LaunchArguments:
        """The sizes of a trainer with this rollout engine, and the pipeline settings under this prefix."""
        sizes = replace(engine, tp=self.tp, pp=self.pp, ep=self.ep, etp=self.etp or self.tp or 1, vpp=self.vpp)
        return replace(
            sizes,
            first=settings.number(f"{prefix}.num_layers_in_first_pipeline_stage"),
            last=settings.number(f"{prefix}.num_layers_in_last_pipeline_stage"),
            embedding=settings.switch(f"{prefix}.account_for_embedding_in_pipeline_split"),
            loss=settings.switch(f"{prefix}.account_for_loss_in_pipeline_split"),
            layout=settings.text(f"{prefix}.pipeline_model_parallel_layout") or None,
        )


@dataclass(frozen=True)
class RolloutEngine:
    """The rollout engine of a job: its weights, its sizes, the GPUs that they must divide, and its cut of the model."""

    side: Side | None = None
    sizes: LaunchArguments = field(default_factory=LaunchArguments)
    groups: tuple[GpuGroup, ...] = ()
    cuts: tuple[ModelSplit, ...] = ()

    @property
    def server(self) -> Server | None:
        """vLLM or SGLang, or None for another engine."""
        name = self.sizes.server
        return "vllm" if name == "vllm" else "sglang" if name == "sglang" else None

    def cut(
        self, tp: int, pp: int, ep: int | None, asked_by: str, *, plain: bool = True, fp8: bool = False
    ) -> RolloutEngine:
        """The engine with these sizes. `plain` is `ModelSplit.plain_experts`, `fp8` is `ModelSplit.online_fp8`."""
        sizes, cuts = replace(self.sizes, engine=tp * pp, engine_pp=pp, engine_ep=ep), self.cuts
        if self.server and tp > 1:
            cuts = (ModelSplit(ENGINE, self.server, tp, asked_by, ep or 1, None, tp, plain, online_fp8=fp8),)
        return replace(self, sizes=sizes, cuts=cuts)


def cite_all(settings: Config, keys: Sequence[str]) -> str:
    """Those of the keys that have a value, with their places."""
    return ", ".join(settings.cite(key) for key in keys if settings.has(key))


_JOB = ("actor_num_nodes", "actor_num_gpus_per_node")
_RANKS = tuple(SIZES.values())
_VLLM_PP = "vllm_pipeline_parallel_size"
_ENGINE = ("rollout_num_gpus_per_engine", "sglang_pp_size", _VLLM_PP, "sglang_ep_size", "sglang_dp_size")
# Options without local engines, and options that replace --rollout-num-gpus.
_NO_ENGINES = ("debug_train_only", "load_debug_rollout_data", "rollout_external_engine_addrs")
_NO_NUMBER = ("colocate", "custom_config_path", *_NO_ENGINES)


def option_placement(
    given: Arguments, words: Sequence[Word], ranks: Word | None = None, is_miles: bool = False
) -> GpuPlacement | None:
    """The GPUs of trainer and engines of a launch by options, or None if it counts none.

    `ranks`: the processes that torchrun, deepspeed or accelerate starts. They count if the launch gives no nodes.

    Source: Megatron-LM `validate_args`; SGLang `ServerArgs`; slime 624b824 and miles 31f1ca9: `ray/placement_group.py`
    (_get_placement_group_layout), `utils/arguments.py`, `backends/sglang_utils/sglang_config.py`, `ray/rollout`
    (_make_group, _resolve_sglang_config). Actor and critic share GPUs. Engines follow the trainer's GPUs, or share
    them with --colocate.
    """
    ranks = ranks if set(_JOB).isdisjoint(given.values) else None
    if {*_JOB, *_ENGINE}.isdisjoint(given.known) and ranks is None:
        return None
    sizes = _OptionSizes(given, words, ranks, is_miles)
    is_counted = ranks is not None or not set(_JOB).isdisjoint(given.known)
    groups = (*([sizes.trainer()] if is_counted else []), *sizes.engines())
    number = sizes.rollout_number() if is_counted else ()
    issues = (*sizes.vocabulary(), *number, *sizes.engine_sizes(), *sizes.shared_nodes())
    return GpuPlacement(groups, issues, tuple(filter(None, [sizes.cut()])))


class _OptionSizes:
    """The sizes of a launch by options, None for one that is unresolved."""

    def __init__(self, given: Arguments, words: Sequence[Word], ranks: Word | None, is_miles: bool) -> None:
        self.given, self.ranks, self.is_miles = given, ranks, is_miles
        of = self._size
        self.actor_nodes, self.each = of("actor_num_nodes", 1), of("actor_num_gpus_per_node", 8)
        self.world = self.actor_nodes * self.each if self.actor_nodes and self.each else None
        self.world = int(ranks.text) if ranks else self.world
        self.node = of("num_gpus_per_node", 8)
        self.tp, self.pp, self.cp, self.ep = (of(SIZES[name], 1) for name in ("tp", "pp", "cp", "ep"))
        self.etp = of(SIZES["etp"], self.tp)
        self.engine, self.server = of("rollout_num_gpus_per_engine", 1), server_of(words)
        self.engine_pp = of(_VLLM_PP if self.server == "vllm" else "sglang_pp_size", 1)
        self.engine_ep, self.engine_dp = of("sglang_ep_size", 1), of("sglang_dp_size", 1)
        self.vllm_dp = of("vllm_data_parallel_size", 1)
        self.dp_attention = bool(given.value("sglang_enable_dp_attention"))
        # With any backend except "none" SGLang spreads experts over all ranks of an engine.
        if given.has("sglang_moe_a2a_backend") and given.value("sglang_moe_a2a_backend") != "none":
            self.engine_ep = self.tp_of_engine
        self.plain_experts = not given.has("sglang_moe_dp_size") or given.value("sglang_moe_dp_size") == 1
        self.dense_tp = None if "sglang_moe_dense_tp_size" in given.values else self.tp_of_engine
        self.shares_nodes = bool(given.value("colocate"))
        self.redundant = of("sglang_ep_num_redundant_experts", 0) or 0
        self.file = words[0].file if words else None
        self.is_relax = any(word.text.partition("=")[0] == "--resource" for word in words)  # counts GPUs by roles

    def _size(self, name: str, default: int | None) -> int | None:
        value: int | None = self.given.value(name, default)
        return value if value is None or value > 0 else None

    def issue(self, expected: str, actual: str, hint: str, names: Sequence[str] = ()) -> Issue:
        """An issue at the places of these arguments."""
        words = self.given.words(names)
        return Issue(f"{expected}{at_places(words)}", actual, hint, file=first_file(words) or self.file)

    def trainer(self) -> GpuGroup:
        words = self.given.words((*_JOB, *_RANKS))
        source = f"processes started at {self.ranks.place}" if self.ranks else " x ".join(_JOB)
        ep = self.ep if self.etp else None  # `Sizes.group` would replace an unresolved etp by tp
        sizes = Sizes(self.tp, self.pp, self.cp, ep, self.etp, None, places_of(words), first_file(words) or self.file)
        return sizes.group("actor", Gpus(self.world, source))

    def vocabulary(self) -> Iterator[Issue]:
        """Rows of the embedding. Megatron pads them to a multiple of TP unless the launch gives their number."""
        rows = self.given.value("padded_vocab_size")
        if rows and self.tp and rows % self.tp:
            expected = f"padded_vocab_size divisible by TP = {self.tp}"
            actual = f"padded_vocab_size = {rows}, at {self.given.get('padded_vocab_size').where}"
            yield self.issue(expected, actual, "leave out --padded-vocab-size, so that Megatron pads to a valid size")

    def rollout_number(self) -> Iterator[Issue]:
        """No GPUs for separate engines: slime and miles stop. With 0 slime starts only a router, and miles waits."""
        name = "rollout_num_gpus"
        is_missing = self.given.lacks(name) or (self.is_miles and self.given.value(name) == 0)
        if is_missing and not (self.ranks or self.is_relax) and all(map(self.given.lacks, _NO_NUMBER)):
            hint = "pass the number of GPUs of the engines, or --colocate: the trainer stops at the start"
            yield self.given.issue((name, *_JOB), "--rollout-num-gpus above 0 without --colocate", hint)

    def engines(self) -> Iterator[GpuGroup]:
        """The rollout's GPUs, on nodes of `num_gpus_per_node` GPUs; for vime of the trainer's number if they share."""
        given, total, name = self.given, self._rollout(), _ENGINE[0]
        first = 0 if self.shares_nodes or given.value("debug_rollout_only") else self.world
        is_placed = not (given.anything or self.ranks or first is None or any(True for _ in self.shared_nodes()))
        words = given.words(("rollout_num_gpus", "num_gpus_per_node", *_JOB, *_ENGINE))
        gpus = Gpus(total, "those of the rollout", self.node, first or 0)
        group = GpuGroup(ENGINE, gpus, ((name, (self.engine or 1,)),), places_of(words), first_file(words), is_placed)
        prefill = given.value("prefill_num_servers", 0)
        is_known = total and self.engine and {"vllm_config", "sglang_config"}.isdisjoint(given.values)
        if is_known and self.engine and prefill is not None:
            left = gpus.subtract(prefill * self.engine, "for prefill_num_servers") if prefill else gpus
            yield replace(group, gpus=replace(left, first=gpus.first + prefill * self.engine))

    def engine_sizes(self) -> Iterator[Issue]:
        """Sizes of an engine that must divide each other."""
        names = ("rollout_num_gpus", *_JOB, *_ENGINE)
        if self.engine and self.engine_pp and self.engine % self.engine_pp:
            name = _VLLM_PP if self.server == "vllm" else "sglang_pp_size"
            expected = f"rollout_num_gpus_per_engine divisible by {name} = {self.engine_pp}"
            actual = f"rollout_num_gpus_per_engine = {self.engine}"
            yield self.issue(expected, actual, "change one of them: the trainer stops", names)
            return
        if (self.engine_dp or 0) > 1 and not self.dp_attention and not self.given.anything:
            expected = f"--sglang-enable-dp-attention, since sglang_dp_size = {self.engine_dp}"
            hint = "pass --sglang-enable-dp-attention, without which slime stops"
            yield self.issue(expected, "the option is missing", hint, names)
        tp = self.tp_of_engine
        for size, short in ((self.engine_ep, "ep"), (self.engine_dp if self.dp_attention else None, "dp")):
            if tp and size and tp % size:
                expected = f"tensor parallel ranks of an engine divisible by sglang_{short}_size = {size}"
                hint = f"choose an --sglang-{short}-size that divides the engine's GPUs"
                yield self.issue(expected, f"{tp} ranks", hint, names)

    def shared_nodes(self) -> Iterator[Issue]:
        """Two different sizes of the nodes that engines and trainer share."""
        names, node, each = ("num_gpus_per_node", "colocate", *_JOB), self.node, self.each
        is_read = not (self.given.anything or self.ranks or "rollout_external_engine_addrs" in self.given.values)
        shared = self.shares_nodes and self.server != "vllm" and self.engine and is_read
        if shared and (self.actor_nodes or 0) > 1 and node and each and node != each:
            default = "" if "num_gpus_per_node" in self.given.values else ", by default"
            expected = f"num_gpus_per_node = actor_num_gpus_per_node = {each}, since engines share the trainer's nodes"
            hint = f"pass --num-gpus-per-node {each}: otherwise engines get the address of another node"
            yield self.issue(expected, f"num_gpus_per_node = {node}{default}", hint, names)

    def _rollout(self) -> int | None:
        """The number of GPUs of local engines, or None without such engines, or if it is unknown."""
        if not all(map(self.given.lacks, _NO_ENGINES)):
            return None
        given = self.given.value("rollout_num_gpus", 0)
        return self.world if self.shares_nodes and (given == 0 or self.is_miles) else given or None

    @property
    def tp_of_engine(self) -> int | None:
        """The tensor parallel size of an engine, or None if unknown, as with vLLM's data parallel ranks."""
        if self.vllm_dp != 1 or not self.engine or not self.engine_pp:
            return None
        return max(self.engine // self.engine_pp, 1)

    def cut(self) -> ModelSplit | None:
        """The engine's cut of a model, or None if it is unknown, or if the sizes do not divide."""
        tp, ep = self.tp_of_engine, self.engine_ep
        if tp is None or ep is None or tp % ep or (self.dp_attention and (not self.engine_dp or tp % self.engine_dp)):
            return None
        attention = tp // (self.engine_dp or 1) if self.dp_attention else tp
        server, option = self.server or "sglang", "--rollout-num-gpus-per-engine"
        cut = ModelSplit(ENGINE, server, tp, option, ep, attention, self.dense_tp, self.plain_experts)
        words = self.given.words(_ENGINE)
        return replace(cut, redundant=self.redundant, ep_option="--sglang-ep-size", words=words, file=self.file)
