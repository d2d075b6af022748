"""The options of `verify`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ckptkit.core.errors import UsageError
from ckptkit.quant.ignore.readers import readers_of
from ckptkit.verify.witnesses.registry import ENGINES, WITNESSES, with_implied

# Megatron-LM's own arguments for `--against-megatron`, under its names.
_MEGATRON = (
    *("vpp", "cp", "pipeline_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "ranks", "trainer_loader"),
)


@dataclass(frozen=True)
class VerifyOptions:
    """How a checkpoint is verified. Raises UsageError for options that contradict each other or have no effect."""

    tp: int = 1  # Megatron's and SGLang's parallel size, as ep
    pp: int = 1  # Megatron's pipeline stages
    ep: int = 1
    etp: int | None = None  # Megatron's tensor parallel size inside experts, or None for tp (1 with ep)
    vpp: int = 1  # virtual pipeline stages per rank
    cp: int = 1  # the context parallel size
    pipeline_layout: str | None = None  # `--pipeline-model-parallel-layout`, for example `Et*3|(tt|)*29m|L`
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    ranks: tuple[int, ...] = ()  # the only ranks to check; empty means all
    trainer_loader: bool = False  # load with Megatron-LM's `load_checkpoint`, as a trainer does
    dp_attention: bool = False  # SGLang keeps the complete attention on every rank
    # Witnesses by name (`ckptkit.verify.witnesses.registry.WITNESSES`). `engine` is SGLang, or vLLM with `vllm`.
    against: frozenset[str] = frozenset()
    # Programs that load or send INT4 weights, as in `--reader`, or None for `quant.ignore.readers.deciding_readers`.
    # An `ignore` list that contradicts the packed weights is an error for these, and a warning for other readers.
    readers: tuple[str, ...] | None = None
    accept: frozenset[str] = frozenset()  # codes of checks that may stay incomplete, such as CK506 without a GPU
    manifest: Path | None = None  # a file with a digest of every tensor
    adapter: Path | None = None  # a PEFT adapter that was merged into the source
    trained: bool = False  # the checkpoint was trained from the source, so its values may differ
    ray: str | None = None  # the address of a Ray cluster that reads the bytes
    rollout_data: Path | None = None  # slime's or miles' file from --save-debug-rollout-data or --save-debug-train-data
    rollout_temperature: float | None = None  # the sampling temperature, or None for that in the file, or 1
    # The Python of a program (`sglang`, `vllm`, `megatron`), by default in CKPTKIT_PROGRAM_PYTHON.
    pythons: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.ep, self.etp or 1, self.vpp, self.cp) < 1:
            raise UsageError("a parallel size is below 1", "pass tp, pp, ep, etp, vpp and cp of 1 or more")
        names = [one.name for one in WITNESSES]
        if unknown := self.against.difference(names):
            raise UsageError(f"against contains {sorted(unknown)}", f"use only {', '.join(map(repr, names))}")
        object.__setattr__(self, "against", with_implied(self.against))
        if "engine" in self.against and self.against >= {one.name for one in ENGINES}:
            hint = "pass --against-sglang or --against-vllm, not both"
            raise UsageError("--engine serves the checkpoint with one engine", hint)
        if self.trained and self.adapter is not None:
            hint = "leave out trained: a merged adapter is compared bit for bit"
            raise UsageError("trained cannot be combined with an adapter", hint)
        if "megatron" not in self.against and self.of_megatron:
            given = ", ".join(self.of_megatron)
            message = f"{given} configures Megatron's launch, and has no effect without --against-megatron"
            raise UsageError(message, "add --against-megatron, or leave it out: files and values do not depend on it")
        if self.dp_attention and ("sglang" not in self.against or self.tp == 1):
            raise UsageError("--dp-attention has no effect here", "use it with --against-sglang and a --tp above 1")
        if self.readers is not None:
            readers_of(self.readers)  # raises for an unknown name
        if self.rollout_temperature is not None and not self.rollout_temperature > 0:
            raise UsageError(f"the temperature is {self.rollout_temperature:g}", "pass one above 0, or none for greedy")
        if self.rollout_temperature is not None and self.rollout_data is None:
            raise UsageError("a temperature needs a rollout", "pass the rollout too (--rollout-data)")

    @property
    def of_megatron(self) -> list[str]:
        """Megatron's arguments that differ from their defaults, as the command line spells them."""
        defaults = {one.name: one.default for one in fields(self)}
        return [f"--{name.replace('_', '-')}" for name in _MEGATRON if getattr(self, name) != defaults[name]]


def verify_options(**options: Any) -> VerifyOptions:
    """Makes VerifyOptions of its fields, with paths as strings and lists of any type.

    Raises UsageError as `VerifyOptions`, and TypeError for another option.
    """
    options["ranks"] = tuple(sorted(set(options.get("ranks") or ())))
    for name in ("manifest", "adapter", "rollout_data"):
        options[name] = Path(options[name]) if options.get(name) else None
    readers, accept = options.pop("readers", None), frozenset(map(str.upper, options.pop("accept", ())))
    against = frozenset(options.pop("against", ()))
    return VerifyOptions(**options, against=against, accept=accept, readers=None if readers is None else tuple(readers))
