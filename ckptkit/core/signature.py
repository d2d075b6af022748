"""Signatures of the Python API: `help` lists the options, and the error for a wrong one names it and the function."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

from ckptkit.core.errors import words_of
from ckptkit.core.printable import shortened

P = ParamSpec("P")
R = TypeVar("R")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "None": type(None),
    "Path": (str, os.PathLike),
    **{one.__name__: one for one in (bool, int, str)},
}
_SEVERAL = re.compile(r"(?:Sequence|frozenset|tuple)\[(.+?)(?:, \.\.\.)?\](?: \| None)?")


def public(*groups: type, hidden: tuple[str, ...] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function of the Python API. Its `**options` are the fields with defaults of the dataclasses `groups`.

    One value for a parameter that takes several counts as a sequence of it. The function raises TypeError for an
    unknown option, with the nearest name, and for a value of another type. A field may declare in its metadata a wider
    `annotation`, and a `help` for the docstring.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = signature(function)
        names = {*own.parameters, *hidden}
        options = [one for group in groups for one in fields(group) if one.name not in names and _has_default(one)]
        kept = [one for one in own.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        shown = own.replace(parameters=[*kept, *map(_parameter, options)])
        title = f"ckptkit.{function.__name__}()"

        @wraps(function)
        def checked(*arguments: P.args, **keywords: P.kwargs) -> R:
            for name in (name for name in keywords if name not in shown.parameters):
                near = "".join(f": did you mean {one!r}?" for one in get_close_matches(name, shown.parameters, 1))
                raise TypeError(f"{title} has no option {name!r}{near}")
            try:
                bound = shown.bind(*arguments, **keywords)
            except TypeError as error:
                raise TypeError(f"{title}: {words_of(error)}") from None
            for name, value in bound.arguments.items():
                bound.arguments[name] = _accepted(f"{title}: {name}", shown.parameters[name].annotation, value)
            return function(*bound.args, **bound.kwargs)

        checked.__signature__ = shown  # type: ignore[attr-defined]
        if options:
            lines = map(_described, options)
            checked.__doc__ = "\n".join([f"{function.__doc__}".rstrip(), "", "    Options:", *lines])
        return checked

    return decorate


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _parameter(field: Field[Any]) -> Parameter:
    """The keyword of an option."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    annotation = field.metadata.get("annotation") or field.type
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _described(field: Field[Any]) -> str:
    """A line of the docstring."""
    one = _parameter(field)
    return f"      {one.name}: {one.annotation} = {one.default!r}  {field.metadata.get('help', '')}".rstrip()


def _accepted(where: str, annotation: str, value: Any) -> Any:
    """The value, in a tuple if it is one of several. Raises TypeError for another type than the annotation's."""
    kinds = _types(annotation)
    if several := _SEVERAL.fullmatch(annotation):
        if isinstance(value, _types(several[1])):
            return (value,)
        kinds = () if isinstance(value, Iterable | None) and not isinstance(value, bytes) else (Iterable,)
    is_number = isinstance(value, bool) and bool not in kinds  # for Python, True is an int
    if kinds and (is_number or not isinstance(value, kinds)):
        raise TypeError(f"{where} is {shortened(value)}, and must be {annotation.replace(' | ', ' or ')}")
    return value


def _types(annotation: str) -> tuple[Any, ...]:
    """The types of an annotation that can be checked, or empty for another one."""
    kinds = [_TYPES.get(word) for word in annotation.split(" | ")]
    return () if None in kinds else tuple(kinds)
