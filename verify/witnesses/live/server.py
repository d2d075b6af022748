"""The protocol of engines that a live witness serves, and helpers that their servers share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Protocol

from torch import Tensor

from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.verify.witnesses.live.job import EngineJob
from ckptkit.verify.witnesses.reference.job import Judged

BUCKET_BYTES = 512 << 20
Held = Mapping[str, tuple[str, int]]  # digest and bytes, by rank and name


class RefusedByEngine(Exception):  # noqa: N818
    """The engine refused a request; the message is its own."""


class NotTried(RefusedByEngine):
    """A request that is known to end this engine was not sent; the message has the reason."""


class Server(Protocol):
    def stop(self) -> None:
        """Ends the engine."""

    def answers(self) -> list[Judged]:
        """The model's log-probabilities for each prompt."""

    def held(self) -> Held:
        """All tensors of all ranks, with the prefix DRAFT for a draft model's. Raises CkptkitError unless complete."""

    def check(self, action: str) -> Sequence[str]:
        """Runs the engine's own checker, if it has one: `compare` returns the names of unequal tensors."""

    def update_by_tensor(self) -> None:
        """Sends the complete checkpoint in buckets, as a trainer does. Raises RefusedByEngine."""

    def update_from_disk(self) -> None:
        """Loads the directory again. Raises RefusedByEngine."""

    def release_and_resume(self) -> None:
        """Releases weights and cache, allocates their memory again, and poisons it. Raises RefusedByEngine."""

    def snapshot_and_poison(self) -> None:
        """Has the engine's own checker copy every tensor, then poisons every parameter."""


class LiveAdapter(Protocol):
    """A module that starts engines of one kind. Exceptions in its phases are no verdict."""

    def serve(self, job: EngineJob, checkpoint: HfCheckpoint) -> Server:
        """Starts the engine. Raises CkptkitError if it cannot run the job."""

    def version(self) -> str:
        """The engine's release."""


def buckets(checkpoint: HfCheckpoint) -> Iterator[list[tuple[str, Tensor]]]:
    """Every tensor once, in lists of at least BUCKET_BYTES, the last one smaller."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in chain.from_iterable(checkpoint.read(names).items() for names in checkpoint.groups):
        bucket.append((name, tensor))
        size += tensor.nbytes
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
