"""How the sizes of a job of slime or miles go with its GPUs, by the options of its launch.

Source: Megatron-LM `validate_args`, megatron-core `initialize_model_parallel`; SGLang `ServerArgs`; slime 624b824 and
miles 31f1ca9: `ray/placement_group.py` (_get_placement_group_layout), `utils/arguments.py`,
`backends/sglang_utils/sglang_config.py`, `ray/rollout` (_make_group, _resolve_sglang_config). Actor and critic share
GPUs. Engines follow the trainer's GPUs, or share them with --colocate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from verify.issue import Issue
from verify.launch.arguments import server_of
from verify.launch.options.arguments import Arguments
from verify.launch.sides import ENGINE
from verify.launch.stacks.sizes import NAMES, Cut, GpuGroup, GpuPlacement, Gpus, Sizes
from verify.launch.words import Word, at_places, first_file, places_of

_JOB = ("actor_num_nodes", "actor_num_gpus_per_node")
_RANKS = tuple(NAMES[name] for name in ("tp", "pp", "cp", "ep", "etp"))
_ENGINE = ("rollout_num_gpus_per_engine", "sglang_pp_size", "sglang_ep_size", "sglang_dp_size")
# Spellings that SGLang takes for one size, and vLLM's option for it.
_ALSO = {
    "sglang_pp_size": ("sglang_pipeline_parallel_size", "vllm_pipeline_parallel_size"),
    "sglang_ep_size": ("sglang_expert_parallel_size", "sglang_ep"),
    "sglang_dp_size": ("sglang_data_parallel_size", "sglang_dp"),
}


# Without --rollout-num-gpus, engines are counted by one of these, or there are none.
_NO_NUMBER = (
    *("colocate", "debug_train_only", "load_debug_rollout_data", "rollout_external_engine_addrs"),
    "custom_config_path",
)
_NUMBER = "give the number of GPUs of the engines, or --colocate: without a number the trainer stops at the start"


def placement_of(
    given: Arguments, words: Sequence[Word], ranks: Word | None = None, is_miles: bool = False
) -> GpuPlacement | None:
    """The GPUs of trainer and engines against their sizes and nodes, or None if a launch counts none.

    `ranks`: the processes that torchrun or its like starts, where the launch counts no nodes itself.
    """
    names = {*_JOB, *_ENGINE, *(one for more in _ALSO.values() for one in more)}
    ranks = ranks if set(_JOB).isdisjoint(given.given) else None
    if names.isdisjoint(given.known) and ranks is None:
        return None
    sizes = _Sizes(given, words, ranks, is_miles)
    is_counted = ranks is not None or not set(_JOB).isdisjoint(given.known)
    groups = (*([sizes.trainer()] if is_counted else []), *sizes.engines())
    number = sizes.number() if is_counted else ()
    issues = (*sizes.vocabulary(), *number, *sizes.engine_sizes(), *sizes.shared_nodes())
    cut = sizes.cut()
    return GpuPlacement(groups, issues, (cut,) if cut else ())


def _spelled(given: Arguments, names: Sequence[str]) -> Mapping[str, Word]:
    """These arguments as the launch gives them, in any spelling."""
    return given.words(one for name in names for one in (name, *_ALSO.get(name, ())))


class _Sizes:
    """The sizes of a launch; None for one that is given and not known."""

    def __init__(self, given: Arguments, words: Sequence[Word], ranks: Word | None, is_miles: bool) -> None:
        self.given, self.ranks, self.is_miles = given, ranks, is_miles
        of = self._size
        self.actor_nodes, self.each = of("actor_num_nodes", 1), of("actor_num_gpus_per_node", 8)
        self.world = None if self.actor_nodes is None or self.each is None else self.actor_nodes * self.each
        self.world = int(ranks.text) if ranks else self.world
        self.node = of("num_gpus_per_node", 8)
        self.tp, self.pp, self.cp, self.ep = (of(NAMES[name], 1) for name in ("tp", "pp", "cp", "ep"))
        self.etp = of(NAMES["etp"], self.tp)
        self.engine = of("rollout_num_gpus_per_engine", 1)
        self.engine_pp, self.engine_ep, self.engine_dp = (of(name, 1) for name in _ENGINE[1:])
        self.server = server_of(words)
        self.vllm_dp = of("vllm_data_parallel_size", 1)
        self.dp_attention = bool(given.value("sglang_enable_dp_attention"))
        # Every backend but none makes SGLang spread experts over all ranks of an engine.
        if given.has("sglang_moe_a2a_backend") and given.value("sglang_moe_a2a_backend") != "none":
            self.engine_ep = self.tp_of_engine
        moe_dp = ("sglang_moe_dp_size", "sglang_moe_data_parallel_size")
        self.plain_experts = not any(given.has(name) and given.value(name) != 1 for name in moe_dp)
        self.dense_tp = None if "sglang_moe_dense_tp_size" in given.given else self.tp_of_engine
        self.shares_nodes = bool(given.value("colocate"))
        self.redundant = of("sglang_ep_num_redundant_experts", 0) or 0
        self.where = words[0].file if words else None
        self.is_relax = any(word.text.partition("=")[0] == "--resource" for word in words)  # counts by roles

    def _size(self, name: str, default: int | None) -> int | None:
        spelled = [self.given.get(one) for one in (name, *_ALSO.get(name, ()))]
        values = [found.value for found in spelled if found.word]
        if None in values or (self.given.anything and not values):
            return None
        value = values[-1 if self.given.anything else 0] if values else default
        return value if value is None or value > 0 else None

    def issue(self, expected: str, actual: str, hint: str, names: Sequence[str] = ()) -> Issue:
        """An issue at the places of these arguments."""
        words = _spelled(self.given, names)
        return Issue(f"{expected}{at_places(words)}", actual, hint, file=first_file(words) or self.where)

    def trainer(self) -> GpuGroup:
        """The trainer's GPUs."""
        words = _spelled(self.given, (*_JOB, *_RANKS))
        source = f"processes started at {self.ranks.place}" if self.ranks else " x ".join(_JOB)
        places, file = places_of(words), first_file(words) or self.where
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
        words = _spelled(given, ("rollout_num_gpus", "num_gpus_per_node", *_JOB, *_ENGINE))
        gpus = Gpus(total, "those of the rollout", self.node, first or 0)
        group = GpuGroup(ENGINE, gpus, ((name, (self.engine or 1,)),), places_of(words), first_file(words), is_placed)
        prefill = given.value("prefill_num_servers", 0)
        is_known = total and self.engine and {"vllm_config", "sglang_config"}.isdisjoint(given.given)
        if is_known and self.engine and prefill is not None:
            left = gpus.less(prefill * self.engine, "for prefill_num_servers") if prefill else gpus
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
            words=_spelled(self.given, _ENGINE),
            file=self.where,
        )
