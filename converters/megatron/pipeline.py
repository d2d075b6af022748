"""Assigns layers to pipeline stages by Megatron's rules: even, uneven and interleaved pipelines, and layouts.

Source: megatron-core `get_num_layers_to_build`, `get_transformer_layer_offset`, `pipeline_parallel_layer_layout.py` and
the checks of `TransformerConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened

# The parts of a layout: embedding, decoder layer ("transformer"), multi-token prediction layer, output layer with loss.
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d{1,9})"), re.compile(r"(.)\*(\d{1,9})"))
_MAX_LAYERS = 10_000  # layers or stages
_MAX_TEXT = 10_000  # characters of a layout string
_MAX_LAYOUT = 1_000_000  # letters of an expanded layout

# Field of Pipeline -> argument of Megatron-LM.
_ARGUMENTS = {
    "layers": "num_layers",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
    "embedding": "account_for_embedding_in_pipeline_split",
    "loss": "account_for_loss_in_pipeline_split",
    "layout": "pipeline_model_parallel_layout",
    "mtp": "mtp_num_layers",
}


@dataclass(frozen=True)
class Pipeline:
    """`layers` decoder layers over `pp` stages of `vpp` model chunks each.

    `first`, `last`: number of layers of the first and last stage, if they differ from the others. `embedding`, `loss`:
    whether these count as a layer of their stage. `layout`: the complete pipeline as a string, such as
    `Et*3|(tt|)*2tmL`, or as Megatron's list of lists; it determines the number of chunks. `mtp`: number of multi-token
    prediction layers.
    """

    layers: int
    pp: int = 1
    vpp: int = 1
    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False
    layout: Any = None
    mtp: int = 0

    @staticmethod
    def from_args(args: Mapping[str, Any]) -> Pipeline:
        """The pipeline of Megatron-LM's training arguments; absent and None mean Megatron's defaults.

        Raises CkptkitError for a value of the wrong type.
        """
        fields = {field: args[name] for field, name in _ARGUMENTS.items() if args.get(name) is not None}
        for field, value in fields.items():
            kind: type = {"embedding": bool, "loss": bool, "layout": object}.get(field, int)
            if not isinstance(value, kind):
                hint = "compare it with the launch script; the checkpoint may be damaged"
                raise CkptkitError(f"the training argument {_ARGUMENTS[field]} is {shortened(value)}, not valid", hint)
        if "layers" not in fields:
            hint = "add num_layers: the layers of a pipeline stage depend on it"
            raise CkptkitError("the training arguments have no num_layers", hint)
        return Pipeline(**fields)

    @cached_property
    def stages(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Global numbers, from 0, of the layers of every chunk of every stage: `stages[stage][chunk]`.

        Raises CkptkitError if Megatron would reject these numbers.
        """
        if not all(0 < size <= _MAX_LAYERS for size in (self.layers, self.pp, self.vpp)):
            raise self._refused(f"pipeline sizes must be 1 to {_MAX_LAYERS}", "compare them with the launch script")
        # In the order of the layers: the first chunk of every stage, then the second, and so on.
        counts = self._count_layers() if self.layout is None else [letters.count("t") for letters in self._letters]
        spans = [tuple(range(start, end)) for start, end in pairwise(accumulate(counts, initial=0))]
        return tuple(tuple(spans[stage :: self.pp]) for stage in range(self.pp))

    def _count_layers(self) -> list[int]:
        """The number of layers of each chunk, in the order of the layers."""
        if self.pp == 1 and (self.vpp > 1 or (self.first and self.last)):
            hint = "use at least two stages, or remove these arguments"
            raise self._refused("a pipeline of one stage has chunks or uneven stages", hint)
        only = self.last if self.first is None else self.first
        ends = [self.first, *[None] * (self.pp - 2), self.last] if self.pp > 1 else [only]
        uneven = any(end is not None for end in ends)
        if uneven and (self.embedding or self.loss):
            message = "the size of the first or last stage is set, but embedding or loss counts as a layer"
            raise self._refused(message, "remove one of the two: Megatron rejects both together")
        left = self.layers + self.embedding + self.loss - sum(end or 0 for end in ends)
        others = ends.count(None)
        if left < 0 or bool(left) != bool(others) or (others and left % others):
            subject, stages = (f"{left} layers", f"{others} other stages") if uneven else ("the layers", "stages")
            hint = "or set the layers of the first or last stage (--decoder-last-pipeline-num-layers)"
            raise self._refused(
                f"{subject} cannot be split evenly over the {stages}", f"choose another number of stages, {hint}"
            )
        sizes = [left // others if end is None else end for end in ends]
        if self.vpp > 1 and not others:
            message = "the sizes of the first and last stage are set, but chunks need a stage between them"
            raise self._refused(message, "remove one of them: Megatron would divide by zero")
        if any(size % self.vpp for size in sizes) or (uneven and 0 in sizes):
            message = f"stages of {', '.join(map(str, sizes))} layers cannot be split into {self.vpp} equal chunks"
            raise self._refused(message, "choose another --vpp")
        counts = [size // self.vpp for size in sizes] * self.vpp
        counts[0] -= self.embedding
        counts[-1] -= self.loss
        return counts

    @cached_property
    def _letters(self) -> list[str]:
        """The layout as one string of letters per chunk, in the order of the layers."""
        if self.first is not None or self.last is not None or self.embedding or self.loss:
            hint = "remove the other pipeline arguments: Megatron rejects them"
            raise self._refused("pipeline_model_parallel_layout is set together with other pipeline arguments", hint)
        chunks = _expand_layout(self.layout)
        flat = "".join(chunks)
        if len(chunks) % self.pp or (self.vpp > 1 and len(chunks) != self.pp * self.vpp):
            raise self._refused(f"the layout has {len(chunks)} parts", "write one per stage and chunk, with | between")
        if flat[:1] != "E" or flat[-1:] != "L" or flat.count("E") != 1 or flat.count("L") != 1:
            message = "the layout must have one E, at its start, and one L, at its end"
            raise self._refused(message, "compare it with the launch script")
        if flat.count("t") != self.layers or flat.count("m") != self.mtp:
            counts = f"{flat.count('t')} layers and {flat.count('m')} for multi-token prediction"
            message = f"the layout has {counts}, but the model has {self.layers} and {self.mtp}"
            raise self._refused(message, "compare num_layers and mtp_num_layers")
        if "m" in flat and ("t" in flat[flat.index("m") :] or sum("m" in chunk for chunk in chunks[-self.pp :]) != 1):
            hint = "put all m after the last t, into the last chunk of one stage"
            raise self._refused("the layout has an m (multi-token prediction) before a t or in several chunks", hint)
        return chunks

    def _refused(self, problem: str, hint: str) -> CkptkitError:
        arguments = ((name, getattr(self, field)) for field, name in _ARGUMENTS.items())
        values = ", ".join(f"{name} {value}" for name, value in arguments if value not in (None, False, 0))
        return CkptkitError(f"{problem}: {values}", hint)


def count_chunks(layout: str) -> int:
    """The number of chunks of all stages in a layout. Raises CkptkitError for an invalid layout."""
    return len(_expand_layout(layout))


def _expand_layout(layout: Any) -> list[str]:
    """One string of letters per chunk. Raises CkptkitError for an invalid layout."""
    if isinstance(layout, (list, tuple)) and all(isinstance(chunk, (list, tuple)) for chunk in layout):
        chunks = ["".join(_LETTERS.get(str(part).strip().lower(), "?") for part in chunk) for chunk in layout]
    elif isinstance(layout, str):
        text = layout.replace(",", "")
        for repeated in _REPEATED:
            sizes = (len(match[1]) * int(match[2]) for match in repeated.finditer(text))
            if len(layout) > _MAX_TEXT or sum(sizes) > _MAX_LAYOUT:  # a long text is not searched
                message = f"pipeline_model_parallel_layout {shortened(layout)} is too long"
                raise CkptkitError(message, "compare it with the launch script")
            text = repeated.sub(lambda match: match[1] * int(match[2]), text)
        chunks = text.split("|")
    else:
        chunks = ["?"]
    if set("".join(chunks)) - set(_LETTERS.values()):
        hint = "use only E, t, m and L, | between stages, *n and parentheses"
        raise CkptkitError(f"pipeline_model_parallel_layout {shortened(layout)} is not a layout", hint)
    return chunks
