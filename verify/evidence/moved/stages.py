"""Names the pipeline stages that a set of layers is, for findings that a stage may explain."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import ranges
from converters.megatron.pipeline import Pipeline
from verify.evidence.folding import layers_of
from verify.evidence.subject import Subject


@dataclass(frozen=True)
class Stages:
    """The pipeline stages of a model."""

    count: int  # decoder layers
    # The layers of each stage's chunks. Empty: the pipeline is unknown, and the stages of every even one are possible.
    chunks: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)

    @staticmethod
    def of_names(names: Collection[str]) -> Stages:
        """An unknown pipeline over the decoder layers that these tensors belong to."""
        return Stages(1 + max(layers_of(names), default=-1))

    def pair(self, layers: Sequence[int], others: Sequence[int]) -> str | None:
        """What two sets of layers are called if each is a stage, or a chunk of one: `stages 1 and 0 of ...`."""
        if not self.chunks:
            return self._even(layers, others)
        one, other = self._label(layers), self._label(others)
        return None if one is None or other is None else f"stages {one} and {other} of the pipeline"

    def _label(self, layers: Sequence[int]) -> str | None:
        for stage, chunks in self.chunks.items():
            if _all(chunks) == list(layers):
                return str(stage)
            for index, chunk in enumerate(chunks):
                if list(chunk) == list(layers):
                    return f"{stage} (chunk {index})"
        return None

    def _even(self, layers: Sequence[int], others: Sequence[int]) -> str | None:
        size = len(layers)
        fits = (
            1 < size < self.count
            and self.count % size == 0
            and all(list(some) == list(range(some[0], some[0] + size)) for some in (layers, others))
            and layers[0] % size == others[0] % size == 0
        )
        if not fits:
            return None
        return f"stages {layers[0] // size} and {others[0] // size} of a pipeline of {self.count // size}"

    def holding(self, layers: Collection[int]) -> str | None:
        """The stage of the known pipeline that holds all of these, with its layers."""
        for stage, chunks in self.chunks.items():
            if set(layers) <= set(_all(chunks)):
                return f"stage {stage} of the pipeline (layers {ranges(_all(chunks))})"
        return None


def _all(chunks: Sequence[Sequence[int]]) -> list[int]:
    return sorted(layer for chunk in chunks for layer in chunk)


def stages_of(subject: Subject) -> Stages:
    """The pipeline that saved the checkpoint, by its training arguments; unknown where they have none.

    Raises CkptkitError where `.metadata` or the training arguments cannot be read.
    """
    args = subject.megatron_files.args if subject.is_megatron else {}
    if (args.get("pipeline_model_parallel_size") or 1) == 1:
        return Stages.of_names(subject.specs)
    try:
        pipeline = Pipeline.from_args(args)
        return Stages(pipeline.layers, dict(enumerate(pipeline.stages)))
    except CkptkitError:  # Megatron would refuse these numbers, so no stage of theirs saved anything
        return Stages.of_names(subject.specs)
