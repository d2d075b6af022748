"""The parallel sizes of a role, the GPUs that it has, and whether the one divides the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ckptkit.verify.core.issue import Issue
from ckptkit.verify.launch.arguments import LaunchArguments, Server, server_of
from ckptkit.verify.launch.options.arguments import Arguments
from ckptkit.verify.launch.options.tables import SIZES
from ckptkit.verify.launch.settings.config import Config
from ckptkit.verify.launch.sides import ENGINE, Side
from ckptkit.verify.launch.words import Word, at_places, first_file, places_of

# The settings of a role's sizes.
NAMES = SIZES | {"vpp": "virtual_pipeline_model_parallel_size"}


@dataclass(frozen=True)
class Gpus:
    """How many GPUs a role has, None where that is not known, and where it is written.

    node: GPUs of one node.
    first: the position of the first of them, counted from the first GPU of the first node.
    """

    count: int | None = None
    source: str = ""
    node: int | None = None
    first: int = 0

    @staticmethod
    def read(settings: Config, nodes: str, each: str) -> Gpus:
        """The nodes under one key times the GPUs of each under another, 8 where that is not given."""
        sizes = settings.size(nodes), settings.size(each, 8)
        if sizes[0] is None or sizes[1] is None:
            return Gpus()
        source = f"{settings.cite(nodes)} {sizes[0]} x {settings.cite(each)} {sizes[1]}"
        return Gpus(sizes[0] * sizes[1], source, sizes[1])

    def subtract(self, count: int, what: str) -> Gpus:
        """Those that are left when another role has taken `count` of them; none at all if it takes more."""
        left = None if self.count is None else max(self.count - count, 0)
        return replace(self, count=left, source=f"{self.source}, less {count} {what}")


@dataclass(frozen=True)
class GpuGroup:
    """The GPUs of one role, and products of sizes that must divide them, by their names: `tp x pp x cp`.

    source: where the sizes are written, in `file` where that is known.
    is_engine: each product is an engine, which must have whole nodes or a part of one.
    is_inside: such an engine cannot have more than one node.
    """

    role: str
    gpus: Gpus = Gpus()
    products: tuple[tuple[str, tuple[int, ...]], ...] = ()
    source: str = ""
    file: Path | None = None
    is_engine: bool = False
    is_inside: bool = False

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
                expected = f"GPUs of the {self.role} that divide by {names} = {product}{source}"
                hint = f"make the GPUs a multiple of {least}, or choose other sizes"
                yield Issue(expected, f"{count} GPUs: {self.gpus.source}", hint, file=self.file)
            elif node and self.is_inside and ranks > node:
                expected = f"engines inside of a node of {node} GPUs, as data parallel ranks must be{source}"
                yield Issue(
                    expected, f"{names} = {ranks} GPUs", "choose sizes that a node has room for", file=self.file
                )
            elif node and (found := across_nodes(ranks, node, count, self.gpus.first)):
                expected = f"engines that fit on nodes of {node} GPUs{source}"
                hint = "choose sizes that divide a node, or whole nodes"
                yield Issue(expected, f"{found}: {self.gpus.source}", hint, file=self.file)


def across_nodes(engine: int, node: int, total: int, offset: int = 0) -> str | None:
    """Which engine of `engine` GPUs does not fit on nodes of `node` GPUs; None where all `total // engine` of them do.

    Engines follow one another from the GPU `offset` on, each in equal parts on whole nodes or inside of one.
    """
    if engine > node and engine % node:
        return f"{engine} GPUs for an engine, {engine // node} nodes and {engine % node} more GPUs"
    share = min(engine, node)
    for first in range(offset, offset + total - share + 1, share)[:node]:
        if first % node + share > node:
            return f"an engine on GPUs {first} to {first + share - 1} of the job, which are on two nodes"
    return None


@dataclass(frozen=True)
class Cut:
    """How a role shares a model out otherwise than Megatron does: over `ranks` ranks.

    by: an engine's tensor parallel ranks, Ulysses' ranks of a sequence, or DTensor's tensor parallel ranks.
    asked_by: the option or setting that gives the ranks.

    Of an engine alone:
    ep: ranks that experts are spread over.
    attention: ranks that heads are spread over, where these are not all.
    dense: ranks that share the layers without experts; None where they are not known.
    plain_experts: no size but these two cuts experts.
    online_fp8: it packs what it is sent in FP8 blocks of 128 by 128, whatever the checkpoint says.
    redundant: experts that are held twice.
    ep_option: what to change for `ep`.
    words: the sizes as the launch writes them; `file` is its file.
    """

    role: str
    by: Literal["sglang", "vllm", "ulysses", "dtensor"]
    ranks: int
    asked_by: str
    ep: int = 1
    attention: int | None = None
    dense: int | None = None
    plain_experts: bool = True
    online_fp8: bool = False
    redundant: int = 0
    ep_option: str = "ep_size"
    words: Mapping[str, Word] = field(default_factory=dict)
    file: Path | None = None

    @staticmethod
    def ulysses(settings: Config, role: str, *keys: str) -> Iterator[Cut]:
        """The ranks that share a sequence by the first of these keys that has a value; nothing for a single one."""
        key = settings.first(*keys)
        if (ranks := settings.size(key)) and ranks > 1:
            yield Cut(role, "ulysses", ranks, settings.cite(key))

    def group(self, gpus: Gpus, name: str) -> GpuGroup:
        """The GPUs that these ranks, which the stack calls so, must divide."""
        return GpuGroup(self.role, gpus, ((name, (self.ranks,)),), self.asked_by)


@dataclass(frozen=True)
class GpuPlacement:
    """How the sizes of a job go with its GPUs.

    groups: the GPUs of each role or group of engines, and what must divide them.
    issues: more that is wrong with sizes.
    cuts: how engines and trainers without Megatron share a model out.
    """

    groups: tuple[GpuGroup, ...] = ()
    issues: tuple[Issue, ...] = ()
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """Megatron's sizes of a role; None where they are not known, of `etp` and `vpp` also where they are not given."""

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
        """Those that `settings` have under the first of these prefixes that has one."""
        keys = {short: settings.first(*(f"{one}.{name}" for one in prefixes)) for short, name in NAMES.items()}
        tp, pp, cp, ep = (settings.size(keys[short]) for short in ("tp", "pp", "cp", "ep"))
        etp, vpp = (settings.size(keys[short], None) for short in ("etp", "vpp"))
        if not settings.get(keys["etp"]).known:
            tp = None
        return Sizes(tp, pp, cp, ep, etp, vpp, cite_all(settings, list(keys.values())))

    def group(self, role: str, gpus: Gpus) -> GpuGroup:
        """What must divide the GPUs. Source: megatron-core `initialize_model_parallel`; etp is tp where not given."""
        etp = self.tp if self.etp is None else self.etp
        products = []
        if self.tp and self.pp and self.cp:
            products.append(("tp x pp x cp", (self.tp, self.pp, self.cp)))
        is_implied = self.tp and self.cp and self.ep and etp and self.tp * self.cp % (self.ep * etp) == 0
        if self.ep and etp and self.pp and not is_implied:
            products.append(("ep x etp x pp", (self.ep, etp, self.pp)))
        return GpuGroup(role, gpus, tuple(products), self.source, self.file)

    def arguments(self, engine: LaunchArguments, settings: Config, prefix: str) -> LaunchArguments:
        """Those of a trainer beside this rollout engine, and how `settings` under this prefix cut its pipeline."""
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
    """The rollout engine of a job: what it loads, its sizes, the GPUs that they must divide, how it cuts a model."""

    side: Side | None = None
    sizes: LaunchArguments = field(default_factory=LaunchArguments)
    groups: tuple[GpuGroup, ...] = ()
    cuts: tuple[Cut, ...] = ()

    def cut(
        self, tp: int, pp: int, ep: int | None, asked_by: str, *, plain: bool = True, fp8: bool = False
    ) -> RolloutEngine:
        """With sizes that are known, `tp` by the setting `asked_by`.

        plain: no more than these sizes cut experts. fp8: it packs what it is sent in FP8.
        """
        sizes = replace(self.sizes, engine=tp * pp, engine_pp=pp, engine_ep=ep)
        if (server := known_server(self.sizes.server)) is None or tp < 2:
            return replace(self, sizes=sizes)
        cut = Cut(ENGINE, server, tp, asked_by, ep or 1, dense=tp, plain_experts=plain, online_fp8=fp8)
        return replace(self, sizes=sizes, cuts=(cut,))


def known_server(name: str | None) -> Server | None:
    """The engine that a stack calls so; None for another one."""
    return "vllm" if name == "vllm" else "sglang" if name == "sglang" else None


def cite_all(settings: Config, keys: Sequence[str]) -> str:
    """Where these keys are written, those alone that are."""
    return ", ".join(settings.cite(key) for key in keys if settings.has(key))


# The GPUs of a launch by options, of slime, miles, vime, Relax or Megatron-LM.
_JOB = ("actor_num_nodes", "actor_num_gpus_per_node")
_RANKS = tuple(SIZES.values())
_VLLM_PP = "vllm_pipeline_parallel_size"
_ENGINE = ("rollout_num_gpus_per_engine", "sglang_pp_size", _VLLM_PP, "sglang_ep_size", "sglang_dp_size")
# Without --rollout-num-gpus, engines are counted by one of these, or there are none.
_NO_NUMBER = (
    *("colocate", "debug_train_only", "load_debug_rollout_data", "rollout_external_engine_addrs"),
    "custom_config_path",
)
_NUMBER = "give the number of GPUs of the engines, or --colocate: without a number the trainer stops at the start"


def option_placement(
    given: Arguments, words: Sequence[Word], ranks: Word | None = None, is_miles: bool = False
) -> GpuPlacement | None:
    """The GPUs of trainer and engines of a launch by options, or None if it counts none.

    `ranks`: the processes that torchrun or its like starts, where the launch counts no nodes itself.

    Source: Megatron-LM `validate_args`; SGLang `ServerArgs`; slime 624b824 and miles 31f1ca9: `ray/placement_group.py`
    (_get_placement_group_layout), `utils/arguments.py`, `backends/sglang_utils/sglang_config.py`, `ray/rollout`
    (_make_group, _resolve_sglang_config). Actor and critic share GPUs. Engines follow the trainer's GPUs, or share
    them with --colocate.
    """
    ranks = ranks if set(_JOB).isdisjoint(given.given) else None
    if {*_JOB, *_ENGINE}.isdisjoint(given.known) and ranks is None:
        return None
    sizes = _OptionSizes(given, words, ranks, is_miles)
    is_counted = ranks is not None or not set(_JOB).isdisjoint(given.known)
    groups = (*([sizes.trainer()] if is_counted else []), *sizes.engines())
    number = sizes.number() if is_counted else ()
    issues = (*sizes.vocabulary(), *number, *sizes.engine_sizes(), *sizes.shared_nodes())
    cut = sizes.cut()
    return GpuPlacement(groups, issues, (cut,) if cut else ())


class _OptionSizes:
    """The sizes of a launch; None for one that is given and not known."""

    def __init__(self, given: Arguments, words: Sequence[Word], ranks: Word | None, is_miles: bool) -> None:
        self.given, self.ranks, self.is_miles = given, ranks, is_miles
        of = self._size
        self.actor_nodes, self.each = of("actor_num_nodes", 1), of("actor_num_gpus_per_node", 8)
        self.world = None if self.actor_nodes is None or self.each is None else self.actor_nodes * self.each
        self.world = int(ranks.text) if ranks else self.world
        self.node = of("num_gpus_per_node", 8)
        self.tp, self.pp, self.cp, self.ep = (of(SIZES[name], 1) for name in ("tp", "pp", "cp", "ep"))
        self.etp = of(SIZES["etp"], self.tp)
        self.engine = of("rollout_num_gpus_per_engine", 1)
        self.server = server_of(words)
        self.engine_pp = of(_VLLM_PP if self.server == "vllm" else "sglang_pp_size", 1)
        self.engine_ep, self.engine_dp = of("sglang_ep_size", 1), of("sglang_dp_size", 1)
        self.vllm_dp = of("vllm_data_parallel_size", 1)
        self.dp_attention = bool(given.value("sglang_enable_dp_attention"))
        # Every backend but none makes SGLang spread experts over all ranks of an engine.
        if given.has("sglang_moe_a2a_backend") and given.value("sglang_moe_a2a_backend") != "none":
            self.engine_ep = self.tp_of_engine
        self.plain_experts = not given.has("sglang_moe_dp_size") or given.value("sglang_moe_dp_size") == 1
        self.dense_tp = None if "sglang_moe_dense_tp_size" in given.given else self.tp_of_engine
        self.shares_nodes = bool(given.value("colocate"))
        self.redundant = of("sglang_ep_num_redundant_experts", 0) or 0
        self.file = words[0].file if words else None
        self.is_relax = any(word.text.partition("=")[0] == "--resource" for word in words)  # counts by roles

    def _size(self, name: str, default: int | None) -> int | None:
        value: int | None = self.given.value(name, default)
        return value if value is None or value > 0 else None

    def issue(self, expected: str, actual: str, hint: str, names: Sequence[str] = ()) -> Issue:
        """An issue at the places of these arguments."""
        words = self.given.words(names)
        return Issue(f"{expected}{at_places(words)}", actual, hint, file=first_file(words) or self.file)

    def trainer(self) -> GpuGroup:
        """The trainer's GPUs."""
        words = self.given.words((*_JOB, *_RANKS))
        source = f"processes started at {self.ranks.place}" if self.ranks else " x ".join(_JOB)
        places, file = places_of(words), first_file(words) or self.file
        ep = self.ep if self.etp else None  # an etp that is not known is not that of tp
        sizes = Sizes(self.tp, self.pp, self.cp, ep, self.etp, source=places, file=file)
        return sizes.group("actor", Gpus(self.world, source))

    def vocabulary(self) -> Iterator[Issue]:
        """Rows of the embedding, which Megatron pads by itself to a multiple of TP unless it is told how many."""
        rows = self.given.value("padded_vocab_size")
        if rows and self.tp and rows % self.tp:
            expected = f"padded_vocab_size that divides by TP = {self.tp}"
            hint = "leave --padded-vocab-size out, so that Megatron pads by --make-vocab-size-divisible-by x TP"
            yield self.issue(
                expected, f"padded_vocab_size = {rows}, at {self.given.get('padded_vocab_size').where}", hint
            )

    def number(self) -> Iterator[Issue]:
        """Engines with GPUs of their own whose number is missing: slime and miles add None to the trainer's GPUs.

        With 0 slime starts a router only, and miles waits for engines that it never starts.
        """
        name = "rollout_num_gpus"
        is_missing = self.given.lacks(name) or (self.is_miles and self.given.value(name) == 0)
        if is_missing and not (self.ranks or self.is_relax) and all(map(self.given.lacks, _NO_NUMBER)):
            expected = f"--{name.replace('_', '-')} above 0 without --colocate"
            yield self.given.issue((name, *_JOB), expected, _NUMBER)

    def engines(self) -> Iterator[GpuGroup]:
        """The rollout's GPUs on nodes of `num_gpus_per_node`, by which slime and miles compute where an engine is.

        vime takes the trainer's number instead where they share GPUs.
        """
        given, total, name = self.given, self._rollout(), _ENGINE[0]
        first = 0 if self.shares_nodes or given.value("debug_rollout_only") else self.world
        is_placed = not (given.anything or self.ranks or first is None or any(True for _ in self.shared_nodes()))
        words = given.words(("rollout_num_gpus", "num_gpus_per_node", *_JOB, *_ENGINE))
        gpus = Gpus(total, "those of the rollout", self.node, first or 0)
        group = GpuGroup(ENGINE, gpus, ((name, (self.engine or 1,)),), places_of(words), first_file(words), is_placed)
        prefill = given.value("prefill_num_servers", 0)
        is_known = total and self.engine and {"vllm_config", "sglang_config"}.isdisjoint(given.given)
        if is_known and self.engine and prefill is not None:
            left = gpus.subtract(prefill * self.engine, "for prefill_num_servers") if prefill else gpus
            yield replace(group, gpus=replace(left, first=gpus.first + prefill * self.engine))

    def engine_sizes(self) -> Iterator[Issue]:
        """Sizes of an engine that must divide one another."""
        names = ("rollout_num_gpus", *_JOB, *_ENGINE)
        if self.engine and self.engine_pp and self.engine % self.engine_pp:
            name = "vllm_pipeline_parallel_size" if self.server == "vllm" else "sglang_pp_size"
            expected = f"rollout_num_gpus_per_engine that divides by {name} = {self.engine_pp}"
            actual = f"rollout_num_gpus_per_engine = {self.engine}"
            yield self.issue(expected, actual, "the trainer stops: change one of them", names)
            return
        if (self.engine_dp or 0) > 1 and not self.dp_attention and not self.given.anything:
            expected = f"--sglang-enable-dp-attention, since sglang_dp_size = {self.engine_dp}"
            yield self.issue(expected, "the launch does not give it", "slime stops without it", names)
        tp = self.tp_of_engine
        for size, short in ((self.engine_ep, "ep"), (self.engine_dp if self.dp_attention else None, "dp")):
            if tp and size and tp % size:
                expected = f"tensor parallel ranks of an engine that divide by sglang_{short}_size = {size}"
                hint = f"give an --sglang-{short}-size that divides the engine's GPUs"
                yield self.issue(expected, f"{tp} ranks", hint, names)

    def shared_nodes(self) -> Iterator[Issue]:
        """Engines on the trainer's nodes, whose size the launch gives twice."""
        names, node, each = ("num_gpus_per_node", "colocate", *_JOB), self.node, self.each
        is_read = not (self.given.anything or self.ranks or "rollout_external_engine_addrs" in self.given.given)
        shared = self.shares_nodes and self.server != "vllm" and self.engine and is_read
        if shared and (self.actor_nodes or 0) > 1 and node and each and node != each:
            default = "" if "num_gpus_per_node" in self.given.given else ", by default"
            expected = f"num_gpus_per_node = actor_num_gpus_per_node = {each}, since engines share the trainer's nodes"
            hint = f"give --num-gpus-per-node {each}: otherwise engines get the address of another node"
            yield self.issue(expected, f"num_gpus_per_node = {node}{default}", hint, names)

    def _rollout(self) -> int | None:
        """The GPUs of local engines, or None if there are none, or how many is not known."""
        elsewhere = ("debug_train_only", "load_debug_rollout_data", "rollout_external_engine_addrs")
        if not all(map(self.given.lacks, elsewhere)):
            return None
        given = self.given.value("rollout_num_gpus", 0)
        if self.shares_nodes and (given == 0 or self.is_miles):
            return self.world
        return given or None

    @property
    def tp_of_engine(self) -> int | None:
        """The tensor parallel size of an engine; None where it is not known, as with vLLM's data parallel ranks."""
        if self.vllm_dp != 1:
            return None
        return max(self.engine // self.engine_pp, 1) if self.engine and self.engine_pp else None

    def cut(self) -> Cut | None:
        """How an engine shares a model out over its ranks; None where that is not known, or they do not divide."""
        tp, ep = self.tp_of_engine, self.engine_ep
        if tp is None or ep is None or tp % ep or (self.dp_attention and (not self.engine_dp or tp % self.engine_dp)):
            return None
        return Cut(
            ENGINE,
            self.server or "sglang",
            tp,
            "--rollout-num-gpus-per-engine",
            ep,
            attention=tp // (self.engine_dp or 1) if self.dp_attention else tp,
            dense=self.dense_tp,
            plain_experts=self.plain_experts,
            redundant=self.redundant,
            ep_option="--sglang-ep-size",
            words=self.given.words(_ENGINE),
            file=self.file,
        )
