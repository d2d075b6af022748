"""Records every write into a parameter while a loader runs, and which part of which tensor was written.

All torch operations of the loading thread pass through `Trace`. A copy into a parameter is a write; a tensor that an
operation makes remembers how, so that a later copy of it can be followed back. Tensors are told apart by where they lie
in memory, so views, transposes and shared storage need no care. `placement` makes sense of what was seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ckptkit.verify.witnesses.loading.region import Region

# Operations that only move elements: run on the numbers of elements, they tell where each went.
_MOVES = frozenset(
    {"cat", "clone", "constant_pad_nd", "flip", "gather", "index", "index_select", "repeat", "roll", "select_scatter"}
    | {"slice_scatter", "split_with_sizes_copy", "stack", "take", "tril", "triu", "_to_copy", "where"}
)
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_full", "new_zeros"})
_MAKES_NOTHING = frozenset({"full", "full_like", "ones", "ones_like", "zeros", "zeros_like"}) | _EMPTY
# Arguments that say which elements move, and hold none that do.
_CHOOSERS = frozenset({"condition", "index", "indices", "mask"})


@dataclass(eq=False)
class Block:
    """What lies in one piece of memory: a parameter, a tensor that was given, or one that was made of such."""

    dtype: torch.dtype
    numel: int
    given: str | None = None  # the name of a tensor that was given
    # The operation that made it, and where in the block its result stands. It takes a function from sources to the
    # numbers of their elements.
    made: tuple[Callable[[Callable[[Source], Tensor]], Tensor], Region] | None = None
    origins: frozenset[str] = frozenset()  # every given tensor that went into it
    writes: list[Write] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """Part of a block, seen as `dtype`, as it was after its first `writes` writes."""

    block: Block
    region: Region
    dtype: torch.dtype
    writes: int


@dataclass(frozen=True)
class Write:
    """What became of a part of a block."""

    into: Region
    dtype: torch.dtype  # what the part is seen as
    source: Source | None  # whose elements it holds; None: a constant, or what was computed
    computed: frozenset[str] = frozenset()  # of these tensors


class _Memory:
    """Which block lies at an address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._found: dict[int, tuple[int, Block]] = {}

    def put(self, tensor: Tensor, block: Block | None) -> None:
        """A tensor lies here now, and whatever lay here before is gone. None: a tensor of no interest."""
        if not tensor.numel():
            return
        start = tensor.data_ptr()
        end = start + span(tensor) * tensor.element_size()
        at = bisect_right(self._starts, start)
        if at and self._found[self._starts[at - 1]][0] > start:
            at -= 1
        while at < len(self._starts) and self._starts[at] < end:
            del self._found[self._starts.pop(at)]
        if block is not None:
            self._starts.insert(at, start)
            self._found[start] = end, block

    def at(self, tensor: Tensor) -> Source | None:
        """What a tensor is part of; None where nothing of interest lies."""
        if not tensor.numel():
            return None
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address)
        end, block = self._found[self._starts[at - 1]] if at else (0, None)
        if block is None or end <= address:
            return None
        offset = (address - self._starts[at - 1]) // tensor.element_size()
        return Source(block, Region(offset, tuple(tensor.shape), tensor.stride()), tensor.dtype, len(block.writes))


def span(tensor: Tensor) -> int:
    """How many elements lie from a tensor's first one to its last one."""
    return Region(0, tuple(tensor.shape), tensor.stride()).end if tensor.numel() else 0


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, records what becomes of the tensors that `feed` passes on.

    `parameters`: each under all its names. `given`: the blocks of what was given, by name. Loaders that load in several
    threads do so in this one, since only here operations are seen.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: dict[str, Block] = {}
        self._memory = _Memory()
        self._number: tuple[Any, Source] | None = None
        self._one_thread = patch.object(ThreadPoolExecutor, "submit", _at_once)
        for tensor in parameters:
            if self._memory.at(tensor) is None:
                self._memory.put(tensor, Block(tensor.dtype, span(tensor)))

    def __enter__(self) -> Trace:
        self._one_thread.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._one_thread.stop()

    def feed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes weights on, in contiguous memory. How they are read is not recorded."""
        rest = iter(weights)
        while True:
            with self._unseen():
                if (pair := next(rest, None)) is None:
                    return
                name, whole = pair[0], pair[1].contiguous()
            block = Block(whole.dtype, whole.numel(), given=name, origins=frozenset([name]))
            self.given[name] = block
            self._memory.put(whole, block)
            yield name, whole

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Readers keep their threads, and their operations cost what they cost without this."""
        self._one_thread.stop()
        try:
            with _disable_current_modes():
                yield
        finally:
            self._one_thread.start()

    def source(self, tensor: Tensor) -> Source | None:
        """What a tensor is part of now; None where it has nothing to do with what is recorded."""
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
            self._note_write(name, arguments, [one for one in written if isinstance(one, Tensor)])
            return result
        sources = {key: tree_map(self._seen, value) for key, value in arguments.items()}
        result = func(*args, **kwargs)
        if name == "_local_scalar_dense" and isinstance(sources["self"], Source):
            self._number = result, sources["self"]
        made = result if len(func._schema.returns) > 1 else (result,)
        for one, returned in zip(made, func._schema.returns, strict=True):
            if returned.alias_info is None:
                self._note_made(func, arguments, sources, one)
        return result

    def _seen(self, value: Any) -> Any:
        return (self._memory.at(value) or value) if isinstance(value, Tensor) else value

    def _note_write(self, name: str, arguments: Mapping[str, Any], written: Iterable[Tensor]) -> None:
        """An operation has written into memory."""
        others = [source for value in arguments.values() for source in map(self._seen, tree_leaves(value))]
        origins = frozenset[str]().union(*(one.block.origins for one in others if isinstance(one, Source)))
        for tensor in written:
            into = self._memory.at(tensor)
            if into is None:
                continue
            source: Source | None = None
            if name == "copy_":
                source = self._memory.at(arguments["src"].expand(tensor.shape))
            elif name == "fill_" and self._number and self._number[0] == arguments.get("value"):
                number = self._number[1]
                sizes = tuple(tensor.shape)
                source = Source(number.block, Region(number.region.offset, sizes, (0,) * len(sizes)), number.dtype, 0)
            if source is not None and (source.dtype.itemsize != source.block.dtype.itemsize):
                source = None
            computed = frozenset() if source is not None or name in ("zero_", "fill_") else origins
            into.block.origins |= origins
            into.block.writes.append(Write(into.region, into.dtype, source, computed))

    def _note_made(self, func: Any, arguments: Mapping[str, Any], sources: Mapping[str, Any], made: Any) -> None:
        """An operation has made new tensors of these."""
        name = _name_of(func)
        leaves = [leaf for value in sources.values() for leaf in tree_leaves(value)]
        origins = frozenset[str]().union(*(leaf.block.origins for leaf in leaves if isinstance(leaf, Source)))
        origins = frozenset() if name in _MAKES_NOTHING else origins
        several = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        for tensor in several:
            block = Block(tensor.dtype, span(tensor), origins=origins) if origins or name in _MAKES_NOTHING else None
            if block is not None and name in _MOVES and len(several) == 1:
                region = Region(0, tuple(tensor.shape), tensor.stride())
                block.made = _again(func, arguments, sources), region
            self._memory.put(tensor, block)


def _name_of(func: Any) -> str:
    return str(func._schema.name.partition("::")[2])


def _again(
    func: Any, arguments: Mapping[str, Any], sources: Mapping[str, Any]
) -> Callable[[Callable[[Source], Tensor]], Tensor]:
    """The same operation, to be run on the numbers of elements."""
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


def _at_once(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    """Does what `ThreadPoolExecutor.submit` does, in the calling thread."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - as an executor does; the caller asks the future
        future.set_exception(error)
    return future
