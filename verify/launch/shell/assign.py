"""Assigns scalars, arrays and their elements; a value that is not known keeps the reason why."""

from __future__ import annotations

import re
from dataclasses import replace

from verify.launch.shell.arithmetic import ArithmeticFault
from verify.launch.shell.expand import Run, calculate_in, expand, joined
from verify.launch.shell.syntax import Assignment
from verify.launch.shell.values import Gap, Shell, Value, Variable

_INDEXED = re.compile(r"\[[^]]*\]\+?=")


def assign(shell: Shell, assignment: Assignment, run: Run) -> bool:
    """Assigns, and returns whether all of the value is known."""
    name, line = assignment.name, assignment.line
    before = shell.variables.get(name)
    if assignment.array is not None:
        values = tuple(expand(shell, assignment.array, run))
        if any(_INDEXED.match(value.text) for value in values) or name in shell.special:
            shell.forget(name, shell.special.get(name) or f"an array with indices at {shell.place(line)}")
            return False
        kept = before.values if assignment.append and before else ()
        shell.assign_array(name, (*kept, *values))
        return all(value.known for value in values)
    value = joined(shell, assignment.value, run)
    value = replace(value, file=shell.file, line=line)
    if value.gaps and value.text == value.gaps[0].source:
        value = replace(value, text=f"${{{name}}}", gaps=(Gap(f"${{{name}}}", value.gaps[0].why),))
    if assignment.index is not None or (before and before.array and name not in shell.special):
        _assign_element(shell, assignment, value, before, run)
    elif assignment.append and before and before.values:
        old = before.values[0]
        shell.assign(name, replace(value, text=old.text + value.text, gaps=(*old.gaps, *value.gaps)))
    else:
        shell.assign(name, value)
    return value.known


def _assign_element(shell: Shell, assignment: Assignment, value: Value, before: Variable | None, run: Run) -> None:
    """`A[index]=value`; without an index it is the first element."""
    values = list(before.values) if before else []
    try:
        index = calculate_in(shell, assignment.index or "0", run)
    except ArithmeticFault:
        index = -1
    if index < -len(values):
        shell.unresolved[f"{shell.place(assignment.line)}: bash refuses to set an element before the first"] = None
    named = re.fullmatch(r"[A-Za-z_]\w*", assignment.index or "") and shell.lookup(assignment.index or "") is None
    special = assignment.name in shell.special or any(one.maybe for one in values[: index + 1])
    if named or special or assignment.append or not 0 <= index <= len(values):
        shell.forget(assignment.name, f"an element set at {shell.place(assignment.line)}")
        return
    values[index : index + 1] = [value]
    shell.assign_array(assignment.name, tuple(values))
