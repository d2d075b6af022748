"""Reads the files of a Megatron torch_dist directory, however broken, without a weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.formats.detect import iteration_of
from ckptkit.formats.torch_dist.plain_dcp import refuse_plain_dcp
from ckptkit.formats.torch_dist.reader import StoredMetadata, TorchDistCheckpoint, read_metadata
from ckptkit.storage.directory import Directory
from converters.megatron.hybrid_model import is_hybrid
from converters.megatron.run_config import args_file, stored_args


class LenientTorchDist(TorchDistCheckpoint):
    """Names and shapes of the global tensors in `.metadata`, opened even where chunks do not tile."""

    def __init__(self, path: Path, metadata: StoredMetadata, hf: Path | None) -> None:
        self.path = path
        self.hf = Directory(hf if hf else path.parent / "hf")
        self.metadata = metadata
        self._logical = dict(self._name_all())


@dataclass(frozen=True)
class MegatronFiles:
    """Everything that the files of a Megatron directory say."""

    root: Path  # what the user gave: the directory with the tracker, or one iteration
    hf: Path | None

    @cached_property
    def weights(self) -> Path:
        """The directory with the weights. Raises CkptkitError when the tracker names none that exists."""
        return iteration_of(self.root)

    @cached_property
    def metadata(self) -> StoredMetadata:
        """What `.metadata` says. Raises CkptkitError when it cannot be read."""
        return read_metadata(self.weights)

    @cached_property
    def opened(self) -> LenientTorchDist:
        """Names and shapes of the global tensors.

        Raises CkptkitError when `.metadata` cannot be read, UnsupportedError where it is not of torch_dist.
        """
        refuse_plain_dcp(self.weights, self.metadata.keys, self.metadata.by_torch)
        return LenientTorchDist(self.weights, self.metadata, self.hf)

    @cached_property
    def hybrid(self) -> bool:
        """Whether the tensors are those of a HybridModel. Raises as `opened`."""
        return is_hybrid(self.opened.specs)

    @cached_property
    def readable(self) -> bool:
        """Whether `.metadata` can be read at all; CK111 says why when it cannot.

        Raises UnsupportedError for a distributed checkpoint in another format.
        """
        try:
            self.opened  # noqa: B018 - a cached property that raises
        except UnsupportedError:
            raise
        except CkptkitError:
            return False
        return True

    @cached_property
    def args(self) -> Mapping[str, Any]:
        """The stored training arguments, of Megatron-LM or as a run's YAML comes to; empty when there are none.

        Raises CkptkitError when they cannot be read.
        """
        args = self.opened.common.get("args")
        if args is None:
            return stored_args(self.weights, {})
        if not hasattr(args, "__dict__"):
            raise CkptkitError(
                f"{self.weights}: the stored training arguments are {type(args).__name__}, not a namespace",
                "convert it again",
            )
        return dict(vars(args))

    @property
    def args_file(self) -> Path:
        """The file that the training arguments stand in. Raises as `opened`."""
        return args_file(self.weights, self.opened.common.get("args") is not None)

    @cached_property
    def blobs(self) -> Mapping[Path, Mapping[tuple[int, int], tuple[str, ...]]]:
        """For every file, the (offset, length) ranges that keys are stored in, in file order; aliases share a range."""
        found: dict[Path, dict[tuple[int, int], list[str]]] = defaultdict(lambda: defaultdict(list))
        stored = [(key, chunk.blob) for key, tensor in self.metadata.tensors.items() for chunk in tensor.chunks]
        for key, blob in (*stored, *self.metadata.objects.items()):
            found[blob.path][blob.offset, blob.length].append(key)
        return {
            path: {at: tuple(keys) for at, keys in sorted(ranges.items())} for path, ranges in sorted(found.items())
        }
