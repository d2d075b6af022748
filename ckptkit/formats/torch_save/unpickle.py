"""Reads the pickles inside a checkpoint without running anything that they name, within bounds.

A pickle may name any callable. Here every name becomes an inert `Record` that only remembers its arguments and its
attributes, so nothing in a file can run code, and a class that is not installed is not an obstacle. The only calls are
those of `Record` and of torch.Size. Python's own unpickler also lets a small file use any amount of memory (an index
of the memo of 10^8) or time (a key whose hash takes 2^40 steps): here keys, integers and names are bounded.

Source: Python's `pickletools.py`, which describes each instruction of protocols 2 to 5.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from ckptkit.core.dtypes import ITEMSIZE
from ckptkit.formats.torch_save.records import Dtype, Items, NotAllowed, Record

MAX_INTEGER = 32  # bytes of an integer: states of random generators have 16
MAX_NAMES = 4096  # classes and functions that one pickle names
MAX_OBJECTS = 20_000_000  # containers, texts and instances, up to 240 bytes each; 500,000 tensors have 17 million
# Values on the stack, with those below each mark, and marks: Python writes containers in pieces of 1,000 items, but for
# tuples, and no container inside more than some hundred others.
MAX_STACK, MAX_MARKS = 1_000_000, 10_000
_PIECE = 1 << 18  # bytes of instructions after which they are counted
# The instructions that make objects.
_MAKES = b"".join((pickle.MARK, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET, pickle.SHORT_BINUNICODE)) + (
    b"".join((pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.NEWOBJ, pickle.REDUCE))
)
_MAX_KEY = 1 << 60  # integers as keys: Python's hash of larger ones is the same for many of them
_GET_1, _GET_4, _MEMOIZE, _STOP = (code[0] for code in (pickle.BINGET, pickle.LONG_BINGET, pickle.MEMOIZE, pickle.STOP))
_INTEGER_1, _INTEGER_2, _TEXT = (code[0] for code in (pickle.BININT1, pickle.BININT2, pickle.SHORT_BINUNICODE))
# Groups of instructions: a new object without arguments and the begin of its state; its end; a torch.Size of 3 axes.
_NEW = pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.MEMOIZE + pickle.EMPTY_DICT + pickle.MEMOIZE + pickle.MARK
_STATE = pickle.SETITEMS + pickle.BUILD
_SIZE = pickle.TUPLE3 + pickle.MEMOIZE + pickle.TUPLE1 + pickle.MEMOIZE + pickle.REDUCE + pickle.MEMOIZE
_EMPTY_TUPLE, _SET_ITEMS, _TUPLE_3 = _NEW[0], _STATE[0], _SIZE[0]
_KEY_DEPTH, _KEY_PARTS = 4, 256  # of tuples as keys, which are hashed again each time


class Machine:
    """A stack, the stacks below each mark, and the memo, as `pickletools` explains them."""

    def __init__(self, content: bytes, named: Callable[[str, str], Any]) -> None:
        self._content, self._named = content, named
        self._at = 0
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: list[Any] = []
        self._names: dict[tuple[str, str], Any] = {}

    def run(self) -> Any:
        """The object that the pickle builds. Raises pickle.UnpicklingError."""
        if (objects := count_objects(self._content)) > MAX_OBJECTS:
            raise pickle.UnpicklingError(f"about {objects} objects, and at most {MAX_OBJECTS} are read")
        try:
            return self._run()
        except UnicodeDecodeError as error:
            raise pickle.UnpicklingError(f"text that is not UTF-8 before byte {self._at + 1}") from error
        except (LookupError, ValueError, struct.error) as error:
            raise pickle.UnpicklingError(f"damaged before byte {self._at + 1}") from error

    def _run(self) -> Any:
        """Runs all instructions, the most frequent ones of `.metadata` and groups of them without a call for each.

        A call would take longer than what they do. The groups do what their instructions do one by one.
        """
        content, memo, marked, at, stack = self._content, self._memo, self._marked, self._at, self._stack
        state: dict[Any, Any]
        counted = _PIECE
        try:
            while True:
                if at >= counted:
                    self._check_sizes(stack)
                    counted = at + _PIECE
                code = content[at]
                if code == _GET_4:
                    stack.append(memo[int.from_bytes(content[at + 1 : at + 5], "little")])
                    at += 5
                elif code == _GET_1:
                    stack.append(memo[content[at + 1]])
                    at += 2
                elif code == _INTEGER_1:
                    stack.append(content[at + 1])
                    at += 2
                elif code == _INTEGER_2:
                    stack.append(content[at + 1] | content[at + 2] << 8)
                    at += 3
                elif code == _EMPTY_TUPLE and content.startswith(_NEW, at) and _is_record(stack[-1]):
                    made, state = stack[-1](), {}
                    stack[-1:] = made, state
                    memo += made, state
                    marked.append(stack)
                    stack = []
                    at += len(_NEW)
                elif code == _SET_ITEMS and content.startswith(_STATE, at) and _takes_state(marked[-1]):
                    items, stack = stack, marked.pop()
                    state = stack.pop()
                    _put(state, items)
                    stack[-1].set_state(state)
                    at += len(_STATE)
                elif code == _TUPLE_3 and content.startswith(_SIZE, at) and stack[-4] is tuple:
                    size = tuple(stack[-3:])
                    stack[-4:] = (size,)
                    memo += size, (size,), size
                    at += len(_SIZE)
                elif code == _MEMOIZE:
                    memo.append(stack[-1])
                    at += 1
                elif code == _TEXT:
                    begin = at + 2
                    at = begin + content[at + 1]
                    stack.append(content[begin:at].decode())
                elif code == _STOP:
                    return stack.pop()
                else:
                    self._at, self._stack = at, stack
                    _DOES[code](self)
                    at, stack = self._at, self._stack
        finally:
            self._at = at

    def _check_sizes(self, stack: list[Any]) -> None:
        """Raises pickle.UnpicklingError where more values wait on the stack or in the memo than any pickle needs."""
        marked = self._marked
        if len(marked) > MAX_MARKS or len(stack) + sum(map(len, marked)) > MAX_STACK:
            raise pickle.UnpicklingError(f"more than {MAX_STACK} values that are not in a container")
        if len(self._memo) > MAX_OBJECTS:
            raise pickle.UnpicklingError(f"more than {MAX_OBJECTS} objects in its memo")

    def unknown(self) -> NoReturn:
        """An instruction of protocol 0 or 1, of the extension registry, for buffers elsewhere, or none at all."""
        raise pickle.UnpicklingError(f"instruction {self._content[self._at]:#04x} at byte {self._at}, not allowed here")

    def _take(self, nbytes: int) -> bytes:
        """The argument of an instruction: the bytes behind its first one."""
        begin = self._at + 1
        self._at = begin + nbytes
        if self._at > len(self._content):
            raise pickle.UnpicklingError("it ends too early")
        return self._content[begin : self._at]

    def _sized(self, width: int) -> bytes:
        """An argument that begins with its length, in `width` bytes."""
        length = int.from_bytes(self._take(width), "little")
        self._at -= 1
        return self._take(length)

    def _line(self) -> str:
        end = self._content.index(b"\n", self._at + 1)
        text = self._content[self._at + 1 : end].decode()
        self._at = end
        return text

    def _push(self, value: Any) -> None:
        self._stack.append(value)
        self._at += 1

    def _popped(self, count: int) -> list[Any]:
        """The last values of the stack, in the order in which they were put there."""
        items = [self._stack.pop() for _ in range(count)]
        self._at += 1
        return items[::-1]

    def _to_mark(self) -> list[Any]:
        """What was put on the stack since the last mark, which is removed."""
        items, self._stack = self._stack, self._marked.pop()
        self._at += 1
        return items

    # Plain values.

    def _integer(self, content: bytes) -> None:
        if len(content) > MAX_INTEGER:
            raise pickle.UnpicklingError(f"an integer of {len(content)} bytes")
        self._stack.append(int.from_bytes(content, "little", signed=True))

    # Containers.

    def mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []
        self._at += 1

    def dict_marked(self) -> None:
        items = self._to_mark()
        self._stack.append({})
        self._put(items)

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(items)
        elif not isinstance(target, Record):  # items of a subclass of list are of no interest
            raise pickle.UnpicklingError(f"items for {type(target).__name__}, which is not a list")

    def add_items(self) -> None:
        items = self._to_mark()
        target = self._stack[-1]
        if type(target) is set:
            target.update(map(_key, items))
        elif not isinstance(target, Record):
            raise pickle.UnpicklingError(f"items for {type(target).__name__}, which is not a set")

    def _put(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is dict or type(target) is Items:
            _put(target, items)
        elif not isinstance(target, Record):  # items of a subclass of dict are of no interest
            raise pickle.UnpicklingError(f"keys for {type(target).__name__}, which is not a dict")

    # The stack and the memo.

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
            self._at += 1
        else:
            self._to_mark()

    def _keep(self, index: bytes) -> None:
        at, memo = int.from_bytes(index, "little"), self._memo
        if at > len(memo):
            raise pickle.UnpicklingError(f"place {at} of the memo, which has {len(memo)}")
        memo[at : at + 1] = [self._stack[-1]]

    # Names, and what is built of them.

    def named(self) -> None:
        module, name = self._line(), self._line()
        self._push(self._find(module, name))

    def named_on_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise pickle.UnpicklingError("a name that is not text")
        self._push(self._find(module, name))

    def _find(self, module: str, name: str) -> Any:
        key = module, name
        if key not in self._names:
            if len(self._names) >= MAX_NAMES:
                raise pickle.UnpicklingError(f"more than {MAX_NAMES} names of classes and functions")
            self._names[key] = self._named(module, name)
        return self._names[key]

    def reduce(self) -> None:
        arguments = self._stack.pop()
        self._stack[-1] = _called(self._stack[-1], arguments)
        self._at += 1

    def new_object_with_keywords(self) -> None:
        self._stack.pop()
        self.reduce()

    def build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Record):
            target.set_state(state)
        elif type(target) is Items:
            # torch hangs `_metadata`, versions of modules, on a state dict. Other attributes would be lost unseen.
            if not isinstance(state, dict) or state.keys() - {"_metadata"}:
                raise pickle.UnpicklingError("a state for a dict that is not `_metadata` of a state dict")
        else:
            raise pickle.UnpicklingError(f"a state for {type(target).__name__}, which has none")
        self._at += 1


def count_objects(content: bytes) -> int:
    """An upper estimate of the objects that a pickle makes, from its bytes; a set counts four, an instance two."""
    instances = content.count(pickle.NEWOBJ) + content.count(pickle.REDUCE)
    return len(content) - len(content.translate(None, _MAKES)) + 3 * content.count(pickle.EMPTY_SET) + instances


def _put(target: dict[Any, Any], items: list[Any]) -> None:
    if len(items) % 2:
        raise pickle.UnpicklingError("a key without a value")
    rest = iter(items)
    for key in rest:
        target[key if type(key) is str or isinstance(key, Record) else _key(key)] = next(rest)


def _is_record(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Record)


def _takes_state(stack: list[Any]) -> bool:
    """Whether a dict ends this stack, and below it is an object that it may be the state of."""
    return type(stack[-1]) is dict and isinstance(stack[-2], Record)


def _called(target: Any, arguments: Any) -> Any:
    """What a call gives, of the few things that may be called."""
    if type(arguments) is not tuple:
        raise pickle.UnpicklingError("arguments that are not a tuple")
    if target is tuple and len(arguments) == 1 and type(arguments[0]) in (tuple, list):
        return tuple(arguments[0])
    if _is_record(target):
        return target(*arguments)
    if isinstance(target, partial):  # of `_nested`
        return target(*arguments)
    if target is Items and not arguments:
        return Items()
    kind = target if isinstance(target, type) else type(target)
    raise pickle.UnpicklingError(f"a call of {kind.__name__}")


def _key(value: Any) -> Any:
    """The value, where it may be a key: its hash costs little, and few others have the same."""
    level, left = [value], _KEY_PARTS
    for _ in range(_KEY_DEPTH):
        left -= len(level)
        if left < 0 or not all(_may_be_in_a_key(one) for one in level):
            break
        level = [part for one in level if type(one) is tuple for part in one]
        if not level:
            return value
    raise pickle.UnpicklingError("a key or an element of a set that is none, or has too many parts")


def _may_be_in_a_key(value: Any) -> bool:
    kind = type(value)
    return (-_MAX_KEY < value < _MAX_KEY) if kind is int else kind in _IN_A_KEY or isinstance(value, (Record, type))


_IN_A_KEY = frozenset({str, bytes, float, bool, type(None), tuple, Dtype})


def _skips(nbytes: int) -> Callable[[Machine], object]:
    """An instruction whose argument means nothing here."""
    return lambda machine: machine._take(nbytes)


def _pushes(make: Callable[[], Any]) -> Callable[[Machine], object]:
    """One that puts something on the stack."""
    return lambda machine: machine._push(make())


def _takes(width: int, make: Callable[[bytes], Any]) -> Callable[[Machine], object]:
    """One that puts on the stack what its argument says, which begins with its length in `width` bytes."""
    return lambda machine: machine._stack.append(make(machine._sized(width)))


def _packs(count: int) -> Callable[[Machine], object]:
    """One that makes a tuple of so many values of the stack."""
    return lambda machine: machine._stack.append(tuple(machine._popped(count)))


def _gathers(make: Callable[[list[Any]], Any]) -> Callable[[Machine], object]:
    """One that makes something of all since the last mark."""

    def gather(machine: Machine) -> None:
        items = machine._to_mark()  # which replaces the stack
        machine._stack.append(make(items))

    return gather


def _keeps(width: int) -> Callable[[Machine], object]:
    """One that puts what is on top of the stack into the memo, at a place of `width` bytes."""
    return lambda machine: machine._keep(machine._take(width))


_INSTRUCTIONS: dict[bytes, Callable[[Machine], object]] = {
    pickle.PROTO: _skips(1),
    pickle.FRAME: _skips(8),
    pickle.NONE: _pushes(lambda: None),
    pickle.NEWTRUE: _pushes(lambda: True),
    pickle.NEWFALSE: _pushes(lambda: False),
    pickle.BININT: lambda machine: machine._stack.append(int.from_bytes(machine._take(4), "little", signed=True)),
    pickle.LONG1: lambda machine: machine._integer(machine._sized(1)),
    pickle.LONG4: lambda machine: machine._integer(machine._sized(4)),
    pickle.BINFLOAT: lambda machine: machine._stack.extend(struct.unpack(">d", machine._take(8))),
    pickle.BINUNICODE: _takes(4, bytes.decode),
    pickle.BINUNICODE8: _takes(8, bytes.decode),
    pickle.SHORT_BINBYTES: _takes(1, bytes),
    pickle.BINBYTES: _takes(4, bytes),
    pickle.BINBYTES8: _takes(8, bytes),
    pickle.BYTEARRAY8: _takes(8, bytearray),
    pickle.MARK: Machine.mark,
    pickle.EMPTY_TUPLE: _pushes(tuple),
    pickle.TUPLE1: _packs(1),
    pickle.TUPLE2: _packs(2),
    pickle.TUPLE3: _packs(3),
    pickle.TUPLE: _gathers(tuple),
    pickle.EMPTY_LIST: _pushes(list),
    pickle.LIST: _gathers(list),
    pickle.EMPTY_DICT: _pushes(dict),
    pickle.DICT: Machine.dict_marked,
    pickle.EMPTY_SET: _pushes(set),
    pickle.FROZENSET: _gathers(lambda items: frozenset(map(_key, items))),
    pickle.APPEND: lambda machine: machine._extend(machine._popped(1)),
    pickle.APPENDS: lambda machine: machine._extend(machine._to_mark()),
    pickle.ADDITEMS: Machine.add_items,
    pickle.SETITEM: lambda machine: machine._put(machine._popped(2)),
    pickle.SETITEMS: lambda machine: machine._put(machine._to_mark()),
    pickle.POP: Machine.pop,
    pickle.POP_MARK: Machine._to_mark,
    pickle.DUP: lambda machine: machine._push(machine._stack[-1]),
    pickle.BINPUT: _keeps(1),
    pickle.LONG_BINPUT: _keeps(4),
    pickle.GLOBAL: Machine.named,
    pickle.STACK_GLOBAL: Machine.named_on_stack,
    pickle.BINPERSID: _skips(0),  # a storage inside a torch.save file stays its description, never its bytes
    pickle.REDUCE: Machine.reduce,
    pickle.NEWOBJ: Machine.reduce,
    pickle.NEWOBJ_EX: Machine.new_object_with_keywords,
    pickle.BUILD: Machine.build,
}
_DOES = tuple(_INSTRUCTIONS.get(bytes([code]), Machine.unknown) for code in range(256))


# How pickles of protocol 2, which torch.save writes, spell modules.
_OLD_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


def loads(content: bytes, allowed: Callable[[str], bool] | None = None) -> Any:
    """The object pickled in `content`: plain Python values, `torch.Size` as a tuple, dtypes, and Records for the rest.

    `allowed` is which classes and functions (`module.name`) it may name; None: any, since none is run. Raises
    NotAllowed for another, and where it calls getattr for anything but what lies inside a class, and
    pickle.UnpicklingError where the pickle is damaged or past the bounds of `Machine`.
    """
    return Machine(content, lambda module, name: _named(module, name, allowed)).run()


def _named(module: str, name: str, allowed: Callable[[str], bool] | None) -> Any:
    """What a name in a pickle becomes."""
    if allowed is not None:
        module = _OLD_NAMES.get(module, module)
        if (module, name) == ("builtins", "getattr"):
            return partial(_nested, allowed)
        if not allowed(f"{module}.{name}"):
            raise NotAllowed(f"{module}.{name}")
    if (module, name) == ("torch", "Size"):
        return tuple
    if module == "torch" and name in ITEMSIZE:
        return Dtype(name)
    if (module, name) == ("collections", "OrderedDict"):
        return Items
    return type(name, (Record,), {"kind": f"{module}.{name}"})


def _nested(allowed: Callable[[str], bool], *arguments: Any) -> Any:
    """What lies inside a class and is named by a call of getattr: a class by protocol 2, an enum's member by 3.11.2."""
    holder, name = arguments if len(arguments) == 2 else (None, None)
    if not (isinstance(holder, type) and issubclass(holder, Record) and isinstance(name, str)):
        raise NotAllowed("builtins.getattr")
    module, _, outer = holder.kind.rpartition(".")
    return _named(module, f"{outer}.{name}", allowed)
