"""The options of `verify`, one object from the command line to every check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ckptkit.core.errors import UsageError
from ckptkit.quant.ignore.readers import readers_of
from ckptkit.verify.witnesses.registry import ENGINES, WITNESSES, with_implied


@dataclass(frozen=True)
class MegatronOptions:
    """Megatron-LM's own arguments, by its names, for `--against-megatron`.

    `cp` is the context parallel size. `pipeline_layout` is `--pipeline-model-parallel-layout`, a string such as
    `Et*3|(tt|)*29m|L`. `ranks`: the only ranks to look at; empty means all of them. `trainer_loader`: load as a trainer
    does, with Megatron-LM's own `load_checkpoint`.
    """

    cp: int = 1
    pipeline_layout: str | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    ranks: tuple[int, ...] = ()
    trainer_loader: bool = False

    def given(self) -> Iterator[str]:
        """The options that differ from their defaults, as the command line spells them."""
        for one in fields(self):
            if getattr(self, one.name) != one.default:
                yield f"--{one.name.replace('_', '-')}"

    def refuse(self, vpp: int = 1) -> None:
        """Raises UsageError where an option, or `vpp` stages a rank, is given although Megatron is not asked."""
        if given := [*["--vpp"] * (vpp != 1), *self.given()]:
            message = f"{', '.join(given)} says how Megatron is launched, and has no effect without --against-megatron"
            raise UsageError(message, "add --against-megatron, or leave it out: files and values do not depend on it")


@dataclass(frozen=True)
class VerifyOptions:
    """How a checkpoint is verified. `verify_options` makes one of what a user gave.

    tp, ep: parallel sizes, Megatron's and SGLang's.
    pp, vpp: Megatron's pipeline stages, and virtual stages a rank.
    etp: Megatron's tensor parallel size inside experts; None: tp, or 1 with ep.
    dp_attention: SGLang keeps attention whole on every rank.
    megatron: the rest of Megatron's launch.
    against: names of `ckptkit.verify.witnesses.registry.WITNESSES` to ask. `engine` is vLLM with `vllm`, else SGLang.
    readers: who will load or send INT4 weights, as `--reader` has them; None: those of
        `ckptkit.quant.ignore.readers.deciding_readers`.
        An `ignore` list that contradicts the packed weights for one of them is an error, for others a warning.
    accept: codes of checks that may stay unchecked, as CK506 without a GPU: the report lists them and is not
        inconclusive because of them.
    manifest: a file with a digest of every tensor.
    adapter: a PEFT adapter that was merged into the source: the checkpoint is compared with what that gives.
    trained: the checkpoint was trained from the source, so its values may differ from the source's.
    ray: the address of a Ray cluster that reads all the bytes; None: threads of this process do.
    rollout_data: what slime or miles wrote for --save-debug-rollout-data or --save-debug-train-data.
    rollout_temperature: what the rollout was sampled at; None: as the file says, or 1.
    pythons: the Python that has a program (`sglang`, `vllm`, `megatron`), where that is another than this one; else the
        environment variable CKPTKIT_PROGRAM_PYTHON counts.

    Raises UsageError for options that contradict each other or have no effect.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    dp_attention: bool = False
    megatron: MegatronOptions = field(default_factory=MegatronOptions)
    against: frozenset[str] = frozenset()
    readers: tuple[str, ...] | None = None
    accept: frozenset[str] = frozenset()
    manifest: Path | None = None
    adapter: Path | None = None
    trained: bool = False
    ray: str | None = None
    rollout_data: Path | None = None
    rollout_temperature: float | None = None
    pythons: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [one.name for one in WITNESSES]
        if unknown := self.against.difference(names):
            raise UsageError(f"against holds {sorted(unknown)}", f"it may hold {', '.join(map(repr, names))}")
        object.__setattr__(self, "against", with_implied(self.against))
        if "engine" in self.against and self.against >= {one.name for one in ENGINES}:
            raise UsageError(
                "--engine serves the checkpoint with one engine", "give --against-sglang or --against-vllm, not both"
            )
        if self.trained and self.adapter is not None:
            raise UsageError(
                "trained and an adapter exclude each other",
                "what an adapter adds is compared bit for bit: leave out trained",
            )
        if "megatron" not in self.against:
            self.megatron.refuse(self.vpp)
        if self.dp_attention and ("sglang" not in self.against or self.tp == 1):
            raise UsageError("--dp-attention has no effect here", "it goes with --against-sglang and a --tp above 1")
        if self.readers is not None:
            readers_of(self.readers)  # raises for an unknown name
        if self.rollout_temperature is not None and not self.rollout_temperature > 0:
            raise UsageError(f"a temperature of {self.rollout_temperature:g}", "it is above 0; leave it out for greedy")
        if self.rollout_temperature is not None and self.rollout_data is None:
            raise UsageError("a temperature without a rollout", "give the rollout too (--rollout-data)")


_MEGATRON = {one.name for one in fields(MegatronOptions)}


def verify_options(**options: Any) -> VerifyOptions:
    """Makes VerifyOptions of its fields and those of MegatronOptions, as a user gave them: paths and lists of any kind.

    Raises as VerifyOptions does, and TypeError for an unknown option.
    """
    megatron = {name: options.pop(name) for name in _MEGATRON & options.keys()}
    megatron["ranks"] = tuple(sorted(set(megatron.get("ranks") or ())))
    for name in ("manifest", "adapter", "rollout_data"):
        options[name] = Path(options[name]) if options.get(name) else None
    readers, accept = options.pop("readers", None), frozenset(map(str.upper, options.pop("accept", ())))
    return VerifyOptions(
        **options,
        accept=accept,
        readers=None if readers is None else tuple(readers),
        megatron=MegatronOptions(**megatron),
    )
