"""Reads pickles that call what scanners of pickles know as dangerous, and says what of it ran. Started by a test."""

import json
import pickle
import sys
from pathlib import Path

LIST = Path(__file__).parents[1] / "ckptkit/formats/gadgets.txt"
_OWN = frozenset({"object.__getattr__", "object.__setattr__", "object.__delattr__"})


def names():
    """Module and name of every gadget; for a module that is dangerous as a whole, a name that stands for any."""
    lines = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    return [(module, "run" if name == "*" else name) for module, name in map(str.split, lines)]


def pickles(module, name):
    """A gadget in every form in which a pickle can call it or set its state, and how the form is called."""
    argument = b"X" + (5).to_bytes(4, "little") + b"print"
    old = b"c" + f"{module}\n{name}\n".encode()
    new = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"
    for kind, found in (("GLOBAL", old), ("STACK_GLOBAL", new)):
        yield f"{kind} REDUCE", b"\x80\x04" + found + argument + b"\x85R."
        yield f"{kind} NEWOBJ", b"\x80\x04" + found + argument + b"\x85\x81."
        yield f"{kind} NEWOBJ_EX", b"\x80\x04" + found + argument + b"\x85}\x92."
        yield f"{kind} BUILD", b"\x80\x04" + found + b")\x81}" + argument + argument + b"sb."
        yield f"{kind} OBJ", b"\x80\x04(" + found + argument + b"o."
    yield "INST", b"\x80\x04(" + argument + b"i" + f"{module}\n{name}\n".encode() + b"."


def main():
    """Prints as JSON: how many were read and refused, events of Python's audit, modules imported, odd values."""
    from ckptkit.formats.torch_save import unpickle
    from ckptkit.formats.torch_save.records import Record

    events = []
    watched = [False]

    def audit(event, _):
        if watched[0] and event not in _OWN:
            events.append(event)

    every = [(module, name, form, content) for module, name in names() for form, content in pickles(module, name)]
    read, refused, odd = 0, 0, []
    before = set(sys.modules)
    sys.addaudithook(audit)
    for module, name, form, content in every:
        watched[0] = True
        try:
            value = unpickle.loads(content)
        except pickle.UnpicklingError:
            value = None
        watched[0] = False
        refused += value is None
        read += value is not None
        if value is not None and not (isinstance(value, Record) and type(value).__mro__[1:] == (Record, object)):
            odd.append(f"{module}.{name}: {form}")
    imported = sorted(set(sys.modules) - before)
    watched[0] = True
    pickle.loads(b"\x80\x04cthis\ns\n.")  # an import, which the hook must see
    print(json.dumps({"read": read, "refused": refused, "odd": odd, "imported": imported, "events": events}))


if __name__ == "__main__":
    main()
