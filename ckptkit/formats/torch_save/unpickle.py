"""Reads the pickles of a checkpoint without running code, and within limits.

A pickle may name any callable. Here every name becomes an inert `Record` with arguments and attributes, so that no file
can run code, and classes need not be installed. Only `Record` and torch.Size are called. Keys, integers and names are
limited, because with Python's unpickler a small file can use any amount of memory (a memo index of 10^8) or time (a key
that takes 2^40 steps to hash).

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
MAX_NAMES = 4096  # classes and functions in one pickle
MAX_OBJECTS = 20_000_000  # containers, texts and instances, up to 240 bytes each; 500,000 tensors have 17 million
# Values on the stack, including those below marks, and marks: Python writes containers except tuples in pieces of 1,000
# items, and nests some hundred containers at most.
MAX_STACK, MAX_MARKS = 1_000_000, 10_000
_PIECE = 1 << 18  # bytes of instructions between checks of sizes
# The instructions that make objects.
_MAKES = b"".join((pickle.MARK, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET, pickle.SHORT_BINUNICODE)) + (
    b"".join((pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.NEWOBJ, pickle.REDUCE))
)
_MAX_KEY = 1 << 60  # integers as keys: many larger ones have the same hash
_GET_1, _GET_4, _MEMOIZE, _STOP = (code[0] for code in (pickle.BINGET, pickle.LONG_BINGET, pickle.MEMOIZE, pickle.STOP))
_INTEGER_1, _INTEGER_2, _TEXT = (code[0] for code in (pickle.BININT1, pickle.BININT2, pickle.SHORT_BINUNICODE))
# Groups of instructions: a new object without arguments and the start of its state; its end; a torch.Size of 3 axes.
_NEW = pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.MEMOIZE + pickle.EMPTY_DICT + pickle.MEMOIZE + pickle.MARK
_STATE = pickle.SETITEMS + pickle.BUILD
_SIZE = pickle.TUPLE3 + pickle.MEMOIZE + pickle.TUPLE1 + pickle.MEMOIZE + pickle.REDUCE + pickle.MEMOIZE
_EMPTY_TUPLE, _SET_ITEMS, _TUPLE_3 = _NEW[0], _STATE[0], _SIZE[0]
_KEY_DEPTH, _KEY_PARTS = 4, 256  # of tuples as keys, which are hashed every time


class Machine:
    """A stack, the stacks below each mark, and the memo (see `pickletools`)."""

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
            raise pickle.UnpicklingError(f"it has about {objects} objects, but ckptkit reads at most {MAX_OBJECTS}")
        try:
            return self._run()
        except UnicodeDecodeError as error:
            raise pickle.UnpicklingError(f"its text before byte {self._at + 1} is not UTF-8") from error
        except (LookupError, ValueError, struct.error) as error:
            raise pickle.UnpicklingError(f"it is damaged before byte {self._at + 1}") from error

    def _run(self) -> Any:
        """Runs all instructions. Inlines the most frequent ones of `.metadata`, because calls would take longer."""
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
                elif code == _SET_ITEMS and content.startswith(_STATE, at) and _has_state(marked[-1]):
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
        """Raises pickle.UnpicklingError for too many values on the stack or in the memo."""
        marked = self._marked
        if len(marked) > MAX_MARKS or len(stack) + sum(map(len, marked)) > MAX_STACK:
            raise pickle.UnpicklingError(f"it has more than {MAX_STACK} values on its stack")
        if len(self._memo) > MAX_OBJECTS:
            raise pickle.UnpicklingError(f"it has more than {MAX_OBJECTS} objects in its memo")

    def unknown(self) -> NoReturn:
        """Raises for an invalid instruction, or one of protocol 0 or 1, the extension registry or external buffers."""
        raise pickle.UnpicklingError(f"its instruction {self._content[self._at]:#04x} at byte {self._at} is forbidden")

    def _take(self, nbytes: int) -> bytes:
        """The argument of an instruction: the bytes after its first one."""
        begin = self._at + 1
        self._at = begin + nbytes
        if self._at > len(self._content):
            raise pickle.UnpicklingError("it ends too early")
        return self._content[begin : self._at]

    def _sized(self, width: int) -> bytes:
        """An argument that starts with its length, in `width` bytes."""
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
        """Pops the last values of the stack, and returns them in the order of pushing."""
        items = [self._stack.pop() for _ in range(count)]
        self._at += 1
        return items[::-1]

    def _to_mark(self) -> list[Any]:
        """Pops all values since the last mark, and the mark."""
        items, self._stack = self._stack, self._marked.pop()
        self._at += 1
        return items

    # Plain values.

    def _integer(self, content: bytes) -> None:
        if len(content) > MAX_INTEGER:
            raise pickle.UnpicklingError(f"it has an integer of {len(content)} bytes")
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
        elif not isinstance(target, Record):  # items of a subclass of list are ignored
            raise pickle.UnpicklingError(f"it adds list items to {type(target).__name__}")

    def add_items(self) -> None:
        items = self._to_mark()
        target = self._stack[-1]
        if type(target) is set:
            target.update(map(_key, items))
        elif not isinstance(target, Record):
            raise pickle.UnpicklingError(f"it adds set items to {type(target).__name__}")

    def _put(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is dict or type(target) is Items:
            _put(target, items)
        elif not isinstance(target, Record):  # items of a subclass of dict are ignored
            raise pickle.UnpicklingError(f"it adds dict items to {type(target).__name__}")

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
            raise pickle.UnpicklingError(f"it writes entry {at} of its memo, which has only {len(memo)} entries")
        memo[at : at + 1] = [self._stack[-1]]

    # Names, and objects of classes.

    def named(self) -> None:
        module, name = self._line(), self._line()
        self._push(self._find(module, name))

    def named_on_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise pickle.UnpicklingError("the name of a class is not a string")
        self._push(self._find(module, name))

    def _find(self, module: str, name: str) -> Any:
        key = module, name
        if key not in self._names:
            if len(self._names) >= MAX_NAMES:
                raise pickle.UnpicklingError(f"it has more than {MAX_NAMES} names of classes and functions")
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
            # torch adds `_metadata`, versions of modules, to a state dict. Other attributes would be lost.
            if not isinstance(state, dict) or state.keys() - {"_metadata"}:
                raise pickle.UnpicklingError("it sets attributes of a dict other than `_metadata`")
        else:
            raise pickle.UnpicklingError(f"it sets attributes of {type(target).__name__}, which has none")
        self._at += 1


def count_objects(content: bytes) -> int:
    """An upper estimate of the objects of a pickle from its bytes; a set counts as four, an instance as two."""
    instances = content.count(pickle.NEWOBJ) + content.count(pickle.REDUCE)
    return len(content) - len(content.translate(None, _MAKES)) + 3 * content.count(pickle.EMPTY_SET) + instances


def _put(target: dict[Any, Any], items: list[Any]) -> None:
    if len(items) % 2:
        raise pickle.UnpicklingError("a dict has a key without a value")
    rest = iter(items)
    for key in rest:
        target[key if type(key) is str or isinstance(key, Record) else _key(key)] = next(rest)


def _is_record(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Record)


def _has_state(stack: list[Any]) -> bool:
    """Whether this stack ends with an object and a dict for its state."""
    return type(stack[-1]) is dict and isinstance(stack[-2], Record)


def _called(target: Any, arguments: Any) -> Any:
    """The result of a call, if it is allowed."""
    if type(arguments) is not tuple:
        raise pickle.UnpicklingError("the arguments of a call are not a tuple")
    if target is tuple and len(arguments) == 1 and type(arguments[0]) in (tuple, list):
        return tuple(arguments[0])
    if _is_record(target):
        return target(*arguments)
    if isinstance(target, partial):  # of `_nested`
        return target(*arguments)
    if target is Items and not arguments:
        return Items()
    kind = target if isinstance(target, type) else type(target)
    raise pickle.UnpicklingError(f"it calls {kind.__name__}, which is not allowed")


def _key(value: Any) -> Any:
    """The value if it is a valid key: with a cheap hash that few other values share."""
    level, left = [value], _KEY_PARTS
    for _ in range(_KEY_DEPTH):
        left -= len(level)
        if left < 0 or not all(_may_be_in_a_key(one) for one in level):
            break
        level = [part for one in level if type(one) is tuple for part in one]
        if not level:
            return value
    raise pickle.UnpicklingError("a key of a dict or an element of a set has an invalid type or too many parts")


def _may_be_in_a_key(value: Any) -> bool:
    kind = type(value)
    return (-_MAX_KEY < value < _MAX_KEY) if kind is int else kind in _IN_A_KEY or isinstance(value, (Record, type))


_IN_A_KEY = frozenset({str, bytes, float, bool, type(None), tuple, Dtype})


def _skips(nbytes: int) -> Callable[[Machine], object]:
    """An instruction with an ignored argument."""
    return lambda machine: machine._take(nbytes)


def _pushes(make: Callable[[], Any]) -> Callable[[Machine], object]:
    """An instruction that pushes a value."""
    return lambda machine: machine._push(make())


def _takes(width: int, make: Callable[[bytes], Any]) -> Callable[[Machine], object]:
    """An instruction that pushes its argument, which starts with its length in `width` bytes."""
    return lambda machine: machine._stack.append(make(machine._sized(width)))


def _packs(count: int) -> Callable[[Machine], object]:
    """An instruction that makes a tuple of `count` values."""
    return lambda machine: machine._stack.append(tuple(machine._popped(count)))


def _gathers(make: Callable[[list[Any]], Any]) -> Callable[[Machine], object]:
    """An instruction that makes an object of all values since the last mark."""

    def gather(machine: Machine) -> None:
        items = machine._to_mark()  # this replaces the stack
        machine._stack.append(make(items))

    return gather


def _keeps(width: int) -> Callable[[Machine], object]:
    """An instruction that stores the top of the stack in the memo, at an index of `width` bytes."""
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
    pickle.BINPERSID: _skips(0),  # a storage of a torch.save file remains a description
    pickle.REDUCE: Machine.reduce,
    pickle.NEWOBJ: Machine.reduce,
    pickle.NEWOBJ_EX: Machine.new_object_with_keywords,
    pickle.BUILD: Machine.build,
}
_DOES = tuple(_INSTRUCTIONS.get(bytes([code]), Machine.unknown) for code in range(256))


# Names of modules in pickles of protocol 2, which torch.save writes.
_OLD_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


def loads(content: bytes, allowed: Callable[[str], bool] | None = None) -> Any:
    """The object pickled in `content`: plain Python values, `torch.Size` as a tuple, dtypes, and Records for the rest.

    `allowed`: which classes and functions (`module.name`) it may name, or None for any, as none is run. Raises
    NotAllowed for others and for calls of getattr except for attributes of classes, and pickle.UnpicklingError for a
    damaged pickle or one beyond the limits of `Machine`.
    """
    return Machine(content, lambda module, name: _named(module, name, allowed)).run()


def _named(module: str, name: str, allowed: Callable[[str], bool] | None) -> Any:
    """The value for a name in a pickle."""
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
    """An attribute of a class from a call of getattr: a nested class (protocol 2) or an enum's member (3.11.2)."""
    holder, name = arguments if len(arguments) == 2 else (None, None)
    if not (isinstance(holder, type) and issubclass(holder, Record) and isinstance(name, str)):
        raise NotAllowed("builtins.getattr")
    module, _, outer = holder.kind.rpartition(".")
    return _named(module, f"{outer}.{name}", allowed)
