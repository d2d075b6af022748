"""Quantizes a bucket on a GPU, in INT4 or FP8, without waiting for it.

An H200 quantizes a layer of Qwen3-30B-A3B in 0.35 ms; Python takes longer to create the layer's 1152 tensors.
Therefore `plan_bucket` prepares a plan from names and shapes once for all updates. The result is a `QuantizedBucket`,
which creates its tensors and waits for the GPU on first access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from threading import Lock
from typing import Any, SupportsIndex, overload

import torch
from torch import Tensor

from ckptkit.quant.kernels.triton_kernels import Launcher, done, working_on
from ckptkit.quant.online.form import Form, Pair, Part

MIN_MATRICES = 16  # packed matrices in a bucket that make a plan worth keeping

Made = Sequence[Tensor]  # the outputs of a launch, each flat, matrix after matrix


class QuantizedBucket(Sequence[Pair]):
    """Names and tensors that a GPU may still be computing. Pickles as a plain list.

    The first access (an item or an iteration, not `len`) creates the tensors and waits for the GPU. It raises
    CkptkitError naming the first weight with a non-finite value or scale: no tensor is returned before all are checked.
    """

    def __init__(self, count: int, finish: Callable[[], list[Pair]]) -> None:
        self._count, self._finish = count, finish
        self._made: list[Pair] | None = None
        self._lock = Lock()

    @property
    def _pairs(self) -> list[Pair]:
        with self._lock:
            if self._made is None:
                self._made = self._finish()
                del self._finish  # it holds the weights
            return self._made

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        return self._pairs[index]

    def __add__(self, other: Iterable[Pair]) -> list[Pair]:
        return [*self._pairs, *other]

    def __radd__(self, other: Iterable[Pair]) -> list[Pair]:
        return [*other, *self._pairs]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return list, (self._pairs,)


@dataclass(frozen=True)
class _Run:
    """Consecutive matrices of one shape."""

    count: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class _Kind:
    """Matrices for one launch, from index `first` of a plan's members."""

    launcher: Launcher
    first: int
    count: int
    runs: tuple[_Run, ...]
    outputs: tuple[tuple[int, torch.dtype], ...]  # length and dtype

    def start(self, weights: Sequence[Tensor], bad: Tensor, device: torch.device) -> Made:
        outputs = [torch.empty(length, dtype=dtype, device=device) for length, dtype in self.outputs]
        members = slice(self.first, self.first + self.count)
        self.launcher.start(weights[members], outputs, bad[members])
        return outputs

    def tensors(self, made: Made) -> list[list[Tensor]]:
        """Splits each output of `start` into one tensor for each matrix."""
        return [_split(flat, [(run.count, run.parts[index]) for run in self.runs]) for index, flat in enumerate(made)]


def _split(flat: Tensor, runs: Sequence[tuple[int, Part]]) -> list[Tensor]:
    matrices: list[Tensor] = []
    pieces = flat.split_with_sizes([count * part.rows * part.width for count, part in runs])
    for piece, (count, part) in zip(pieces, runs, strict=True):
        matrices += piece.view(-1, part.width).split_with_sizes([part.rows] * count)
    return matrices


@dataclass(frozen=True)
class BucketPlan:
    """Quantizes buckets of the names and shapes it was made for."""

    form: Form
    device: torch.device
    sent: tuple[str, ...]  # names as the trainer sends them
    names: tuple[str, ...]  # names in the checkpoint
    fits: Callable[..., bool]  # whether tensors match the plan: class, dtype, device, shape, strides
    members: tuple[int, ...]  # indices of the packed tensors, kind by kind
    unpacked: tuple[int, ...]  # indices of the tensors passed through unchanged
    kinds: tuple[_Kind, ...]
    shapes: Tensor  # int64 [members, 2], [0] where none are sent
    outputs: tuple[str, ...]  # names of the results
    # Of each result, its index in the list of each part of all `members`, their shapes, and the unpacked tensors.
    order: tuple[int, ...]

    def quantize(self, pairs: Sequence[Pair]) -> QuantizedBucket | None:
        """Starts the kernels on the current stream. Returns None if names or tensors do not match the plan."""
        if len(pairs) != len(self.sent):
            return None
        names, tensors = zip(*pairs, strict=True)
        if names != self.sent or not self.fits(*tensors):
            return None
        with working_on(self.device):
            bad = torch.zeros(len(self.members), dtype=torch.int32, device=self.device)
            weights = [tensors[place] for place in self.members]
            made = [kind.start(weights, bad, self.device) for kind in self.kinds]
            shapes = self.shapes.to(self.device, non_blocking=True)
            wait = done(self.device)

        def finish() -> list[Pair]:
            found = list(self._pairs(made, shapes, [tensors[place].detach() for place in self.unpacked]))
            wait()
            if wrong := bad.nonzero().flatten().tolist():
                at = min(self.members[place] for place in wrong)
                raise self.form.not_finite(tensors[at], self.names[at])
            return found

        return QuantizedBucket(len(self.outputs), finish)

    def _pairs(self, made: Sequence[Made], shapes: Tensor, unpacked: Sequence[Tensor]) -> Iterator[Pair]:
        each = [kind.tensors(outputs) for kind, outputs in zip(self.kinds, made, strict=True)]
        parts = [tensor for kinds in zip(*each, strict=True) for tensors in kinds for tensor in tensors]
        found = [*parts, *shapes.view(-1).split_with_sizes([2] * len(shapes)), *unpacked]
        return zip(self.outputs, itemgetter(*self.order)(found), strict=True)


def plan_bucket(named: Sequence[Pair], known: Sequence[str], packed: frozenset[str], form: Form) -> BucketPlan | None:
    """Plans how to quantize a bucket. `known`: its names in the checkpoint; those in `packed` are quantized.

    Returns None if the form has no kernel for them, or if the packed matrices are fewer than MIN_MATRICES, empty, not
    all on one GPU, not contiguous or of a subclass of Tensor other than Parameter.
    Raises CkptkitError, naming the tensor, for what the form cannot quantize.
    """
    tensors = [tensor for _, tensor in named]
    weights = {index: tensor for index, tensor in enumerate(tensors) if known[index] in packed}
    device = next((weight.device for weight in weights.values()), None)
    if len(weights) < MIN_MATRICES or device is None or not all(_is_plain(one, device) for one in weights.values()):
        return None
    for index, weight in weights.items():
        form.check(weight, known[index])
    if not all(form.has_kernel(weight) for weight in weights.values()):
        return None
    kinds = list(_kinds(weights, form))
    members = tuple(index for _, indices in kinds for index in indices)
    outputs, order = _outputs(known, members, form)
    shapes = [tensors[index].shape for index in members] if form.sends_shape else []
    return BucketPlan(
        form=form,
        device=device,
        sent=tuple(name for name, _ in named),
        names=tuple(known),
        fits=looks_like(tensors),
        members=members,
        unpacked=tuple(index for index in range(len(known)) if index not in weights),
        kinds=tuple(kind for kind, _ in kinds),
        shapes=torch.tensor(shapes, dtype=torch.int64),
        outputs=outputs,
        order=order,
    )


def _is_plain(weight: Tensor, device: torch.device) -> bool:
    is_there = weight.is_cuda and weight.device == device and type(weight) in (Tensor, torch.nn.Parameter)
    return is_there and weight.is_contiguous() and weight.numel() > 0


def _kinds(weights: Mapping[int, Tensor], form: Form) -> Iterator[tuple[_Kind, list[int]]]:
    """Yields each kind with the indices of its matrices, ordered by shape."""

    def size(place: int) -> tuple[Any, ...]:
        weight = weights[place]
        return str(weight.dtype), weight.numel(), tuple(weight.shape), place

    first = 0
    for launcher, same in groupby(sorted(weights, key=size), lambda place: form.launcher(weights[place])):
        places = list(same)
        alike = groupby(places, lambda place: form.parts(weights[place]))
        runs = tuple(_Run(len(list(run)), parts) for parts, run in alike)
        outputs = tuple(
            (sum(run.count * run.parts[which].rows * run.parts[which].width for run in runs), part.dtype)
            for which, part in enumerate(runs[0].parts)
        )
        yield _Kind(launcher, first, len(places), runs, outputs), places
        first += len(places)


def _outputs(names: Sequence[str], members: Sequence[int], form: Form) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns `outputs` and `order` of a `BucketPlan`."""
    count, place_of = len(members), {place: index for index, place in enumerate(members)}
    found: list[tuple[str, int]] = []
    next_unpacked = len(form.names("")) * count
    for place, name in enumerate(names):
        if (index := place_of.get(place)) is None:
            found.append((name, next_unpacked))
            next_unpacked += 1
        else:
            found += [(part, which * count + index) for which, part in enumerate(form.names(name))]
    return tuple(name for name, _ in found), tuple(index for _, index in found)


def looks_like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Returns a function that checks that other tensors have the same classes, dtypes, devices, shapes and strides.

    torch.compile's guards check all tensors in one call. A Python loop takes a third of the GPU's time for them.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:  # private to torch: a version may lack it
        expected = [_looks(tensor) for tensor in tensors]
        return lambda *others: [_looks(other) for other in others] == expected
    sizes: Any = [list(tensor.shape) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    checked: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return checked


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
