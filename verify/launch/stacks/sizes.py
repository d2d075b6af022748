"""The parallel sizes of a role, the GPUs that it has, and whether the one divides the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from verify.issue import Issue
from verify.launch.arguments import LaunchArguments, Server
from verify.launch.settings.config import Config
from verify.launch.sides import ENGINE, Side
from verify.launch.words import Word

# The settings of Megatron's sizes, which all stacks call alike.
NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
}


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

    def less(self, count: int, what: str) -> Gpus:
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
    where: the option or setting that says it.

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
    where: str
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
        return GpuGroup(self.role, gpus, ((name, (self.ranks,)),), self.where)


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
        return Sizes(tp, pp, cp, ep, etp, vpp, places(settings, list(keys.values())))

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
        self, tp: int, pp: int, ep: int | None, where: str, *, plain: bool = True, fp8: bool = False
    ) -> RolloutEngine:
        """With sizes that are known, `tp` by `where`.

        plain: no more than these sizes cut experts. fp8: it packs what it is sent in FP8.
        """
        sizes = replace(self.sizes, engine=tp * pp, engine_pp=pp, engine_ep=ep)
        if (server := server_named(self.sizes.server)) is None or tp < 2:
            return replace(self, sizes=sizes)
        cut = Cut(ENGINE, server, tp, where, ep or 1, dense=tp, plain_experts=plain, online_fp8=fp8)
        return replace(self, sizes=sizes, cuts=(cut,))


def server_named(name: str | None) -> Server | None:
    """The engine that a stack calls so; None for another one."""
    return "vllm" if name == "vllm" else "sglang" if name == "sglang" else None


def places(settings: Config, keys: Sequence[str]) -> str:
    """Where these keys are written, those alone that are."""
    return ", ".join(settings.cite(key) for key in keys if settings.has(key))
