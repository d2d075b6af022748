"""What each engine offers behind a live witness, and what its servers share."""

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
    """The engine answered that it did not do what was asked; the message is its own."""


class NotTried(RefusedByEngine):
    """A request that is known to end this engine was not sent; the message says why."""


class Server(Protocol):
    """A running engine and the requests that the witness sends."""

    def stop(self) -> None:
        """Ends the engine."""

    def answers(self) -> list[Judged]:
        """What the model makes of each prompt."""

    def held(self) -> Held:
        """Everything that all ranks hold; DRAFT before names of a draft model. Raises CkptkitError unless each does."""

    def check(self, action: str) -> Sequence[str]:
        """The engine's own checker, of one that has it: `compare` gives the names of unequal tensors."""

    def update_by_tensor(self) -> None:
        """The whole checkpoint in buckets, as a trainer sends it. Raises Refused."""

    def update_from_disk(self) -> None:
        """The directory again. Raises Refused."""

    def release_and_resume(self) -> None:
        """Gives weights and cache back, and takes memory for them again, which then holds poison. Raises Refused."""

    def snapshot_and_poison(self) -> None:
        """The engine's own checker remembers every tensor; then every parameter is poisoned."""


class LiveAdapter(Protocol):
    """A module that starts engines of one kind. Its phases' exceptions are no verdict."""

    def serve(self, job: EngineJob, checkpoint: HfCheckpoint) -> Server:
        """Raises CkptkitError where the engine cannot do what the job asks."""

    def version(self) -> str:
        """Its release."""


def buckets(checkpoint: HfCheckpoint) -> Iterator[list[tuple[str, Tensor]]]:
    """Every tensor once, in lists of at least BUCKET_BYTES, the last one less."""
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
