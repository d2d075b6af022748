"""How Megatron would be launched, beyond the parallel sizes that SGLang has too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from ckptkit.core.errors import UsageError


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
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                yield f"--{field.name.replace('_', '-')}"

    def refuse(self, vpp: int = 1) -> None:
        """Raises UsageError where an option, or `vpp` stages a rank, is given although Megatron is not asked."""
        if given := [*["--vpp"] * (vpp != 1), *self.given()]:
            message = f"{', '.join(given)} says how Megatron is launched, and has no effect without --against-megatron"
            raise UsageError(message, "add --against-megatron, or leave it out: files and values do not depend on it")
