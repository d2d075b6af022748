"""Records every write into a parameter while a loader runs, and the tensors that the values came from.

All torch operations of the loading thread pass through `Trace`. A copy into a parameter is a write; the result of an
operation remembers how it was made, so that a later copy of it can be traced back. Tensors are identified by address,
so views, transposes and shared storage need no special case. `placement` interprets the record.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ckptkit.verify.witnesses.loading.region import Region

# Operations that only move elements: run on the numbers of elements, they return the new place of each.
_MOVES = frozenset(
    {"cat", "clone", "constant_pad_nd", "flip", "gather", "index", "index_select", "repeat", "roll", "select_scatter"}
    | {"slice_scatter", "split_with_sizes_copy", "stack", "take", "tril", "triu", "_to_copy", "where"}
)
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_full", "new_zeros"})
_CONSTANT = frozenset({"full", "full_like", "ones", "ones_like", "zeros", "zeros_like"}) | _EMPTY
# Arguments that select elements and contain none of them.
_CHOOSERS = frozenset({"condition", "index", "indices", "mask"})


@dataclass(eq=False)
class Block:
    """A contiguous piece of memory: a parameter, a tensor that was given, or the result of an operation on such."""

    dtype: torch.dtype
    numel: int
    given: str | None = None  # the name of a tensor from `feed`
    # The operation that made it, run on a function from sources to the numbers of their elements, and its own place.
    made: tuple[Callable[[Callable[[Source], Tensor]], Tensor], Region] | None = None
    origins: frozenset[str] = frozenset()  # every given tensor that it was made of
    writes: list[Write] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """Part of a block, viewed as `dtype`, as it was after its first `writes` writes."""

    block: Block
    region: Region
    dtype: torch.dtype
    writes: int


@dataclass(frozen=True)
class Write:
    """A write into a part of a block."""

    into: Region
    dtype: torch.dtype  # as which the part is viewed
    source: Source | None  # of the elements, or None for a constant or computed values
    computed: frozenset[str] = frozenset()  # the tensors that computed values came from


class _Memory:
    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: dict[int, tuple[int, Block]] = {}  # end and block, by start

    def put(self, tensor: Tensor, block: Block | None) -> None:
        """Replaces any blocks at a tensor's address by `block`, or by none for a tensor of no interest."""
        if not tensor.numel():
            return
        start = tensor.data_ptr()
        end = start + span(tensor) * tensor.element_size()
        at = bisect_right(self._starts, start)
        if at and self._blocks[self._starts[at - 1]][0] > start:
            at -= 1
        while at < len(self._starts) and self._starts[at] < end:
            del self._blocks[self._starts.pop(at)]
        if block is not None:
            self._starts.insert(at, start)
            self._blocks[start] = end, block

    def at(self, tensor: Tensor) -> Source | None:
        """The part of a block at a tensor's address, or None without a block."""
        if not tensor.numel():
            return None
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address)
        end, block = self._blocks[self._starts[at - 1]] if at else (0, None)
        if block is None or end <= address:
            return None
        offset = (address - self._starts[at - 1]) // tensor.element_size()
        return Source(block, Region(offset, tuple(tensor.shape), tensor.stride()), tensor.dtype, len(block.writes))


def span(tensor: Tensor) -> int:
    """The number of elements from a tensor's first to its last in memory."""
    return Region(0, tuple(tensor.shape), tensor.stride()).end if tensor.numel() else 0


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, records the use of the tensors that `feed` yields. `parameters`: each under all its names."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: dict[str, Block] = {}  # the tensors from `feed`, by name
        self._memory = _Memory()
        self._number: tuple[Any, Source] | None = None
        # Loaders with threads load in this one, since a torch dispatch mode sees no other.
        self._one_thread = patch.object(ThreadPoolExecutor, "submit", _submit_inline)
        for tensor in parameters:
            if self._memory.at(tensor) is None:
                self._memory.put(tensor, Block(tensor.dtype, span(tensor)))

    def __enter__(self) -> Trace:
        self._one_thread.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._one_thread.stop()

    def feed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights in contiguous memory. Reading them is not recorded."""
        remaining = iter(weights)
        while True:
            with self._paused():
                if (pair := next(remaining, None)) is None:
                    return
                name, tensor = pair[0], pair[1].contiguous()
            self.given[name] = Block(tensor.dtype, tensor.numel(), given=name, origins=frozenset([name]))
            self._memory.put(tensor, self.given[name])
            yield name, tensor

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Turns recording off, so that readers keep their threads and speed."""
        self._one_thread.stop()
        try:
            with _disable_current_modes():
                yield
        finally:
            self._one_thread.start()

    def source(self, tensor: Tensor) -> Source | None:
        """The part of a block that a tensor is now, or None for an unrelated tensor."""
        return self._memory.at(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        written = [
            arguments[argument.name]
            for argument in func._schema.arguments
            if argument.alias_info and argument.alias_info.is_write and argument.name in arguments
        ]
        if written:
            result = func(*args, **kwargs)
            self._record_write(name, arguments, [value for value in written if isinstance(value, Tensor)])
            return result
        sources = {key: tree_map(self._source_or_value, value) for key, value in arguments.items()}
        result = func(*args, **kwargs)
        if name == "_local_scalar_dense" and isinstance(sources["self"], Source):
            self._number = result, sources["self"]
        results = result if len(func._schema.returns) > 1 else (result,)
        for returned, schema in zip(results, func._schema.returns, strict=True):
            if schema.alias_info is None:
                self._record_result(func, arguments, sources, returned)
        return result

    def _source_or_value(self, value: Any) -> Any:
        return (self._memory.at(value) or value) if isinstance(value, Tensor) else value

    def _record_write(self, name: str, arguments: Mapping[str, Any], written: Iterable[Tensor]) -> None:
        origins = _origins(self._source_or_value(leaf) for value in arguments.values() for leaf in tree_leaves(value))
        for tensor in written:
            if (into := self._memory.at(tensor)) is None:
                continue
            source: Source | None = None
            if name == "copy_":
                source = self._memory.at(arguments["src"].expand(tensor.shape))
            elif name == "fill_" and self._number and self._number[0] == arguments.get("value"):
                number, sizes = self._number[1], tuple(tensor.shape)
                source = Source(number.block, Region(number.region.offset, sizes, (0,) * len(sizes)), number.dtype, 0)
            if source is not None and source.dtype.itemsize != source.block.dtype.itemsize:
                source = None
            computed = frozenset() if source is not None or name in ("zero_", "fill_") else origins
            into.block.origins |= origins
            into.block.writes.append(Write(into.region, into.dtype, source, computed))

    def _record_result(self, func: Any, arguments: Mapping[str, Any], sources: Mapping[str, Any], result: Any) -> None:
        name = _name_of(func)
        is_constant = name in _CONSTANT
        origins = frozenset() if is_constant else _origins(tree_leaves(dict(sources)))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            block = Block(tensor.dtype, span(tensor), origins=origins) if origins or is_constant else None
            if block is not None and name in _MOVES and len(tensors) == 1:
                block.made = _replay(func, arguments, sources), Region(0, tuple(tensor.shape), tensor.stride())
            self._memory.put(tensor, block)


def _origins(leaves: Iterable[Any]) -> frozenset[str]:
    return frozenset[str]().union(*(leaf.block.origins for leaf in leaves if isinstance(leaf, Source)))


def _name_of(func: Any) -> str:
    return str(func._schema.name.partition("::")[2])


def _replay(func: Any, arguments: Mapping[str, Any], sources: Mapping[str, Any]) -> Callable[..., Tensor]:
    """Returns the same operation, to be run on the numbers of elements."""
    name = _name_of(func)
    chosen = {key: arguments[key] for key in sources if key in _CHOOSERS}
    replayed = {**sources, **tree_map(lambda one: one.cpu() if isinstance(one, Tensor) else one, chosen)}
    if name == "constant_pad_nd":
        replayed["value"] = -1

    def run(numbers: Callable[[Source], Tensor]) -> Tensor:
        def element(value: Any) -> Any:
            if isinstance(value, Source):
                return numbers(value)
            return torch.full_like(value, -1, dtype=torch.int64) if isinstance(value, Tensor) else value

        values = {key: value if key in _CHOOSERS else tree_map(element, value) for key, value in replayed.items()}
        if name == "_to_copy":
            return values["self"]  # type: ignore[no-any-return]
        result: Tensor = func(**values)
        return result

    return run


def _submit_inline(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    """`ThreadPoolExecutor.submit` in the calling thread."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - as an executor does
        future.set_exception(error)
    return future
